"""Queues and threads of rivals, with runtimes that do what a test says."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from stageloom.edge_agent.bench.contestant import TimedTask
from stageloom.edge_agent.bench.model_files import Feeds
from stageloom.edge_agent.bench.rival_threads import (
    AsynchronousRival,
    RivalQueue,
    TaskOrder,
    ThreadedRival,
)

FEEDS: Feeds = {"x": np.zeros(1)}


class Ends:
    """How tasks ended, and a condition to wait with."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []
        self._changed = threading.Condition()

    def __call__(self, task: TimedTask, completed: bool) -> None:
        with self._changed:
            self.seen.append((task.number, completed))
            self._changed.notify_all()

    def wait(self, count: int) -> list[tuple[int, bool]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= count, timeout=30.0)
        return self.seen


class Recorder:
    """Says which worker ran which model; every run waits for a permit."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.began = threading.Semaphore(0)
        self.ran: list[tuple[int, int]] = []

    def run(self, worker: int, model: int, feeds: Feeds) -> object:
        self.began.release()
        self.permits.acquire()
        self.ran.append((worker, model))
        return None


def task(number: int, *, model: int = 0, due_in_s: float = 1000.0) -> TimedTask:
    return TimedTask(number, model, float(number), time.monotonic() + due_in_s)


def order_of(order: TaskOrder, due_in_s: tuple[float, ...]) -> list[int]:
    queue = RivalQueue(order, Ends())
    for number, due in enumerate(due_in_s):
        queue.put(task(number, due_in_s=due), FEEDS)
    return [taken[0].number for _ in due_in_s if (taken := queue.take()) is not None]


def test_the_oldest_task_is_taken_first_or_the_most_urgent_one() -> None:
    assert order_of(TaskOrder.ARRIVAL, (300.0, 100.0, 200.0)) == [0, 1, 2]
    assert order_of(TaskOrder.DEADLINE, (300.0, 100.0, 200.0)) == [1, 2, 0]


def test_a_task_that_is_too_late_is_given_up_when_its_turn_comes() -> None:
    ends = Ends()
    queue = RivalQueue(TaskOrder.ARRIVAL, ends)
    queue.put(task(0, due_in_s=-1.0), FEEDS)
    queue.put(task(1), FEEDS)
    taken = queue.take()
    assert taken is not None
    assert taken[0].number == 1
    assert ends.seen == [(0, False)]


def test_two_workers_share_one_queue() -> None:
    ends, runtime = Ends(), Recorder()
    rival = ThreadedRival(lambda: runtime, 3, workers=2)
    rival.start(ends)
    for number in range(3):
        rival.submit(task(number, model=number), FEEDS)
    runtime.began.acquire()
    runtime.began.acquire()  # both hold a task; the third waits
    assert not runtime.began.acquire(blocking=False)
    runtime.permits.release(3)
    assert sorted(ends.wait(3)) == [(0, True), (1, True), (2, True)]
    rival.stop()


def test_a_thread_of_its_own_runs_each_model() -> None:
    ends, runtime = Ends(), Recorder()
    rival = ThreadedRival(lambda: runtime, 2, workers=0)
    rival.start(ends)
    runtime.permits.release(4)
    for number in range(4):
        rival.submit(task(number, model=number % 2), FEEDS)
    ends.wait(4)
    assert set(runtime.ran) == {(0, 0), (1, 1)}
    rival.stop()


class Stumbling:
    """A runtime that cannot run model 0."""

    def run(self, worker: int, model: int, feeds: Feeds) -> object:
        if model == 0:
            raise ValueError("no such operator")
        return None


def test_a_run_that_fails_ends_its_task_alone_and_its_error_is_told() -> None:
    ends = Ends()
    rival = ThreadedRival(Stumbling, 2, workers=1)
    rival.start(ends)
    for number in range(4):
        rival.submit(task(number, model=number % 2), FEEDS)
    assert ends.wait(4) == [(0, False), (1, True), (2, False), (3, True)]
    assert rival.problem == "ValueError: no such operator"
    rival.stop()


class OneRequest:
    """A model with one request, which ends when the test says."""

    def __init__(self) -> None:
        self._idle = threading.Event()
        self._idle.set()
        self.asked = threading.Semaphore(0)
        self.running: list[Callable[[], None]] = []

    def wait_for_room(self) -> object:
        self.asked.release()
        return self._idle.wait(30.0)

    def begin(self, feeds: Feeds, done: Callable[[], None]) -> None:
        self._idle.clear()
        self.running.append(done)

    def finish(self) -> None:
        done = self.running[-1]
        self._idle.set()
        done()


def test_a_queue_of_requests_chooses_its_task_once_there_is_room() -> None:
    ends, model = Ends(), OneRequest()
    rival = AsynchronousRival(lambda: [model])
    rival.start(ends)
    rival.submit(task(0), FEEDS)
    model.asked.acquire()
    rival.submit(task(1, due_in_s=0.0), FEEDS)  # expires while the request is busy
    rival.submit(task(2), FEEDS)
    model.asked.acquire()
    model.finish()
    assert sorted(ends.wait(2)) == [(0, True), (1, False)]
    model.asked.acquire()
    rival.stop()


class BrokenRequests:
    """A queue of requests whose second task fails, of which it tells when it is asked for room the next time;
    or it fails at once."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self._begun = 0

    def wait_for_room(self) -> object:
        if self._begun >= 2:
            raise RuntimeError("out of memory")
        return None

    def begin(self, feeds: Feeds, done: Callable[[], None]) -> None:
        self._begun += 1
        if self._begun == 1:
            done()
        elif self._at_once:
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("at_once", [False, True])
def test_once_a_request_fails_its_queue_gives_every_task_up_and_its_error_is_told(at_once: bool) -> None:
    ends, model = Ends(), BrokenRequests(at_once=at_once)
    rival = AsynchronousRival(lambda: [model])
    rival.start(ends)
    for number in range(4):
        rival.submit(task(number), FEEDS)
    assert ends.wait(4) == [(0, True), (1, False), (2, False), (3, False)]
    assert rival.problem == "RuntimeError: out of memory"
    rival.stop()
