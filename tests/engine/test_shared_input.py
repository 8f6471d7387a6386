"""Shared inputs: one task for several models."""

import pytest

from stageloom.shared.plan import QueuePlan, QueueRule
from tests.engine.driver import Driver
from tests.engine.plans import chains, models_of, with_models


def test_a_shared_task_is_answered_when_all_its_models_end() -> None:
    driver = Driver(chains(1, 2, run_ahead=1))
    task = driver.submit("a", "b")
    driver.end()
    driver.end()
    assert driver.outcome(task) == ""
    driver.end()
    assert driver.outcome(task) == "completed"
    assert [(name, part.value) for name, part in driver.answers[task].parts] == [
        ("a", "completed"),
        ("b", "completed"),
    ]


def test_an_error_in_one_model_is_told_with_the_others_results() -> None:
    driver = Driver(chains(1, 1, run_ahead=1))
    task = driver.submit("a", "b")
    driver.end(error="broken")
    assert driver.outcome(task) == ""
    driver.end()
    answer = driver.answers[task]
    assert (answer.outcome.value, answer.code) == ("failed", "shared_part")
    assert {name: part.value for name, part in answer.parts} == {"a": "failed", "b": "completed"}
    assert answer.reason == "model 'a': broken"


def test_a_cancelled_shared_task_leaves_all_its_models() -> None:
    driver = Driver(chains(2, 2, run_ahead=1))
    task = driver.submit("a", "b")
    driver.do(driver.core.cancel(task, 0.0))
    driver.end_all()
    assert driver.outcome(task) == "cancelled"
    assert driver.core.idle
    assert len(driver.issued) == 1


def _buffered() -> Driver:
    """`a` is slow: task 0 runs, task 1 is in slot 0, and shared task 2 is in the buffers of `a` and `b`."""
    driver = Driver(chains(1, 1, 1, run_ahead=1, fields={"work_conserving": False}))
    driver.submit("a")
    driver.submit("a")
    driver.submit("a", "b")
    return driver


@pytest.mark.promise("shared-input-enters-models")
def test_a_shared_task_enters_only_when_all_its_buffers_are_free() -> None:
    """Task 3 waits for the buffer of `a`, so it does not enter `c` either."""
    driver = _buffered()
    third = driver.submit("a", "c")
    assert driver.core.snapshot(0.0).models[2].queued == 1
    driver.end_all()
    assert driver.outcome(third) == "completed"


@pytest.mark.promise("shared-input-enters-models")
def test_no_younger_task_takes_a_buffer_that_an_older_one_waits_for() -> None:
    """Task 3 waits for `a` and so claims `c`; task 4 wants `b` and `c` and must not overtake it."""
    driver = _buffered()
    third = driver.submit("a", "c")
    fourth = driver.submit("b", "c")
    driver.end_all()
    in_c = [task for s in driver.issued for m in s.members if m.member.model == 2 for task in m.tasks]
    assert in_c == [third, fourth]


def test_a_younger_task_may_pass_where_the_older_one_does_not_wait() -> None:
    driver = _buffered()
    driver.submit("a", "b")
    younger = driver.submit("c")
    for _ in range(8):
        if driver.outcome(younger):
            break
        driver.end()
    assert driver.outcome(younger) == "completed"


def test_single_and_shared_tasks_are_launched_in_order_of_arrival() -> None:
    driver = Driver(chains(1, 1, run_ahead=1))
    first = driver.submit("a")
    second = driver.submit("a")
    shared = driver.submit("a", "b")
    last = driver.submit("a")
    driver.end_all()
    in_a = [task for s in driver.issued for m in s.members if m.member.model == 0 for task in m.tasks]
    assert in_a == [first, second, shared, last]


def test_a_shared_task_needs_room_in_all_its_queues_and_takes_none_if_refused() -> None:
    models = models_of([1, 1], queue=QueuePlan(max_tasks=1))
    driver = Driver(with_models(models, run_ahead=1))
    for _ in range(3):
        driver.submit("a")
    task = driver.submit("a", "b")
    assert driver.answers[task].code == "queue_full"
    assert driver.core.snapshot(0.0).models[1].queued == 0


def test_a_shared_task_in_the_buffers_is_never_dropped() -> None:
    models = models_of([1, 1], queue=QueuePlan(max_tasks=1, rule=QueueRule.DROP_OLDEST))
    driver = Driver(with_models(models, run_ahead=1))
    driver.submit("a")
    driver.submit("a")
    shared = driver.submit("a", "b")
    late = driver.submit("a")
    assert driver.answers[late].code == "queue_full"
    driver.end_all()
    assert driver.outcome(shared) == "completed"


def test_a_model_that_goes_ends_its_part_only() -> None:
    driver = Driver(chains(1, 1, run_ahead=1))
    driver.submit("b")
    driver.submit("b")
    shared = driver.submit("a", "b")
    driver.load(1, chains(1, run_ahead=1))
    driver.activate(1)
    driver.end_all()
    answer = driver.answers[shared]
    assert answer.outcome.value == "failed"
    assert {name: part.value for name, part in answer.parts} == {"a": "completed", "b": "refused"}
