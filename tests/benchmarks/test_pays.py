"""What windows say of two plans, the loads that change, and the figures."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.pays.__main__ import figures_of
from benchmarks.pays.device import one_wide_lane
from benchmarks.pays.gain import REGIMES, figure_of
from benchmarks.pays.intervals import Tasks, in_time, interval, mean_log_s, p50_s, p99_s, ratio
from benchmarks.pays.load import outcome_of
from benchmarks.pays.scenarios import SCENARIOS, visits
from stageloom.edge_agent.bench.load import WindowResult
from stageloom.shared.errors import TaskExpired, TaskFailed, TaskRefused
from stageloom.shared.plan import Resource
from tests.engine.plans import chains


def tasks(latencies_s: list[float], late: int = 0) -> Tasks:
    return Tasks(np.array(latencies_s), np.arange(len(latencies_s)) >= late)


def test_a_task_without_a_result_counts_as_twice_its_deadline() -> None:
    result = WindowResult(np.array([0, 1, 1]), np.array([0.1, np.nan, 0.2]), np.array([True, False, True]))
    assert Tasks.of(result, [1.0, 3.0]).latency_s.tolist() == [0.1, 6.0, 0.2]


def test_statistics_are_of_all_tasks() -> None:
    found = tasks([0.01 * n for n in range(1, 101)], late=40)
    assert [p50_s(found), p99_s(found), in_time(found)] == pytest.approx([0.51, 1.0, 60.0])
    assert mean_log_s(tasks([0.1, 10.0])) == pytest.approx(1.0)


def test_a_ratio_of_windows_that_took_turns_is_of_all_and_its_interval_draws_pairs() -> None:
    """Windows differ tenfold, pairs by exactly two: the interval of the pairs has no width."""
    under = [tasks([base] * 5) for base in (0.01, 0.1, 0.05, 0.02)]
    over = [Tasks(one.latency_s / 2.0, one.in_time) for one in under]
    assert ratio(mean_log_s, over, under) == pytest.approx((0.5, 0.5, 0.5))
    low, high = interval(mean_log_s, under)
    assert low < mean_log_s(Tasks.together(under)) < high
    with pytest.raises(ValueError, match="no pairs"):
        ratio(p50_s, over[:3], under)
    with pytest.raises(ValueError, match="no windows"):
        interval(p50_s, [])


@pytest.mark.more
def test_an_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(60):
        under = [tasks(list(rng.lognormal(0.0, 0.3, 40))) for _ in range(20)]
        over = [tasks(list(0.8 * rng.lognormal(0.0, 0.3, 40))) for _ in range(20)]
        _, low, high = ratio(mean_log_s, over, under)
        held += low <= 0.8 <= high
    assert held >= 50  # of 60; below 50 has probability 1e-4 at 95 %


def test_scenarios_lead_in_change_and_come_back() -> None:
    night_and_day = SCENARIOS["night_and_day"]
    assert visits(night_and_day) == [0, 1, 1, 2, 2]
    assert SCENARIOS["turning_mix"][1].weights([1, 2, 4]) == (4, 2, 1)
    assert all(
        phases[0].lead and not any(phase.lead for phase in phases[1:]) for phases in SCENARIOS.values()
    )


def test_only_what_was_promised_is_no_loss() -> None:
    errors = (None, TaskExpired("late"), TaskRefused("queue", "full"), TaskFailed("broken"))
    assert [outcome_of(error) for error in errors] == ["completed", "expired", "refused", "lost"]


def test_figures_are_called_as_the_load_and_the_plans_are() -> None:
    night, day, cuts, taken = REGIMES
    assert figure_of(cuts, "in_time", "urgent") == "day_in_time_over_whole_plan.urgent"
    assert figure_of(night, "p50", "ocr") == "night_p50_over_day_plan.ocr"
    assert figure_of(day, "in_time", "ocr") == "day_in_time_over_night_plan.ocr"
    assert figure_of(taken, "in_time", "small") == "core_taken_in_time_over_before.small"


def phase(on: bool, visit: int, **values: object) -> dict[str, object]:
    still = {"commits": 0, "lost": 0, "decided_s": None, "active_s": None, "in_time_share": 0.5, "tasks": 100}
    about = {"part": "phase", "mix": "ocr", "scenario": "night_and_day", "replanning": on, "visit": visit}
    return {**about, "repetition": 0, **still, **values}


def test_phases_of_a_scenario_become_figures_and_the_lead_counts_for_nothing_but_losses() -> None:
    rows = [
        phase(False, 0),
        phase(False, 1, lost=1),
        phase(True, 0, decided_s=99.0, commits=1),
        phase(True, 1, decided_s=20.0, active_s=20.1, commits=1, in_time_share=0.75),
        phase(True, 2, decided_s=3.0, active_s=1.5, in_time_share=0.75),
        phase(False, 2),
    ]
    name = "ocr.night_and_day"
    assert figures_of(rows) == {
        f"commits.{name}": 1.0,
        f"lost.{name}": 1.0,
        f"decided_s.{name}": 20.0,
        f"again_active_s.{name}": 1.5,
        f"in_time_on_over_off.{name}": 1.5,
    }


def test_tasks_in_time_are_compared_where_a_repetition_ran_both_ways() -> None:
    """Three repetitions with re-planning, one without: as many tasks are in time in each."""
    rows = [phase(False, 1), *(phase(True, 1, repetition=number) for number in range(3))]
    assert figures_of(rows)["in_time_on_over_off.ocr.night_and_day"] == 1.0


def test_a_phase_counts_by_its_tasks() -> None:
    """A night of 100 tasks, all in time; by day 450 of 900 instead of 900."""
    night, day = {"in_time_share": 1.0, "tasks": 100}, {"in_time_share": 1.0, "tasks": 900}
    rows = [phase(False, 1, **night), phase(False, 1, **day), phase(True, 1, **night)]
    rows.append(phase(True, 1, **{**day, "in_time_share": 0.5}))
    assert figures_of(rows)["in_time_on_over_off.ocr.night_and_day"] == pytest.approx(0.55)


def test_one_wide_lane_of_a_plan_with_an_express_lane_names_no_lane_that_is_gone() -> None:
    core = Resource(cores=(0,))
    blocks = tuple(
        replace(block, resources=(number % 2,)) for number, block in enumerate(chains(2, 1).plan.combined)
    )
    lanes = replace(
        chains(2, 1).plan,
        lanes=2,
        resources=(core, replace(core, cores=(1,))),
        lane_resources=(0, 1),
        combined=blocks,
    )
    wide = one_wide_lane(lanes)
    assert wide.lanes == 1 and wide.resources == (Resource(cores=(0, 1)),)
    assert {block.resources for block in wide.combined} == {()}
