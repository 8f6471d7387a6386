"""The trial of a candidate plan against the control that runs, as a state machine. No clock, no thread.

Windows of the two plans in randomised ABBA order, never two plans in one window; after
every pair from the 8th on (from the 4th, for differences that nobody could overlook) a sequential test on
the paired log ratios of latency and busy seconds, or of tasks per second where tasks wait all the time
(`evidence.py`): commit, reject, or no gain when time is up.
A candidate that crashes, stalls, fails tasks or harms p99, the oldest task's age or the share of tasks in
time is rejected at once, with the reason.

The caller carries out the actions in order and reports what became of them. An event that is late or repeated
changes nothing. `now` is in seconds on one monotonic clock; call `tick` no later than `next_wakeup`.

    begin -> SaveRecord -> recorded -> ( Activate -> activated -> settled -> MeasureSide -> window_ended )
          again and again -> Activate, Decide

Where the same plan has two windows in a row, the second begins at once. Nothing pauses when plans change: new
launches go to the next plan, and its window begins once nothing is in flight on the one before.
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct

from stageloom.shared.engine.evidence import Evidence, Figure
from stageloom.shared.engine.interval_guard import Seconds, Share
from stageloom.shared.engine.windows import (
    Rng,
    Side,
    WindowFigures,
    abba,
    window_length_s,
)
from stageloom.shared.ids import Digest
from stageloom.shared.messages.outputs import OutputsVerdict


class Verdict(str, Enum):
    """How a trial ended."""

    COMMIT = "commit"
    REJECT = "reject"
    NO_GAIN = "no_gain"
    REFUSED = "refused"  # it never began: the candidate was not tried
    ABANDONED = "abandoned"  # no fault of the candidate's, which may be tried again
    IDLE = "idle"  # no load to compare under: it runs guarded, and is not proven by that


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """That a trial began: on disk before the candidate first runs, until the verdict replaces it.

    Whoever finds it at boot knows that the agent stopped in the middle: see `found_at_boot`.
    """

    candidate: Digest
    control: Digest
    environment: str  # power mode, executor versions, precision: what the verdict holds for
    began_us: int  # wall clock, microseconds since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What a trial found. Ratios above 1: the candidate is better; None with too few pairs to say.

    `ratio` and `interval` are those of `figure`, which decided; the others' ratios stand beside it.
    """

    verdict: Verdict
    reason: str  # one line
    ratio: float | None = None  # geometric mean over the pairs
    interval: tuple[float, float] | None = None  # 95 %, two-sided, of the ratio; not adjusted for stopping
    pairs: int = 0  # that said something
    seconds_s: float = 0.0  # from the first event to the decision
    figure: Figure | None = None
    latency_ratio: float | None = None  # the control's over the candidate's
    busy_ratio: float | None = None  # likewise, device seconds per completed task
    outputs: OutputsVerdict | None = None  # of two versions, which are compared by what they give


UNDECIDED: Final = "undecided after "
"""So begins the reason of a rejection that no trial decided: which plan is better is not known."""


NO_LOAD: Final = "no load to compare under"
"""So begins the reason where no task came: then nothing is known of either plan."""


def crowding(control_bytes: int, candidate_bytes: int, memory_bytes: int) -> str:
    """Why two plans cannot be loaded at once, or nothing."""
    needed_bytes = control_bytes + candidate_bytes
    if needed_bytes <= memory_bytes:
        return ""
    return (
        f"both plans need {needed_bytes} bytes, more than the {memory_bytes} there are; "
        "`stageloom plan push --now` takes it without a trial"
    )


def lasting(seconds: float) -> str:
    """A duration in words, rounded up."""
    return f"{math.ceil(seconds)} s" if seconds <= 90.0 else f"{math.ceil(seconds / 60.0)} min"


def found_at_boot(record: TrialRecord) -> TrialResult:
    """What an unfinished trial means: the candidate may be what stopped the agent, so it is rejected."""
    return TrialResult(
        verdict=Verdict.REJECT,
        reason=f"the agent stopped during the trial of plan {record.candidate[:16]}",
    )


Loss: TypeAlias = Annotated[float, Meta(ge=0.0, lt=1.0)]
"""What a figure may be worse by. All of it would leave a ratio of 0, which no plan falls below."""


class TrialConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a trial is run; the defaults are those whose error rates docs/trial.md states."""

    timing_s: Seconds = 10.0  # the models are timed for so long at most before the windows begin
    shortest_window_s: Seconds = 0.25
    instance_times: Annotated[float, Meta(ge=1.0, le=10_000.0)] = 20.0  # in a window, at least
    cut: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.1  # of a window's begin is not measured: it fills
    window_tasks: Annotated[float, Meta(ge=0.0, le=10_000.0)] = 10.0  # expected in a window, at least
    model_tasks: Annotated[float, Meta(ge=0.0, le=10_000.0)] = 2.0  # likewise, of each model that matters
    min_pairs: Annotated[int, Meta(ge=2, le=10_000)] = 8  # first look
    early_pairs: Annotated[int, Meta(ge=2, le=10_000)] = 4  # first look at gross differences: two whole ABBA
    gross: Loss = 0.25
    spared: Share = 0.005  # so much of the tasks in time a gain may cost on average
    confidence: Annotated[float, Meta(ge=0.5, lt=1.0)] = 0.998  # of each bound at each look
    gain: Loss = 0.02  # less is not worth a change; as much worse is a rejection
    worth: Share = 0.1  # so much lower latency may be paid for with busy seconds
    limit_s: Seconds = 60.0  # longer only where windows are long: `TrialCore.limit_s`
    longest_s: Seconds = 600.0
    guard: Share = 0.2  # p99 or oldest age worse by more is a rejection
    age_floor_s: Seconds = 0.01  # ages that differ by less are equal to every user
    brake_age_s: Seconds = 1.0  # no task waits longer for the candidate, unless it did for the control
    stall_s: Seconds = 10.0  # a swap, its last steps or a window that is overdue by more is a fault
    min_failed: Annotated[int, Meta(ge=1, le=1_000_000)] = 3
    max_failed_share: Share = 0.1  # more than the control's


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSetup:
    """What is compared. Times are measured ones, at the batch sizes that run."""

    record: TrialRecord
    models: tuple[str, ...]
    service_s: tuple[float, ...]  # device time of one task under the control; weighs the mix [num_models]
    instance_s: tuple[float, ...]  # begin to end of one instance, under the slower plan [num_models]
    control_bytes: int  # what the executor states for each plan; shared weights count in the control's
    candidate_bytes: int
    memory_bytes: int  # what both may take together
    arrivals_per_s: tuple[float, ...] = ()  # per model; empty where it is not known [num_models]
    oldest_age_s: float = 0.0  # of the oldest waiting task when the trial begins

    def __post_init__(self) -> None:
        if not self.models or not len(self.models) == len(self.service_s) == len(self.instance_s):
            raise ValueError(f"a trial needs one service and one instance time per model: {self}")
        if self.arrivals_per_s and len(self.arrivals_per_s) != len(self.models):
            raise ValueError(f"a trial needs no rates, or one per model: {self}")
        if not all(0.0 < seconds < math.inf for seconds in (*self.service_s, *self.instance_s)):
            raise ValueError(f"a trial needs measured times: {self}")


# Actions, to be carried out in this order.


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """Make the record durable, then report `recorded`."""

    record: TrialRecord


@dataclass(frozen=True, slots=True)
class Activate:
    """Launch into this plan; report `activated`, and `settled` when nothing is in flight on the other one."""

    side: Side


@dataclass(frozen=True, slots=True)
class MeasureSide:
    """Report `window_ended` with what happens between these instants."""

    window: int  # counts up from 0
    side: Side
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class Decide:
    """The last action. Persist the verdict in place of the record, in one write."""

    result: TrialResult


TrialAction: TypeAlias = SaveRecord | Activate | MeasureSide | Decide


class _Phase(Enum):
    NEW = "new"
    SAVING = "saving"
    ACTIVATING = "activating"
    SETTLING = "settling"
    MEASURING = "measuring"
    OVER = "over"


_DOING = {
    _Phase.SAVING: "saving",
    _Phase.ACTIVATING: "activating",
    _Phase.SETTLING: "its steps",
    _Phase.MEASURING: "measuring",
}

_SLOWEST = 5.0
"""Instances of the slowest model that a plan may take to run empty, or a task to wait, without blame."""


def lengths(setup: TrialSetup, config: TrialConfig) -> tuple[float, float]:
    """How long a window and the whole trial are, in seconds.

    Windows stretch to slow models and slow arrivals, and the trial to three times the windows of its first
    look, `longest_s` at most; where even the first look would take longer, windows are as long as it
    allows.
    """
    pairs = 2 * config.min_pairs
    wanted_s = window_length_s(
        setup.instance_s,
        arrivals_per_s=setup.arrivals_per_s,
        weights_s=setup.service_s,
        tasks=config.window_tasks,
        model_tasks=config.model_tasks,
        shortest_s=config.shortest_window_s,
        instance_times=config.instance_times,
    )
    longest_s = max(config.longest_s, config.limit_s)
    window_s = min(wanted_s, _MEASURED * longest_s / pairs)
    limit_s = min(max(config.limit_s, _LOOKS * pairs * window_s / _MEASURED), longest_s)
    return window_s, limit_s


_MEASURED = 0.9
"""Of a long trial's time; in the rest plans run empty."""

_LOOKS = 3


class TrialCore:
    """One trial. `rng` is a seeded generator (`random.Random`)."""

    def __init__(self, setup: TrialSetup, rng: Rng, config: TrialConfig | None = None) -> None:
        self.setup = setup
        self.config = config or TrialConfig()
        self.result: TrialResult | None = None
        self.window_s, self.limit_s = lengths(setup, self.config)
        slowest_s = _SLOWEST * max(setup.instance_s)
        self._patience_s = max(self.config.stall_s, slowest_s)
        self._brake_age_s = max(self.config.brake_age_s, slowest_s)
        self._order = abba(rng)
        self._phase = _Phase.NEW
        self._began_s = 0.0
        self._due_s = math.inf  # when the phase is overdue
        self._running = Side.CONTROL
        self._window = -1
        self._side = Side.CONTROL  # of the current window
        self._pending: WindowFigures | None = None  # first window of the pair
        self._pair_began_s = 0.0
        self._counts_from_s = -math.inf  # pairs that began before are of other arrivals
        self._pairs: list[tuple[float, WindowFigures, WindowFigures]] = []  # began at; control, candidate
        self._age_floor_s = max(self.config.age_floor_s, slowest_s)
        self._evidence = self._no_evidence()
        self._failed = dict.fromkeys(Side, 0)
        self._ended = dict.fromkeys(Side, 0)
        self._control_age_s = setup.oldest_age_s  # the worst that a task waited for it
        self._waits_from_s = -math.inf  # before that tasks waited for the candidate
        self.stalled = False  # the plan that ran did not come to an end: its engine may hang

    def _no_evidence(self) -> Evidence:
        config = self.config
        return Evidence(
            self.setup.service_s,
            min_pairs=config.min_pairs,
            confidence=config.confidence,
            gain=config.gain,
            worth=config.worth,
            guard=config.guard,
            age_floor_s=self._age_floor_s,
            early_pairs=config.early_pairs,
            gross=config.gross,
            spared=config.spared,
        )

    # Events

    def begin(self, now: float) -> list[TrialAction]:
        """The first event.

        Raises:
            ValueError: the trial has begun already.
        """
        if self._phase is not _Phase.NEW:
            raise ValueError("the trial has begun already")
        self._began_s = now
        if refusal := self._refusal():
            self._phase = _Phase.OVER
            self.result = TrialResult(verdict=Verdict.REFUSED, reason=refusal)
            return [Decide(self.result)]
        self._enter(_Phase.SAVING, now + self._patience_s)
        return [SaveRecord(self.setup.record)]

    def recorded(self, now: float) -> list[TrialAction]:
        return self._next_window(now) if self._phase is _Phase.SAVING else []

    def activated(self, now: float) -> list[TrialAction]:
        """The plan of the last `Activate` is the one launched into."""
        if self._phase is _Phase.ACTIVATING:
            self._waits_from_s = now
            self._enter(_Phase.SETTLING, now + self._patience_s)
        return []

    def settled(self, now: float) -> list[TrialAction]:
        """Nothing is in flight on the other plan."""
        return self._measure(now) if self._phase is _Phase.SETTLING else []

    def window_ended(self, window: int, figures: WindowFigures, now: float) -> list[TrialAction]:
        """What the window with this number showed."""
        if self._phase is not _Phase.MEASURING or window != self._window:
            return []
        self._failed[self._side] += figures.failed
        self._ended[self._side] += figures.failed + sum(figures.completed)
        if harm := self._harm(figures.oldest_age_s, now):
            return self._end(Verdict.REJECT, harm, now)
        if self._pending is None:
            self._pending = figures
            return self._next_window(now)
        first, self._pending = self._pending, None
        control, candidate = (first, figures) if self._side is Side.CANDIDATE else (figures, first)
        if self._pair_began_s >= self._counts_from_s:
            self._pairs.append((self._pair_began_s, control, candidate))
            self._evidence.take(control, candidate)
        if failures := self._failures():
            return self._end(Verdict.REJECT, failures, now)
        return self._look(now) or self._next_window(now)

    def arrivals_moved(self, since_s: float) -> None:
        """Other tasks come since that instant: a pair that began before does not say which plan is for them.

        The trial ends when it would have, as that was announced.
        """
        self._counts_from_s = max(self._counts_from_s, since_s)
        self._pairs = [pair for pair in self._pairs if pair[0] >= self._counts_from_s]
        self._evidence = self._no_evidence()
        for _, control, candidate in self._pairs:
            self._evidence.take(control, candidate)

    def crashed(self, reason: str, now: float) -> list[TrialAction]:
        """The engine process or its backend died."""
        if self.settling:  # with steps of both in flight: the newcomer is to blame
            return self._end(Verdict.REJECT, f"the engine crashed as the plans changed: {reason}", now)
        return self._fault(self._running, f"crashed: {reason}", now)

    def abandon(self, reason: str, now: float) -> list[TrialAction]:
        """Something matters more: a newer desired plan, another power mode, a record that was not written."""
        return self._end(Verdict.ABANDONED, reason, now)

    def tick(self, now: float, oldest_age_s: float = 0.0) -> list[TrialAction]:
        """Time passed; `oldest_age_s` is that of the oldest waiting task of all models."""
        if self._phase in (_Phase.NEW, _Phase.OVER):
            return []
        if harm := self._harm(oldest_age_s, now):
            return self._end(Verdict.REJECT, harm, now)
        if now >= self._due_s:
            self.stalled = self._phase is not _Phase.SAVING
            settling = self._phase is _Phase.SETTLING  # it is the plan before that does not end its steps
            blamed = self._running.other if settling else self._running
            return self._fault(blamed, f"did not end {_DOING[self._phase]} in time", now)
        return self._give_up(now) if now >= self.ends_s else []

    @property
    def next_wakeup(self) -> float | None:
        """When `tick` has something to do; None when the trial is over or has not begun."""
        if self._phase in (_Phase.NEW, _Phase.OVER):
            return None
        return min(self._due_s, self.ends_s)

    @property
    def saving(self) -> bool:
        """It waits for its record to be durable."""
        return self._phase is _Phase.SAVING

    @property
    def settling(self) -> bool:
        """Both plans may have steps in flight: from the order on, which may be half carried out."""
        return self._phase in (_Phase.ACTIVATING, _Phase.SETTLING)

    @property
    def ends_s(self) -> float:
        """When there is no gain, if nothing was sure until then."""
        return self._began_s + self.limit_s

    @property
    def announcement(self) -> str:
        """How long it takes, said before the first window."""
        return f"the trial takes up to {lasting(self.limit_s)}"

    @property
    def pairs(self) -> int:
        """Pairs so far that said something."""
        return self._evidence.pairs

    @property
    def ratio(self) -> float | None:
        """Over the pairs so far, above 1 where the candidate is better."""
        logs = self._evidence.logs
        return math.exp(logs.mean) if logs.count else None

    @property
    def brake_age_s(self) -> float:
        """A candidate under which a task waited longer is rejected at once; infinite for the control."""
        if self._running is Side.CONTROL:
            return math.inf
        return max(self._brake_age_s, 2 * self._control_age_s)

    # Decisions

    def _refusal(self) -> str:
        """Why the trial cannot begin, or nothing."""
        setup = self.setup
        return crowding(setup.control_bytes, setup.candidate_bytes, setup.memory_bytes)

    def _look(self, now: float) -> list[TrialAction]:
        """After a pair: decide, or nothing yet."""
        if decision := self._evidence.decision():
            better, reason = decision
            return self._end(Verdict.COMMIT if better else Verdict.REJECT, reason, now)
        # A pair that could not end in time would only cost its changes.
        return self._give_up(now) if now + 2 * self.window_s > self.ends_s else []

    def _give_up(self, now: float) -> list[TrialAction]:
        """Time is up. Where it was too short for the arrivals of today the plan may be tried again."""
        reason, moved = self._evidence.undecided(), self._counts_from_s > -math.inf
        if moved and self._evidence.pairs < self.config.min_pairs:
            return self._end(Verdict.ABANDONED, f"arrivals moved meanwhile: {reason}", now)
        return self._end(Verdict.NO_GAIN, reason, now)

    def _harm(self, oldest_age_s: float, now: float) -> str:
        """What the candidate does that cannot wait for statistics, or nothing.

        What it leaves behind is not the control's: else it would raise its own brake with every window.
        """
        if self._running is Side.CONTROL:
            self._control_age_s = max(self._control_age_s, min(oldest_age_s, now - self._waits_from_s))
            return ""
        if oldest_age_s > self.brake_age_s:
            return f"a task had waited {oldest_age_s:.2f} s, longer than {self.brake_age_s:.2f} s"
        return ""

    def _failures(self) -> str:
        """Tasks that fail under the candidate more than under the control, or nothing.

        Asked after whole pairs: before the control's window a fault of the models looks like the candidate's.
        """
        failed, ended = self._failed[Side.CANDIDATE], self._ended[Side.CANDIDATE]
        share = self._failed[Side.CONTROL] / (self._ended[Side.CONTROL] or 1)
        if failed >= self.config.min_failed and failed > (share + self.config.max_failed_share) * ended:
            return f"{failed} of {ended} tasks failed"
        return ""

    # Steps

    def _enter(self, phase: _Phase, due_s: float) -> None:
        self._phase, self._due_s = phase, due_s

    def _next_window(self, now: float) -> list[TrialAction]:
        self._window += 1
        before, self._side = self._running, next(self._order)
        if self._side is before:
            self._waits_from_s = -math.inf  # a backlog that outlasts a window is the control's, too
            return self._measure(now)
        self._running, self._waits_from_s = self._side, math.inf
        self._enter(_Phase.ACTIVATING, now + self._patience_s)
        return [Activate(self._side)]

    def _measure(self, now: float) -> list[TrialAction]:
        to_s = now + self.window_s
        if self._pending is None:
            self._pair_began_s = now
        self._enter(_Phase.MEASURING, to_s + self._patience_s)
        return [MeasureSide(self._window, self._side, now + self.config.cut * self.window_s, to_s)]

    def _fault(self, blamed: Side, reason: str, now: float) -> list[TrialAction]:
        if blamed is Side.CANDIDATE:
            return self._end(Verdict.REJECT, f"the candidate {reason}", now)
        return self._end(Verdict.ABANDONED, f"the control {reason}", now)

    def _end(self, verdict: Verdict, reason: str, now: float) -> list[TrialAction]:
        if self._phase in (_Phase.NEW, _Phase.OVER):
            return []
        untouched = self._phase is _Phase.SAVING  # nothing was changed yet
        self._enter(_Phase.OVER, math.inf)
        evidence = self._evidence
        logs = evidence.logs
        # Two-sided, for one comparison: each of the two bounds is exceeded in one of forty.
        low, high = logs.bounds(0.975)
        said = logs.count > 1
        self.result = TrialResult(
            verdict=verdict,
            reason=reason,
            ratio=math.exp(logs.mean) if said else None,
            interval=(math.exp(low), math.exp(high)) if said else None,
            pairs=evidence.pairs,
            seconds_s=now - self._began_s,
            figure=evidence.figure if said else None,
            latency_ratio=evidence.ratio_of(Figure.LATENCY),
            busy_ratio=evidence.ratio_of(Figure.BUSY),
        )
        decide = Decide(self.result)
        if untouched:
            return [decide]
        return [Activate(Side.CANDIDATE if verdict is Verdict.COMMIT else Side.CONTROL), decide]
