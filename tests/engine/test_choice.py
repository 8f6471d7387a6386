"""Which combined block runs next: ratio, round robin, weighted, and what is overdue."""

from dataclasses import replace

import pytest

from stageloom.shared.plan import StepChoice
from tests.engine.driver import Driver
from tests.engine.plans import chains, models_of, with_models


def _first_members(driver: Driver) -> str:
    return "".join("abcdef"[step.members[0].member.model] for step in driver.issued)


def test_the_highest_input_ratio_runs_first() -> None:
    """While `c` runs, {a, b} becomes half active and {d} fully: `d` came last and goes first."""
    groups = [[(0, 0, 0), (1, 0, 0)], [(2, 0, 0)], [(3, 0, 0)]]
    driver = Driver(chains(1, 1, 1, 1, groups=groups, run_ahead=1))
    for model in ("c", "a", "d"):
        driver.submit(model)
    driver.end_all()
    assert _first_members(driver) == "cda"


def test_ties_of_the_ratio_go_to_the_oldest_instance() -> None:
    driver = Driver(chains(1, 1, 1, run_ahead=1))
    for model in ("c", "b", "a"):
        driver.submit(model)
    driver.end_all()
    assert _first_members(driver) == "cba"


def test_round_robin_gives_everyone_a_turn() -> None:
    driver = Driver(chains(1, 1, 1, step_choice=StepChoice.ROUND_ROBIN, run_ahead=1))
    for model in "aaaabbbbcccc":
        driver.submit(model)
    driver.end_all()
    assert _first_members(driver) == "abcabcabcabc"


def test_weights_share_the_steps_in_proportion() -> None:
    models = [replace(m, weight=w) for m, w in zip(models_of([1, 1]), (3, 1), strict=True)]
    driver = Driver(with_models(models, step_choice=StepChoice.WEIGHTED, run_ahead=1, max_skips=100))
    for model in "ab" * 40:
        driver.submit(model)
    for _ in range(40):
        driver.end()
    assert 29 <= _first_members(driver)[:40].count("a") <= 31


def test_an_idle_model_saves_up_no_share() -> None:
    models = [replace(m, weight=1) for m in models_of([1, 1])]
    driver = Driver(with_models(models, step_choice=StepChoice.WEIGHTED, run_ahead=1, max_skips=100))
    for _ in range(20):
        driver.submit("a")
        driver.end_all()
    for _ in range(5):
        driver.submit("a")
        driver.submit("b")
    driver.end_all()
    assert "bbb" not in _first_members(driver)


def test_a_combined_block_passed_over_max_skips_times_is_overdue() -> None:
    """{a, b} has the higher ratio as long as both keep coming; {c, d} has one input only."""
    groups = [[(0, 0, 0), (1, 0, 0)], [(2, 0, 0), (3, 0, 0)]]
    driver = Driver(chains(1, 1, 1, 1, groups=groups, run_ahead=1, max_skips=3))
    for _ in range(10):
        driver.submit("a")
        driver.submit("b")
    driver.submit("c")
    for _ in range(8):
        driver.end()
    # The first step ran with `a` alone, before `b` came; `c` is passed over three times after that.
    assert _first_members(driver)[:9] == "aaaa" + "c" + "aaaa"
    stats = driver.core.snapshot(0.0).combined
    assert stats[1].most_skips == 3


@pytest.mark.promise("combined-block-passed-over")
def test_half_the_time_left_makes_a_combined_block_overdue() -> None:
    groups = [[(0, 0, 0), (1, 0, 0)], [(2, 0, 0), (3, 0, 0)]]
    driver = Driver(chains(1, 1, 1, 1, groups=groups, run_ahead=1, max_skips=100))
    for _ in range(10):
        driver.submit("a")
        driver.submit("b")
    driver.submit("c", deadline_s=1.0)
    driver.now = 0.4999
    driver.end()
    assert _first_members(driver) == "aa"
    driver.now = 0.5
    driver.end()
    assert _first_members(driver) == "aac"


def test_max_skips_comes_before_half_the_time_left() -> None:
    groups = [[(0, 0, 0), (1, 0, 0)], [(2, 0, 0), (3, 0, 0)], [(4, 0, 0), (5, 0, 0)]]
    driver = Driver(chains(1, 1, 1, 1, 1, 1, groups=groups, run_ahead=1, max_skips=2))
    for _ in range(10):
        driver.submit("a")
        driver.submit("b")
    driver.submit("c")
    driver.end()
    driver.end()  # `c` was passed over twice
    driver.submit("e", deadline_s=1.0)
    driver.now = 0.9
    driver.end()
    driver.end()
    assert _first_members(driver) == "aaace"


@pytest.mark.promise("combined-block-passed-over")
def test_none_is_passed_over_more_than_the_bound() -> None:
    """Five combined blocks, each with one of two inputs, against one that is always full."""
    pairs = [[(0, 0, 0), (0, 1, 0)], *([(m, 0, 0), (m, 1, 0)] for m in range(1, 6))]
    models = models_of([1] * 6, replicas=2)
    driver = Driver(with_models(models, pairs, run_ahead=1, max_skips=4))
    for _ in range(200):
        driver.submit("a")
    for model in "bcdef" * 8:
        driver.submit(model)
    driver.end_all()
    stats = driver.core.snapshot(0.0).combined
    assert max(c.most_skips for c in stats) <= 4 + 6 - 1
    assert max(c.most_skips for c in stats) > 4, "the load must strain the bound"


def test_what_was_passed_over_is_forgotten_when_its_work_is_gone() -> None:
    groups = [[(0, 0, 0), (1, 0, 0)], [(2, 0, 0), (3, 0, 0)]]
    driver = Driver(chains(1, 1, 1, 1, groups=groups, run_ahead=1, max_skips=2))
    for _ in range(10):
        driver.submit("a")
        driver.submit("b")
    task = driver.submit("c")
    driver.end()
    driver.do(driver.core.cancel(task, 0.0))
    driver.submit("c")
    driver.end()
    driver.end()
    assert _first_members(driver) == "aaaa"
    driver.end()
    assert _first_members(driver) == "aaaac"
