"""The device's side of the link as a pure core: (event, now) -> actions.

It holds two things apart. `state` is durable: the desired value, how far it got, last-known-good; every
change is a `Persist` ahead of the actions that rest on it. The session (connected, welcomed, timers) is not.
After any event the core compares what is desired with what is done and asks for the next step, so a lost
answer, a crash or a full disk at any point costs time, never a plan or the truth of a report.
"""

from collections.abc import Collection, Sequence

import msgspec

from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle import local, trials
from stageloom.edge_agent.lifecycle.events import (
    Action,
    FetchArtifact,
    Hold,
    Persist,
    RunProfile,
    RunStageProfile,
    UsePolicy,
)
from stageloom.edge_agent.lifecycle.local import HELD_MOST, at_boot
from stageloom.edge_agent.lifecycle.session import AlarmBox, LinkConfig, Session
from stageloom.edge_agent.lifecycle.states import Attempt, Cause, LinkState, RunnablePlan
from stageloom.edge_agent.lifecycle.trials import Way
from stageloom.shared.ids import Digest
from stageloom.shared.messages import control
from stageloom.shared.messages.base import Refused
from stageloom.shared.messages.control import ArtifactNeed, Desired, DeviceState
from stageloom.shared.text import bounded, counted


class LinkCore:
    """All decisions of the device's link. `handle` wants events one at a time, from one thread."""

    def __init__(self, state: LinkState, *, config: LinkConfig) -> None:
        self.config = config
        self.state = state
        self.session = Session(config)
        self.disk = Disk(state)
        self._needs = Needs(again_s=config.fetch_again_s)
        self._environment: str | None = None
        self._active_told: ev.ActiveChanged | None = None
        self._asked: tuple[Attempt, str] | None = None
        self._staged: ev.PlanStaged | None = None  # what the manager said of the attempt's plan
        self._alarms = AlarmBox(config.boot)
        self._local = local.LocalPlans(wait_s=config.local_wait_s, again_s=config.local_again_s)

    def boot(self, environment: str, present: frozenset[Digest], now_s: float) -> list[ev.Action]:
        """The first call: run last-known-good, and decide what the state found on disk means."""
        self._needs.present = set(present)
        good = self.state.last_good
        actions: list[ev.Action] = [ev.RestorePlan(good)] if good is not None else []
        return actions + self.handle(ev.EnvironmentChanged(environment), now_s)

    def _settle(self, now_s: float) -> list[ev.Action]:
        """What the state found at boot means, until that is on disk: a full disk makes no crash forgotten."""
        if self.disk.settled or self.disk.blocked(now_s):
            return []
        self.disk.settled = True
        return self._apply(at_boot(self.state, self._wall_us(now_s)))

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Action]:
        """Decide. `now_s` is monotonic."""
        settled = self._settle(now_s)
        return settled + self._take(event, now_s) + self._reconcile(now_s) + self._tell_planner(now_s)

    def report(self) -> control.Report:
        """What is true now."""
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

    # -- events ---------------------------------------------------------------------------------------------

    def _take(self, event: ev.Event, now_s: float) -> list[ev.Action]:
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
            case ev.ManagerRestarted():
                self._asked = None
                self._local.forget()
                self._needs.forget_profiles()
            case ev.EnvironmentChanged(environment):
                self._environment = environment
                return self.session.is_now(environment, self.report(), now_s)
            case ev.ActiveChanged():
                self._active_told = event
            case ev.AlarmRaised():
                self._alarms.take(event, self.session.environment)
                self._local.alarm(event.cause, self.state.attempt, now_s)
            case ev.PlansMade(plans):
                self._local.made(plans)
            case ev.ProfileAnswered(request):
                return self._answered(request)
            case ev.PersistFailed(reason):
                # Believe only what is on disk; whatever was learned since is asked for again.
                self.state = self.disk.failed(reason, now_s + self.config.storage_again_s)
                self._asked = None
                self._needs.forget_profiles()
                self._local.forget()
            case ev.RestoreFailed(reason):
                if (back := local.lost(self.state)) is not None:
                    return self._become(back) + [ev.RestorePlan(plan) for plan in (back.last_good,) if plan]
                if self.state.state is DeviceState.COMMITTED:
                    # The plan is not to blame for a damaged artifact: it is fetched and tried again.
                    cause = Cause.ARTIFACTS_MISSING if self._missing() else Cause.RESTORE_FAILED
                    return self._become(self.state.moved(cause, reason))
            case ev.Tick():
                return self.session.tick(self.report(), now_s)
            case (
                ev.PlanVerified()
                | ev.PlanStaged()
                | ev.PlanRefused()
                | ev.TrialBegins()
                | ev.TrialDecided()
                | ev.ProbationPassed()
                | ev.ProbationFailed()
            ):
                return self._outcome(event, now_s)
        return []

    def _message(self, message: control.ControlToDevice, now_s: float) -> list[ev.Action]:
        match message:
            case control.Welcome():
                self.session.welcome(message)
                self._alarms.connected()
                self._local.connected()
                return []
            case control.HeartbeatAck() | control.ReportedAck():
                self.session.stored(message.revision)
                return []
            case control.Desired():
                return self._desired(message, now_s)
            case control.AlarmAck():
                self._alarms.acknowledged(message)
                return []
            case Refused():
                return self.session.refused(message, self.report(), now_s)

    def _desired(self, desired: control.Desired, now_s: float) -> list[ev.Action]:
        known = self.state.desired
        if known is not None and (desired.epoch, desired.generation) <= (known.epoch, known.generation):
            # Late, repeated, or from a planner that lost its memory: tell it what we have seen.
            same = msgspec.structs.replace(desired, correlation=known.correlation) == known
            return [] if same else self.session.send_report(self.report(), now_s)
        if self.disk.blocked(now_s):
            return []  # the planner offers it again with the next heartbeat
        actions: list[ev.Action] = []
        if known is not None:
            actions.append(ev.AbandonPlan((known.epoch, known.generation)))
        rows = trials.abandoned(self.state, "a newer plan is desired", self._wall_us(now_s))
        before, ended = local.superseded(self.state, self._wall_us(now_s))
        actions += ended
        wanted = {one.request for one in desired.profiles}
        if desired.stage_profile is not None:
            wanted.add(desired.stage_profile.request)
        cause, reason = Cause.DESIRED, ""
        if trials.only_measures(self.state, desired):
            cause, reason = Cause.MEASURE, self.state.reason
        moved = msgspec.structs.replace(
            before.moved(cause, reason),
            desired=desired,
            probation_boots=0,
            trial=None,
            abandoned=0,
            way="",
            answered=tuple(one for one in self.state.answered if one in wanted),
        )
        return self._become(moved) + actions + [ev.Record(row) for row in rows]

    def _outcome(self, event: ev.Outcome, now_s: float) -> list[ev.Action]:
        """What the plan manager says; an answer for another attempt or state is late and changes nothing."""
        if (changed := local.outcome(self.state, event, self._wall_us(now_s))) is not None:
            good = changed.state.last_good
            failed = isinstance(event, ev.ProbationFailed) and good is not None
            return self._apply(changed) + ([ev.RestorePlan(good)] if failed and good else [])
        state = self.state.state
        if self.state.desired is None or event.attempt != self.state.attempt:
            return []
        match event, state:
            case ev.PlanVerified(), DeviceState.RECEIVED | DeviceState.WAITING:
                return self._become(self.state.moved(Cause.VERIFIED, ""))
            case ev.PlanStaged(), DeviceState.VERIFIED | DeviceState.STAGED:
                self._staged = event
                return [] if state is DeviceState.STAGED else self._become(self.state.moved(Cause.STAGED, ""))
            case (
                ev.PlanRefused(),
                DeviceState.RECEIVED | DeviceState.WAITING | DeviceState.VERIFIED | DeviceState.STAGED,
            ):
                return self._become(self.state.moved(Cause.REFUSED, event.reason))
            case ev.TrialBegins(), DeviceState.STAGED:
                moved = self.state.moved(Cause.TRIAL_BEGINS, "")
                return self._become(msgspec.structs.replace(moved, trial=event.record))
            case ev.TrialDecided(), DeviceState.STAGED | DeviceState.TRIAL:
                return self._apply(trials.decided(self.state, event, self._wall_us(now_s)))
            case ev.ProbationPassed(), DeviceState.PROBATION:
                return self._apply(trials.committed(self.state, self._wall_us(now_s)))
            case ev.ProbationFailed(), DeviceState.PROBATION:
                good = self.state.last_good
                actions = self._apply(trials.rolled_back(self.state, event.reason, self._wall_us(now_s)))
                return actions + ([ev.RestorePlan(good)] if good else [])
        return []

    def _apply(self, changed: trials.Changed) -> list[ev.Action]:
        """Take over a state, then tell what led to it."""
        return self._become(changed.state) + [ev.Record(row) for row in changed.rows]

    def _wall_us(self, now_s: float) -> int:
        return round((now_s + self.config.wall_s) * 1e6)

    def _told(self, now_s: float) -> list[ev.Action]:
        """What the shell said about the world, as levels: said once, true until it says otherwise."""
        actions: list[ev.Action] = []
        if self._active_told is not None and self._active_told.active != self.state.active:
            active, counter = self._active_told.active, self.state.local_counter
            counter = max(counter, active.local_counter) if active else counter
            actions += self._change(active=active, local_counter=counter)
        environment = self._environment
        if environment is None or environment == self.state.environment:
            return actions
        kept, ended = local.environment_changed(self.state, self._wall_us(now_s))
        actions += self._become(kept) + ended
        ends_trial = self.state.state in (DeviceState.STAGED, DeviceState.TRIAL)
        actions += self._apply(trials.environment_changed(self.state, environment, self._wall_us(now_s)))
        return actions + ([ev.AbandonPlan(self.state.attempt)] if ends_trial else [])

    def _fetch_failed(self, digest: Digest, reason: str) -> list[ev.Action]:
        if self.state.state is not DeviceState.WAITING or digest not in {
            one.digest for one in self._missing()
        }:
            return []
        return self._change(reason=bounded(f"artifact {digest[:12]}: {reason}"))

    def _answered(self, request: int) -> list[ev.Action]:
        if request in self.state.answered:
            return []
        return self._change(answered=(*self.state.answered, request))

    # -- state ----------------------------------------------------------------------------------------------

    def _change(self, **fields: object) -> list[ev.Action]:
        return self._become(msgspec.structs.replace(self.state, **fields))

    def _become(self, new: LinkState) -> list[ev.Action]:
        """Take over a new state: durable first, if a start would find another one else; then reported."""
        if new == self.state:
            return []
        before = self.report()
        if (new.state, new.desired) != (self.state.state, self.state.desired):
            self._asked = None
        self.state = new
        if self.report() != before:
            self.state = msgspec.structs.replace(new, revision=new.revision + 1)
        return [self.disk.keep(self.state)]

    def persisted(self, state: LinkState) -> None:
        """The shell's word that a `Persist` reached the disk."""
        self.disk.persisted(state)
        self._take_as_told(state)

    def held(self, state: LinkState) -> None:
        """The shell's word that it came to a `Hold`, and whatever was before it is done."""
        self.disk.held(state)
        self._take_as_told(state)

    def _take_as_told(self, state: LinkState) -> None:
        """What runs need not be said again once the state that names it is safe."""
        if self._active_told is not None and self._active_told.active == state.active:
            self._active_told = None

    def _missing(self) -> list[control.ArtifactNeed]:
        return self._needs.missing(self.state.desired)

    # -- reconcile ------------------------------------------------------------------------------------------

    def _reconcile(self, now_s: float) -> list[ev.Action]:
        """Ask for whatever the state still lacks; asking twice for the same thing is harmless."""
        if self.disk.blocked(now_s):
            return []
        actions = self._told(now_s) + self._next_step(now_s) + self._local_step(now_s)
        desired, welcomed = self.state.desired, self.session.welcomed
        actions += self._needs.profiles(desired, self.state.answered, now_s, connected=welcomed)
        actions += self._needs.policy(desired, now_s, connected=welcomed)
        return actions + self.session.keep_told(self.report(), now_s)

    def _tell_planner(self, now_s: float) -> list[ev.Action]:
        """An alarm and a local plan, whatever else goes on."""
        if not self.session.welcomed:
            return []
        alarm = self._alarms.due(now_s, self.config.alarm_again_s)
        planned = self._local.message(self.state, self.state.attempt, self.config.boot, now_s)
        return [ev.Send(one) for one in (alarm, planned) if one is not None]

    def _local_step(self, now_s: float) -> list[ev.Action]:
        begun = self._local.begin(
            self.state,
            self.state.attempt,
            connected=self.session.welcomed,
            present=self._needs.present,
            now_s=now_s,
        )
        actions = self._become(begun) if begun is not None else []
        state, asked = self._local.step(self.state, self._wall_us(now_s))
        return actions + self._become(state) + asked

    def _next_step(self, now_s: float) -> list[ev.Action]:
        plan, attempt = self.state.candidate, self.state.attempt
        match self.state.state:
            case DeviceState.RECEIVED | DeviceState.WAITING:
                return self._acquire(plan, attempt, now_s)
            case DeviceState.VERIFIED if plan:
                # An artifact that was there when the plan was checked may have been found damaged since.
                return (
                    self._wait(now_s) if self._missing() else self._ask("stage", ev.StagePlan(attempt, plan))
                )
            case DeviceState.STAGED if plan:
                return self._begin(plan, attempt, now_s)
            case DeviceState.TRIAL:
                return self._ask("trial", ev.TrialRecorded(attempt))
            case DeviceState.PROBATION if plan:
                guarded = self.state.way in (Way.PROVEN.value, Way.GUARD.value)
                return self._ask("activate", ev.ActivatePlan(attempt, plan, guarded))
        return []

    def _begin(self, plan: RunnablePlan, attempt: Attempt, now_s: float) -> list[ev.Action]:
        """From staged on: a trial, or straight under probation."""
        staged = self._staged
        if staged is None or staged.attempt != attempt:
            return self._ask("stage", ev.StagePlan(attempt, plan))
        way, now_us = trials.way_of(self.state, staged), self._wall_us(now_s)
        if way is Way.TRIAL:
            return self._ask("trial", ev.RunTrial(attempt, plan, self.state.environment, now_us))
        if way.guarded and staged.starves:
            return self._become(self.state.moved(Cause.REFUSED, staged.starves))
        # The record is on disk before the plan runs: a crash from here on is found at boot.
        actions = self._apply(trials.activated(self.state, staged, way, now_us))
        return actions + self._ask("activate", ev.ActivatePlan(attempt, plan, way.guarded))

    def _acquire(self, plan: RunnablePlan | None, attempt: Attempt, now_s: float) -> list[ev.Action]:
        good, active = self.state.last_good, self.state.active
        received = self.state.state is DeviceState.RECEIVED
        if received and plan is None:
            return self._become(
                self.state.moved(Cause.NOTHING_TO_DO, "no plan is desired; what runs goes on")
            )
        if plan is None:
            return []
        if received and good and active and good.ref.digest == active.digest == plan.ref.digest:
            moved = self.state.moved(Cause.NOTHING_TO_DO, "it was committed and runs already")
            state, restored = local.adopted(moved, plan)
            return self._become(state) + restored
        if self._missing():
            return self._wait(now_s)
        return self._ask("verify", ev.VerifyPlan(attempt, plan))

    def _wait(self, now_s: float) -> list[ev.Action]:
        """For artifacts that are missing, and fetch them."""
        missing = self._missing()
        actions: list[ev.Action] = []
        if self.state.state is not DeviceState.WAITING:
            reason = f"{counted(len(missing), 'artifact')} to fetch"
            actions += self._become(self.state.moved(Cause.ARTIFACTS_MISSING, reason))
        return actions + self._needs.fetch(missing, now_s, connected=self.session.welcomed)

    def _ask(self, what: str, action: ev.Action) -> list[ev.Action]:
        wanted = (self.state.attempt, what)
        if self._asked == wanted:
            return []
        self._asked = wanted
        return [action]


class Disk:
    """Follows states on their way to the disk, and says which one is left after a failure."""

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
        held = state.revision < self._written.revision + HELD_MOST
        if held and state.same_at_start(self._written):
            return Hold(state)
        self._written = state
        return Persist(state)

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


class Needs:
    """Asks for each artifact, profile and policy once, and again where that is due."""

    def __init__(self, *, again_s: float) -> None:
        """`again_s`: how long a fetch may take to begin before it is asked for again."""
        self.present: set[Digest] = set()
        self._again_s = again_s
        self._fetch_asked_s: dict[Digest, float] = {}
        self._profiles_asked: set[int] = set()
        self._policy_used: Digest | None = None  # the policy that the agent was told of

    def gone(self, digest: Digest) -> None:
        """An artifact was removed or found damaged."""
        self.present.discard(digest)
        if digest == self._policy_used:
            self._policy_used = None

    def forget_profiles(self) -> None:
        """Whoever was asked for a profile does not know of it any more."""
        self._profiles_asked.clear()

    def missing(self, desired: Desired | None) -> list[ArtifactNeed]:
        """Artifacts of the desired plan that are not here."""
        return [need for need in desired.artifacts if need.digest not in self.present] if desired else []

    def fetch(self, needs: Sequence[ArtifactNeed], now_s: float, *, connected: bool) -> list[Action]:
        """Fetch what was not asked for a moment ago."""
        if not connected:
            return []
        actions: list[Action] = []
        for need in needs:
            asked_s = self._fetch_asked_s.get(need.digest, float("-inf"))
            if now_s - asked_s >= self._again_s:
                self._fetch_asked_s[need.digest] = now_s
                actions.append(FetchArtifact(need))
        return actions

    def policy(self, desired: Desired | None, now_s: float, *, connected: bool) -> list[Action]:
        """Fetch the policy that is desired, then say which one to plan with."""
        need = desired.policy if desired else None
        if need is not None and need.digest not in self.present:
            artifact = ArtifactNeed("policy", need.digest, need.size_bytes)
            return self.fetch([artifact], now_s, connected=connected)
        wanted = need.digest if need is not None else None
        if wanted == self._policy_used:
            return []
        self._policy_used = wanted
        return [UsePolicy(wanted)]

    def profiles(
        self, desired: Desired | None, answered: Collection[int], now_s: float, *, connected: bool
    ) -> list[Action]:
        """Ask for the measurements that are desired, once their artifacts are here."""
        if desired is None:
            return []
        wanted: list[tuple[int, tuple[ArtifactNeed, ...], Action]] = [
            (one.request, (one.artifact,), RunProfile(one)) for one in desired.profiles
        ]
        if (stages := desired.stage_profile) is not None:
            wanted.append((stages.request, stages.artifacts, RunStageProfile(stages)))
        actions: list[Action] = []
        for request, needs, action in wanted:
            if request in answered or request in self._profiles_asked:
                continue
            if missing := [need for need in needs if need.digest not in self.present]:
                actions += self.fetch(missing, now_s, connected=connected)
                continue
            self._profiles_asked.add(request)
            actions.append(action)
        return actions
