"""A contest whose contestants die or fail at tasks, without processes."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from stageloom.edge_agent.bench.capacity import CapacitySearch
from stageloom.edge_agent.bench.contest import CapacityFound, Contest, ContestLoad
from stageloom.edge_agent.bench.contestant_process import ContestantError
from stageloom.edge_agent.bench.load import WindowResult
from stageloom.edge_agent.bench.rival_settings import NAIVE
from stageloom.edge_agent.bench.stageloom_contestant import AgentSetting
from stageloom.edge_agent.bench.window_run import Carried
from tests.bench.not_starting import NotStarting

CARRIED_PER_S = 40.0
SEARCH = CapacitySearch(few=1, many=4)
NAMES = ("stageloom", "naive", "ort_2x1")


class MortalContest(Contest):
    """Every contestant carries the same; `dies` does so in its fifth window, and where eight tasks are always
    open in its first."""

    def __init__(self, dies: str, needed: tuple[str, ...] = ("stageloom",)) -> None:
        load = ContestLoad(weights=(1.0,), deadlines_s=(1.0,))
        super().__init__([], load, lambda line: None, needed=needed)
        self.models = [None]  # type: ignore[list-item] # one; only its number counts
        self._dies = dies
        self._processes = {
            name: SimpleNamespace(name=name, plan="", problem="", saturated=partial(self.carry, name))  # type: ignore[misc]
            for name in NAMES
        }
        self.ran: list[str] = []
        self.left: list[str] = []

    def leave(self, names: Iterable[str]) -> None:
        self.left += names

    def carry(self, name: str, wanted: object) -> Carried:
        if name == self._dies:
            raise ContestantError(f"{name} has died")
        return Carried(CARRIED_PER_S, 0)

    def window(self, name: str, rate_per_s: float, number: int) -> WindowResult:
        self.ran.append(name)
        if name == self._dies and self.ran.count(name) >= 5:
            raise ContestantError(f"{name} has died")
        in_time = rate_per_s <= CARRIED_PER_S
        return WindowResult(np.zeros(50, np.int64), np.full(50, 0.001), np.full(50, in_time))


@pytest.mark.parametrize("plan", [b"", b"a plan"], ids=["measures first", "has a plan"])
def test_a_needed_contestant_that_does_not_start_ends_the_contest_and_a_rival_is_absent(
    plan: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stageloom.edge_agent.bench.contest.ContestantProcess", NotStarting)
    contest = Contest([], ContestLoad(weights=(), deadlines_s=()), lambda line: None, needed=("stageloom",))
    contest.enter([NAIVE])
    with pytest.raises(ContestantError, match="stageloom: out of memory"):
        contest.enter([AgentSetting("stageloom", plan)])
    assert contest.absent == {"naive": "naive: out of memory"}


def test_a_rival_that_dies_is_absent_and_all_others_are_measured_on() -> None:
    contest = MortalContest("naive")
    found = {name: CapacityFound() for name in NAMES}
    contest.capacities(found, SEARCH, 10.0)
    assert contest.absent == {"naive": "naive has died"}
    assert contest.left == ["naive"] and contest.ran.count("naive") == 5
    assert found.keys() == {"stageloom", "ort_2x1"}
    assert all(one.per_s == pytest.approx(CARRIED_PER_S, rel=0.05) for one in found.values())


def test_a_rival_that_dies_while_it_is_measured_closely_leaves_what_was_found() -> None:
    contest = MortalContest("naive")
    found = {name: CapacityFound() for name in NAMES}
    contest.settle(found, lambda: NAMES, [SEARCH], 10.0, math.inf)
    assert found.keys() == {"stageloom", "ort_2x1"}
    assert contest.absent.keys() == {"naive"}


MEASURING: dict[str, Callable[[Contest], Any]] = {
    "capacities": lambda contest: contest.capacities({name: CapacityFound() for name in NAMES}, SEARCH, 10.0),
    "windows at one rate": lambda contest: contest.windows_at(NAMES, 10.0, 6),
    "saturated": lambda contest: contest.saturated(NAMES, (1.0,), 0.1, 2),
}


@pytest.mark.parametrize("measure", MEASURING.values(), ids=MEASURING)
def test_the_death_of_a_needed_contestant_ends_the_contest(measure: Callable[[Contest], Any]) -> None:
    with pytest.raises(ContestantError, match="stageloom has died"):
        measure(MortalContest("stageloom"))


@pytest.mark.parametrize("part", ["windows at one rate", "saturated"])
def test_a_rival_that_dies_after_the_capacities_is_absent_and_the_others_have_their_turns(part: str) -> None:
    contest = MortalContest("naive")
    found = MEASURING[part](contest)
    assert {name: len(results) for name, results in found.items()} == dict.fromkeys(
        ("stageloom", "ort_2x1"), 6 if part == "windows at one rate" else 2
    )
    assert contest.absent == {"naive": "naive has died"} and contest.left == ["naive"]


def test_once_time_is_over_every_contestant_has_one_saturated_round() -> None:
    found = MortalContest("nobody").saturated(NAMES, (1.0,), 0.1, 5, until_s=-math.inf)
    assert found == {name: [CARRIED_PER_S] for name in NAMES}


def test_a_saturated_round_in_which_tasks_fail_has_no_rate_and_the_contest_tells_the_error() -> None:
    class FailingContest(MortalContest):
        def carry(self, name: str, wanted: object) -> Carried:
            if name != "naive":
                return super().carry(name, wanted)
            self._processes[name].problem = "MemoryError: no room"
            return Carried(100.0 * CARRIED_PER_S, 7)

    contest = FailingContest("nobody")
    found = contest.saturated(NAMES, (1.0,), 0.1, 2)
    assert found == {name: [0.0 if name == "naive" else CARRIED_PER_S] * 2 for name in NAMES}
    assert contest.problems == {"naive": "MemoryError: no room"}


def test_a_window_that_is_interrupted_leaves_no_rate_without_samples() -> None:
    class InterruptedContest(MortalContest):
        def window(self, name: str, rate_per_s: float, number: int) -> WindowResult:
            if len(self.ran) == 4:
                raise KeyboardInterrupt
            return super().window(name, rate_per_s, number)

    found = {name: CapacityFound() for name in NAMES}
    with pytest.raises(KeyboardInterrupt):
        InterruptedContest("nobody").capacities(found, SEARCH, 10.0)
    assert sum(len(windows) for one in found.values() for windows in one.samples.values()) == 4
    assert all(windows for one in found.values() for windows in one.samples.values())


def test_the_search_begins_for_each_where_it_is_told() -> None:
    class RateContest(MortalContest):
        rates: ClassVar[dict[str, list[float]]] = {name: [] for name in NAMES}

        def window(self, name: str, rate_per_s: float, number: int) -> WindowResult:
            self.rates[name].append(rate_per_s)
            return super().window(name, rate_per_s, number)

    contest = RateContest("nobody")
    found = {name: CapacityFound() for name in NAMES}
    found["ort_2x1"].first_per_s = CARRIED_PER_S
    contest.capacities(found, SEARCH, CARRIED_PER_S / 10)
    first = {name: rates[0] for name, rates in contest.rates.items()}
    assert first["ort_2x1"] == pytest.approx(10 * first["stageloom"], rel=0.05)
    assert len(contest.rates["ort_2x1"]) < len(contest.rates["stageloom"])
    assert len({one.per_s for one in found.values()}) == 1


def test_only_those_that_are_wanted_have_further_windows() -> None:
    contest = MortalContest("nobody")
    found = {name: CapacityFound() for name in NAMES}

    def wanted() -> list[str]:
        return [name for name in NAMES if name != "naive" or not found["naive"].samples]

    contest.capacities(found, SEARCH, 10.0, wanted=wanted)
    assert contest.ran.count("naive") == 1
    assert found["ort_2x1"].per_s == pytest.approx(CARRIED_PER_S, rel=0.05)
