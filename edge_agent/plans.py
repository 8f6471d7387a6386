"""The plan manager: which plan the engine process should run, and how to get there. Pure.

It stands between the link core, which knows what is desired, and the engine process, which runs plans by
key. `good` is last-known-good, `fallback` the good plan before it, the *candidate* the plan of one attempt on
its way from verification over staging and perhaps a trial to probation. Whatever happens, the manager works
towards its target: the candidate once it is to be activated, else the incumbent, which is the good plan or
the fallback, else nothing. A method returns what to do next.
"""

import itertools
from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from edge_agent.engine_view import EngineView
from edge_agent.link import events as link
from edge_agent.link.events import Attempt, PlanRef, RunnablePlan
from edge_agent.plan_actions import (
    Action,
    Activated,
    CheckPlan,
    KeepFallback,
    LoadPlan,
    Models,
    Note,
    StartEngine,
    StopEngine,
    Tell,
)
from edge_agent.plan_facts import PlanFacts
from edge_agent.probation import Probation, ProbationConfig, Verdict
from edge_agent.supervisor import Supervisor
from edge_agent.trial_runner import TrialPlans, TrialRunner
from edge_agent.waiting import WaitingLog
from edge_agent.worker.messages import Measured, PlanTooLarge
from shared.engine.steps import Outcome, PlanKey
from shared.engine.trial import TrialConfig, TrialRecord, TrialResult
from shared.engine.trial import Verdict as TrialVerdict
from shared.engine.windows import Side
from shared.ids import Digest
from shared.messages.control import Origin

_NEVER: Attempt = (0, 0)
_RATES_S = 10.0


class Phase(Enum):
    """How far a candidate has come."""

    VERIFYING = "verifying"
    STAGING = "staging"
    STAGED = "staged"
    TRIAL = "trial"
    ACTIVATING = "activating"
    PROBATION = "probation"


@dataclass(frozen=True, kw_only=True)
class ManagerConfig:
    """Limits of the manager's patience."""

    probation: ProbationConfig = field(default_factory=ProbationConfig)
    trial: TrialConfig = field(default_factory=TrialConfig)
    timing_s: float = 10.0  # the models of a trial are timed for so long at most
    load_limit_s: float = 120.0  # an engine process that loads one plan for so long is taken to hang


@dataclass
class _Candidate:
    attempt: Attempt
    plan: RunnablePlan
    phase: Phase
    guarded: bool = False
    probation: Probation | None = None
    runner: TrialRunner | None = None

    @property
    def digest(self) -> Digest:
        return self.plan.ref.digest

    @property
    def runs(self) -> bool:
        """It runs or is to run next, for good."""
        return self.phase in (Phase.ACTIVATING, Phase.PROBATION)

    @property
    def in_window(self) -> bool:
        """It runs in a trial, or has won it and waits for the word to stay."""
        return self.runner is not None and self.runner.side is Side.CANDIDATE


class PlanManager:
    """All decisions about plans on this device."""

    def __init__(
        self,
        supervisor: Supervisor,
        config: ManagerConfig | None = None,
        fallback: RunnablePlan | None = None,
        *,
        waiting: WaitingLog | None = None,
        coin: Random | None = None,
    ) -> None:
        """`waiting` is filled by the owner; `coin` tosses the order of a trial's windows."""
        self._config = config or ManagerConfig()
        self._supervisor = supervisor
        self._waiting = waiting or WaitingLog()
        self._coin = coin or Random(0)
        self._good: RunnablePlan | None = None
        self._fallback = fallback
        self._adopted: RunnablePlan | None = None  # runs on although its attempt was abandoned
        self._candidate: _Candidate | None = None
        self._decided: link.TrialDecided | None = None  # the last trial's, until the next attempt
        self._engine = EngineView()
        self._keys = itertools.count(1)
        self._windows = itertools.count(1)
        self._served: Models = {}
        self._checking: set[Digest] = set()
        self._checked: dict[Digest, PlanFacts] = {}
        self._unusable: dict[Digest, str] = {}  # does not check or load
        self._announced: Digest | None = None  # the plan that was last said to run outside of windows
        self._exchanging = False  # one plan gives way before the other is loaded: both do not fit
        self.last_pause_s: float | None = None  # of the last exchange

    # -- what others ask ------------------------------------------------------------------------------------

    @property
    def active(self) -> RunnablePlan | None:
        """The plan that runs."""
        return self._engine.running

    @property
    def models(self) -> Models:
        """What the plan serves that tasks sent from now on meet; while the engine restarts, the last one's.

        Orders reach the engine process in sequence, so a swap counts from when it was asked for.
        """
        asked = self._engine.asked
        plan = None if asked is None else self._engine.loaded.get(asked)
        if plan is not None:
            facts = self._checked.get(plan.ref.digest)
            self._served = facts.models if facts else {}
        return self._served

    @property
    def engine_up(self) -> bool:
        """The engine process takes commands."""
        return self._engine.up

    @property
    def loading(self) -> bool:
        """A plan is being loaded, which may take the engine's time."""
        return bool(self._engine.loading)

    @property
    def exchanging(self) -> bool:
        """One plan gives way to another; tasks wait in the engine's queues meanwhile."""
        return self._exchanging

    @property
    def phase(self) -> Phase | None:
        """How far the present attempt has come."""
        return self._candidate.phase if self._candidate else None

    @property
    def runner(self) -> TrialRunner | None:
        """The trial that runs, if one does."""
        runner = self._candidate.runner if self._candidate else None
        return None if runner is None or runner.over else runner

    def plan_of(self, key: PlanKey) -> RunnablePlan | None:
        """The plan behind a key of the present engine process."""
        return self._engine.loaded.get(key) or self._engine.loading.get(key)

    def facts_of(self, digest: Digest) -> PlanFacts | None:
        """What is known of a plan that was checked."""
        return self._checked.get(digest)

    def needed(self) -> set[Digest]:
        """Artifacts that a plan held here names."""
        return {need.digest for plan in self._held() for need in plan.artifacts}

    @property
    def checked_plans(self) -> Set[Digest]:
        """Plans that are known to be sound; what is kept about others can go."""
        return self._checked.keys()

    def _held(self) -> list[RunnablePlan]:
        """Every plan that has a part to play, here or in the engine process."""
        candidate, engine = self._candidate, self._engine
        plans = [self._good, self._fallback, self._adopted, candidate.plan if candidate else None]
        return [
            *(plan for plan in plans if plan is not None),
            *engine.loaded.values(),
            *engine.loading.values(),
        ]

    # -- what the link asks for -----------------------------------------------------------------------------

    def restore(self, plan: RunnablePlan) -> list[Action]:
        """Run last-known-good."""
        self._good, self._adopted = plan, None
        if self._candidate is not None and self._candidate.runs:
            self._candidate = None
        return self._pursue()

    def verify(self, attempt: Attempt, plan: RunnablePlan) -> list[Action]:
        """Check a plan; answered by PlanVerified or PlanRefused."""
        return self._begin(attempt, plan, Phase.VERIFYING) + self._pursue()

    def stage(self, attempt: Attempt, plan: RunnablePlan) -> list[Action]:
        """Load a plan beside the one that runs; answered by PlanStaged or PlanRefused."""
        return self._begin(attempt, plan, Phase.STAGING) + self._pursue()

    def run_trial(self, order: link.RunTrial, now_s: float) -> list[Action]:
        """Compare the staged plan with the one that runs; answered by TrialBegins or TrialDecided."""
        if self._decided is not None and self._decided.attempt == order.attempt:
            return [Tell(self._decided)]
        candidate = self._candidate
        if candidate is not None and candidate.attempt == order.attempt and candidate.runner is not None:
            return candidate.runner.again()
        control = self._control_for(order.plan.ref.digest)
        if candidate is None or candidate.phase is not Phase.STAGED or control is None:
            reason = "the plan to compare with does not run any more"
            result = TrialResult(verdict=TrialVerdict.ABANDONED, reason=reason)
            return [Tell(link.TrialDecided(order.attempt, None, result))]
        candidate.phase = Phase.TRIAL
        candidate.runner = self._runner(order, control)
        return self._advance(candidate, candidate.runner.begin(now_s))

    def trial_recorded(self, attempt: Attempt, now_s: float) -> list[Action]:
        """The record is durable; answered by TrialDecided."""
        if self._decided is not None and self._decided.attempt == attempt:
            return [Tell(self._decided)]
        candidate = self._candidate
        if candidate is None or candidate.attempt != attempt or candidate.runner is None:
            result = TrialResult(verdict=TrialVerdict.ABANDONED, reason="the trial was lost")
            return [Tell(link.TrialDecided(attempt, None, result))]
        return self._advance(candidate, candidate.runner.recorded(now_s))

    def activate(self, attempt: Attempt, plan: RunnablePlan, *, guarded: bool = False) -> list[Action]:
        """Swap and watch; answered by ProbationPassed or ProbationFailed. `guarded`: see `Probation`."""
        candidate = self._candidate
        if candidate is not None and candidate.attempt == attempt and candidate.runs:
            return []
        actions = self._begin(attempt, plan, Phase.ACTIVATING)
        assert self._candidate is not None
        self._candidate.guarded = guarded
        return actions + self._pursue()

    def abandon(self, attempt: Attempt) -> list[Action]:
        """A newer generation took its place: free what is staged, let what runs run."""
        candidate = self._candidate
        if candidate is None or candidate.attempt != attempt:
            return []
        self._candidate = self._decided = None
        if candidate.runs:
            self._adopted = candidate.plan
        return self._pursue() if candidate.runner is not None else self._tidy()

    def shut_down(self, now_s: float) -> list[Action]:
        """The agent is told to stop: a trial ends without a verdict, and the plan may be tried again."""
        candidate = self._candidate
        if candidate is None or candidate.runner is None:
            return []
        return self._advance(candidate, candidate.runner.abandon("the agent was stopped", now_s))

    def _begin(self, attempt: Attempt, plan: RunnablePlan, phase: Phase) -> list[Action]:
        actions: list[Action] = []
        if self._candidate is not None and self._candidate.attempt != attempt:
            actions = self.abandon(self._candidate.attempt)
        self._candidate = _Candidate(attempt, plan, phase)
        self._decided = None
        self._unusable.pop(plan.ref.digest, None)
        return actions

    # -- trials ---------------------------------------------------------------------------------------------

    def _control_for(self, digest: Digest) -> RunnablePlan | None:
        """The plan that runs, if this one can be compared with it."""
        running = self.active
        ours = self._checked.get(digest)
        theirs = self._checked.get(running.ref.digest) if running is not None else None
        return running if ours and theirs and ours.compares_with(theirs) else None

    def _runner(self, order: link.RunTrial, control: RunnablePlan) -> TrialRunner:
        engine, digest = self._engine, order.plan.ref.digest
        crowded = engine.crowded.get(digest)
        key, active = engine.key_of(digest, engine.loaded), engine.active
        control_bytes = engine.stated_bytes.get(active, 0) if active is not None else 0
        plans = TrialPlans(
            record=TrialRecord(
                candidate=digest,
                control=control.ref.digest,
                environment=order.environment,
                began_us=order.at_us,
            ),
            models=tuple(self._checked[digest].artifacts),
            control_bytes=crowded.memory_bytes - crowded.room_bytes if crowded else control_bytes,
            candidate_bytes=crowded.added_bytes if crowded else engine.stated_bytes.get(key or PlanKey(0), 0),
            memory_bytes=crowded.memory_bytes if crowded else max(engine.memory_bytes, control_bytes),
        )
        config = self._config
        return TrialRunner(order.attempt, plans, self._coin, self._windows, config.trial, config.timing_s)

    def _advance(self, candidate: _Candidate, actions: list[Action]) -> list[Action]:
        """Carry out what the trial wants, and follow it to the plan that it launches into."""
        runner, engine = candidate.runner, self._engine
        assert runner is not None
        if runner.draining:
            engine.draining = True
        if runner.decided is not None and self._candidate is candidate:
            self._decided = runner.decided
            if runner.decided.result.verdict is not TrialVerdict.COMMIT:
                self._candidate = None
            if runner.stalled and engine.up and not engine.stopping:
                engine.stopping = True
                actions.append(StopEngine())
        return actions + self._pursue()

    def measured(self, figures: Measured, now_s: float) -> list[Action]:
        """A window was measured."""
        candidate = self._candidate
        if candidate is None or candidate.runner is None:
            return []
        return self._advance(candidate, candidate.runner.measured(figures, now_s))

    def drained(self, now_s: float) -> list[Action]:
        """Nothing is in flight."""
        candidate, engine = self._candidate, self._engine
        if not engine.draining:
            return []
        if self._exchanging:
            return engine.unload(engine.loaded)
        if candidate is None or candidate.runner is None:
            return []
        return self._advance(candidate, candidate.runner.drained(now_s))

    # -- what happened --------------------------------------------------------------------------------------

    def checked(self, facts: PlanFacts) -> list[Action]:
        """The plan is legal and its artifacts are whole."""
        self._checking.discard(facts.digest)
        self._checked[facts.digest] = facts
        return self._pursue()

    def check_failed(self, digest: Digest, reason: str, damaged: frozenset[Digest]) -> list[Action]:
        """It is not; `damaged` artifacts were removed."""
        self._checking.discard(digest)
        actions: list[Action] = [Tell(link.ArtifactGone(one)) for one in sorted(damaged)]
        candidate = self._candidate
        if damaged and candidate is not None and candidate.digest == digest and not candidate.runs:
            # The plan is not to blame: the link fetches again and asks again.
            self._candidate = None
            actions.append(Tell(link.ManagerRestarted()))
        return actions + self._useless(digest, reason) + self._pursue()

    def loaded(self, key: PlanKey, stated_bytes: int = 0, memory_bytes: int = 0) -> list[Action]:
        """The engine process has loaded it; `memory_bytes` is what plans may take there together."""
        engine = self._engine
        plan = engine.loading.pop(key, None)
        if plan is not None:
            engine.loaded[key] = plan
            engine.stated_bytes[key], engine.memory_bytes = stated_bytes, memory_bytes
        return self._pursue()

    def too_large(self, sizes: PlanTooLarge) -> list[Action]:
        """It was not loaded: it does not fit beside what is, or not at all."""
        plan = self._engine.loading.pop(PlanKey(sizes.key), None)
        if plan is None:
            return []
        if sizes.alone_bytes <= sizes.memory_bytes:
            self._engine.crowded[plan.ref.digest] = sizes
            return self._pursue()
        reason = (
            f"it needs {sizes.alone_bytes} bytes, and there are {sizes.memory_bytes} for plans; "
            "make one with fewer replicas, smaller batches or fewer models, or raise `memory_bytes`"
        )
        return self._useless(plan.ref.digest, reason) + self._pursue()

    def load_failed(self, key: PlanKey, reason: str) -> list[Action]:
        """The engine process could not load or activate it; what ran before still runs."""
        engine = self._engine
        plan = engine.loading.pop(key, None)
        if plan is not None:
            return self._useless(plan.ref.digest, reason) + self._pursue()
        if key != engine.asked:
            return []  # it was to be freed, and is
        # It was loaded once, so it is not to blame: it was freed before the order came. Load it again.
        engine.loaded.pop(key, None)
        engine.asked = engine.active
        return self._pursue()

    def activated(self, key: PlanKey, now_s: float, paused_s: float = 0.0) -> list[Action]:
        """New launches go to it, after nothing was launched for `paused_s`."""
        self._engine.active = key
        plan, candidate = self.active, self._candidate
        if plan is None:
            return []
        actions = self._exchanged(plan, paused_s)
        runner = self.runner
        if candidate is not None and runner is not None and not runner.draining:
            side = Side.CANDIDATE if plan.ref.digest == candidate.digest else Side.CONTROL
            return actions + self._advance(candidate, runner.activated(side, now_s))
        self._watch_running(now_s)
        return [*actions, *self._announce(), *self._pursue()]

    def _announce(self) -> list[Action]:
        """Say what runs, outside of the windows of a trial."""
        plan = self.active
        if plan is None or self.runner is not None:
            return []
        ref = plan.ref
        if plan is self._fallback:
            ref = PlanRef(ref.digest, Origin.FALLBACK, ref.local_counter)
        actions: list[Action] = []
        if not (self._candidate and self._candidate.in_window):  # the link knows, once it has the verdict
            actions.append(Tell(link.ActiveChanged(ref)))
        if self._announced != ref.digest:
            self._announced = ref.digest
            wanted = self._candidate is not None and self._candidate.digest == ref.digest
            attempt = self._candidate.attempt if self._candidate is not None and wanted else _NEVER
            actions.append(Activated(ref, attempt))
        return actions

    def _exchanged(self, plan: RunnablePlan, paused_s: float) -> list[Action]:
        """Count the pause of an exchange that has ended."""
        if not self._exchanging:
            return []
        self._exchanging, self.last_pause_s = False, paused_s
        text = f"plan {plan.ref.digest[:12]} runs after a pause of {paused_s * 1e3:.0f} ms: both did not fit"
        return [Note("swap_pause", text)]

    def released(self, key: PlanKey) -> list[Action]:
        """The engine process has freed it."""
        self._engine.released(key)
        return self._pursue()

    def ready(self) -> list[Action]:
        """A fresh engine process takes commands."""
        self._engine = EngineView(up=True)
        return self._pursue()

    def exited(self, how: str, now_s: float) -> list[Action]:
        """The engine process is gone, and everything in it."""
        wanted, blamed, before = self._engine.stopping, self._blamed(), self.active
        self._engine = EngineView()
        self._exchanging, self._announced = False, None
        if wanted:
            actions = self._step_back(how, now_s)
            if before is not None and not self._target():
                actions.append(Tell(link.ActiveChanged(None)))
            return [*actions, StartEngine(0.0)]
        delay_s = self._supervisor.crashed(blamed.ref.digest if blamed else None, now_s)
        actions = [Note("engine_crashed", f"the engine process ended: {how}")]
        actions += self._candidate_crashed(how, blamed, now_s)
        if blamed is not None:
            self._forsake(blamed.ref.digest)
        if blamed is not None and self._supervisor.condemned(blamed.ref.digest):
            reason = f"the engine crashed {self._supervisor.config.max_crashes} times under it, last: {how}"
            actions.append(Note("plan_condemned", f"plan {blamed.ref.digest[:12]}: {reason}"))
            if blamed is self._good:
                actions.append(Tell(link.RestoreFailed(reason)))
        if self._target() is None:
            actions.append(Tell(link.ActiveChanged(None)))
        return [*actions, Tell(link.ManagerRestarted()), StartEngine(delay_s)]

    def task_ended(self, outcome: Outcome, reason: str, key: PlanKey | None) -> list[Action]:
        """A task ended in the engine process, on the plan `key`; None: it never ran."""
        candidate = self._candidate
        if candidate is None or candidate.probation is None or key is None or key != self._engine.active:
            return []  # a task of the plan before says nothing about the new one
        candidate.probation.task_ended(outcome, reason)
        return self._judge(candidate, candidate.probation)

    def tick(self, now_s: float) -> list[Action]:
        """Time passed."""
        self._watch_running(now_s)
        actions = self._end_overdue_load(now_s)
        candidate = self._candidate
        if candidate is None or self._engine.stopping:
            return actions
        if candidate.runner is not None and not candidate.runner.over:
            return actions + self._advance(candidate, candidate.runner.tick(now_s))
        if candidate.probation is None:
            return actions
        candidate.probation.tick(now_s)
        return actions + self._judge(candidate, candidate.probation)

    def _end_overdue_load(self, now_s: float) -> list[Action]:
        """Nothing inside the process can interrupt a load that hangs, so it is ended with the process."""
        engine, limit_s = self._engine, self._config.load_limit_s
        key = next(iter(engine.loading), None)
        if key is None or engine.stopping:
            return []
        if engine.first_load is None or engine.first_load[0] != key:
            engine.first_load = (key, now_s)
        if now_s - engine.first_load[1] <= limit_s:
            return []
        engine.stopping = True
        digest = engine.loading[key].ref.digest
        reason = f"it was not loaded within {limit_s:g} s, so the engine process was ended"
        note = Note("load_overdue", f"plan {digest[:12]}: {reason}")
        return [note, *self._useless(digest, reason), StopEngine()]

    # -- decisions ------------------------------------------------------------------------------------------

    def _watch_running(self, now_s: float) -> None:
        """Probation begins once the candidate runs.

        No swap says so where the plan ran before its attempt began: desired again while it was on probation,
        or activated in the last window of its trial.
        """
        candidate, engine = self._candidate, self._engine
        if candidate is None or candidate.phase is not Phase.ACTIVATING or self.active is None:
            return
        if self.active.ref.digest == candidate.digest and engine.asked == engine.active:
            candidate.phase = Phase.PROBATION
            waiting = self._waiting if candidate.guarded else None
            candidate.probation = Probation(now_s, self._config.probation, waiting)

    def _judge(self, candidate: _Candidate, probation: Probation) -> list[Action]:
        match probation.verdict:
            case Verdict.OPEN:
                return []
            case Verdict.PASSED:
                self._candidate, self._adopted = None, None
                actions: list[Action] = []
                if self._good is not None and self._good.ref.digest != candidate.digest:
                    self._fallback = self._good
                    actions.append(KeepFallback(self._good))
                self._good = candidate.plan
                return [*actions, Tell(link.ProbationPassed(candidate.attempt))]
            case Verdict.FAILED:
                self._candidate = None
                self._forsake(candidate.digest)
                failed = link.ProbationFailed(candidate.attempt, probation.reason)
                return [Tell(failed), *self._pursue()]

    def _forsake(self, digest: Digest) -> None:
        """What ran on from an earlier attempt has failed in a later one, or brought the engine down."""
        if self._adopted is not None and self._adopted.ref.digest == digest:
            self._adopted = None

    def _step_back(self, how: str, now_s: float) -> list[Action]:
        """What was loaded is lost with the engine process: load it again. A trial has ended."""
        candidate = self._candidate
        if candidate is None:
            return []
        if candidate.runner is not None and not candidate.runner.over:
            return self._advance(candidate, candidate.runner.crashed(how, now_s))
        if candidate.phase is Phase.STAGED:
            candidate.phase = Phase.STAGING
        elif candidate.phase is Phase.PROBATION:
            candidate.phase, candidate.probation = Phase.ACTIVATING, None
        return []

    def _candidate_crashed(self, how: str, blamed: RunnablePlan | None, now_s: float) -> list[Action]:
        candidate = self._candidate
        if candidate is None:
            return []
        if candidate.runner is not None or blamed is not candidate.plan:
            return self._step_back(how, now_s)
        self._candidate = None
        if candidate.phase is Phase.PROBATION:
            reason = f"the engine crashed under it: {how}"
        else:
            reason = f"the engine crashed while it was loaded: {how}"
        told = link.ProbationFailed if candidate.runs else link.PlanRefused
        return [Tell(told(candidate.attempt, reason))]

    def _blamed(self) -> RunnablePlan | None:
        """Under which plan the engine process ended: the newcomer if it loaded or ran, else the one that ran.

        What the process said before it ended has been heard, so a plan whose activation it did not report
        has not run.
        """
        candidate, engine = self._candidate, self._engine
        if candidate is not None:
            loads = engine.key_of(candidate.digest, engine.loading) is not None
            if candidate.phase is Phase.PROBATION or loads:
                return candidate.plan
        return self.active or next(iter(engine.loading.values()), None)

    def _useless(self, digest: Digest, reason: str) -> list[Action]:
        """A plan does not check or load."""
        self._unusable[digest] = reason
        actions: list[Action] = []
        candidate = self._candidate
        if candidate is not None and candidate.digest == digest:
            self._candidate = None
            told = link.ProbationFailed if candidate.runs else link.PlanRefused
            actions.append(Tell(told(candidate.attempt, reason)))
        if self._good is not None and self._good.ref.digest == digest:
            actions.append(Note("last_good_unusable", reason))
            actions.append(Tell(link.RestoreFailed(reason)))
            if self.active is None and self._target() is None:
                actions.append(Tell(link.ActiveChanged(None)))
        return actions

    def _target(self) -> RunnablePlan | None:
        candidate = self._candidate
        if candidate is not None and (candidate.runs or candidate.in_window):
            return candidate.plan
        return self._incumbent()

    def _incumbent(self) -> RunnablePlan | None:
        """What runs where no candidate does."""
        for plan in (self._adopted, self._good, self._fallback):
            if plan is None or plan.ref.digest in self._unusable:
                continue
            if not self._supervisor.condemned(plan.ref.digest):
                return plan
        return None

    def _pursue(self) -> list[Action]:
        """The next steps towards the target and the candidate; asking again changes nothing."""
        return self._pursue_target() + self._pursue_candidate() + self._announce_later() + self._tidy()

    def _announce_later(self) -> list[Action]:
        """After a trial the plan that runs was activated in its last window."""
        engine = self._engine
        same = engine.asked == engine.active and not engine.draining
        plan = self.active
        return self._announce() if same and plan is not None and plan.ref.digest != self._announced else []

    def _pursue_candidate(self) -> list[Action]:
        candidate, engine = self._candidate, self._engine
        if candidate is None or candidate.runs:
            return []
        if candidate.digest not in self._checked:
            return self._check(candidate.plan)
        if candidate.phase is Phase.VERIFYING:
            return [Tell(link.PlanVerified(candidate.attempt))]
        if candidate.phase is not Phase.STAGING or not self._at_rest():
            return []
        key = engine.key_of(candidate.digest, engine.loaded)
        if key in engine.freed:
            return []
        if key is None and candidate.digest not in engine.crowded:
            return self._load(candidate.plan)
        candidate.phase = Phase.STAGED
        return [Tell(self._staged(candidate))]

    def _at_rest(self) -> bool:
        """What is to run runs, or nothing is: a newcomer must not hold it up, nor be compared with a hole."""
        target = self._target()
        return target is None or (self.active is not None and self.active.ref.digest == target.ref.digest)

    def _staged(self, candidate: _Candidate) -> link.PlanStaged:
        control = self._control_for(candidate.digest)
        if control is None:
            return link.PlanStaged(candidate.attempt)
        ours, theirs = self._checked[candidate.digest], self._checked[control.ref.digest]
        arrivals_per_s = self._waiting.last_arrivals_per_s(_RATES_S)
        return link.PlanStaged(
            candidate.attempt,
            control.ref.digest,
            ours.same_but_intervals(theirs),
            ours.starves(arrivals_per_s),
        )

    def _pursue_target(self) -> list[Action]:
        engine, target = self._engine, self._target()
        if not engine.up or engine.stopping:
            return self._check(target) if target is not None else []
        if self.runner is not None and self.runner.draining:
            return []
        if target is None:
            if engine.active is None:
                return []
            engine.stopping = True
            return [StopEngine()]
        key = engine.key_of(target.ref.digest, engine.loaded)
        if key is None:
            crowded = target.ref.digest in engine.crowded
            return self._make_room() if crowded else self._load(target)
        if self._exchanging and key in engine.freed:
            return []  # it is loaded again once it is gone
        return engine.swap_to(key, keep=self.runner is not None)

    def _make_room(self) -> list[Action]:
        """Both do not fit: what runs ends, and gives way."""
        engine = self._engine
        if engine.active is None:
            return engine.unload(engine.loaded)
        self._exchanging = True
        return engine.drain()

    def _load(self, plan: RunnablePlan) -> list[Action]:
        digest = plan.ref.digest
        if digest not in self._checked:
            return self._check(plan)
        engine = self._engine
        if not engine.up or engine.stopping or engine.holds(digest):
            return []
        key = PlanKey(next(self._keys))
        engine.loading[key] = plan
        return [LoadPlan(key, plan)]

    def _check(self, plan: RunnablePlan) -> list[Action]:
        digest = plan.ref.digest
        if digest in self._checked or digest in self._checking:
            return []
        self._checking.add(digest)
        return [CheckPlan(plan)]

    def _tidy(self) -> list[Action]:
        """Free what was loaded and is not wanted any more, and forget plans that are gone."""
        held = {plan.ref.digest for plan in self._held()}
        self._checked = {digest: facts for digest, facts in self._checked.items() if digest in held}
        self._unusable = {digest: reason for digest, reason in self._unusable.items() if digest in held}
        engine, candidate = self._engine, self._candidate
        plans = [candidate.plan if candidate else None, self._target()]
        if candidate is not None and not candidate.runs:
            plans.append(self._incumbent())
        wanted = {plan.ref.digest for plan in plans if plan is not None}
        return engine.unload(
            key
            for key, plan in list(engine.loaded.items())
            if key not in (engine.asked, engine.active) and plan.ref.digest not in wanted
        )
