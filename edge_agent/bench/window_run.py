"""One window on a contestant: tasks handed over at their instants, their ends written down."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from stageloom.edge_agent.bench.contestant import Contestant, TimedTask
from stageloom.edge_agent.bench.load import Array, ArrivalWindow
from stageloom.edge_agent.bench.model_files import Feeds

_LEAD_S: Final = 0.005
_GRACE_S: Final = 0.010
_DRAIN_S: Final = 60.0
_TURNING_S: Final = 60.0  # beyond what a closed loop was asked for


class Carried(NamedTuple):
    """What a closed loop came to: results a second, and how many of all its tasks had none."""

    per_s: float
    without_result: int


class _Turns:
    """When tasks of a closed loop had turned over: in a turn as many of every model end as are open.

    A turn that leaves more of the model which ended it open than any before still filled the loop with it,
    and whatever passed meanwhile was no throughput: counting begins anew at its end.
    """

    def __init__(self, models: Iterable[int], outstanding: int) -> None:
        self.at_s: list[float] = []  # ends of turns, where counting begins and of those that count
        self._whole = Counter(dict.fromkeys(models, outstanding))
        self._left = self._whole.copy()
        self._open: Counter[int] = Counter()
        self._most: Counter[int] = Counter()

    def began(self, model: int) -> None:
        self._open[model] += 1

    def ended(self, model: int, now_s: float) -> None:
        self._open[model] -= 1
        self._left[model] -= 1
        if max(self._left.values()) > 0:
            return
        self._left = self._whole.copy()
        if self._open[model] > self._most[model]:
            self._most[model] = self._open[model]
            self.at_s = []
        self.at_s.append(now_s)

    @property
    def lasted_s(self) -> float:
        """Those that count."""
        at_s = self.at_s
        return at_s[-1] - at_s[0] if at_s else 0.0


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
        self._turns: _Turns | None = None

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
            if self._turns is not None:
                self._turns.ended(task.model, now_s)
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
    ) -> Carried:
        """Let `outstanding` tasks always be open, the next of `models`, over and over, and count them.

        A loop begins empty. Whoever lets short tasks pass fills it with long ones meanwhile, and would be
        paid for short ones that passed them though they never ran. So what counts are whole turns (`_Turns`)
        that last `seconds`, once the loop is full: where long tasks hold every place, they limit the rest.
        `per_s` is 0 where that takes a minute longer.

        A task without a result makes room for the next at once: beside any, the others' rate says nothing.
        """
        self._reset(0)
        self._turns = turns = _Turns(models, outstanding)
        until_s = time.monotonic() + seconds + _TURNING_S
        asked = self._hand_over(contestant, models, outstanding, until_s, lambda: turns.lasted_s >= seconds)
        with self._changed:
            self._turns = None
        self._await_none_open(time.monotonic() + _DRAIN_S)
        without_result = asked - self.completed
        if turns.lasted_s < seconds:
            return Carried(0.0, without_result)
        within = (self._ended_s > turns.at_s[0]) & (self._ended_s <= turns.at_s[-1])
        return Carried(float(np.count_nonzero(within)) / turns.lasted_s, without_result)

    def keep_open(
        self, contestant: Contestant, models: Sequence[int], outstanding: int, seconds: float
    ) -> None:
        """The same load for so long and no longer, where no rate is asked for."""
        self._reset(0)
        self._hand_over(contestant, models, outstanding, time.monotonic() + seconds, lambda: False)
        self._await_none_open(time.monotonic() + _DRAIN_S)

    def _hand_over(
        self,
        contestant: Contestant,
        models: Sequence[int],
        outstanding: int,
        until_s: float,
        enough: Callable[[], bool],
    ) -> int:
        """How many there were."""
        self._ended_s = np.full(1024, np.nan)
        number = 0
        while not enough() and (now_s := time.monotonic()) < until_s:
            if number == len(self._ended_s):
                with self._changed:
                    self._ended_s = np.concatenate([self._ended_s, np.full(number, np.nan)])
            model = models[number % len(models)]
            with self._changed:
                self._open += 1
                if self._turns is not None:
                    self._turns.began(model)
            contestant.submit(TimedTask(number, model, now_s), self._chosen(number, model))
            number += 1
            with self._changed:
                self._changed.wait_for(lambda: self._open < outstanding, timeout=until_s - now_s)
        return number

    def _reset(self, tasks: int) -> None:
        with self._changed:
            self._ended_s = np.full(tasks, np.nan)
            self._open = tasks
            self._turns = None

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
