"""Programs: asked for at load, on demand within bounds, replaced by a fallback until they are there."""

import pytest

from tests.engine.driver import Driver
from tests.engine.plans import chains

PAIR = [[(0, 0, 0), (1, 0, 0)]]


def test_load_asks_for_full_masks_at_the_largest_and_the_smallest_batch() -> None:
    driver = Driver(chains(1, 1, groups=PAIR, fields={"batch": 3}))
    assert [(p.mask, p.buckets) for p in driver.asked] == [(0b11, (3, 3)), (0b11, (1, 1))]


def test_a_step_falls_back_until_its_program_is_ready() -> None:
    driver = Driver(chains(1, 1, groups=PAIR, run_ahead=1), prepare=False)
    driver.submit("a")
    assert driver.issued[0].fallback
    assert [p.mask for p in driver.asked] == [0b11, 0b01]
    driver.do(driver.core.program_ready(driver.asked[1], 0.0))
    driver.submit("a")
    driver.end()
    assert not driver.issued[1].fallback
    assert driver.core.snapshot(0.0).fallback_steps == 1


def test_a_program_is_asked_for_once() -> None:
    driver = Driver(chains(1, 1, groups=PAIR, run_ahead=1), prepare=False)
    for _ in range(3):
        driver.submit("a")
    driver.end_all()
    assert [p.mask for p in driver.asked] == [0b11, 0b01]


def test_a_failed_program_is_not_asked_for_again() -> None:
    driver = Driver(chains(1, 1, groups=PAIR, run_ahead=1), prepare=False)
    driver.submit("a")
    driver.do(driver.core.program_failed(driver.asked[1], 0.0))
    driver.submit("a")
    driver.end_all()
    assert [p.mask for p in driver.asked] == [0b11, 0b01]
    assert driver.issued[1].fallback


def test_programs_on_demand_are_bounded() -> None:
    groups = [[(0, 0, 0), (1, 0, 0), (2, 0, 0)]]
    driver = Driver(chains(1, 1, 1, groups=groups, run_ahead=1), prepare=False, max_preparing=1)
    for model in "abc":
        driver.submit(model)
        driver.end_all()
    assert [p.mask for p in driver.asked] == [0b111, 0b001]
    driver.do(driver.core.program_ready(driver.asked[1], 0.0))
    driver.submit("c")
    assert [p.mask for p in driver.asked] == [0b111, 0b001, 0b100]


def test_a_program_that_is_not_remembered_is_never_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. The first combined block remembers the program of all and of `a`. 2. `b` and `c` run by others, of
    which it would never know that they are ready. 3. The second combined block still gets its own."""
    monkeypatch.setattr("stageloom.shared.engine.records.MAX_REMEMBERED", 2)
    groups = [[(0, 0, 0), (1, 0, 0), (2, 0, 0)], [(3, 0, 0), (4, 0, 0)]]
    driver = Driver(chains(1, 1, 1, 1, 1, groups=groups, run_ahead=1), prepare=False, max_preparing=1)
    for model in "abcbcd":
        driver.submit(model)
        driver.end_all()
        for asked in driver.asked:
            driver.do(driver.core.program_ready(asked, 0.0))
    assert [(p.combined, p.mask) for p in driver.asked] == [(0, 0b111), (1, 0b11), (0, 0b001), (1, 0b01)]
    assert [step.fallback for step in driver.issued] == [True] * 6
    for model in ("a", "b", "d"):
        driver.submit(model)
        driver.end_all()
    assert [step.fallback for step in driver.issued[6:]] == [False, True, False]


def test_a_program_of_a_released_plan_is_ignored() -> None:
    driver = Driver(chains(1), prepare=False)
    driver.load(1, chains(1))
    driver.activate(1)
    assert driver.released == [0]
    assert driver.core.program_ready(driver.asked[0], 0.0) == []


def test_a_fallback_runs_its_members_downstream_first() -> None:
    driver = Driver(chains(2, groups=[[(0, 0, 0), (0, 0, 1)]], run_ahead=1), prepare=False)
    for _ in range(3):
        driver.submit("a")
    driver.end()
    assert driver.issued[1].fallback
    assert [m.member.block for m in driver.issued[1].members] == [1, 0]
