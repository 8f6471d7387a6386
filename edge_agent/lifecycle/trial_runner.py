"""Drives one trial: what `TrialCore` decides becomes orders to the engine process. Pure.

First the models' times are measured under the control, while it serves as ever; a device without a task in
that time, and for half a minute before, cannot compare anything: what somebody pushed runs under a guard.
Then the core takes over: its record is made durable by the lifecycle core (`trial_begins`, answered by
`recorded`), and only after that the candidate may run.
"""

from collections.abc import Callable, Iterator, Sequence

from msgspec import structs

from stageloom.edge_agent.lifecycle.events import Action
from stageloom.edge_agent.worker.messages import ModelFigures, OpenWindow, WindowMeasured
from stageloom.shared.engine.trial import (
    NO_LOAD,
    Activate,
    Decide,
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
    lasting,
)
from stageloom.shared.engine.windows import Rng, Side, WindowFigures

_LOOK_S = 0.5
_FEW_TASKS = 5
_SLOW = 3.0
"""Times `timing_s`: so long a task is waited for where some came of late."""

_SHORTEST_S = 1e-6  # a time of zero is one that the clock could not tell

IDLE = f"{NO_LOAD}: runs guarded"


class TrialRunner:
    """One trial. `side` is the plan to launch into; with a `result` it is over."""

    def __init__(
        self,
        record: TrialRecord,
        models: tuple[str, ...],
        *,
        control_bytes: int,
        candidate_bytes: int,
        memory_bytes: int,
        begins: Callable[[str], list[Action]],
        guarded_s: float,
        lately: bool = False,
        rng: Rng,
        numbers: Iterator[int],
        config: TrialConfig,
    ) -> None:
        """`begins` has the record stored and says how long the trial takes, after which `recorded` is called.

        `lately`: tasks have come in the last half minute, if none comes now. `guarded_s`: for how long a plan
        is watched that runs without a trial.
        Bytes are what the plans take, and what both may take together. `numbers` of windows are unique in
        this agent.
        """
        self.record = record
        self.side = Side.CONTROL
        self.result: TrialResult | None = None
        self._models = models
        self._control_bytes, self._candidate_bytes = control_bytes, candidate_bytes
        self._memory_bytes = memory_bytes
        self._begins = begins
        self._patience_s = config.timing_s * (_SLOW if lately else 1.0)  # without any task
        self._guarded_s = guarded_s
        self._rng = rng
        self._numbers = numbers
        self._config = config
        self._began_s = 0.0
        self._number = 0  # of the window that is measured
        self._window = 0  # the core's number of it
        self._seen = {name: ModelFigures(name) for name in models}  # under the control
        self._timed_s = 0.0  # for so long
        self._oldest_age_s = 0.0
        self._core: TrialCore | None = None  # once the models are timed

    @property
    def over(self) -> bool:
        return self.result is not None

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
        if crowded := crowding(self._control_bytes, self._candidate_bytes, self._memory_bytes):
            return self._end(TrialResult(verdict=Verdict.REFUSED, reason=crowded))
        return [self._measure(now, now + _LOOK_S)]

    def again(self) -> list[Action]:
        """The core asks again: what it was told did not reach the disk."""
        core = self._core
        return self._begins(core.announcement) if core is not None and core.saving else []

    def recorded(self, now: float) -> list[Action]:
        """The record is durable: the windows begin."""
        return [] if self._core is None else self._do(self._core.recorded(now))

    def activated(self, side: Side, now: float) -> list[Action]:
        """New launches go to this plan."""
        if self._core is None or side is not self.side:
            return []
        return self._do(self._core.activated(now))

    def settled(self, side: Side, now: float) -> list[Action]:
        """Nothing is in flight but on this plan."""
        if self._core is None or side is not self.side:
            return []
        return self._do(self._core.settled(now))

    @property
    def settling(self) -> bool:
        """Both plans may have steps in flight."""
        return self._core is not None and self._core.settling

    def measured(self, figures: WindowMeasured, now: float) -> list[Action]:
        if self.over or figures.number != self._number:
            return []
        if self._core is None:
            return self._timed(figures, now)
        return self._do(self._core.window_ended(self._window, window_figures(figures, self._models), now))

    def arrivals_moved(self, since_s: float) -> None:
        """Other tasks come since that instant."""
        if self._core is not None:
            self._core.arrivals_moved(since_s)

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
        if self._core is not None:
            return self._do(self._core.tick(now))
        if now > self._began_s + self._patience_s + self._config.stall_s:
            return self.abandon("the models could not be timed: the engine process does not answer", now)
        return []

    # Steps

    def _timed(self, figures: WindowMeasured, now: float) -> list[Action]:
        self._oldest_age_s = max(self._oldest_age_s, figures.oldest_age_s)
        self._timed_s += figures.measured_s
        for model in figures.models:
            if (seen := self._seen.get(model.name)) is not None:
                self._seen[model.name] = structs.replace(
                    seen,
                    completed=seen.completed + model.completed,
                    busy_s=seen.busy_s + model.busy_s,
                    instances=seen.instances + model.instances,
                    instance_s=seen.instance_s + model.instance_s,
                    ended=seen.ended + model.ended,
                )
        taken_s, longest_s = now - self._began_s, self._config.timing_s
        busy = [seen for seen in self._seen.values() if seen.completed]
        enough = bool(busy) and all(seen.completed >= _FEW_TASKS for seen in busy)
        all_busy = len(busy) == len(self._seen)
        if taken_s < longest_s and not (enough and (all_busy or taken_s >= longest_s / 5)):
            return [self._measure(now, now + _LOOK_S)]
        if not busy:
            if taken_s < self._patience_s:
                return [self._measure(now, now + _LOOK_S)]
            if any(seen.ended for seen in self._seen.values()):
                reason = f"no task completed in {taken_s:.0f} s, though some came: nothing can be compared"
                return self._end(TrialResult(verdict=Verdict.NO_GAIN, reason=reason, seconds_s=taken_s))
            reason = f"{IDLE} for {lasting(self._guarded_s)}"
            return self._end(TrialResult(verdict=Verdict.IDLE, reason=reason, seconds_s=taken_s))
        return self._begin_core(now)

    def _begin_core(self, now: float) -> list[Action]:
        """A model without a task so far counts like the average of the others, should one come."""
        service_s = {
            name: seen.busy_s / seen.completed for name, seen in self._seen.items() if seen.completed
        }
        instance_s = {
            name: seen.instance_s / seen.instances for name, seen in self._seen.items() if seen.instances
        }
        usual_s = sum(service_s.values()) / len(service_s)
        longest_s = max(instance_s.values(), default=usual_s)
        setup = TrialSetup(
            record=self.record,
            models=self._models,
            service_s=tuple(max(service_s.get(name, usual_s), _SHORTEST_S) for name in self._models),
            instance_s=tuple(max(instance_s.get(name, longest_s), _SHORTEST_S) for name in self._models),
            control_bytes=self._control_bytes,
            candidate_bytes=self._candidate_bytes,
            memory_bytes=self._memory_bytes,
            arrivals_per_s=tuple(self._seen[name].ended / self._timed_s for name in self._models),
            oldest_age_s=self._oldest_age_s,
        )
        self._core = TrialCore(setup, self._rng, self._config)
        return self._do(self._core.begin(now))

    def _do(self, actions: Sequence[TrialAction]) -> list[Action]:
        out: list[Action] = []
        for action in actions:
            match action:
                case SaveRecord():
                    out += self.again()
                case Activate(side):
                    self.side = side
                case MeasureSide(window, _, from_s, to_s):
                    self._window = window
                    out.append(self._measure(from_s, to_s))
                case Decide(result):
                    out += self._end(result)
        return out

    def _measure(self, from_s: float, to_s: float) -> OpenWindow:
        self._number = next(self._numbers)
        if self._core is None:
            return OpenWindow(self._number, from_s, to_s)
        return OpenWindow(self._number, from_s, to_s, self._core.brake_age_s)

    def _end(self, result: TrialResult) -> list[Action]:
        self.result = result
        return []


def window_figures(seen: WindowMeasured, models: tuple[str, ...]) -> WindowFigures:
    """What the engine process counted, per model in the order of `models`."""
    by_name = {one.name: one for one in seen.models}
    of = [by_name.get(name) or ModelFigures(name) for name in models]
    return WindowFigures(
        completed=tuple(one.completed for one in of),
        failed=seen.failed,
        measured_s=max(seen.measured_s, _SHORTEST_S),
        busy_s=max(seen.busy_s, 0.0),
        saturated=seen.saturated,
        p99_s=seen.p99_s,
        oldest_age_s=seen.oldest_age_s,
        judged=tuple(one.judged for one in of),
        log_latency=tuple(one.log_latency for one in of),
        due=seen.due,
        in_time=seen.in_time,
    )
