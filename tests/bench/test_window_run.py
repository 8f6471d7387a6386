"""Windows on a contestant that answers from a thread of its own."""

import math
import threading

import numpy as np
import pytest

from stageloom.edge_agent.bench import window_run
from stageloom.edge_agent.bench.contestant import Ended, TimedTask
from stageloom.edge_agent.bench.load import ArrivalWindow, judge, mixed_models
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
    carried = runner.closed_loop(contestant, [0, 0, 0], 2, 0.2)
    assert contestant.most_open == 2
    assert carried.per_s > 0.0 and carried.without_result == 0


def test_a_closed_loop_tells_how_many_of_its_tasks_had_no_result() -> None:
    runner, contestant = WindowRunner(FEEDS), Instant()
    contestant.start(runner.ended)
    carried = runner.closed_loop(contestant, [0, 1, 0], 2, 0.05)
    assert carried.without_result == pytest.approx(runner.completed / 2, abs=2)


class OneServer:
    """Runs a task whenever so many wait, the one that `order` says; also the `time` of `window_run`."""

    def __init__(self, service_s: tuple[float, float], outstanding: int, order: str) -> None:
        self._service_s, self._outstanding, self._order = service_s, outstanding, order
        self._now_s, self._used_s = 0.0, [0.0, 0.0]
        self._waiting: list[TimedTask] = []

    def monotonic(self) -> float:
        return self._now_s

    def start(self, ended: Ended) -> None:
        self._ended = ended

    def submit(self, task: TimedTask, feeds: Feeds) -> None:
        self._waiting.append(task)
        if len(self._waiting) == self._outstanding:
            runs = min(self._waiting, key=self._turn)
            self._waiting.remove(runs)
            self._now_s += self._service_s[runs.model]
            self._used_s[runs.model] += self._service_s[runs.model]
            self._ended(runs, True)

    def _turn(self, task: TimedTask) -> tuple[float, int]:
        by_model = {"first come": [0.0, 0.0], "shortest": self._service_s, "fair": self._used_s}[self._order]
        return by_model[task.model], task.number

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("seconds", [0.6, 2.0])
@pytest.mark.parametrize("order", ["first come", "shortest", "fair"])
@pytest.mark.parametrize("short_s", [0.001, 0.004])
def test_a_saturated_server_carries_its_mix_also_where_short_tasks_overtake(
    short_s: float, order: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long task to ten short ones, of which 80 may pass before the first long one runs."""
    service_s, rates = (0.050, short_s), []
    for seed in range(8):
        server, runner = OneServer(service_s, 8, order), WindowRunner(FEEDS)
        monkeypatch.setattr(window_run, "time", server)
        monkeypatch.setattr(window_run, "_DRAIN_S", 0.0)
        server.start(runner.ended)
        rates.append(runner.closed_loop(server, mixed_models((1.0, 10.0), seed), 8, seconds).per_s)
    assert np.mean(rates) == pytest.approx(11.0 / (service_s[0] + 10.0 * service_s[1]), rel=0.03)
    assert np.ptp(rates) < 0.15 * np.mean(rates)


def test_a_closed_loop_whose_tasks_never_turn_over_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    server, runner = OneServer((50.0, 0.001), 8, "shortest"), WindowRunner(FEEDS)
    monkeypatch.setattr(window_run, "time", server)
    monkeypatch.setattr(window_run, "_DRAIN_S", 0.0)
    server.start(runner.ended)
    assert runner.closed_loop(server, mixed_models((1.0, 10.0), 0), 8, 0.6).per_s == 0.0
    assert runner.completed > 80
