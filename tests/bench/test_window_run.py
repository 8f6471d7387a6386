"""Windows on a contestant that answers from a thread of its own."""

import math
import threading

import numpy as np

from stageloom.edge_agent.bench.contestant import Ended, TimedTask
from stageloom.edge_agent.bench.load import ArrivalWindow, judge
from stageloom.edge_agent.bench.model_files import Feeds
from stageloom.edge_agent.bench.window_run import WindowRunner

FEEDS: list[list[Feeds]] = [[{"x": np.zeros(1)}], [{"y": np.zeros(1)}]]


class Instant:
    """Answers model 0 at once, gives model 1 up, and counts what is open at most."""

    def __init__(self) -> None:
        self.most_open = 0
        self._open = 0
        self._lock = threading.Lock()
        self.inputs: set[str] = set()

    def start(self, ended: Ended) -> None:
        self._ended = ended

    def submit(self, task: TimedTask, feeds: Feeds) -> None:
        self.inputs |= feeds.keys()
        with self._lock:
            self._open += 1
            self.most_open = max(self.most_open, self._open)
        threading.Timer(0.001, self._end, (task,)).start()

    def _end(self, task: TimedTask) -> None:
        with self._lock:
            self._open -= 1
        self._ended(task, task.model == 0)

    def stop(self) -> None:
        pass


def test_each_task_gets_its_models_inputs_and_one_that_was_given_up_has_no_latency() -> None:
    runner, contestant = WindowRunner(FEEDS), Instant()
    contestant.start(runner.ended)
    window = ArrivalWindow(np.array([0.0, 0.002, 0.004]), np.array([0, 1, 0]), np.array([30.0, 0.01]))
    result = judge(window, runner.open_loop(contestant, window))
    assert [math.isnan(latency) for latency in result.latency_s] == [False, True, False]
    assert list(result.in_time) == [True, False, True]
    assert np.all(result.latency_s[[0, 2]] >= 0.001)
    assert contestant.inputs == {"x", "y"}


def test_a_closed_loop_keeps_some_tasks_open_and_never_more() -> None:
    runner, contestant = WindowRunner(FEEDS), Instant()
    contestant.start(runner.ended)
    rate = runner.closed_loop(contestant, [0, 0, 0], 2, 0.2)
    assert contestant.most_open == 2
    assert rate > 0.0
