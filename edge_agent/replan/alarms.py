"""From glances at the engine to alarms: what arrives, what waits, and when a re-plan is due. Pure.

A *glance* comes some ten times a second, an even pace that the trigger wants. What it does not carry is
handed in: measured service times, which change slowly, and the drift of the running plan.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from stageloom.edge_agent.lifecycle.states import RunnablePlan
from stageloom.edge_agent.reporting.telemetry import row_name
from stageloom.shared.engine.stats import QueueSnapshot
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Alarm, AlarmSample, ModelLoad, UsualLoad
from stageloom.shared.policy.arrivals import YOUNG_S, Arrivals
from stageloom.shared.policy.plain import Load
from stageloom.shared.policy.queues import TOP_THRESHOLD, QueueMeasure, progress_bits
from stageloom.shared.policy.regime import Regime, RegimeWatch, moved
from stageloom.shared.policy.returns import ReturnWatch
from stageloom.shared.policy.trigger import Firing, Trigger, TriggerConfig

_DEADLINES_S: Final = 120.0
"""How long a deadline is remembered after a task that had one like it."""

_TIGHT: Final = 4
"""One glance in so many may show a tighter deadline than the one that counts."""

_ANSWERED_S: Final = 900.0
"""A plan that comes later than this after an alarm has nothing to do with it."""

_MODELS: Final = 64  # what an alarm holds
_BLOCKS: Final = 62  # what a mask holds


@dataclass(frozen=True, kw_only=True)
class Fired:
    """A re-plan is due: why, and what the device saw. `loads` are in the order of the samples' models.

    `moved_since_s`: when the arrivals of today began, where they have moved.
    """

    firing: Firing
    loads: tuple[Load, ...]
    moved_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class ChosenFor:
    """The arrivals that a plan of this structure was chosen for."""

    structure: Digest
    regime: Regime


class Deadlines:
    """The deadlines of one model's tasks of late, from a task's arrival: of each glance the tightest.

    A task that its application submits late has little of its time left. It says nothing of the others, so
    that no single glance counts.
    """

    def __init__(self) -> None:
        self._by_time: deque[tuple[float, float]] = deque()
        self._ascending: list[float] = []

    def add(self, at_s: float, tightest_s: float | None) -> None:
        """Take in one glance's."""
        while self._by_time and at_s - self._by_time[0][0] > _DEADLINES_S:
            _, old_s = self._by_time.popleft()
            del self._ascending[bisect_left(self._ascending, old_s)]
        if tightest_s is not None and tightest_s > 0:
            self._by_time.append((at_s, tightest_s))
            insort(self._ascending, tightest_s)

    @property
    def tight_s(self) -> float | None:
        """Less is left in one glance in four at most."""
        return self._ascending[len(self._ascending) // _TIGHT] if self._ascending else None

    @property
    def usual_s(self) -> float | None:
        """The median."""
        return self._ascending[len(self._ascending) // 2] if self._ascending else None


@dataclass(frozen=True, slots=True)
class _Asked:
    """An alarm for something else than the regime: what ran then, what for, and what came."""

    structure: Digest | None
    chosen_for: Regime | None
    at_s: float
    regime: Regime
    began_s: float


class Alarms:
    """One device's trigger, fed by the engine."""

    def __init__(
        self,
        *,
        measure: QueueMeasure = QueueMeasure.WORK,
        threshold: float | None = None,
        regime: float = 2.0,
        cooldown_s: float = 10.0,
        power_mode: str | None = None,
        chosen: ChosenFor | None = None,
    ) -> None:
        """`threshold` in s^2 or tasks^2; None: from the deadlines seen, or TOP's for tasks.

        `power_mode`: the one that the last decision was made for; None: that of the first glance. `chosen`
        was known before a restart, and counts if its plan runs.
        """
        self.chosen = chosen  # of the plan that runs, as far as it is known; to be kept over a restart
        self._measure, self._threshold, self._cooldown_s = measure, threshold, cooldown_s
        self._regime_factor = regime
        self.trigger = Trigger(self.config(None), power_mode=power_mode)
        self._arrivals = Arrivals()
        self._regime = RegimeWatch(self._arrivals)
        self._returns = ReturnWatch()
        self._asked: _Asked | None = None
        self._ran: Digest | None = None  # the structure that ran at the last glance
        self._deadlines: dict[str, Deadlines] = {}
        self._tight_s: float | None = None
        self._service_s: dict[str, float] = {}

    def config(self, tight_s: float | None) -> TriggerConfig:
        """Thresholds for tasks whose tight deadline, from arrival, is this one; None: they have none."""
        config = TriggerConfig.with_deadlines([] if tight_s is None else [tight_s])
        variance = TOP_THRESHOLD if self._measure is QueueMeasure.TASKS else config.variance
        return replace(
            config,
            measure=self._measure,
            variance=variance if self._threshold is None else self._threshold,
            cooldown_s=self._cooldown_s,
            regime=self._regime_factor,
        )

    def glance(
        self,
        seen: QueueSnapshot,
        service_s: Mapping[str, float],
        *,
        held: bool,
        trying: bool = False,
        drift: float = 1.0,
        power_mode: str = "",
        structure: Digest | None = None,
    ) -> Fired | None:
        """One glance; none fires while `held`, nor while `trying`, but for arrivals that moved.

        `trying`: a plan is on its way or on trial, which was found for the arrivals before; `structure` is
        that of the plan which runs apart from it. Nor while it is not known yet how much comes since more do.

        A model that the running plan has not measured yet keeps the service time that it had before: a swap
        must not look like an empty queue.
        """
        self._service_s.update({name: one for name, one in service_s.items() if one > 0.0})
        self._arrivals.add(seen.at_s, {queue.name: queue.arrived for queue in seen.queues})
        tight_s = self._tight(seen)
        if tight_s != self._tight_s:
            self._tight_s = tight_s
            self.trigger.configure(self.config(tight_s))
        if not (held or trying):
            self._settle(seen.at_s, structure)
        regime = self._regime.look(self._service_s, self._regime_factor)
        if not (held or trying):
            self._remember(structure)
        back = self._back(structure, held=held)
        if back is not None and self._regime.chosen_for is not None:
            regime = moved(self._regime.chosen_for, back, self._service_s)
        loads = self.loads(seen)
        progress = tuple(progress_bits((queue.progress,), queue.blocks) for queue in seen.queues)
        young = seen.at_s - self._arrivals.rise_s < YOUNG_S and back is None
        firing = self.trigger.observe(
            *(loads, progress, seen.at_s),
            power_mode=power_mode,
            drift=drift,
            regime=regime,
            held=held or young,
            trying=trying,
            at_once=back is not None,
        )
        if firing is None:
            return None
        if regime <= self._regime_factor:
            late = self._regime.of_late
            self._asked = _Asked(structure, self._regime.chosen_for, seen.at_s, *late)
            if self._regime.chosen_for is None:  # else it would be learned with what came before the alarm
                self._regime.chose(*late)
            return Fired(firing=firing, loads=self.loads(seen))
        self._asked = None
        self._returns.left(self._regime.chosen_for, structure, self._service_s, seen.at_s)
        if back is None:
            since_s = self._regime.answered()
            return Fired(firing=firing, loads=self.loads(seen), moved_since_s=since_s)
        self._returns.told(seen.at_s)
        self._regime.chose(back, seen.at_s)
        loads = tuple(_at(back[load.model].per_s, load) for load in self.loads(seen))
        return Fired(firing=firing, loads=loads, moved_since_s=seen.at_s)

    def _back(self, structure: Digest | None, *, held: bool) -> Regime | None:
        """A regime that is back, in which another plan ran."""
        newest = self._arrivals.newest
        if held or newest is None:
            self._returns.rest()
            return None
        return self._returns.look(
            newest,
            self._regime.chosen_for,
            structure,
            self._service_s,
            self._regime_factor,
        )

    def _settle(self, at_s: float, structure: Digest | None) -> None:
        """Another plan runs; since an alarm: it was chosen for what that showed.

        With other launch intervals alone it is no other plan: those follow every burst.
        """
        if structure is not None:
            if self._ran is None and self.chosen is not None and self.chosen.structure == structure:
                self._regime.chose(self.chosen.regime, at_s)
            if self._ran not in (None, structure):
                self.trigger.another_plan(at_s)
            self._ran = structure
        asked = self._asked
        if asked is None:
            return
        other = None not in (structure, asked.structure) and structure != asked.structure
        if other:
            self._returns.left(asked.chosen_for, asked.structure, self._service_s, at_s)
            self._regime.chose(asked.regime, asked.began_s)
        if other or at_s - asked.at_s > _ANSWERED_S:
            self._asked = None

    def _remember(self, structure: Digest | None) -> None:
        """What the plan that runs was chosen for."""
        regime, chosen = self._regime.chosen_for, self.chosen
        if structure is None or regime is None:
            return
        if chosen is None or chosen.structure != structure or chosen.regime is not regime:
            self.chosen = ChosenFor(structure, regime)

    def _tight(self, seen: QueueSnapshot) -> float | None:
        """The tightest of all models', those included that the running plan no longer serves."""
        newest = {queue.name: queue.tightest_s for queue in seen.queues}
        for name in newest:
            self._deadlines.setdefault(name, Deadlines())
        for name, deadlines in self._deadlines.items():
            deadlines.add(seen.at_s, newest.get(name))
        known = [one.tight_s for one in self._deadlines.values()]
        return min((one for one in known if one is not None), default=None)

    def loads(self, seen: QueueSnapshot) -> tuple[Load, ...]:
        """Every model's load, in the glance's order."""
        return tuple(
            Load(
                model=queue.name,
                arrivals_per_s=self._arrivals.late(queue.name).per_s,
                service_s=self._service(queue.name),
                queued=queue.queued,
                oldest_age_s=queue.oldest_age_s,
                usual_per_s=self._arrivals.usual(queue.name).per_s,
                deadline_s=self._deadline(queue.name),
            )
            for queue in seen.queues
        )

    def _service(self, model: str) -> float:
        return self._service_s.get(model, 0.0)

    def _deadline(self, model: str) -> float:
        known = self._deadlines.get(model)
        return (known.usual_s or 0.0) if known else 0.0


def _at(per_s: float, load: Load) -> Load:
    """As known of the regime that is back: what came within a second says less."""
    return replace(load, arrivals_per_s=per_s, usual_per_s=per_s)


def alarm_raised(fired: Fired, running: RunnablePlan | None, at_us: int) -> Alarm:
    """What the planner is told, but for boot, number and environment; `at_us` is the wall clock."""
    return Alarm(
        boot=0,
        number=1,
        at_us=at_us,
        cause=fired.firing.cause.value,
        value=fired.firing.value,
        threshold=fired.firing.threshold,
        plan=running.ref.digest if running else None,
        loads=tuple(
            ModelLoad(
                row_name(load.model),
                load.arrivals_per_s,
                load.service_s * 1e6,
                load.queued,
                round(load.oldest_age_s * 1e6),
            )
            for load in fired.loads[:_MODELS]
        ),
        samples=tuple(
            AlarmSample(
                tuple(_mask(blocks) for blocks in sample.progress[:_MODELS]),
                tuple(sample.deviation[:_MODELS]),
            )
            for sample in fired.firing.samples
        ),
        usual=tuple(
            UsualLoad(load.usual_per_s, round(load.deadline_s * 1e6)) for load in fired.loads[:_MODELS]
        ),
    )


def _mask(blocks: tuple[int, ...]) -> int:
    return sum(bit << at for at, bit in enumerate(blocks[:_BLOCKS]))
