"""Queue bounds and rules, alone and against a reference that sorts lists."""

from random import Random

import pytest

from stageloom.shared.engine.patience import wanted_by_s
from stageloom.shared.engine.queues import TaskQueue
from stageloom.shared.engine.steps import Task
from stageloom.shared.ids import TaskId
from stageloom.shared.plan import QueuePlan, QueueRule
from tests.engine.driver import Driver
from tests.engine.plans import chains


def _driver(rule: QueueRule, max_tasks: int = 2, max_bytes: int = 1 << 20) -> Driver:
    """One lane that is busy with the first task (0), and a second one (1) in slot 0."""
    queue = QueuePlan(rule=rule, max_tasks=max_tasks, max_bytes=max_bytes)
    driver = Driver(chains(1, fields={"queue": queue}, run_ahead=1))
    driver.submit("a")
    driver.submit("a")
    return driver


def _outcomes(driver: Driver) -> dict[int, str]:
    return {task: answer.code for task, answer in driver.answers.items()}


def test_refuse_newest_keeps_who_came_first() -> None:
    driver = _driver(QueueRule.REFUSE_NEWEST)
    for _ in range(4):
        driver.submit("a")
    assert _outcomes(driver) == {4: "queue_full", 5: "queue_full"}
    driver.end_all()
    assert driver.order() == [0, 1, 2, 3]


def test_drop_oldest_keeps_who_came_last() -> None:
    driver = _driver(QueueRule.DROP_OLDEST)
    for _ in range(4):
        driver.submit("a")
    assert _outcomes(driver) == {2: "queue_full", 3: "queue_full"}
    driver.end_all()
    assert driver.order() == [0, 1, 4, 5]


def test_the_latest_deadline_loses_and_the_earliest_runs_first() -> None:
    driver = _driver(QueueRule.DEADLINE)
    for deadline in (0.5, 0.3, 0.4, None):
        driver.submit("a", deadline_s=deadline)
    assert _outcomes(driver) == {2: "queue_full", 5: "queue_full"}
    driver.end_all()
    assert driver.order() == [0, 1, 3, 4]


def test_without_a_deadline_a_task_is_wanted_after_its_patience() -> None:
    driver = _driver(QueueRule.DEADLINE, max_tasks=3)
    for deadline in (1.1, None, 0.9, 0.8):
        driver.submit("a", deadline_s=deadline)
    assert _outcomes(driver) == {2: "queue_full"}
    driver.end_all()
    assert driver.order() == [0, 1, 5, 4, 3]


def test_tasks_without_a_deadline_go_behind_others_until_their_model_s_turn() -> None:
    """However long they have waited, within their model's own queue, too."""
    queue = TaskQueue(QueuePlan(rule=QueueRule.DEADLINE))
    entries = [
        Task(id=TaskId(number), models=("a",), nbytes=1, deadline_s=deadline_s)
        for number, deadline_s in enumerate((None, None, 7.0, 9.0))
    ]
    for number, entry in enumerate(entries):
        entry.seq, entry.patient_until_s = number, 1.0
        queue.add(entry)
    assert queue.take(8.0) is entries[2]
    assert queue.take(8.0) is entries[0]
    assert queue.take(9.5) is entries[3]
    assert queue.take(9.5) is entries[1]


def test_the_lowest_priority_loses_newest_first() -> None:
    driver = _driver(QueueRule.PRIORITY)
    for priority in (1, 1, 2, 1):
        driver.submit("a", priority=priority)
    assert _outcomes(driver) == {3: "queue_full", 5: "queue_full"}
    driver.end_all()
    assert driver.order() == [0, 1, 4, 2]


@pytest.mark.promise("queues-bounded-exactly-tasks")
def test_the_bound_is_exact_in_tasks() -> None:
    driver = _driver(QueueRule.REFUSE_NEWEST, max_tasks=3)
    for _ in range(3):
        driver.submit("a")
    assert not driver.answers
    driver.submit("a")
    assert _outcomes(driver) == {5: "queue_full"}


@pytest.mark.promise("queues-bounded-exactly-tasks")
def test_the_bound_is_exact_in_bytes() -> None:
    driver = _driver(QueueRule.REFUSE_NEWEST, max_tasks=100, max_bytes=10)
    driver.submit("a", nbytes=4)
    driver.submit("a", nbytes=6)
    assert not driver.answers
    driver.submit("a", nbytes=1)
    assert _outcomes(driver) == {4: "queue_full"}


def test_several_old_tasks_go_for_one_large_one() -> None:
    driver = _driver(QueueRule.DROP_OLDEST, max_tasks=100, max_bytes=10)
    for nbytes in (3, 3, 3, 7):
        driver.submit("a", nbytes=nbytes)
    assert _outcomes(driver) == {2: "queue_full", 3: "queue_full"}


def test_a_task_larger_than_the_queue_costs_nobody_their_place() -> None:
    driver = _driver(QueueRule.DROP_OLDEST, max_tasks=100, max_bytes=10)
    driver.submit("a", nbytes=10)
    driver.submit("a", nbytes=11)
    assert _outcomes(driver) == {3: "too_large"}


def test_nobody_is_evicted_for_a_newcomer_that_is_refused_all_the_same() -> None:
    """Room for the newcomer would need two victims, but the second one is worth more than the newcomer."""
    driver = _driver(QueueRule.PRIORITY, max_tasks=100, max_bytes=10)
    driver.submit("a", nbytes=5, priority=0)
    driver.submit("a", nbytes=5, priority=2)
    driver.submit("a", nbytes=8, priority=1)
    assert _outcomes(driver) == {4: "queue_full"}


def test_cancelled_tasks_leave_room_at_once() -> None:
    driver = _driver(QueueRule.REFUSE_NEWEST)
    first = driver.submit("a")
    driver.submit("a")
    driver.do(driver.core.cancel(first, 0.0))
    driver.submit("a")
    assert _outcomes(driver) == {2: "cancelled"}


class _Reference:
    """The rules as a sorted list."""

    def __init__(self, plan: QueuePlan) -> None:
        self.plan = plan
        self.tasks: list[Task] = []

    def key(self, entry: Task) -> tuple[float, int]:
        if self.plan.rule is QueueRule.DEADLINE:
            return wanted_by_s(entry), entry.seq
        if self.plan.rule is QueueRule.PRIORITY:
            return -entry.priority, entry.seq
        return 0.0, entry.seq

    def fits(self, tasks: list[Task]) -> bool:
        return len(tasks) <= self.plan.max_tasks and sum(t.nbytes for t in tasks) <= self.plan.max_bytes

    def submit(self, entry: Task) -> list[Task] | None:
        if entry.nbytes > self.plan.max_bytes:
            return None
        kept = sorted([*self.tasks, entry], key=self.key)
        lost = []
        while not self.fits(kept):
            lost.append(kept.pop(0 if self.plan.rule is QueueRule.DROP_OLDEST else -1))
        if entry in lost:
            return None
        self.tasks = kept
        return lost

    def take(self) -> Task:
        self.tasks.sort(key=self.key)
        return self.tasks.pop(0)


@pytest.mark.promise("queues-bounded-exactly-tasks")
@pytest.mark.parametrize("rule", list(QueueRule))
def test_queue_agrees_with_a_sorted_list(rule: QueueRule) -> None:
    random = Random(f"queue {rule}")
    for _ in range(30):
        plan = QueuePlan(
            rule=rule, max_tasks=random.choice([1, 2, 5, 20]), max_bytes=random.choice([15, 100])
        )
        queue, reference = TaskQueue(plan), _Reference(plan)
        for number in range(200):
            action = random.random()
            if action < 0.6:
                deadline = random.choice([None, float(random.randint(0, 5))])
                entry = Task(
                    id=TaskId(number),
                    models=("a",),
                    nbytes=random.choice([1, 5, 16]),
                    priority=random.randint(0, 2),
                    deadline_s=deadline,
                )
                entry.seq = number
                entry.patient_until_s = 0.03 * number
                losers = queue.losers(entry)
                assert losers == reference.submit(entry)
                if losers is not None:
                    for loser in losers:
                        queue.discard(loser)
                    queue.add(entry)
            elif reference.tasks and action < 0.8:
                assert queue.take() is reference.take()
            elif reference.tasks:
                gone = random.choice(reference.tasks)
                reference.tasks.remove(gone)
                queue.discard(gone)
            assert len(queue) == len(reference.tasks)
            assert queue.nbytes == sum(entry.nbytes for entry in reference.tasks)


def test_ended_tasks_do_not_pile_up_in_the_orders() -> None:
    queue = TaskQueue(QueuePlan(rule=QueueRule.PRIORITY, max_tasks=10_000))
    keep = Task(id=TaskId(0), models=("a",), nbytes=1)
    queue.add(keep)
    for number in range(1, 2_000):
        entry = Task(id=TaskId(number), models=("a",), nbytes=1, priority=-1)
        entry.seq = number
        queue.add(entry)
        queue.discard(entry)
    assert len(queue._runs) < 200 and len(queue._loses) < 200
    assert queue.take() is keep
