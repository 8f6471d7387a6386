"""A load that stays until it is ended, and what became of its tasks, by when they arrived."""

import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from benchmarks.pays.intervals import Tasks
from benchmarks.pays.load import Application
from stageloom import Client
from stageloom.edge_agent.bench.contestant import TimedTask
from stageloom.edge_agent.bench.model_files import ModelUnderTest

WINDOW_S: Final = 2.0
_DRAIN_S: Final = 20.0
_COMPARED: Final = 4


class StayingLoad:
    """Poisson arrivals from a thread of its own. All instants are on the monotonic clock.

    A task arrives when it is due to, whatever became of earlier ones.
    """

    def __init__(
        self, application: Application, weights: Sequence[float], rate_per_s: float, seed: int
    ) -> None:
        self.began_s = time.monotonic()
        self.rate_per_s = rate_per_s
        self._application = application
        self._share = np.asarray(weights, np.float64) / sum(weights)
        self._rng = np.random.default_rng(seed)
        self._tasks: list[TimedTask] = []
        self._ended_s: list[float] = []  # of each task; nan while it is open, and where it has no result
        self._open = 0
        self._changed = threading.Condition()
        self._stop = threading.Event()
        application.start(self._ended)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """No more tasks; returns once all have ended. One that does not in time is lost."""
        self._stop.set()
        self._thread.join()
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0, _DRAIN_S)
            self._application.outcomes["lost"] += self._open

    def windows(self, begin_s: float, end_s: float) -> list[Tasks]:
        """What arrived between two instants, in whole windows, oldest first; to be asked after `end`."""
        deadlines_s = np.asarray(self._application.deadlines_s, np.float64)
        arrived_s = np.array([task.arrived_s for task in self._tasks])
        model = np.array([task.model for task in self._tasks], np.int64)
        latency_s = np.array(self._ended_s) - arrived_s
        answered = ~np.isnan(latency_s)
        in_time = latency_s < deadlines_s[model]  # never where there is no result
        latency_s = np.where(answered, latency_s, 2.0 * deadlines_s[model])
        found = []
        for number in range(int((end_s - begin_s) / WINDOW_S)):
            first_s = begin_s + number * WINDOW_S
            within = (arrived_s >= first_s) & (arrived_s < first_s + WINDOW_S)
            found.append(Tasks(latency_s[within], in_time[within], answered[within]))
        return found

    def _run(self) -> None:
        at_s = self.began_s
        while True:
            at_s += float(self._rng.exponential(1.0 / self.rate_per_s))
            if self._stop.wait(max(at_s - time.monotonic(), 0.0)):
                return
            model = int(self._rng.choice(len(self._share), p=self._share))
            due_s = at_s + self._application.deadlines_s[model]
            task = TimedTask(len(self._tasks), model, at_s, due_s)
            with self._changed:
                self._tasks.append(task)
                self._ended_s.append(float("nan"))
                self._open += 1
            feeds = self._application.feeds[model]
            self._application.submit(task, feeds[task.number % len(feeds)])

    def _ended(self, task: TimedTask, completed: bool) -> None:
        now_s = time.monotonic()
        with self._changed:
            if completed:
                self._ended_s[task.number] = now_s
            self._open -= 1
            self._changed.notify_all()


def compare(client: Client, model: ModelUnderTest) -> tuple[float, float, int]:
    """Results of a model beside onnxruntime's: the largest relative difference; the largest relative change
    of an output between two inputs, without which the first would say nothing; and how many."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model.path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    feeds = model.feeds(_COMPARED)
    expected = [dict(zip(names, session.run(names, dict(given)), strict=True)) for given in feeds]
    found = [client.run(model.name, given, timeout_s=_DRAIN_S) for given in feeds]
    pairs = zip(found, expected, strict=True)
    difference = max(relative(one[name], reference[name]) for one, reference in pairs for name in names)
    change = max(min(relative(one[name], expected[0][name]) for name in names) for one in expected[1:])
    return difference, change, len(feeds)


def relative(value: "np.ndarray[Any, Any]", reference: "np.ndarray[Any, Any]") -> float:
    """Norm of the difference over norm of the reference; infinite where either is not finite."""
    wide = reference.astype(np.float64)
    difference = float(np.linalg.norm(value.astype(np.float64) - wide))
    norm = float(np.linalg.norm(wide))
    if not np.isfinite(difference) or not norm > 0.0:
        return float("inf")
    return difference / norm
