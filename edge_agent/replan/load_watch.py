"""What the engine process says of its load: service times and queues as telemetry, and alarms."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from stageloom.edge_agent.executor_choice import facts_now
from stageloom.edge_agent.lifecycle.events import EnvironmentChanged
from stageloom.edge_agent.lifecycle.facts import PlanFacts
from stageloom.edge_agent.lifecycle.states import RunnablePlan
from stageloom.edge_agent.parts import Parts
from stageloom.edge_agent.replan.alarms import Alarms, ChosenFor, Fired, alarm_raised
from stageloom.edge_agent.reporting.telemetry import ServiceTimes, engine_rows
from stageloom.edge_agent.store import StateFile
from stageloom.edge_agent.worker.messages import Stats
from stageloom.shared.engine.stats import QueueSnapshot
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.errors import StorageError
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Origin
from stageloom.shared.policy.trigger import Cause

_PLANS: Final = 16
"""Plans whose steps may come in one report."""


DecidedFor: TypeAlias = tuple[ChosenFor | None, str]
"""What the newest decision was made for: arrivals, and a power mode, empty where it is not known."""


class ChosenFile:
    """What the plan that runs was chosen for; a start that finds nothing to read learns it anew."""

    def __init__(self, path: Path) -> None:
        self._file = StateFile(path)

    def load(self) -> DecidedFor:
        """As it was saved last."""
        body = self._file.load().body
        try:
            return (None, "") if body is None else msgspec.msgpack.decode(body, type=DecidedFor)
        except msgspec.MsgspecError:  # of another version
            return (None, "")

    def save(self, decided: DecidedFor) -> str:
        """Replace it durably; why not, if it cannot be written."""
        try:
            self._file.save(msgspec.msgpack.encode(decided))
        except StorageError as error:
            return str(error)
        return ""


class LoadWatch:
    """Measures what the running plan's tasks cost, and asks for another plan where queues diverge."""

    def __init__(self, parts: Parts, environment: str = "", chosen: ChosenFile | None = None) -> None:
        """`environment`: that of the state found on disk, in which the last decision was made.

        A mode that takes a reboot changes while no agent runs, and so do arrivals: the plan that runs was
        `chosen` for those before; None: what is learned is not kept. The file knows the mode as well, as the
        agent may have stopped before the planner heard of another one.
        """
        config = parts.config
        self.stats: Stats | None = None  # the newest of this engine process
        self._parts = parts
        self._mode = parts.machine.power_mode  # that the link knows of
        self._service = ServiceTimes(())
        self._ran: dict[int, Digest] = {}  # by key, the last plans of this engine process, freed ones too
        self._chosen_file = chosen
        self._saved = chosen_for, mode = (None, "") if chosen is None else chosen.load()
        self._alarms = Alarms(
            chosen=chosen_for,
            measure=config.alarm_measure,
            threshold=config.alarm_threshold,
            regime=config.alarm_regime,
            cooldown_s=config.alarm_cooldown_s,
            power_mode=mode or (parts.machine.mode_then(environment) if environment else "") or None,
        )
        self._dropped = 0  # alarms of which the trigger knows that nobody heard them

    def plan_active(self, key: PlanKey, facts: PlanFacts) -> None:
        """Another plan runs: what its tasks cost is measured anew."""
        self._service = ServiceTimes(facts.members)
        self._ran.pop(key, None)
        self._ran[key] = facts.digest
        while len(self._ran) > _PLANS:
            del self._ran[next(iter(self._ran))]

    def engine_exited(self) -> None:
        """What it held is gone."""
        self.stats = None
        self._ran.clear()

    def stats_arrived(self, stats: Stats) -> None:
        """Once per statistics interval."""
        plans = self._parts.plans
        self.stats = stats
        self._service.add(stats)
        plan = plans.plan_of(PlanKey(stats.key)) if stats.key is not None else None
        digest = plan.ref.digest if plan else None
        facts = plans.facts_of(digest) if digest else None
        members, lanes = (facts.members, facts.lanes) if facts else ((), 1)
        self._parts.profiles.drift.add(stats, digest, members, lanes=lanes)
        self._parts.journal.record(engine_rows(stats, self._ran, self._service.per_task_us()))

    def glanced(self, seen: QueueSnapshot, *, alarms: bool, disturbed: bool) -> None:
        """Ten times a second: is a re-plan due? While a plan is tried or guarded `Alarms.glance` says when.

        Without `alarms` only what tasks wait is remembered. `disturbed`: by what the agent itself measures.
        """
        parts = self._parts
        parts.waiting.seen(seen.at_s, seen.oldest_age_s, {one.name: one.arrived for one in seen.queues})
        if seen.key is None or not alarms:
            return
        self.tell_mode()
        drift = parts.profiles.drift.ratio
        plans = parts.plans
        tried = plans.tried
        if (dropped := parts.lifecycle.core.alarms.dropped) != self._dropped:
            self._dropped = dropped
            self._alarms.trigger.unheard()
        running = plans.plan_of(PlanKey(seen.key)) if tried is None else plans.incumbent
        fired = self._alarms.glance(
            seen,
            {name: us * 1e-6 for name, us in self._service.per_task_us().items()},
            held=disturbed or (plans.phase is not None and tried is None),
            trying=tried is not None,
            drift=drift,
            power_mode=parts.machine.power_mode,
            structure=self._structure(running),
        )
        if fired is not None:
            if fired.firing.cause is Cause.DRIFT:  # of another cause the planner renews no costs
                parts.profiles.drift.answered()
            self._raise(fired, running)
        self._keep_decided(running)

    def _keep_decided(self, running: RunnablePlan | None) -> None:
        """Save what has changed, beside the loop, which a slow disk would hold up.

        Not before the planner has heard of the alarm for it, which a start forgets: until then the start is
        to find what was before, and to raise it again. Arrivals are saved earlier where the device's own
        answer to them runs by then. A planner's plan that was on trial as they moved is none.
        """
        alarms, file = self._alarms, self._chosen_file
        chosen, mode = alarms.chosen, alarms.trigger.power_mode or ""
        if self._parts.lifecycle.core.alarms.told_once:
            before, mode = self._saved
            own = running is not None and running.ref.origin is Origin.LOCAL
            if before and chosen and not (own and chosen.structure != before.structure):
                chosen = replace(chosen, regime=before.regime)
        decided = (chosen, mode)
        if file is None or decided == self._saved:
            return
        self._saved = decided
        tell = self._parts.journal.note
        self._parts.background.run(
            lambda: file.save(decided), lambda problem: tell("storage", problem) if problem else None
        )

    def _structure(self, plan: RunnablePlan | None) -> Digest | None:
        facts = self._parts.plans.facts_of(plan.ref.digest) if plan is not None else None
        return facts.structure if facts is not None else None

    def tell_mode(self) -> None:
        """Another power mode is another environment; the planner knows of it and of the cores that are left
        before an alarm that it causes."""
        machine = self._parts.machine
        if machine.power_mode != self._mode:
            self._mode = machine.power_mode
            self._parts.profiles.drift.answered()  # steps take another time for that reason alone
            self._parts.journal.record([facts_now(self._parts.config)])  # a mode may take cores away
            self._parts.lifecycle.handle(EnvironmentChanged(machine.environment()))

    def _raise(self, fired: Fired, running: RunnablePlan | None) -> None:
        parts, firing = self._parts, fired.firing
        if fired.moved_since_s is not None:
            parts.plans.arrivals_moved(fired.moved_since_s)
        parts.lifecycle.handle(alarm_raised(fired, running, round(time.time() * 1e6)))
        parts.local.fired(fired, running)
        values = f"{firing.value:.6g}, above {firing.threshold:.6g}"
        parts.journal.note(
            "alarm", f"{firing.cause.value} is {values}: the planner is asked for another plan"
        )
