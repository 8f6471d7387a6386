"""What windows say of two plans, the loads that change, and the figures."""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.pays import __main__ as pays
from benchmarks.pays.__main__ import FULL, QUICK, SETUP_S, figures_of, measure, parts_of
from benchmarks.pays.device import one_wide_lane
from benchmarks.pays.dynamics import Found, soonest
from benchmarks.pays.gain import REGIMES, figure_of, measure_gain
from benchmarks.pays.intervals import Tasks, in_time, interval, mean_log_s, p50_s, p99_s, ratio
from benchmarks.pays.load import Application, outcome_of
from benchmarks.pays.scenarios import SCENARIOS, Phase, visits
from benchmarks.processes import DemoFailed
from benchmarks.runner import Report, run
from stageloom.edge_agent.bench.contest import ContestLoad
from stageloom.edge_agent.bench.contestant_process import ContestantError
from stageloom.edge_agent.bench.load import WindowResult
from stageloom.edge_agent.bench.window_run import Carried
from stageloom.planner.store.replans import BEING_TRIED, OVERTAKEN
from stageloom.shared.errors import TaskExpired, TaskFailed, TaskRefused
from stageloom.shared.plan import Plan, Resource
from tests.bench.not_starting import NotStarting
from tests.engine.plans import chains


def tasks(latencies_s: list[float], late: int = 0, given_up: int = 0) -> Tasks:
    """The first ones are late, and given up."""
    number = np.arange(len(latencies_s))
    return Tasks(np.array(latencies_s), number >= max(late, given_up), number >= given_up)


def test_a_task_without_a_result_counts_as_twice_its_deadline() -> None:
    result = WindowResult(np.array([0, 1, 1]), np.array([0.1, np.nan, 0.2]), np.array([True, False, True]))
    assert Tasks.of(result, [1.0, 3.0]).latency_s.tolist() == [0.1, 6.0, 0.2]


def test_statistics_are_of_all_tasks() -> None:
    found = tasks([0.01 * n for n in range(1, 101)], late=40)
    assert [p50_s(found), p99_s(found), in_time(found)] == pytest.approx([0.51, 1.0, 60.0])
    assert mean_log_s(tasks([0.1, 10.0])) == pytest.approx(1.0)


@pytest.mark.parametrize("carried", [Carried(80.0, 3), Carried(0.0, 0)])
def test_a_loop_whose_tasks_had_no_result_or_did_not_turn_over_is_no_measure_of_a_load(
    carried: Carried,
) -> None:
    application = Application(None, [], [])  # type: ignore[arg-type]
    application._runner = SimpleNamespace(closed_loop=lambda *_: carried)  # type: ignore[assignment]
    with pytest.raises(DemoFailed, match=f"{carried.without_result} had no result"):
        application.saturated_per_s([1.0], 2.0)


def test_a_percentile_that_falls_on_tasks_without_a_result_is_none_and_neither_is_a_ratio() -> None:
    """A task without a result counts as 40 ms elsewhere, though others take longer."""
    found = tasks([0.04] * 60 + [0.002] * 20 + [0.1] * 20, given_up=60)
    assert np.isnan([p50_s(found), p99_s(found)]).all()
    assert p50_s(tasks([0.04] * 40 + [0.002] * 20 + [0.1] * 40, given_up=40)) == 0.1
    assert np.isnan(ratio(p50_s, [found] * 4, [tasks([0.1] * 100)] * 4)).all()
    some = [tasks([0.04] * 80, given_up=80), tasks([0.1] * 100), tasks([0.1] * 100), tasks([0.1] * 100)]
    value, *ends = ratio(p50_s, some, [tasks([0.1] * 100)] * 4)
    assert value == 1.0 and np.isnan(ends).all()  # of some draws


def test_a_ratio_of_windows_that_took_turns_is_of_all_and_its_interval_draws_pairs() -> None:
    """Windows differ tenfold, pairs by exactly two: the interval of the pairs has no width."""
    under = [tasks([base] * 5) for base in (0.01, 0.1, 0.05, 0.02)]
    over = [replace(one, latency_s=one.latency_s / 2.0) for one in under]
    assert ratio(mean_log_s, over, under) == pytest.approx((0.5, 0.5, 0.5))
    low, high = interval(mean_log_s, under)
    assert low < mean_log_s(Tasks.together(under)) < high
    with pytest.raises(ValueError, match="no pairs"):
        ratio(p50_s, over[:3], under)
    with pytest.raises(ValueError, match="no windows"):
        interval(p50_s, [])


def test_windows_too_few_to_know_their_spread_have_no_interval() -> None:
    """Of two windows an interval for 95 % held the truth in about half of all cases."""
    windows = [tasks([0.01 * number] * 5) for number in range(1, 5)]
    assert np.isnan(interval(mean_log_s, windows[:3])).all()
    assert not np.isnan(interval(mean_log_s, windows)).any()
    value, *ends = ratio(mean_log_s, windows[:3], windows[1:])
    assert value < 1.0 and np.isnan(ends).all()


def test_fewer_pairs_than_an_interval_needs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(measure, options=pays._OPTIONS, argv=["--pairs", "3"])
    assert "'3' pairs have no interval" in (told := capsys.readouterr().err) and "give 4 or more" in told


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


def test_a_re_plan_that_leaves_the_decision_to_another_one_decides_nothing() -> None:
    """As in a run of 28 November: the age of the oldest task came before the arrivals that stay."""
    rows = [
        replan(-20.0, 40.0, None, "overtaken by generation 1.9"),
        replan(0.4, 1.5, None, OVERTAKEN),
        replan(1.0, 1.1, None, BEING_TRIED),
        replan(1.4, 2.1, 2.2),
    ]
    assert soonest(rows, no_alarms) == {"decided_s": 2.1, "active_s": 2.2}
    assert soonest(rows[:3], no_alarms) == {"decided_s": None, "active_s": None}


def test_a_trial_under_way_at_a_change_decides_where_alarms_were_left_to_it() -> None:
    rows = [replan(-90.0, -30.0, -29.0), replan(-30.0, 80.0, None), replan(5.0, 5.1, None, BEING_TRIED)]
    assert soonest(rows, lambda until_s: int(until_s > 5.0)) == {"decided_s": 80.0, "active_s": None}
    assert soonest(rows, no_alarms)["decided_s"] is None
    assert soonest([*rows, replan(90.0, 95.0, None)], lambda until_s: 1)["decided_s"] == 95.0


def replan(at_s: float, decided_s: float, active_s: float | None, reason: str = "") -> dict[str, Any]:
    return {"at_s": at_s, "decided_s": decided_s, "active_s": active_s, "reason": reason}


def no_alarms(until_s: float) -> int:
    return 0


def test_figures_are_called_as_the_load_and_the_plans_are() -> None:
    night, day, cuts, taken = REGIMES
    assert figure_of(cuts, "in_time", "urgent") == "day_in_time_over_whole_plan.urgent"
    assert figure_of(night, "p50", "ocr") == "night_p50_over_day_plan.ocr"
    assert figure_of(day, "in_time", "ocr") == "day_in_time_over_night_plan.ocr"
    assert figure_of(taken, "in_time", "small") == "core_taken_in_time_over_before.small"
    assert taken.under == "before"  # not `day`, whose place a plan that was committed by day takes


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
        f"first_changes_committed.{name}": 1.0,
        f"lost.{name}": 1.0,
        f"decided_s.{name}": 20.0,
        f"undecided.{name}": 0.0,
        f"again_active_s.{name}": 1.5,
        f"never_active_again.{name}": 0.0,
        f"in_time_on_over_off.{name}": 1.5,
    }


def test_changes_that_nothing_came_of_are_counted_and_leave_no_longest_time() -> None:
    """Two first changes of which one is decided and has two commits, and a second visit without a plan."""
    rows = [phase(True, 1, decided_s=20.0, commits=2), phase(True, 1), phase(True, 2)]
    name = "ocr.night_and_day"
    assert figures_of(rows) == {
        f"commits.{name}": 2.0,
        f"first_changes_committed.{name}": 1.0,
        f"lost.{name}": 0.0,
        f"undecided.{name}": 1.0,
        f"never_active_again.{name}": 1.0,
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


def asked(**changes: Any) -> argparse.Namespace:
    """The options, as if nothing were given but these."""
    given = dict.fromkeys(("minutes", "only", "mix", "scenario", "phase", "pairs"))
    return argparse.Namespace(**{**given, "quick": False, "repetitions": 1, **changes})


class Device:
    """Has a day plan; each device another one."""

    made = 0

    def __init__(self, *_: object) -> None:
        self.day = chains(*[1] * (1 + Device.made)).plan
        Device.made += 1

    def __enter__(self) -> "Device":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prepare(self) -> None:
        pass

    def plan(self, name: str) -> Plan:
        assert name == "day"
        return self.day


class Driven:
    """Commits a plan in each phase while re-planning; its agent dies then in the scenario `fails`."""

    fails = ""

    def __init__(self, *_: object) -> None:
        pass

    def capacity_per_s(self, weights: object) -> float:
        return 10.0

    def run(self, scenario: str, phases: tuple[Phase, ...], seed: int, *, replanning: bool) -> Found:
        if replanning and scenario == Driven.fails:
            raise DemoFailed("the agent ended")
        row = phase(replanning, 1, scenario=scenario)
        del row["mix"], row["repetition"]
        plans = {one.name: chains(3, 3).plan.wire for one in phases}
        return Found([row], plans if replanning else {})


@pytest.fixture
def gains(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, bytes]]:
    """Nothing is started; returns the plans that were to be measured in turns, mix by mix."""
    plans: list[Mapping[str, bytes]] = []
    replaced = {
        "PaysDevice": Device,
        "Dynamics": Driven,
        "load_mix": lambda *_: [],
        "one_wide_lane": lambda plan: plan,
        "measure_gain": lambda *given: plans.append(given[4]),
    }
    for name, one in replaced.items():
        monkeypatch.setattr(pays, name, one)
    monkeypatch.setattr(Device, "made", 0)
    return plans


def test_an_agent_that_dies_costs_neither_what_was_measured_before_nor_other_mixes(
    gains: list[Mapping[str, bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Driven, "fails", "night_and_day")
    report = Report("pays")
    assert measure(report, asked(mix=["small", "zoo"], cache=tmp_path)) == 1
    told = [(row["part"], row["mix"], row.get("replanning")) for row in report.rows if row["part"] != "plan"]
    assert told == [
        ("phase", "small", False),
        ("absent", "small", None),
        ("phase", "zoo", False),
        ("phase", "zoo", True),
    ]
    assert report.rows[1]["reason"] == "the agent ended" and len(gains) == 1
    assert (
        "undecided.zoo.turning_mix" in report.figures and "commits.small.night_and_day" not in report.figures
    )


def test_a_plan_for_a_taken_core_is_compared_with_what_its_own_device_began_with(
    gains: list[Mapping[str, bytes]], tmp_path: Path
) -> None:
    report = Report("pays")
    assert measure(report, asked(mix=["ocr"], cache=tmp_path)) == 0
    (plans,) = gains
    assert plans["before"] == chains(1, 1).plan.wire != plans["day"] == plans["taken"]
    found = {row["name"]: row["scenario"] for row in report.rows if row["part"] == "plan"}
    assert found == {
        "day": "night_and_day",
        "night": "night_and_day",
        "taken": "core_taken",
        "before": "core_taken",
    }


@pytest.mark.parametrize(("quick", "most_s"), [(False, 3600.0), (True, 1200.0)])
def test_what_is_asked_for_by_default_fits_into_the_time_that_is_told(quick: bool, most_s: float) -> None:
    parts = parts_of(asked(quick=quick), QUICK if quick else FULL)
    assert sum(seconds + SETUP_S for own in parts.values() for seconds in own.values()) <= most_s


def test_what_the_time_does_not_reach_for_is_left_out_and_a_row_says_so(
    gains: list[Mapping[str, bytes]], tmp_path: Path
) -> None:
    """Two phases and a half of 30 s each way, and 130 s for a device; the turns take 216 s."""
    report = Report("pays")
    assert measure(report, asked(minutes=5.0, phase=30.0, mix=["zoo"], cache=tmp_path)) == 0
    assert [row for row in report.rows if row["part"] != "phase"] == [
        {"part": "left_out", "mix": "zoo", "of": "gain", "repetition": 0},
    ]
    assert len(report.rows) == 3 and not gains


def test_a_contestant_that_dies_leaves_the_loads_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying:
        """Serves the night; all tasks take 10 ms."""

        names = ("night", "day", "naive")
        absent: Mapping[str, str] = {"taken": "it cannot serve"}

        def enter(self, settings: object) -> None:
            pass

        def windows_at(
            self, names: list[str], rate_per_s: float, windows: int
        ) -> dict[str, list[WindowResult]]:
            if rate_per_s > 5.0:
                raise ContestantError("day died")
            result = WindowResult(np.zeros(4, np.int64), np.full(4, 0.01), np.full(4, True))
            return {name: [result] * windows for name in names}

    @contextmanager
    def dying(*_: object, needed: tuple[str, ...]) -> Iterator[Dying]:
        yield Dying()

    monkeypatch.setattr("benchmarks.pays.gain.Contest", dying)
    report = Report("pays")
    load = ContestLoad(weights=[1.0], deadlines_s=[0.02])
    with pytest.raises(ContestantError):
        measure_gain(report, "zoo", [], load, {"night": b"", "day": b""}, 10.0, 4)
    assert Counter(row["part"] for row in report.rows) == {"gain": 3, "ratio": 8, "absent": 1}
    assert report.figures["night_p50_over_day_plan.zoo"] == 1.0


def test_an_agent_that_does_not_start_with_its_plan_ends_the_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stageloom.edge_agent.bench.contest.ContestantProcess", NotStarting)
    load = ContestLoad(weights=[1.0], deadlines_s=[0.02])
    with pytest.raises(ContestantError, match="day: out of memory"):
        measure_gain(Report("pays"), "zoo", [], load, {"day": b"a plan"}, 10.0, 2)
