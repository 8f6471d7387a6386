"""What the pairs of a trial's windows say so far about the candidate, and when that is enough. Pure.

Where tasks waited all the time in both windows of most pairs the plans set the throughput, and tasks per
second decide. Otherwise two figures do: latency, which is what users see, and busy device seconds per task,
which is what is left for more load. All three weigh models by their work, so that short tasks hardly count:
beside them, the share of tasks in time counts every task as one.

- *Better*: latency or busy seconds are surely better by more than `gain`, and the other is not worse by as
  much on average. Latency that is surely better by more than `worth` may be paid for with busy seconds. Or
  surely so many more of a hundred tasks are in time, and no other figure is worse by as much on average.
- *Worse*: latency surely is, by more than `gain`, whatever it saves; or busy seconds surely are and latency
  surely does not gain `worth`. Neither counts while more tasks in time may still pay for it.

Differences that nobody could overlook, surely above `gross`, decide from the `early_pairs`-th pair on:
a device need not serve under a plan that starves its tasks until small differences could be told.

*Surely*: a one-sided Student bound on the mean over the pairs. It is looked at after every pair and for
several figures, so its confidence is well above that of one comparison; `benchmarks/trial.py` measures what
is left.
"""

import math
from collections.abc import Sequence
from enum import Enum

from stageloom.shared.engine.windows import (
    PairedLogs,
    WindowFigures,
    log_busy_gain,
    log_growth,
    log_in_time_gain,
    log_latency_gain,
    log_rate_gain,
)


class Figure(str, Enum):
    """What two plans are compared by, as `TrialEnded.figure` spells it."""

    RATE = "rate"  # tasks per second, where tasks wait all the time
    LATENCY = "latency"
    BUSY = "busy"  # device seconds per completed task
    IN_TIME = "in_time"  # the share of tasks that are in time


_SEEN = 0.01
"""Shares of tasks in time that differ by less are not worth a word."""


class Evidence:
    """The pairs of one trial. Pairs of which nothing can be said are counted as `silent`."""

    def __init__(
        self,
        service_s: Sequence[float],
        *,
        min_pairs: int,
        confidence: float,
        gain: float,
        worth: float,
        guard: float,
        age_floor_s: float,
        early_pairs: int,
        gross: float,
        spared: float,
    ) -> None:
        """`service_s`: device time of one task, which weighs the models [num_models]. See `TrialConfig`."""
        self.silent = 0
        self._service_s = service_s
        self._min_pairs, self._confidence = min_pairs, confidence
        self._gain, self._worth, self._guard = gain, worth, guard
        self._age_floor_s = age_floor_s
        self._early_pairs, self._gross, self._spared = early_pairs, gross, spared
        self._logs = {figure: PairedLogs() for figure in Figure}
        self._p99, self._age = PairedLogs(), PairedLogs()
        self._in_time = PairedLogs()  # differences of shares: above 0 where the candidate is better
        self._tasks = [[0, 0], [0, 0]]  # control and candidate: those that were due, and in time
        self._decided_by: Figure | None = None

    def take(self, control: WindowFigures, candidate: WindowFigures) -> None:
        """One more pair."""
        for side, figures in zip(self._tasks, (control, candidate), strict=True):
            side[0] += figures.due
            side[1] += figures.in_time
        rate = log_rate_gain(control, candidate, self._service_s)
        busy = log_busy_gain(control, candidate, self._service_s)
        latency = log_latency_gain(control, candidate, self._service_s)
        if rate is not None:
            self._logs[Figure.RATE].add(rate)
        elif latency is not None:
            self._logs[Figure.LATENCY].add(latency)
            if busy is not None:
                self._logs[Figure.BUSY].add(busy)
        else:
            self.silent += 1
            return
        if control.p99_s and candidate.p99_s:
            self._p99.add(log_growth(control.p99_s, candidate.p99_s, 0.0))
        self._age.add(log_growth(control.oldest_age_s, candidate.oldest_age_s, self._age_floor_s))
        before, after = control.in_time_share, candidate.in_time_share
        if before is not None and after is not None:
            self._in_time.add(after - before)
            self._logs[Figure.IN_TIME].add(log_in_time_gain(control, candidate))

    # What it says

    @property
    def figure(self) -> Figure:
        """What the plans are compared by: what decided, once something has."""
        if self._decided_by is not None:
            return self._decided_by
        return self._compared[0]

    @property
    def _compared(self) -> tuple[Figure, ...]:
        """Those that weigh models by their work."""
        loaded = self._logs[Figure.RATE].count > self._logs[Figure.LATENCY].count
        return (Figure.RATE,) if loaded else (Figure.LATENCY, Figure.BUSY)

    @property
    def logs(self) -> PairedLogs:
        """Of `figure`, above 0 where the candidate is better."""
        return self._logs[self.figure]

    @property
    def pairs(self) -> int:
        """That said something."""
        return self._logs[Figure.RATE].count + self._logs[Figure.LATENCY].count

    def ratio_of(self, figure: Figure) -> float | None:
        """Above 1 where the candidate is better; None below two pairs."""
        logs = self._logs[figure]
        return math.exp(logs.mean) if logs.count > 1 else None

    # Decisions

    def decision(self) -> tuple[bool, str] | None:
        """Whether the candidate is to take over, and why; None while that is not sure."""
        if self._age.count >= self._min_pairs and (harm := self._harm()):
            return False, harm
        if self.logs.count < self._min_pairs:
            return self._early()
        found = self._by_rate() if self.figure is Figure.RATE else self._by_latency_and_busy()
        if (found is None or not found[0]) and self._more_in_time(self._min_pairs, self._gain):
            return self._decide(True, Figure.IN_TIME)
        return found

    def _early(self) -> tuple[bool, str] | None:
        if self.logs.count < self._early_pairs:
            return None
        if self._in_time.count >= self._early_pairs and self._fewer_in_time(self._gross):
            return False, self._said_in_time()
        low, high = self.logs.bounds(self._confidence)
        if low > math.log1p(self._gross) and self._unharmed:
            return self._decide(True, self.figure, self._gross)
        if self._more_in_time(self._early_pairs, self._gross):
            return self._decide(True, Figure.IN_TIME, self._gross)
        if high < math.log1p(-self._gross) and not self._time_may_pay(high, self._early_pairs):
            return self._decide(False, self.figure, self._gross)
        return None

    def _by_rate(self) -> tuple[bool, str] | None:
        low, high = self._bounds(Figure.RATE)
        if high < math.log1p(-self._gain) and not self._time_may_pay(high, self._min_pairs):
            return self._decide(False, Figure.RATE)
        if low > math.log1p(self._gain) and self._unharmed:
            return self._decide(True, Figure.RATE)
        return None

    def _by_latency_and_busy(self) -> tuple[bool, str] | None:
        gained, lost = math.log1p(self._gain), math.log1p(-self._gain)
        worth = math.log1p(self._worth)
        low, high = self._bounds(Figure.LATENCY)
        busy_low, busy_high = self._bounds(Figure.BUSY)
        if high < lost and not self._time_may_pay(high, self._min_pairs):
            return self._decide(False, Figure.LATENCY)
        if busy_high < lost and high < worth and not self._time_may_pay(busy_high, self._min_pairs):
            return self._decide(False, Figure.BUSY)
        if not self._unharmed:
            return None
        if low > (gained if self._logs[Figure.BUSY].mean >= lost else worth):
            return self._decide(True, Figure.LATENCY)
        if busy_low > gained and self._logs[Figure.LATENCY].mean >= lost:
            return self._decide(True, Figure.BUSY)
        return None

    def _more_in_time(self, pairs: int, by: float) -> bool:
        """Surely, and what that costs in the other figures is less on average."""
        sure = self._in_time.count >= pairs and self._in_time.bounds(self._confidence)[0] > by
        return sure and self._unharmed and not self._overpaid

    @property
    def _overpaid(self) -> bool:
        """Whether a figure is worse on average by more than tasks in time are better."""
        lost = min(self._logs[figure].mean for figure in self._compared)
        return lost < -self._logs[Figure.IN_TIME].mean

    def _time_may_pay(self, lost: float, pairs: int) -> bool:
        """Whether so many more tasks may still turn out to be in time. `lost`: a logarithm, below 0."""
        in_time = self._logs[Figure.IN_TIME]
        return in_time.count >= pairs and in_time.bounds(self._confidence)[1] > -lost

    def _decide(self, better: bool, figure: Figure, by: float | None = None) -> tuple[bool, str]:
        self._decided_by = figure
        than = f"{'better' if better else 'worse'} by more than {self._gain if by is None else by:.0%}"
        return better, f"{than}: {self.said(figure)}"

    def _surely_gained(self, figure: Figure) -> bool:
        """Shares of tasks in time are compared by difference, which spreads more evenly than a ratio."""
        if figure is Figure.IN_TIME:
            return (
                self._in_time.count >= self._min_pairs
                and self._in_time.bounds(self._confidence)[0] > self._gain
            )
        return self._bounds(figure)[0] > math.log1p(self._gain)

    def _bounds(self, figure: Figure) -> tuple[float, float]:
        logs = self._logs[figure]
        return logs.bounds(self._confidence) if logs.count >= self._min_pairs else (-math.inf, math.inf)

    # Guards

    @property
    def _harms(self) -> tuple[tuple[str, PairedLogs], ...]:
        """What a gain must not be paid for with, and how it grew.

        The tail of latencies is that of completed tasks: where surely more of them are in time, it has those
        that were given up before.
        """
        age = ("oldest task's age", self._age)
        return (age,) if self._surely_gained(Figure.IN_TIME) else (("p99 latency", self._p99), age)

    def _harm(self) -> str:
        """What is surely worse than a gain may cost, or nothing."""
        for what, growth in self._harms:
            if growth.bounds(self._confidence)[0] > math.log1p(self._guard):
                return f"{what} is {math.expm1(growth.mean):.0%} worse over {growth.count} pairs"
        return self._said_in_time() if self._fewer_in_time(self._gain) else ""

    def _fewer_in_time(self, by: float) -> bool:
        return self._in_time.bounds(self._confidence)[1] < -by

    @property
    def _unharmed(self) -> bool:
        """A gain that may be paid for in other ways waits until that is sure, or time is up.

        Latency weighs models by their work: a heavy one may gain what many small ones lose in tasks in time.
        """
        grown = any(growth.mean > math.log1p(self._guard) for _, growth in self._harms)
        return not grown and self._in_time.mean >= -self._spared

    # Words

    def said(self, figure: Figure) -> str:
        """What a figure came to, in a user's words."""
        if figure is Figure.IN_TIME:
            before, after = self._shares()
            return f"{after:.0%} of tasks in time instead of {before:.0%}, {self._alone(self._compared[0])}"
        return self._alone(figure) + self._tasks_in_time()

    def _alone(self, figure: Figure) -> str:
        before = math.exp(-self._logs[figure].mean)
        if figure is Figure.RATE:
            return f"{1 / before:.2f} times as many tasks per second"
        busy = math.exp(-self._logs[Figure.BUSY].mean)
        if figure is Figure.BUSY:
            latency = math.exp(-self._logs[Figure.LATENCY].mean)
            return f"busy time per task {before:.2f} of before, latency {latency:.2f}"
        paid = f" for {busy:.2f} of the busy time per task" if busy > 1 + self._gain else ""
        return f"latency {before:.2f} of before{paid}"

    def _said_in_time(self) -> str:
        before, after = self._shares()
        return f"{after:.0%} of tasks in time instead of {before:.0%} over {self._in_time.count} pairs"

    def _tasks_in_time(self) -> str:
        before, after = self._shares()
        if abs(after - before) < _SEEN:
            return ""
        return f", {after:.0%} of tasks in time instead of {before:.0%}"

    def _shares(self) -> tuple[float, float]:
        control, candidate = (in_time / (due or 1) for due, in_time in self._tasks)
        return control, candidate

    def undecided(self) -> str:
        """Why nothing was decided when time is up."""
        pairs = self.logs.count
        if pairs < self._min_pairs:
            silent = f" and {self.silent} without a task on both sides" if self.silent else ""
            return f"only {pairs} pairs{silent} before time was up"
        figures = (Figure.IN_TIME, *self._compared)
        sure = [figure for figure in figures if self._surely_gained(figure)]
        if not sure:
            what = self.said(self.figure)
            return f"no difference of {self._gain:.0%} is sure after {pairs} pairs ({what})"
        found = f"better by more than {self._gain:.0%}, but"
        for what, growth in self._harms:
            if growth.mean > math.log1p(self._guard):
                grown = f"{what} grew by {math.expm1(growth.mean):.0%} (allowed: {self._guard:.0%})"
                return f"{found} {grown} over {pairs} pairs"
        if not self._unharmed:
            return f"{found} {self._said_in_time()}"
        if sure == [Figure.IN_TIME]:
            return f"{found} other figures may have paid for it: {self.said(Figure.IN_TIME)}"
        if Figure.LATENCY in sure:
            busy = math.exp(-self._logs[Figure.BUSY].mean)
            pay = f"that would pay for {busy:.2f} of the busy time per task"
            return f"{found} not by the {self._worth:.0%} {pay}"
        return f"{found} latency may have paid for it: {self.said(Figure.BUSY)}"
