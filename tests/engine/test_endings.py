"""How tasks end in flight and in the queue: deadlines, cancels, failures, refusals."""

import pytest

from stageloom.shared.engine.steps import PlanKey, Task
from stageloom.shared.ids import StepId, TaskId
from stageloom.shared.plan import QueuePlan
from tests.engine.driver import Driver
from tests.engine.plans import chains


@pytest.mark.promise("queues-bounded-exactly-tasks")
def test_a_queued_task_expires_exactly_at_its_deadline() -> None:
    driver = Driver(chains(1, run_ahead=1))
    driver.submit("a")
    driver.submit("a")
    task = driver.submit("a", deadline_s=0.25)
    assert driver.core.next_wakeup(0.0) == 0.25
    driver.at(0.2499)
    assert driver.outcome(task) == ""
    driver.at(0.25)
    assert driver.outcome(task) == "expired"
    driver.end_all()
    assert task not in driver.order()


@pytest.mark.promise("queues-bounded-exactly-tasks")
def test_a_task_in_flight_expires_at_once_and_frees_its_slot_at_the_border() -> None:
    """The lane runs block 0; block 1 is never issued, and the slot is given to the next instance."""
    driver = Driver(chains(2, run_ahead=1))
    task = driver.submit("a", deadline_s=0.25)
    driver.submit("a")
    driver.at(0.25)
    assert driver.outcome(task) == "expired"
    assert [(drop.instance, drop.after) for drop in driver.drops] == [(0, (0,))]
    driver.end_all()
    assert driver.ran() == [[(0, 0, 0)], [(0, 0, 0)], [(0, 0, 1)]]


def test_a_result_that_comes_at_the_deadline_is_too_late() -> None:
    driver = Driver(chains(1))
    task = driver.submit("a", deadline_s=0.25)
    driver.now = 0.25
    driver.end()
    assert driver.outcome(task) == "expired"


def test_a_task_that_comes_after_its_deadline_is_expired() -> None:
    driver = Driver(chains(1))
    driver.now = 1.0
    assert driver.outcome(driver.submit("a", deadline_s=1.0)) == "expired"
    assert not driver.issued


def test_a_cancelled_task_in_flight_is_answered_at_once() -> None:
    driver = Driver(chains(3, run_ahead=2))
    task = driver.submit("a")
    driver.do(driver.core.cancel(task, 0.0))
    assert driver.outcome(task) == "cancelled"
    assert driver.drops[0].after == (0, 1)
    driver.end_all()
    assert len(driver.issued) == 2
    assert driver.core.idle


def test_a_task_cancelled_in_its_last_step_just_ends() -> None:
    driver = Driver(chains(1))
    task = driver.submit("a")
    driver.do(driver.core.cancel(task, 0.0))
    driver.end()
    assert driver.outcome(task) == "cancelled"
    assert not driver.drops


def test_cancelling_twice_or_too_late_changes_nothing() -> None:
    driver = Driver(chains(1))
    task = driver.submit("a")
    driver.end()
    driver.do(driver.core.cancel(task, 0.0))
    driver.do(driver.core.cancel(TaskId(99), 0.0))
    assert driver.outcome(task) == "completed"


def test_the_next_instance_waits_for_the_steps_of_a_cancelled_one() -> None:
    """Its step still writes slot 1, which the next instance's block 0 overwrites."""
    driver = Driver(chains(2, groups=[[(0, 0, 0)], [(0, 0, 1)]], run_ahead=2))
    first = driver.submit("a")
    driver.do(driver.core.cancel(first, 0.0))
    # Both steps were issued already: nothing is left to free.
    driver.submit("a")
    driver.end()
    assert driver.issued[2].after == (1,)


def test_a_failed_step_fails_its_members_tasks_only() -> None:
    groups = [[(0, 0, 0), (1, 0, 0)], [(0, 0, 1)], [(1, 0, 1)], [(2, 0, 0)]]
    driver = Driver(chains(2, 2, 1, groups=groups, run_ahead=1))
    c = driver.submit("c")
    a, b = driver.submit("a"), driver.submit("b")
    driver.end()
    assert driver.ran()[1] == [(0, 0, 0), (1, 0, 0)]
    driver.end(error="out of memory")
    assert [driver.outcome(task) for task in (a, b, c)] == ["failed", "failed", "completed"]
    assert driver.answers[a].code == "executor_failed"
    assert driver.answers[a].reason == "out of memory"
    driver.submit("a")
    driver.end_all()
    assert driver.core.idle
    assert driver.outcome(TaskId(3)) == "completed"


def test_steps_that_ran_ahead_of_a_failed_one_are_ignored() -> None:
    driver = Driver(chains(2, run_ahead=2))
    task = driver.submit("a")
    driver.end(error="broken")
    assert driver.drops[0].after == (1,)
    driver.end()
    assert driver.outcome(task) == "failed"
    assert driver.core.idle


def test_an_unknown_model_is_refused_by_name() -> None:
    driver = Driver(chains(1))
    task = driver.submit("nobody")
    assert driver.answers[task].code == "unknown_model"
    assert "'nobody'" in driver.answers[task].reason


def test_one_id_cannot_be_submitted_twice() -> None:
    driver = Driver(chains(1))
    task = driver.submit("a")
    with pytest.raises(ValueError, match="here already"):
        driver.core.submit(Task(id=task, models=("a",), nbytes=1), 0.0)


def test_a_step_that_is_not_in_flight_cannot_end() -> None:
    driver = Driver(chains(1))
    driver.submit("a")
    driver.end()
    with pytest.raises(ValueError, match="not in flight"):
        driver.core.step_done(StepId(0), 0.0)


def test_counters_add_up() -> None:
    driver = Driver(chains(1, fields={"queue": QueuePlan(max_tasks=1)}, run_ahead=1))
    for _ in range(4):
        driver.submit("a")  # runs, in slot 0, queued, refused
    driver.do(driver.core.cancel(TaskId(1), 0.0))
    driver.submit("a", deadline_s=0.5)
    driver.at(0.5)
    driver.end(error="broken")
    driver.end_all()
    stats = driver.core.snapshot(1.0)
    ended = stats.ended
    assert (ended.completed, ended.refused, ended.failed, ended.cancelled, ended.expired) == (1, 1, 1, 1, 1)
    assert stats.submitted == 5 and stats.open_tasks == 0
    assert stats.models[0].ended == ended
    assert stats.active == PlanKey(0)


def test_snapshot_shows_queues_and_progress() -> None:
    driver = Driver(chains(3, fields={"replicas": 2}, run_ahead=1))
    for _ in range(3):
        driver.submit("a", nbytes=5)
    driver.now = 2.0
    driver.end()
    model = driver.core.snapshot(5.0).models[0]
    # Ratio: ties go to the oldest. It is in block 1 now; the second waits in replica 1 and the third queues.
    assert model.progress == (0b011, 0b001)
    assert (model.queued, model.queued_bytes, model.oldest_age_s) == (0, 0, 0.0)
    driver.submit("a", nbytes=7)
    model = driver.core.snapshot(5.0).models[0]
    assert (model.queued, model.queued_bytes, model.oldest_age_s) == (1, 7, 3.0)


def test_drain_stops_launching_and_refuse_empties_the_queue() -> None:
    driver = Driver(chains(1, run_ahead=1))
    first, second, third = (driver.submit("a") for _ in range(3))
    driver.do(driver.core.drain(0.0))
    driver.end_all()
    assert [driver.outcome(task) for task in (first, second, third)] == ["completed", "completed", ""]
    assert driver.core.idle
    driver.do(driver.core.drain(0.0, refuse=True))
    assert driver.answers[third].code == "draining"
    assert driver.answers[driver.submit("a")].code == "draining"
    driver.activate(0)
    driver.submit("a")
    assert driver.steps
