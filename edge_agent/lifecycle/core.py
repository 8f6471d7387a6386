"""Decides about plans on this device, from a desired value to last-known-good. Pure.

`state` is durable: the desired value, how far it got, last-known-good. Each change is a `Persist` or a
`Hold`, and nothing that rests on it happens before the shell says that it is done. The plan manager knows
what runs; the core calls it and is called back with what became of a plan. Whenever all actions are carried
out, the core compares what is desired with what is done and takes the next step. So a lost answer, a crash
or a full disk at any point costs time, never a plan or the truth of a report.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import UNSET, structs

from stageloom.edge_agent.lifecycle import attempts
from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle.attempts import HELD_MOST, Changed, Way
from stageloom.edge_agent.lifecycle.events import Action, Hold, Persist
from stageloom.edge_agent.lifecycle.local import LocalPlans
from stageloom.edge_agent.lifecycle.manager import PlanManager
from stageloom.edge_agent.lifecycle.needs import Needs, requested
from stageloom.edge_agent.lifecycle.session import AlarmBox, LinkConfig, PlannerSession
from stageloom.edge_agent.lifecycle.states import (
    OPEN,
    UNDONE,
    VERDICTS,
    AttemptId,
    LinkState,
    PlanAttempt,
    PlanRef,
    RunnablePlan,
    TransitionCause,
)
from stageloom.shared.engine.trial import TrialRecord, TrialResult, Verdict
from stageloom.shared.ids import Digest
from stageloom.shared.messages import control
from stageloom.shared.messages.base import Refused
from stageloom.shared.messages.control import (
    ArtifactNeed,
    DeviceState,
)
from stageloom.shared.messages.telemetry import TrialEnded
from stageloom.shared.text import bounded, counted


class Lifecycle:
    """The plans of one device. Call `handle` or `add`, then `next` until it returns None, on one thread."""

    def __init__(self, state: LinkState, *, config: LinkConfig, plans: PlanManager) -> None:
        self.config = config
        self.state = state
        self.session = PlannerSession(config)
        self.disk = Disk(state)
        self.plans = plans
        plans.outcomes = self
        self._outbox: deque[Action] = deque()
        self._once_durable: list[Callable[[], list[Action]]] = []
        self.wall_s = 0.0  # the wall clock less the monotonic one; the shell knows when that has changed
        self._now_s = 0.0
        self._needs = Needs(again_s=config.fetch_again_s)
        self._environment: str | None = None
        self._active_told: tuple[PlanRef | None] | None = None  # what runs, until a state names it
        self._asked: dict[AttemptId, tuple[DeviceState, str]] = {}  # of the plan manager
        self._staged: ev.PlanStaged | None = None  # what the manager said of the attempt's plan
        self._lost_good: Digest | None = None  # last-known-good does not run for artifacts that it lacks
        self.alarms = AlarmBox(config.boot)
        self._local = LocalPlans(wait_s=config.local_wait_s, again_s=config.local_again_s)

    # -- what the shell calls -------------------------------------------------------------------------------

    def boot(self, environment: str, present: frozenset[Digest], now_s: float) -> None:
        """The first call: run last-known-good, and decide what the state found on disk means."""
        self._needs.present = set(present)
        if self.state.last_good is not None:
            self.add(self.plans.restore(self.state.last_good))
        self.handle(ev.EnvironmentChanged(environment), now_s)

    def handle(self, event: ev.Event, now_s: float) -> None:
        """Take an event. `now_s` is monotonic."""
        self._now_s = now_s
        self.add(self._settle(now_s))
        self.add(self._take(event, now_s))

    def add(self, actions: Sequence[Action]) -> None:
        """Queue what the plan manager decided."""
        self._outbox.extend(actions)

    def next(self, now_s: float) -> Action | None:
        """The next action to carry out; None while there is nothing to do."""
        self._now_s = now_s
        if not self._outbox:
            self.add(self._reconcile(now_s))
        return self._outbox.popleft() if self._outbox else None

    def persisted(self, state: LinkState) -> None:
        """A `Persist` reached the disk."""
        self.disk.persisted(state)
        self._accept_active(state)

    def held(self, state: LinkState) -> None:
        """The shell came to a `Hold`, and whatever was before it is done."""
        self.disk.held(state)
        self._accept_active(state)

    def persist_failed(self, reason: str, now_s: float) -> None:
        """Believe only what is on disk, and drop what rests on the rest; it is asked for again."""
        self.state = self.disk.failed(reason, now_s + self.config.storage_again_s)
        self._outbox = deque(
            action
            for action in self._outbox
            if not isinstance(action, ev.Persist | ev.Hold | ev.SendMessage | TrialEnded)
        )
        self._once_durable.clear()
        self.forgot()
        self.add(self._tell_of_disk(reason))

    def report(self) -> control.Report:
        """The state as the planner is told of it."""
        state = self.state
        return control.Report(
            revision=state.revision,
            epoch=state.desired.epoch if state.desired else 0,
            generation=state.desired.generation if state.desired else 0,
            seen=state.desired.plan_digest if state.desired else None,
            active=state.active.digest if state.active else None,
            origin=state.active.origin if state.active else None,
            local_counter=state.local_counter,
            state=state.state,
            reason=state.reason,
            activation=state.desired.activation if state.desired else None,
            autonomy=state.desired.autonomy if state.desired else None,
        )

    def needed(self) -> set[Digest]:
        """Artifacts that must stay: of plans that have a part to play, and what waits for the desired one.

        Once there is a verdict on that, its plan has none.
        """
        good = self.state.last_good
        named = self._needs.named(self.state.desired, plan=self.state.state not in VERDICTS)
        return self.plans.needed() | named | ({need.digest for need in good.artifacts} if good else set())

    # -- what the plan manager calls ------------------------------------------------------------------------
    # An outcome of another attempt or state is late and changes nothing.

    def verified(self, attempt_id: AttemptId) -> list[Action]:
        """It decodes and is legal, and its artifacts are whole."""
        attempt = self._attempt(attempt_id, DeviceState.RECEIVED, DeviceState.WAITING)
        if attempt is None:
            return []
        return self._become(self.state.advanced(attempt, TransitionCause.VERIFIED))

    def staged(self, staged: ev.PlanStaged) -> list[Action]:
        """The plan can run: a trial, probation or a refusal is next."""
        attempt = self._attempt(staged.attempt, DeviceState.VERIFIED, DeviceState.STAGED)
        if attempt is None:
            return []
        self._staged = staged
        if attempt.state is DeviceState.STAGED:
            return []
        return self._become(self.state.advanced(attempt, TransitionCause.STAGED))

    def trial_begins(self, attempt_id: AttemptId, record: TrialRecord, lasts: str) -> list[Action]:
        """Everything is ready: the candidate runs once the record is durable. `lasts`: how long, in words."""
        attempt = self._attempt(attempt_id, DeviceState.STAGED)
        if attempt is None:
            return []
        way = attempts.compares(self.state, attempt, self._staged).value
        begun = self.state.advanced(attempt, TransitionCause.TRIAL_BEGINS, lasts, record=record, way=way)
        return self._become(begun)

    def trial_decided(
        self, attempt_id: AttemptId, control: Digest | None, result: TrialResult
    ) -> list[Action]:
        """The trial ended, or was refused: after a commit the candidate runs, else the control."""
        attempt = self._attempt(attempt_id, DeviceState.STAGED, DeviceState.TRIAL)
        actions: list[Action] = []
        if attempt is not None and result.verdict is Verdict.IDLE:
            result = attempts.without_load(self.state, attempt, result)
        if attempt is not None and result.verdict is Verdict.IDLE:
            return self._apply(
                attempts.activated(self.state, attempt, Way.IDLE, control, self._now_us, result.reason)
            )
        if attempt is not None:
            way = attempts.compares(self.state, attempt, self._staged)
            decided = attempts.decided(self.state, attempt, result, self._now_us, way, control=control)
            actions = self._apply(decided)
        return [*actions, ev.CollectArtifacts()]

    def passed(self, attempt_id: AttemptId) -> list[Action]:
        """It ran for as long as it had to, and nothing speaks against it."""
        attempt = self._attempt(attempt_id, DeviceState.PROBATION)
        actions: list[Action] = []
        if attempt is not None:
            self._lost_good = None
            actions = self._apply(attempts.passed(self.state, attempt, self._now_us))
        return [*actions, ev.CollectArtifacts(downloads=True)]

    def failed(self, attempt_id: AttemptId, reason: str) -> list[Action]:
        """It is not legal, cannot be prepared, or did not outlive probation: then the plan before runs."""
        actions: list[Action] = []
        if attempt := self._attempt(attempt_id, DeviceState.PROBATION):
            good = self.state.last_good
            actions = self._apply(attempts.failed(self.state, attempt, reason, self._now_us))
            if good is not None:
                self._once_durable.append(partial(self.plans.restore, good))
        elif attempt := self._attempt(attempt_id, *UNDONE):
            actions = self._become(attempts.refused(self.state, attempt, reason))
        return [*actions, ev.CollectArtifacts()]

    def restore_failed(self, reason: str) -> list[Action]:
        """Last-known-good does not run any more."""
        if (back := attempts.lost_local_plan(self.state)) is not None:
            if back.last_good is not None:
                self._once_durable.append(partial(self.plans.restore, back.last_good))
            return self._become(back)
        if self.state.state is not DeviceState.COMMITTED:
            good = self.state.last_good
            self._lost_good = good.ref.digest if good is not None and self._needs.lost(good) else None
            return []
        # The plan is not to blame for a damaged artifact: it is fetched and tried again.
        if self._missing():
            state, rows = attempts.superseded(self.state, self._now_us, reason)
            return self._apply((state.moved(TransitionCause.ARTIFACTS_MISSING, reason), rows))
        return self._become(self.state.moved(TransitionCause.RESTORE_FAILED, reason))

    def active_changed(self, active: PlanRef | None) -> None:
        """What runs changed: a fallback, a plan made locally, or nothing. True until it is said otherwise."""
        self._active_told = (active,)

    def artifact_gone(self, digest: Digest) -> None:
        """An artifact was found damaged and removed."""
        self._needs.gone(digest)

    def forgot(self) -> None:
        """What the plan manager was asked for is lost: ask again."""
        self._asked.clear()
        self._needs.forget_profiles()

    def _attempt(self, attempt_id: AttemptId, *states: DeviceState) -> PlanAttempt | None:
        """The attempt that an outcome is of, if it is in one of these states."""
        for attempt in self.state.attempts:
            if attempt.id == attempt_id and attempt.state in states:
                return attempt
        return None

    # -- events ---------------------------------------------------------------------------------------------

    def _settle(self, now_s: float) -> list[Action]:
        """What the state found at boot means, until that is on disk: a full disk makes no crash forgotten."""
        if self.disk.settled or self.disk.blocked(now_s):
            return []
        self.disk.settled = True
        return self._apply(attempts.at_boot(self.state, self._now_us))

    def _take(self, event: ev.Event, now_s: float) -> list[Action]:
        match event:
            case ev.Connected():
                return self.session.connected(self.report(), now_s)
            case ev.Lost():
                self.session.lost()
            case ev.Received(message):
                self.session.heard(now_s)
                return self._message(message, now_s)
            case ev.ArtifactPresent(digest):
                self._needs.present.add(digest)
            case ev.ArtifactGone(digest):
                self._needs.gone(digest)
            case ev.FetchFailed(digest, reason):
                return self._fetch_failed(digest, reason)
            case ev.EnvironmentChanged(environment):
                self._environment = environment
                return self.session.is_now(environment, self.report(), now_s)
            case control.Alarm():
                self.alarms.take(event, self.session.environment, now_s)
                self._local.alarm(event.cause, self.state, now_s)
            case ev.PlansMade(plans):
                self._local.made(plans)
            case ev.PlanMeasured(plan, cause):
                self._local.measured(plan, cause, self.state)
                return self._change(proven=attempts.proven_with(self.state, plan, holds=True))
            case ev.ProfileAnswered(request):
                if request in requested(self.state.desired) - {*self.state.answered}:
                    return self._change(answered=(*self.state.answered, request))
            case ev.TimePassed():
                return self.session.tick(self.report(), now_s)
        return []

    def _message(self, message: control.ControlToDevice, now_s: float) -> list[Action]:
        match message:
            case control.Welcome():
                self.session.welcome(message)
                self.alarms.connected()
                self._local.connected()
            case control.HeartbeatAck() | control.ReportedAck():
                self.session.stored(message.revision)
            case control.Desired():
                return self._desired(message, now_s)
            case control.AlarmAck():
                self.alarms.acknowledged(message)
            case Refused():
                return self.session.refused(message, self.report(), now_s)
        return []

    def _desired(self, desired: control.Desired, now_s: float) -> list[Action]:
        known = self.state.desired
        if known is not None and (desired.epoch, desired.generation) <= (known.epoch, known.generation):
            # Late, repeated, or from a planner that lost its memory: tell it what we have seen.
            same = structs.replace(desired, correlation=known.correlation) == known
            return [] if same else self.session.send_report(self.report(), now_s)
        if self.disk.blocked(now_s):
            return []  # the planner offers it again with the next heartbeat
        before, rows = attempts.superseded(self.state, self._now_us)
        wanted = set[int]()  # requests that may be known here
        if known is None or known.epoch == desired.epoch:  # a restored database gives numbers again
            wanted = requested(desired)
        self._needs.forget_profiles(keep=wanted)
        cause, reason = TransitionCause.DESIRED, ""
        if measures := attempts.only_measures(self.state, desired):
            cause, reason = TransitionCause.MEASURE, attempts.standing(self.state.reason)
        moved = structs.replace(
            before.moved(cause, reason),
            desired=desired,
            probation_boots=0,
            trial=None,
            abandoned=0,
            way="",
            judged_in=before.judged_in if measures else UNSET,
            answered=tuple(request for request in self.state.answered if request in wanted),
        )
        # What was fetched for the value before, or half of it, would take the room of what this one needs.
        return [*self._apply((moved, rows)), ev.CollectArtifacts(downloads=True)]

    def _fetch_failed(self, digest: Digest, reason: str) -> list[Action]:
        actions: list[Action] = []
        waits = self.state.state is DeviceState.WAITING
        if waits and digest in {need.digest for need in self._missing()}:
            actions = self._change(reason=bounded(f"artifact {digest[:12]}: {reason}"))
        # The disk may be full of what was fetched for an older value while this one came.
        return [*actions, ev.CollectArtifacts(downloads=True)]

    # -- state ----------------------------------------------------------------------------------------------

    @property
    def _now_us(self) -> int:
        return round((self._now_s + self.wall_s) * 1e6)

    def _apply(self, changed: Changed) -> list[Action]:
        """Take over a state, then tell what led to it."""
        state, rows = changed
        return [*self._become(state), *rows]

    def _change(self, **fields: object) -> list[Action]:
        return self._become(structs.replace(self.state, **fields))

    def _become(self, new: LinkState) -> list[Action]:
        """Take over a new state: durable first, if a start would find another one else; then reported."""
        if new == self.state:
            return []
        before = self.report()
        still_open = {attempt.id for attempt in new.attempts if attempt.state in OPEN}
        for attempt in self.state.attempts:
            if attempt.state in OPEN and attempt.id not in still_open:
                self._once_durable.append(partial(self.plans.abandon, attempt.id))
        if self.state.local is not None and new.local is None:
            self._local.ended(self.state.local)
        if (new.state, new.desired) != (self.state.state, self.state.desired):
            self._asked.pop(self.state.attempt, None)
        self.state = new
        if self.report() != before:
            self.state = structs.replace(new, revision=new.revision + 1)
        return [self.disk.keep(self.state)]

    def _tell_of_disk(self, problem: str) -> list[Action]:
        """Why nothing goes on, where that can be said without the disk: nothing of the plan ran yet."""
        reason = bounded(f"the link's state cannot be stored: {problem}")
        told = structs.replace(self.state, reason=reason, revision=self.state.revision + 1)
        if self.state.reason == reason or not self.disk.can_hold(told):
            return []
        return self._become(told)

    def _accept_active(self, state: LinkState) -> None:
        """What runs need not be said again once the state that names it is safe."""
        if self._active_told == (state.active,):
            self._active_told = None

    def _missing(self) -> list[ArtifactNeed]:
        return self._needs.missing(self.state.desired)

    # -- reconcile ------------------------------------------------------------------------------------------

    def _reconcile(self, now_s: float) -> list[Action]:
        """The next step towards what is desired, once all before it is carried out."""
        if not self.disk.blocked(now_s):
            calls, self._once_durable = self._once_durable, []
            if actions := [action for call in calls for action in call()]:
                return actions
            steps = (self._take_what_is_told, self._step_attempts, self._mend_good, self._begin_local)
            for step in steps:
                if actions := step(now_s):
                    return actions
            desired, welcomed = self.state.desired, self.session.welcomed
            actions = self._needs.profiles(desired, self.state.answered, now_s, connected=welcomed)
            actions += self._needs.policy(desired, now_s, connected=welcomed)
            if actions:
                return actions
        return self._tell_planner(now_s)

    def _take_what_is_told(self, now_s: float) -> list[Action]:
        """What the shell said about the world, as levels: said once, true until it says otherwise."""
        if self._active_told is not None and self._active_told != (self.state.active,):
            (active,) = self._active_told
            counter = max(self.state.local_counter, active.local_counter if active else 0)
            return self._change(active=active, local_counter=counter)
        environment = self._environment
        if environment is None or environment == self.state.environment:
            return []
        if self.state.state in (DeviceState.STAGED, DeviceState.TRIAL):
            self._once_durable.append(partial(self.plans.abandon, self.state.attempt))
        self._once_durable.append(self.plans.environment_changed)
        after, rows = attempts.environment_changed(self.state, environment, self._now_us)
        if after.active != self.state.active and after.last_good is not None:
            self._once_durable.append(partial(self.plans.restore, after.last_good))
        return self._apply((after, rows))

    def _tell_planner(self, now_s: float) -> list[Action]:
        """A report, an alarm and a local plan, whatever else goes on."""
        if not self.session.welcomed:
            return []
        if told := self.session.keep_told(self.report(), now_s):
            return told
        alarm = self.alarms.due(now_s, self.config.alarm_again_s)
        planned = self._local.message(self.state, self.config.boot, now_s)
        return [ev.SendMessage(message) for message in (alarm, planned) if message is not None]

    def _begin_local(self, now_s: float) -> list[Action]:
        begun = self._local.begin(
            self.state, connected=self.session.welcomed, present=self._needs.present, now_s=now_s
        )
        return [] if begun is None else self._become(begun)

    def _step_attempts(self, now_s: float) -> list[Action]:
        if self.state.state is DeviceState.RECEIVED and self.state.candidate is None:
            reason = "no plan is desired; what runs goes on"
            return self._become(self.state.moved(TransitionCause.NOTHING_TO_DO, reason))
        for attempt in self.state.attempts:
            if actions := self._next_step(attempt, now_s):
                return actions
        return []

    def _mend_good(self, now_s: float) -> list[Action]:
        """Where no attempt brings another plan: fetch what last-known-good lacks, and restore it.

        The desired plan names it in the usual case, that of the same models.
        """
        good, desired = self.state.last_good, self.state.desired
        if self.state.state not in VERDICTS or good is None or desired is None:
            return []
        was_lost = self._lost_good == good.ref.digest
        lost = self._needs.lost(good) if was_lost else []
        there = {need.digest for need in desired.artifacts}
        named = [need for need in lost if need.digest in there]
        reason = attempts.without_loss(self.state.reason)
        if lost:
            reason = attempts.with_loss(reason, named=len(named) == len(lost))
        if reason != self.state.reason:
            return self._change(reason=reason)
        if was_lost and not lost and self.state.local is None:
            self._lost_good = None
            return self.plans.restore(good)
        return self._needs.fetch(named, now_s, connected=self.session.welcomed)

    def _next_step(self, attempt: PlanAttempt, now_s: float) -> list[Action]:
        missing = [] if attempt.local else self._missing()
        match attempt.state:
            case DeviceState.RECEIVED if self._runs_already(attempt):
                return self._nothing_to_do(attempt.plan)
            case DeviceState.RECEIVED | DeviceState.WAITING | DeviceState.VERIFIED if missing:
                # An artifact that was there when the plan was checked may have been found damaged since.
                return self._wait(now_s)
            case DeviceState.RECEIVED | DeviceState.WAITING:
                return self._ask(attempt, "verify", partial(self.plans.verify, attempt.id, attempt.plan))
            case DeviceState.VERIFIED:
                return self._stage(attempt)
            case DeviceState.STAGED:
                return self._begin(attempt, now_s)
            case DeviceState.TRIAL:
                return self._ask(attempt, "trial", partial(self.plans.trial_recorded, attempt.id, now_s))
            case DeviceState.PROBATION:
                guarded = attempts.is_guarded(attempt)
                idle = attempt.way == Way.IDLE.value
                call = partial(self.plans.activate, attempt.id, attempt.plan, guarded=guarded, idle=idle)
                return self._ask(attempt, "activate", call)
        return []

    def _runs_already(self, attempt: PlanAttempt) -> bool:
        """The desired plan was committed, and runs."""
        good, active = self.state.last_good, self.state.active
        if attempt.local or good is None or active is None:
            return False
        return good.ref.digest == active.digest == attempt.plan.ref.digest

    def _nothing_to_do(self, plan: RunnablePlan) -> list[Action]:
        moved = self.state.moved(TransitionCause.NOTHING_TO_DO, "it was committed and runs already")
        if moved.planned is not None:
            # The planner desires what was planned here: it is the planner's from now on.
            moved = structs.replace(moved, active=plan.ref, last_good=plan, planned=None)
            self._once_durable.append(partial(self.plans.restore, plan))
        return self._become(moved)

    def _stage(self, attempt: PlanAttempt) -> list[Action]:
        return self._ask(attempt, "stage", partial(self.plans.stage, attempt.id, attempt.plan))

    def _begin(self, attempt: PlanAttempt, now_s: float) -> list[Action]:
        """From staged on: a trial, or straight under probation."""
        staged = self._staged
        if staged is None or staged.attempt != attempt.id:
            return self._stage(attempt)
        way = attempts.way_of(self.state, attempt, staged)
        if way is None:
            return self._become(self.state.advanced(attempt, TransitionCause.NOT_NOW))
        if way is Way.TRIAL:
            environment, at_us = self.state.environment, self._now_us
            call = partial(self.plans.run_trial, attempt.id, attempt.plan, environment, at_us, now_s)
            return self._ask(attempt, "trial", call)
        if way in (Way.FIRST, Way.OUTPUTS) and staged.interface:
            return self._become(attempts.refused(self.state, attempt, bounded(staged.interface)))
        if way is Way.FIRST and attempts.uncompared(self.state, attempt, staged):
            return self._become(attempts.refused(self.state, attempt, attempts.UNCOMPARED))
        if (tolerance := attempts.tolerance_of(self.state, staged)) is not None and way is Way.OUTPUTS:
            environment, at_us = self.state.environment, self._now_us
            compare = partial(self.plans.compare_outputs, attempt.id, attempt.plan, tolerance)
            return self._ask(attempt, "trial", lambda: compare(environment, at_us, now_s))
        if way.guarded and staged.starves:
            return self._become(attempts.refused(self.state, attempt, staged.starves))
        # The record is on disk before the plan runs: a crash from here on is found at boot.
        return self._apply(attempts.activated(self.state, attempt, way, staged.control, self._now_us))

    def _wait(self, now_s: float) -> list[Action]:
        """For artifacts that are missing, and fetch them."""
        missing = self._missing()
        if self.state.state is not DeviceState.WAITING:
            reason = f"{counted(len(missing), 'artifact')} to fetch"
            return self._become(self.state.moved(TransitionCause.ARTIFACTS_MISSING, reason))
        return self._needs.fetch(missing, now_s, connected=self.session.welcomed)

    def _ask(self, attempt: PlanAttempt, what: str, call: Callable[[], list[Action]]) -> list[Action]:
        """Call the plan manager once for this attempt and state."""
        asked = (attempt.state, what)
        if self._asked.get(attempt.id) == asked:
            return []
        self._asked = {one.id: self._asked[one.id] for one in self.state.attempts if one.id in self._asked}
        self._asked[attempt.id] = asked
        if attempt.local and attempt.state not in (DeviceState.RECEIVED, DeviceState.VERIFIED):
            self._local.prepared()
        return call()


class Disk:
    """Which states may be believed: those on disk, or that a start would make of what is there."""

    def __init__(self, found: LinkState) -> None:
        self.error: str | None = None  # why the last write failed
        self.settled = False  # what the state found at boot means is decided
        self._believed = found
        self._settled_durably = False
        self._on_disk = found
        self._written = found  # will be on disk once the actions handed out are carried out
        self._blocked_until_s = 0.0

    def blocked(self, now_s: float) -> bool:
        """A write failed a moment ago: nothing new is begun until the next may succeed."""
        return now_s < self._blocked_until_s

    def keep(self, state: LinkState) -> Hold | Persist:
        """How to take over a state: on disk first, unless a start would find the same anyway."""
        if self.can_hold(state):
            return Hold(state)
        self._written = state
        return Persist(state)

    def can_hold(self, state: LinkState) -> bool:
        """Whether it may be believed without being on disk."""
        held = state.revision < self._written.revision + HELD_MOST
        return held and state.same_at_start(self._written)

    def persisted(self, state: LinkState) -> None:
        """A `Persist` reached the disk."""
        self._on_disk, self.error = state, None
        self.held(state)

    def held(self, state: LinkState) -> None:
        """The shell came to a `Hold`, and whatever was before it is done."""
        self._believed, self._settled_durably = state, self.settled

    def failed(self, reason: str, again_s: float) -> LinkState:
        """A write failed; the state to go back to. `again_s`: when to try again."""
        self._written, self.settled = self._on_disk, self._settled_durably
        self.error, self._blocked_until_s = reason, again_s
        return self._believed
