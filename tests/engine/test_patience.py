"""Tasks without a deadline beside those that have one: neither keeps the other from its share of lanes."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

import pytest

from stageloom.shared.engine.patience import PATIENCE_S, next_turn_s
from stageloom.shared.ids import StepId, TaskId
from stageloom.shared.plan import QueuePlan, StepChoice
from tests.engine.driver import Driver
from tests.engine.plans import chains

STEP_S = {"a": 0.010, "b": 0.020}


@dataclass
class Played:
    """What a plan of the models a and b did with seeded arrivals; `a`'s tasks are due in 50 ms."""

    driver: Driver
    seed: int = 0
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waited_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _arrived_s: dict[TaskId, float] = field(default_factory=dict)
    _ends_s: dict[StepId, float] = field(default_factory=dict)

    def run(self, seconds: float, gaps_s: dict[str, tuple[float, float]]) -> None:
        """Tasks of each model come apart by times that are uniform in its gap."""
        driver, random = self.driver, Random(self.seed)
        end_s = driver.now + seconds
        next_s = {name: driver.now + random.uniform(*gap) for name, gap in gaps_s.items()}
        self._begin()
        while True:
            name = min(next_s, key=lambda one: next_s[one])
            step = min(self._ends_s, key=lambda one: self._ends_s[one], default=None)
            step_s = end_s if step is None else self._ends_s[step]
            at = min(step_s, next_s[name], driver.core.next_wakeup(driver.now) or end_s)
            if at >= end_s:
                return
            driver.at(at)
            if step is not None and step_s == at:
                del self._ends_s[step]
                self._end(step)
            elif next_s[name] == at:
                task = driver.submit(name, deadline_s=at + 0.05 if name == "a" else None)
                self._arrived_s[task] = at
                next_s[name] += random.uniform(*gaps_s[name])
            self._begin()

    def _end(self, step: StepId) -> None:
        found = next(one for one in self.driver.steps if one.id == step)
        name = "ab"[found.members[0].member.model]
        self.driver.do(self.driver.core.step_done(step, self.driver.now, None, STEP_S[name]))
        self.driver.steps.remove(found)

    def _begin(self) -> None:
        """What was issued runs: one step a lane, as `run_ahead` is 1."""
        for step in self.driver.steps:
            if step.id not in self._ends_s:
                (member,) = step.members
                name = "ab"[member.member.model]
                self._ends_s[step.id] = self.driver.now + STEP_S[name]
                self.busy_s[name] += STEP_S[name]
                self.waited_s[name] += [self.driver.now - self._arrived_s[task] for task in member.tasks]


def _driver(lanes: int) -> Driver:
    fields = {"queue": QueuePlan(max_tasks=100_000), "replicas": lanes}
    return Driver(chains(1, 1, step_choice=StepChoice.DEADLINE, run_ahead=1, lanes=lanes, fields=fields))


SATURATING = {1: (0.004, 0.010), 2: (0.002, 0.005)}  # gaps of model a, by lanes


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_beside_an_urgent_model_that_saturates_no_task_waits_longer_than_its_patience(
    lanes: int, seed: int
) -> None:
    """And the step that runs when its patience ends."""
    played = Played(_driver(lanes), seed)
    played.run(20.0, {"a": SATURATING[lanes], "b": (0.1, 0.3)})
    assert len(played.waited_s["b"]) > 80
    assert 0.9 * PATIENCE_S < max(played.waited_s["b"]) <= PATIENCE_S + max(STEP_S.values()) + 1e-9


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_backlog_without_deadlines_takes_its_share_and_no_more(lanes: int, seed: int) -> None:
    """Its tasks are all older than their patience, and would go before any urgent one."""
    played = Played(_driver(lanes), seed)
    played.run(20.0, {"a": SATURATING[lanes], "b": (0.008 / lanes, 0.012 / lanes)})
    assert max(played.waited_s["b"]) > 5 * PATIENCE_S
    share = played.busy_s["b"] / sum(played.busy_s.values())
    assert 0.45 < share < 0.55


@pytest.mark.parametrize("lanes", [1, 2])
def test_what_an_idle_lane_was_used_for_is_paid_for_no_longer_than_a_patience(lanes: int) -> None:
    played = Played(_driver(lanes))
    played.run(10.0, {"b": (0.008 / lanes, 0.012 / lanes)})
    assert played.busy_s["b"] > 9.5 * lanes
    gaps_s = {"a": SATURATING[lanes], "b": (1.0, 1.0)}
    played.run(PATIENCE_S, gaps_s)
    before_s = played.busy_s["b"]
    played.run(4.0, gaps_s)
    assert 0.45 < (played.busy_s["b"] - before_s) / (4.0 * lanes) < 0.55


def test_by_its_patience_it_goes_before_what_is_due_later() -> None:
    """One lane; in closed form: 0 runs, then 2 (due at 0.9), 1 (at 0 + 1) and 3 (at 1.1)."""
    driver = Driver(chains(1, 1, step_choice=StepChoice.DEADLINE, run_ahead=1))
    driver.submit("a", deadline_s=0.5)
    driver.submit("b")
    driver.submit("a", deadline_s=0.9)
    driver.submit("a", deadline_s=1.1)
    driver.end_all()
    assert driver.order() == [0, 2, 1, 3]


def test_it_never_expires() -> None:
    driver = Driver(chains(1, step_choice=StepChoice.DEADLINE, run_ahead=1))
    first, second = driver.submit("a"), driver.submit("a")
    driver.at(100.0 * PATIENCE_S)
    driver.end_all()
    assert [driver.outcome(task) for task in (first, second)] == ["completed", "completed"]


def test_turns_are_a_share_apart_and_no_further_ahead_than_the_patience() -> None:
    assert next_turn_s(-math.inf, 5.0, 0.25, 1.0) == 5.25
    assert next_turn_s(5.25, 5.125, 0.25, 1.0) == 5.5  # launched before its turn
    assert next_turn_s(5.25, 5.75, 0.25, 1.0) == 6.0  # and after it
    assert next_turn_s(6.0, 5.0, 0.25, 1.0) == 6.0
    assert next_turn_s(6.0, 5.0, 3.0, 1.0) == 8.0  # one launch alone takes longer
