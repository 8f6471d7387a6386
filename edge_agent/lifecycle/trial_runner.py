"""Drives one trial: what `TrialCore` decides becomes orders to the engine process. Pure.

First the models' times are measured under the control, while it serves as ever; a device without a task in
that time cannot compare anything, which is *no gain*. Then the core takes over: its record is made durable by
the link (`TrialBegins`, answered by `recorded`), and only after that the candidate may run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from stageloom.edge_agent.lifecycle.events import Action, DrainEngine, MeasureWindow, TrialDecided
from stageloom.edge_agent.lifecycle.states import Attempt
from stageloom.edge_agent.worker.messages import WindowMeasured
from stageloom.shared.engine.trial import (
    Activate,
    Decide,
    Drain,
    MeasureSide,
    SaveRecord,
    TrialAction,
    TrialConfig,
    TrialCore,
    TrialRecord,
    TrialResult,
    TrialSetup,
    Verdict,
    crowding,
)
from stageloom.shared.engine.windows import Rng, Side, WindowFigures

_LOOK_S = 0.5
_FEW_TASKS = 5
_SHORTEST_S = 1e-6  # a time of zero is one that the clock could not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlans:
    """The two plans of a trial, and what they need."""

    record: TrialRecord
    models: tuple[str, ...]
    control_bytes: int
    candidate_bytes: int
    memory_bytes: int


class _Stage(Enum):
    TIMING = "timing"
    TRIAL = "trial"
    OVER = "over"


@dataclass(slots=True)
class _Times:
    """What was seen of one model under the control."""

    completed: int = 0
    busy_s: float = 0.0
    instances: int = 0
    instance_s: float = 0.0


class TrialRunner:
    """One trial of one attempt. `side` is the plan to launch into, unless `draining`."""

    def __init__(
        self,
        attempt: Attempt,
        plans: TrialPlans,
        begins: Callable[[], list[Action]],
        rng: Rng,
        numbers: Iterator[int],
        config: TrialConfig,
        timing_s: float,
    ) -> None:
        """`begins` has the record stored, after which `recorded` is called.

        `numbers` of windows are unique in this agent; the models are timed for `timing_s` at most.
        """
        self.attempt = attempt
        self.plans = plans
        self.side = Side.CONTROL
        self.draining = False
        self.decided: TrialDecided | None = None
        self._begins = begins
        self._rng = rng
        self._numbers = numbers
        self._config = config
        self._timing_s = timing_s
        self._stage = _Stage.TIMING
        self._began_s = 0.0
        self._number = 0  # of the window that is measured
        self._window = 0  # the core's number of it
        self._times = {name: _Times() for name in plans.models}
        self._oldest_age_s = 0.0
        self._core: TrialCore | None = None

    @property
    def over(self) -> bool:
        return self._stage is _Stage.OVER

    @property
    def stalled(self) -> bool:
        """The engine did not come to an end of something: it may hang."""
        return self._core is not None and self._core.stalled

    def progress(self, now: float) -> tuple[int, float | None, float]:
        """Pairs so far, the ratio over them, and seconds left at most."""
        core = self._core
        if core is None:
            return 0, None, self._config.limit_s
        return core.pairs, core.ratio, max(core.ends_s - now, 0.0)

    # Events

    def begin(self, now: float) -> list[Action]:
        """Time the models under the control; refused if both plans do not fit into memory."""
        self._began_s = now
        plans = self.plans
        if crowded := crowding(plans.control_bytes, plans.candidate_bytes, plans.memory_bytes):
            return self._end(TrialResult(verdict=Verdict.REFUSED, reason=crowded))
        return [self._measure(now, now + _LOOK_S)]

    def again(self) -> list[Action]:
        """The link asks again: what it was told did not reach the disk."""
        return self._begins() if self._core is not None and self._core.saving else []

    def recorded(self, now: float) -> list[Action]:
        """The record is durable: the windows begin."""
        return self._do(self._core.recorded(now)) if self._core is not None and not self.over else []

    def drained(self, now: float) -> list[Action]:
        return self._do(self._core.drained(now)) if self._core is not None and not self.over else []

    def activated(self, side: Side, now: float) -> list[Action]:
        """New launches go to this plan."""
        if self._core is None or self.over or side is not self.side:
            return []
        return self._do(self._core.activated(now))

    def measured(self, figures: WindowMeasured, now: float) -> list[Action]:
        if self.over or figures.number != self._number:
            return []
        if self._core is None:
            return self._timed(figures, now)
        return self._do(self._core.window_ended(self._window, self._figures(figures), now))

    def crashed(self, how: str, now: float) -> list[Action]:
        if self._core is None:
            return self.abandon(f"the control crashed: {how}", now)
        return self._do(self._core.crashed(how, now))

    def abandon(self, reason: str, now: float) -> list[Action]:
        """End without a verdict, for `reason`."""
        if self.over:
            return []
        if self._core is None:
            return self._end(TrialResult(verdict=Verdict.ABANDONED, reason=reason))
        return self._do(self._core.abandon(reason, now))

    def tick(self, now: float) -> list[Action]:
        """End what has stalled."""
        if self.over:
            return []
        if self._core is not None:
            return self._do(self._core.tick(now))
        if now > self._began_s + self._timing_s + self._config.stall_s:
            return self.abandon("the models could not be timed: the engine process does not answer", now)
        return []

    # Steps

    def _timed(self, figures: WindowMeasured, now: float) -> list[Action]:
        self._oldest_age_s = max(self._oldest_age_s, figures.oldest_age_s)
        for one in figures.models:
            times = self._times.get(one.name)
            if times is not None:
                times.completed += one.completed
                times.busy_s += one.busy_s
                times.instances += one.instances
                times.instance_s += one.instance_s
        taken_s = now - self._began_s
        seen = [times for times in self._times.values() if times.completed]
        enough = bool(seen) and all(times.completed >= _FEW_TASKS for times in seen)
        all_seen = len(seen) == len(self._times)
        if taken_s < self._timing_s and not (enough and (all_seen or taken_s >= self._timing_s / 5)):
            return [self._measure(now, now + _LOOK_S)]
        if not seen:
            reason = (
                f"no task completed in {taken_s:.0f} s: an idle device cannot compare plans; push it again "
                "under load, or take it without a trial with `stageloom plan push --now`"
            )
            return self._end(TrialResult(verdict=Verdict.NO_GAIN, reason=reason, seconds_s=taken_s))
        return self._begin_core(now)

    def _begin_core(self, now: float) -> list[Action]:
        """A model without a task so far counts like the average of the others, should one come."""
        service_s = {n: t.busy_s / t.completed for n, t in self._times.items() if t.completed}
        instance_s = {n: t.instance_s / t.instances for n, t in self._times.items() if t.instances}
        usual_s = sum(service_s.values()) / len(service_s)
        longest_s = max(instance_s.values(), default=usual_s)
        plans = self.plans
        setup = TrialSetup(
            record=plans.record,
            models=plans.models,
            service_s=tuple(max(service_s.get(name, usual_s), _SHORTEST_S) for name in plans.models),
            instance_s=tuple(max(instance_s.get(name, longest_s), _SHORTEST_S) for name in plans.models),
            control_bytes=plans.control_bytes,
            candidate_bytes=plans.candidate_bytes,
            memory_bytes=plans.memory_bytes,
            oldest_age_s=self._oldest_age_s,
        )
        self._stage = _Stage.TRIAL
        self._core = TrialCore(setup, self._rng, self._config)
        return self._do(self._core.begin(now))

    def _figures(self, seen: WindowMeasured) -> WindowFigures:
        completed = {one.name: one.completed for one in seen.models}
        counts = tuple(completed.get(name, 0) for name in self.plans.models)
        return WindowFigures(
            completed=counts,
            failed=seen.failed,
            measured_s=max(seen.measured_s, _SHORTEST_S),
            busy_s=max(seen.busy_s, 0.0),
            saturated=seen.saturated,
            # A task for several models that has ended in one of them only has no latency yet.
            p99_s=max(seen.p99_s, _SHORTEST_S) if any(counts) else 0.0,
            oldest_age_s=seen.oldest_age_s,
        )

    def _do(self, actions: Sequence[TrialAction]) -> list[Action]:
        out: list[Action] = []
        for action in actions:
            match action:
                case SaveRecord():
                    out += self._begins()
                case Drain():
                    self.draining = True
                    out.append(DrainEngine())
                case Activate(side):
                    self.side, self.draining = side, False
                case MeasureSide(window, _, from_s, to_s):
                    self._window = window
                    out.append(self._measure(from_s, to_s))
                case Decide(result):
                    out += self._end(result)
        return out

    def _measure(self, from_s: float, to_s: float) -> MeasureWindow:
        self._number = next(self._numbers)
        if self._core is None:
            return MeasureWindow(self._number, from_s, to_s)
        return MeasureWindow(self._number, from_s, to_s, self._core.brake_age_s)

    def _end(self, result: TrialResult) -> list[Action]:
        self._stage = _Stage.OVER
        self.draining = False
        self.decided = TrialDecided(self.attempt, self.plans.record.control, result)
        return []
