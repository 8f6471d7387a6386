"""The device's side of the link as a pure core: (event, now) -> actions.

It holds two things apart. `state` is durable: the desired value, how far it got, last-known-good; every
change is a `Persist` ahead of the actions that rest on it. The session (connected, welcomed, timers) is not.
After any event the core compares what is desired with what is done and asks for the next step, so a lost
answer, a crash or a full disk at any point costs time, never a plan or the truth of a report.
"""

from dataclasses import dataclass

import msgspec

from edge_agent.link import events as ev
from edge_agent.link import local, trials
from edge_agent.link.alarms import AlarmBox
from edge_agent.link.boot import HELD_MOST, at_boot
from edge_agent.link.states import Cause
from edge_agent.link.trials import Way
from shared.ids import Digest
from shared.messages import control
from shared.messages.base import RefusalCode, Refused
from shared.messages.control import DeviceState
from shared.text import counted


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """Who this agent is, and its pace until the planner says otherwise."""

    boot: int
    agent_version: str = ""
    hello_again_s: float = 2.0
    silent_after_s: float = 4.0
    fetch_again_s: float = 2.0
    storage_again_s: float = 5.0
    refused_again_s: float = 60.0
    alarm_again_s: float = 1.0
    local_wait_s: float = 5.0  # how long a connected planner has to answer an alarm before a local plan does
    local_again_s: float = 5.0
    wall_s: float = 0.0  # the wall clock less the monotonic one


class LinkCore:
    """All decisions of the device's link. `handle` wants events one at a time, from one thread."""

    def __init__(self, state: ev.LinkState, *, config: LinkConfig) -> None:
        self.config = config
        self.state = state
        self.device: str | None = None  # the name we are enrolled under, once welcomed
        self.denied: Refused | None = None  # why the planner will not have us
        self.storage_error: str | None = None
        self.bulk_credits = 1
        self.welcomed = False
        self._present: set[Digest] = set()
        self._environment: str | None = None
        self._active_told: ev.ActiveChanged | None = None
        self._durable = state  # what is believed: on disk, or what a start would make of what is
        self._on_disk = state
        self._written = state  # will be on disk once the actions handed out are carried out
        self._settled = self._settled_durably = False  # what the state found at boot means is decided
        self._storage_blocked_until_s = 0.0
        self._connected = False
        self._connection = 0
        self._superseded = 0
        self._hello_first_s = 0.0
        self._hello_sent_s = 0.0
        self._heard_s = 0.0
        self._heartbeat_sent_s = 0.0
        self._heartbeat_interval_s = 1.0
        self._reported_sent_s = float("-inf")
        self._sent_revision = -1
        self._stored_revision = 0
        self._asked: tuple[ev.Attempt, str] | None = None
        self._staged: ev.PlanStaged | None = None  # what the manager said of the attempt's plan
        self._fetch_asked_s: dict[Digest, float] = {}
        self._profiles_asked: set[int] = set()
        self._policy_used: Digest | None = None  # the policy that the agent was told of
        self._alarms = AlarmBox(config.boot)
        self._local = local.LocalPlans(wait_s=config.local_wait_s, again_s=config.local_again_s)

    def boot(self, environment: str, present: frozenset[Digest], now_s: float) -> list[ev.Action]:
        """The first call: run last-known-good, and decide what the state found on disk means."""
        self._present = set(present)
        good = self.state.last_good
        actions: list[ev.Action] = [ev.RestorePlan(good)] if good is not None else []
        return actions + self.handle(ev.EnvironmentChanged(environment), now_s)

    def _settle(self, now_s: float) -> list[ev.Action]:
        """What the state found at boot means, until that is on disk: a full disk makes no crash forgotten."""
        if self._settled or now_s < self._storage_blocked_until_s:
            return []
        self._settled = True
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
                self._connected, self.welcomed = True, False
                self._connection += 1
                return self._hello(now_s)
            case ev.Lost():
                self._connected = self.welcomed = False
            case ev.Received(message):
                self._heard_s = now_s
                return self._message(message, now_s)
            case ev.ArtifactPresent(digest):
                self._present.add(digest)
            case ev.ArtifactGone(digest):
                self._present.discard(digest)
                self._policy_used = None if digest == self._policy_used else self._policy_used
            case ev.FetchFailed(digest, reason):
                return self._fetch_failed(digest, reason)
            case ev.ManagerRestarted():
                self._asked = None
                self._local.forget()
                self._profiles_asked.clear()
            case ev.EnvironmentChanged(environment):
                before, self._environment = self._environment, environment
                if self.welcomed and environment != before:
                    return self._hello(now_s, again=True)  # which says what this device is now
            case ev.ActiveChanged():
                self._active_told = event
            case ev.AlarmRaised():
                self._alarms.take(event, self._environment or "")
                self._local.alarm(event.cause, self.state.attempt, now_s)
            case ev.PlansMade(plans):
                self._local.made(plans)
            case ev.ProfileAnswered(request):
                return self._answered(request)
            case ev.PersistFailed(reason):
                # Believe only what is on disk; whatever was learned since is asked for again.
                self.state, self._written, self._asked = self._durable, self._on_disk, None
                self._settled = self._settled_durably
                self.storage_error = reason
                self._storage_blocked_until_s = now_s + self.config.storage_again_s
                self._profiles_asked.clear()
                self._local.forget()
            case ev.RestoreFailed(reason):
                if (back := local.lost(self.state)) is not None:
                    return self._become(back) + [ev.RestorePlan(plan) for plan in (back.last_good,) if plan]
                if self.state.state is DeviceState.COMMITTED:
                    # The plan is not to blame for a damaged artifact: it is fetched and tried again.
                    cause = Cause.ARTIFACTS_MISSING if self._missing() else Cause.RESTORE_FAILED
                    return self._become(self.state.moved(cause, reason))
            case ev.Tick():
                return self._tick(now_s)
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
                self.welcomed, self.denied, self.device = True, None, message.device
                self._heartbeat_interval_s = message.heartbeat_interval_s
                self.bulk_credits = message.bulk_credits
                self._stored_revision = 0
                self._alarms.connected()
                self._local.connected()
                return []
            case control.HeartbeatAck():
                self._stored_revision = message.revision
                return []
            case control.ReportedAck():
                self._stored_revision = message.revision
                return []
            case control.Desired():
                return self._desired(message, now_s)
            case control.AlarmAck():
                self._alarms.acknowledged(message)
                return []
            case Refused():
                return self._refused(message, now_s)

    def _desired(self, desired: control.Desired, now_s: float) -> list[ev.Action]:
        known = self.state.desired
        if known is not None and (desired.epoch, desired.generation) <= (known.epoch, known.generation):
            # Late, repeated, or from a planner that lost its memory: tell it what we have seen.
            same = msgspec.structs.replace(desired, correlation=known.correlation) == known
            return [] if same else self._send_report(now_s)
        if now_s < self._storage_blocked_until_s:
            return []  # the planner offers it again with the next heartbeat
        actions: list[ev.Action] = []
        if known is not None:
            actions.append(ev.AbandonPlan((known.epoch, known.generation)))
        rows = trials.abandoned(self.state, "a newer plan is desired", self._wall_us(now_s))
        before, ended = local.abandoned(self.state, "a newer plan is desired", self._wall_us(now_s))
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

    def _refused(self, refused: Refused, now_s: float) -> list[ev.Action]:
        ours = refused.boot in (0, self.config.boot)
        if refused.code is RefusalCode.HELLO_FIRST or (refused.code is RefusalCode.SUPERSEDED and ours):
            if now_s - self._hello_sent_s < self.config.hello_again_s / 4:
                return []  # our hello and this refusal passed each other
            return self._hello(now_s)
        if refused.code in (RefusalCode.REVOKED, RefusalCode.UNKNOWN_KEY, RefusalCode.SUPERSEDED):
            again_s = self.config.refused_again_s
            if refused.code is RefusalCode.SUPERSEDED:
                # A late hello of our life before, or a copy of this device: come back soon, then ever later.
                again_s = min(again_s, self.config.hello_again_s * 4**self._superseded)
                self._superseded = min(self._superseded + 1, 8)
            self.denied, self._connected, self.welcomed = refused, False, False
            return [ev.Reconnect(f"{refused.code.value}: {refused.reason}", again_s)]
        return []

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
        return self._change(reason=f"artifact {digest[:12]}: {reason}"[:512])

    def _answered(self, request: int) -> list[ev.Action]:
        if request in self.state.answered:
            return []
        return self._change(answered=(*self.state.answered, request))

    # -- time -----------------------------------------------------------------------------------------------

    def _tick(self, now_s: float) -> list[ev.Action]:
        if not self._connected:
            return []
        silent_s = max(self.config.silent_after_s, 3 * self._heartbeat_interval_s)
        if now_s - max(self._heard_s, self._hello_first_s) > silent_s:
            self._connected = self.welcomed = False
            return [ev.Reconnect(f"the planner has been silent for {silent_s:g} s")]
        if not self.welcomed:
            due = now_s - self._hello_sent_s >= self.config.hello_again_s
            return self._hello(now_s, again=True) if due else []
        if now_s - self._heartbeat_sent_s < self._heartbeat_interval_s:
            return []
        self._heartbeat_sent_s = now_s
        if now_s - self._hello_sent_s > self.config.refused_again_s:
            self._superseded = 0
        report = self.report()
        heartbeat = control.Heartbeat(
            boot=self.config.boot,
            epoch=report.epoch,
            generation=report.generation,
            state=report.state,
            revision=report.revision,
        )
        return [ev.Send(heartbeat)]

    def _hello(self, now_s: float, *, again: bool = False) -> list[ev.Action]:
        self._hello_sent_s = self._reported_sent_s = now_s
        self._sent_revision = self.state.revision
        if not again:
            self._hello_first_s = now_s
        hello = control.Hello(
            boot=self.config.boot,
            connection=self._connection,
            agent_version=self.config.agent_version,
            device_class=self._environment or "",
            report=self.report(),
        )
        return [ev.Send(hello)]

    def _send_report(self, now_s: float) -> list[ev.Action]:
        if not self.welcomed:
            return []  # the hello carries it
        self._reported_sent_s = now_s
        return [ev.Send(control.Reported(boot=self.config.boot, report=self.report()))]

    # -- state ----------------------------------------------------------------------------------------------

    def _change(self, **fields: object) -> list[ev.Action]:
        return self._become(msgspec.structs.replace(self.state, **fields))

    def _become(self, new: ev.LinkState) -> list[ev.Action]:
        """Take over a new state: durable first, if a start would find another one else; then reported."""
        if new == self.state:
            return []
        before = self.report()
        self._asked = (
            None if (new.state, new.desired) != (self.state.state, self.state.desired) else self._asked
        )
        self.state = new
        if self.report() != before:
            self.state = msgspec.structs.replace(new, revision=new.revision + 1)
        if self.state.revision < self._written.revision + HELD_MOST and new.same_at_start(self._written):
            return [ev.Hold(self.state)]
        self._written = self.state
        return [ev.Persist(self.state)]

    def persisted(self, state: ev.LinkState) -> None:
        """The shell's word that a `Persist` reached the disk."""
        self._on_disk, self.storage_error = state, None
        self.held(state)

    def held(self, state: ev.LinkState) -> None:
        """The shell's word that it came to a `Hold`, and whatever was before it is done."""
        self._durable = state
        self._settled_durably = self._settled
        if self._active_told is not None and self._active_told.active == state.active:
            self._active_told = None

    def _missing(self) -> list[control.ArtifactNeed]:
        desired = self.state.desired
        return [need for need in desired.artifacts if need.digest not in self._present] if desired else []

    # -- reconcile ------------------------------------------------------------------------------------------

    def _reconcile(self, now_s: float) -> list[ev.Action]:
        """Ask for whatever the state still lacks; asking twice for the same thing is harmless."""
        if now_s < self._storage_blocked_until_s:
            return []
        actions = self._told(now_s) + self._next_step(now_s) + self._local_step(now_s) + self._profiles(now_s)
        actions += self._policy(now_s)
        if self.welcomed and self.state.revision != self._stored_revision:
            overdue = now_s - self._reported_sent_s >= self._heartbeat_interval_s
            if self.state.revision != self._sent_revision or overdue:
                self._sent_revision = self.state.revision
                actions += self._send_report(now_s)
        return actions

    def _tell_planner(self, now_s: float) -> list[ev.Action]:
        """An alarm and a local plan, whatever else goes on."""
        if not self.welcomed:
            return []
        alarm = self._alarms.due(now_s, self.config.alarm_again_s)
        planned = self._local.message(self.state, self.state.attempt, self.config.boot, now_s)
        return [ev.Send(one) for one in (alarm, planned) if one is not None]

    def _local_step(self, now_s: float) -> list[ev.Action]:
        begun = self._local.begin(
            self.state,
            self.state.attempt,
            connected=self.welcomed,
            present=self._present,
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

    def _begin(self, plan: ev.RunnablePlan, attempt: ev.Attempt, now_s: float) -> list[ev.Action]:
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

    def _acquire(self, plan: ev.RunnablePlan | None, attempt: ev.Attempt, now_s: float) -> list[ev.Action]:
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
        return actions + self._fetch(missing, now_s)

    def _ask(self, what: str, action: ev.Action) -> list[ev.Action]:
        wanted = (self.state.attempt, what)
        if self._asked == wanted:
            return []
        self._asked = wanted
        return [action]

    def _fetch(self, needs: list[control.ArtifactNeed], now_s: float) -> list[ev.Action]:
        if not self.welcomed:
            return []
        actions: list[ev.Action] = []
        for need in needs:
            asked_s = self._fetch_asked_s.get(need.digest, float("-inf"))
            if now_s - asked_s >= self.config.fetch_again_s:
                self._fetch_asked_s[need.digest] = now_s
                actions.append(ev.FetchArtifact(need))
        return actions

    def _policy(self, now_s: float) -> list[ev.Action]:
        """Fetch the policy that is desired, then say which one to plan with."""
        need = self.state.desired.policy if self.state.desired else None
        if need is not None and need.digest not in self._present:
            return self._fetch([control.ArtifactNeed("policy", need.digest, need.size_bytes)], now_s)
        wanted = need.digest if need is not None else None
        if wanted == self._policy_used:
            return []
        self._policy_used = wanted
        return [ev.UsePolicy(wanted)]

    def _profiles(self, now_s: float) -> list[ev.Action]:
        desired = self.state.desired
        if desired is None:
            return []
        wanted: list[tuple[int, tuple[control.ArtifactNeed, ...], ev.Action]] = [
            (one.request, (one.artifact,), ev.RunProfile(one)) for one in desired.profiles
        ]
        if (stages := desired.stage_profile) is not None:
            wanted.append((stages.request, stages.artifacts, ev.RunStageProfile(stages)))
        actions: list[ev.Action] = []
        for request, needs, action in wanted:
            if request in self.state.answered or request in self._profiles_asked:
                continue
            if missing := [need for need in needs if need.digest not in self._present]:
                actions += self._fetch(missing, now_s)
                continue
            self._profiles_asked.add(request)
            actions.append(action)
        return actions
