"""One window on a contestant: tasks handed over at their instants, their ends written down."""

import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from stageloom.edge_agent.bench.contestant import Contestant, TimedTask
from stageloom.edge_agent.bench.load import Array, ArrivalWindow
from stageloom.edge_agent.bench.model_files import Feeds

_LEAD_S: Final = 0.005
_GRACE_S: Final = 0.010
_DRAIN_S: Final = 60.0


class WindowRunner:
    """Runs windows on a started contestant, one after the other; `ended` is what it is started with.

    Args:
        feeds: inputs by model, then to choose from.
    """

    def __init__(self, feeds: Sequence[Sequence[Feeds]]) -> None:
        self._feeds = feeds
        self._changed = threading.Condition()
        self._ended_s: Array = np.empty(0)
        self._open = 0

    @property
    def completed(self) -> int:
        """Tasks of the last window that had a result."""
        return int(np.count_nonzero(np.isfinite(self._ended_s)))

    def ended(self, task: TimedTask, completed: bool) -> None:
        """The contestant is done with a task."""
        now_s = time.monotonic()
        with self._changed:
            if completed:
                self._ended_s[task.number] = now_s
            self._open -= 1
            self._changed.notify_all()

    def open_loop(self, contestant: Contestant, window: ArrivalWindow) -> Array:
        """Instants of results [tasks] float64 from the window's begin, nan for none.

        Tasks are handed over when they arrive, whatever became of earlier ones. What is open after the last
        arrival is awaited until its deadline; what runs even then ends before this returns, and counts as
        late.
        """
        self._reset(window.tasks)
        due_s = window.due_s()
        begin_s = time.monotonic() + _LEAD_S
        for number, (at_s, model) in enumerate(zip(window.at_s.tolist(), window.model.tolist(), strict=True)):
            _sleep_until(begin_s + at_s)
            task = TimedTask(number, model, begin_s + at_s, begin_s + float(due_s[number]))
            contestant.submit(task, self._chosen(number, model))
        finite = due_s[np.isfinite(due_s)]
        self._await_none_open(begin_s + float(finite.max(initial=0.0)) + _GRACE_S)
        found: Array = self._ended_s - begin_s
        self._await_none_open(time.monotonic() + _DRAIN_S)
        return found

    def closed_loop(
        self, contestant: Contestant, models: Sequence[int], outstanding: int, seconds: float
    ) -> float:
        """Tasks a second while `outstanding` are always open: the next of `models`, over and over."""
        self._reset(0)
        capacity = 1024
        self._ended_s = np.full(capacity, np.nan)
        begin_s = time.monotonic()
        number = 0
        while (now_s := time.monotonic()) < begin_s + seconds:
            if number == len(self._ended_s):
                with self._changed:
                    self._ended_s = np.concatenate([self._ended_s, np.full(number, np.nan)])
            model = models[number % len(models)]
            with self._changed:
                self._open += 1
            contestant.submit(TimedTask(number, model, now_s), self._chosen(number, model))
            number += 1
            with self._changed:
                self._changed.wait_for(lambda: self._open < outstanding, timeout=begin_s + seconds - now_s)
        self._await_none_open(time.monotonic() + _DRAIN_S)
        return float(np.count_nonzero(self._ended_s <= begin_s + seconds)) / seconds

    def _reset(self, tasks: int) -> None:
        with self._changed:
            self._ended_s = np.full(tasks, np.nan)
            self._open = tasks

    def _chosen(self, number: int, model: int) -> Feeds:
        offered = self._feeds[model]
        return offered[number % len(offered)]

    def _await_none_open(self, until_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._open <= 0, timeout=max(until_s - time.monotonic(), 0.0))


def _sleep_until(instant_s: float) -> None:
    left_s = instant_s - time.monotonic()
    if left_s > 0.0:
        time.sleep(left_s)
