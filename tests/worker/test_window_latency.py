"""Whose latency counts in a window of a trial, and as what: the counter on a core that only queues."""

import math
from collections.abc import Iterable, Mapping
from typing import cast

import pytest

from stageloom.edge_agent.worker.accounting import WindowCounter
from stageloom.edge_agent.worker.messages import ModelFigures, WindowMeasured
from stageloom.shared.engine.core import EngineCore
from stageloom.shared.engine.steps import Outcome, Task
from stageloom.shared.ids import TaskId

pytestmark = pytest.mark.more


class _Queues:
    """What a window asks the core for."""

    failed = 0
    waiting = False

    def oldest_age_s(self, now: float) -> float:
        return 0.0

    def completed(self) -> Mapping[str, int]:
        return {"a": 0, "b": 0}


_CORE = cast(EngineCore, _Queues())


def window() -> WindowCounter:
    """From 10 to 11 s: the latencies of what arrives until 10.9 s count."""
    return WindowCounter.begin(_CORE, None, 0.0, 10.0, 11.0)


def end(counter: WindowCounter, waiting: Iterable[Task] = ()) -> WindowMeasured:
    return counter.end(1, _CORE, 0.0, 11.0, waiting)


def task(arrived_s: float, deadline_s: float | None = None, models: tuple[str, ...] = ("a",)) -> Task:
    made = Task(id=TaskId(1), models=models, nbytes=0, deadline_s=deadline_s)
    made.arrived_s = arrived_s
    return made


def latency(seen: WindowMeasured, name: str = "a") -> tuple[object, object]:
    """Tasks that count, and the geometric mean of their latencies."""
    model: ModelFigures = next(one for one in seen.models if one.name == name)
    return model.judged, math.exp(model.log_latency / (model.judged or 1))


def test_completed_tasks_count_from_arrival_to_answer() -> None:
    counter = window()
    counter.task_ended(task(10.0, 10.5), Outcome.COMPLETED, 10.1)
    counter.task_ended(task(10.2), Outcome.COMPLETED, 10.6)
    seen = end(counter)
    assert latency(seen) == (2, pytest.approx(0.2))
    assert seen.p99_s == pytest.approx(0.4)
    assert (seen.due, seen.in_time) == (2, 2)


def test_tasks_that_wait_are_in_the_tail_so_that_a_growing_queue_has_no_short_one() -> None:
    """Of a plan that falls behind, only what overtakes its queue completes in the window."""
    counter = window()
    for _ in range(50):
        counter.task_ended(task(10.2), Outcome.COMPLETED, 10.201)
    assert end(counter, [task(10.1), task(10.3)]).p99_s == pytest.approx(0.9)


@pytest.mark.parametrize("arrived_s", [9.99, 10.95])
def test_tasks_of_before_and_of_the_last_tenth_speak_of_no_plan(arrived_s: float) -> None:
    """One waited while the other plan ran or drained; the other is too young to have waited."""
    counter, one = window(), task(arrived_s, arrived_s + 5)
    counter.task_ended(one, Outcome.COMPLETED, 10.99)
    seen = end(counter, [task(arrived_s)])
    assert latency(seen) == (0, 1.0)
    assert (seen.due, seen.in_time) == (0, 0)
    assert seen.models[0].ended == 1, "it came, whatever it says"
    assert seen.p99_s == 0.0, "nor of its tail"


@pytest.mark.parametrize("outcome", [Outcome.EXPIRED, Outcome.CANCELLED, Outcome.REFUSED, Outcome.FAILED])
def test_what_was_not_answered_in_time_counts_as_twice_the_time_that_it_had(outcome: Outcome) -> None:
    counter = window()
    counter.task_ended(task(10.0, 10.25), outcome, 10.01)
    seen = end(counter)
    assert latency(seen) == (1, pytest.approx(0.5))
    assert (seen.due, seen.in_time) == (1, 0)


def test_without_a_deadline_a_task_that_was_given_up_counts_by_its_age_and_one_that_failed_does_not() -> None:
    counter = window()
    counter.task_ended(task(10.0), Outcome.CANCELLED, 10.3)
    counter.task_ended(task(10.0), Outcome.FAILED, 10.001)
    counter.task_ended(task(10.0), Outcome.REFUSED, 10.0)
    seen = end(counter)
    assert latency(seen) == (1, pytest.approx(0.3))
    assert (seen.due, seen.in_time) == (3, 0)


def test_a_task_that_came_after_its_deadline_blames_no_plan() -> None:
    counter = window()
    counter.task_ended(task(10.1, 10.05), Outcome.EXPIRED, 10.1)
    seen = end(counter)
    assert (*latency(seen), seen.due) == (0, 1.0, 0)


def test_a_plan_cannot_hide_the_tasks_that_it_leaves_waiting() -> None:
    seen = end(window(), [task(10.2), task(10.6, 20.0), task(9.0)])
    assert latency(seen) == (2, pytest.approx(math.sqrt(0.8 * 0.4)))
    assert (seen.due, seen.in_time) == (0, 0), "they may still be in time"


def test_a_task_for_several_models_counts_in_each() -> None:
    counter = window()
    counter.task_ended(task(10.0, models=("a", "b")), Outcome.COMPLETED, 10.1)
    seen = end(counter)
    assert latency(seen, "a") == latency(seen, "b") == (1, pytest.approx(0.1))
    assert seen.due == 1
