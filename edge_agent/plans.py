"""The plan manager: which plan the engine process should run, and how to get there. Pure.

It stands between the link core, which knows what is desired, and the engine process, which runs plans by
key. `good` is last-known-good, `fallback` the good plan before it, a *trial* the plan of one attempt on its
way from verification over staging to probation. Whatever happens, the manager works towards its target: the
trial once it is to be activated, else good, else fallback, else nothing. A method returns what to do next.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum

from edge_agent.link import events as link
from edge_agent.link.events import Attempt, PlanRef, RunnablePlan
from edge_agent.plan_actions import (
    Action,
    CheckPlan,
    KeepFallback,
    LoadPlan,
    Models,
    Note,
    StartEngine,
    StopEngine,
    SwapTo,
    Tell,
    UnloadPlan,
)
from edge_agent.probation import Probation, ProbationConfig, Verdict
from edge_agent.supervisor import Supervisor
from shared.engine.steps import Outcome, PlanKey
from shared.ids import Digest
from shared.messages.control import Origin


class Phase(Enum):
    """How far a trial has come."""

    VERIFYING = "verifying"
    STAGING = "staging"
    STAGED = "staged"
    ACTIVATING = "activating"
    PROBATION = "probation"


@dataclass
class _Trial:
    attempt: Attempt
    plan: RunnablePlan
    phase: Phase
    probation: Probation | None = None

    @property
    def digest(self) -> Digest:
        return self.plan.ref.digest

    @property
    def runs(self) -> bool:
        """It runs or is to run next."""
        return self.phase in (Phase.ACTIVATING, Phase.PROBATION)


@dataclass
class _Engine:
    """What is known of the present engine process."""

    up: bool = False
    stopping: bool = False
    loading: dict[PlanKey, RunnablePlan] = field(default_factory=dict)
    loaded: dict[PlanKey, RunnablePlan] = field(default_factory=dict)
    asked: PlanKey | None = None  # the last one that was asked to run
    kept: set[PlanKey] = field(default_factory=set)  # asked to run (it frees itself) or being freed
    active: PlanKey | None = None
    first_load: tuple[PlanKey, float] | None = None  # plans load in turn: whose turn it is, and since when

    def key_of(self, digest: Digest, plans: Mapping[PlanKey, RunnablePlan]) -> PlanKey | None:
        return next((key for key, plan in plans.items() if plan.ref.digest == digest), None)


class PlanManager:
    """All decisions about plans on this device."""

    def __init__(
        self,
        supervisor: Supervisor,
        probation: ProbationConfig | None = None,
        fallback: RunnablePlan | None = None,
        load_limit_s: float = 120.0,
    ) -> None:
        """`load_limit_s`: an engine process that loads one plan for so long is taken to hang."""
        self._load_limit_s = load_limit_s
        self._supervisor = supervisor
        self._probation = probation or ProbationConfig()
        self._good: RunnablePlan | None = None
        self._fallback = fallback
        self._adopted: RunnablePlan | None = None  # runs on although its attempt was abandoned
        self._trial: _Trial | None = None
        self._engine = _Engine()
        self._next_key = 1
        self._served: Models = {}
        self._checking: set[Digest] = set()
        self._checked: dict[Digest, Models] = {}
        self._unusable: dict[Digest, str] = {}  # does not check or load

    # -- what others ask ------------------------------------------------------------------------------------

    @property
    def active(self) -> RunnablePlan | None:
        """The plan that runs."""
        key = self._engine.active
        return None if key is None else self._engine.loaded.get(key)

    @property
    def models(self) -> Models:
        """What the plan serves that tasks sent from now on meet; while the engine restarts, the last one's.

        Orders reach the engine process in sequence, so a swap counts from when it was asked for.
        """
        asked = self._engine.asked
        plan = None if asked is None else self._engine.loaded.get(asked)
        if plan is not None:
            self._served = self._checked.get(plan.ref.digest, {})
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
    def phase(self) -> Phase | None:
        """How far the present attempt has come."""
        return self._trial.phase if self._trial else None

    def plan_of(self, key: PlanKey) -> RunnablePlan | None:
        """The plan behind a key of the present engine process."""
        return self._engine.loaded.get(key) or self._engine.loading.get(key)

    def needed(self) -> set[Digest]:
        """Artifacts that a plan held here names."""
        return {need.digest for plan in self._held() for need in plan.artifacts}

    @property
    def checked_plans(self) -> Set[Digest]:
        """Plans that are known to be sound; what is kept about others can go."""
        return self._checked.keys()

    def _held(self) -> list[RunnablePlan]:
        """Every plan that has a part to play, here or in the engine process."""
        trial, engine = self._trial, self._engine
        plans = [self._good, self._fallback, self._adopted, trial.plan if trial else None]
        return [
            *(plan for plan in plans if plan is not None),
            *engine.loaded.values(),
            *engine.loading.values(),
        ]

    # -- what the link asks for -----------------------------------------------------------------------------

    def restore(self, plan: RunnablePlan) -> list[Action]:
        """Run last-known-good."""
        self._good, self._adopted = plan, None
        if self._trial is not None and self._trial.runs:
            self._trial = None
        return self._pursue()

    def verify(self, attempt: Attempt, plan: RunnablePlan) -> list[Action]:
        """Check a plan; answered by PlanVerified or PlanRefused."""
        actions = self._begin(attempt, plan, Phase.VERIFYING)
        return actions + self._pursue()

    def stage(self, attempt: Attempt, plan: RunnablePlan) -> list[Action]:
        """Load a plan beside the one that runs; answered by PlanStaged or PlanRefused."""
        actions = self._begin(attempt, plan, Phase.STAGING)
        return actions + self._pursue()

    def activate(self, attempt: Attempt, plan: RunnablePlan) -> list[Action]:
        """Swap and watch; answered by ProbationPassed or ProbationFailed."""
        if self._trial is not None and self._trial.attempt == attempt and self._trial.runs:
            return []
        actions = self._begin(attempt, plan, Phase.ACTIVATING)
        return actions + self._pursue()

    def abandon(self, attempt: Attempt) -> list[Action]:
        """A newer generation took its place: free what is staged, let what runs run."""
        trial = self._trial
        if trial is None or trial.attempt != attempt:
            return []
        self._trial = None
        if trial.runs:
            self._adopted = trial.plan
        return self._tidy()

    def _begin(self, attempt: Attempt, plan: RunnablePlan, phase: Phase) -> list[Action]:
        actions: list[Action] = []
        if self._trial is not None and self._trial.attempt != attempt:
            actions = self.abandon(self._trial.attempt)
        self._trial = _Trial(attempt, plan, phase)
        self._unusable.pop(plan.ref.digest, None)
        return actions

    # -- what happened --------------------------------------------------------------------------------------

    def checked(self, digest: Digest, models: Models) -> list[Action]:
        """The plan is legal and its artifacts are whole."""
        self._checking.discard(digest)
        self._checked[digest] = models
        return self._pursue()

    def check_failed(self, digest: Digest, reason: str, damaged: frozenset[Digest]) -> list[Action]:
        """It is not; `damaged` artifacts were removed."""
        self._checking.discard(digest)
        actions: list[Action] = [Tell(link.ArtifactGone(one)) for one in sorted(damaged)]
        if damaged and self._trial is not None and self._trial.digest == digest and not self._trial.runs:
            # The plan is not to blame: the link fetches again and asks again.
            self._trial = None
            actions.append(Tell(link.ManagerRestarted()))
        return actions + self._useless(digest, reason) + self._pursue()

    def loaded(self, key: PlanKey) -> list[Action]:
        """The engine process has loaded it."""
        plan = self._engine.loading.pop(key, None)
        if plan is not None:
            self._engine.loaded[key] = plan
        return self._pursue()

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

    def activated(self, key: PlanKey, now_s: float) -> list[Action]:
        """New launches go to it."""
        self._engine.active = key
        plan = self.active
        if plan is None:
            return []
        self._watch_running(now_s)
        ref = plan.ref
        if plan is self._fallback:
            ref = PlanRef(ref.digest, Origin.FALLBACK, ref.local_counter)
        return [Tell(link.ActiveChanged(ref)), *self._pursue()]

    def released(self, key: PlanKey) -> list[Action]:
        """The engine process has freed it."""
        self._engine.loaded.pop(key, None)
        return []

    def ready(self) -> list[Action]:
        """A fresh engine process takes commands."""
        self._engine = _Engine(up=True)
        return self._pursue()

    def exited(self, how: str, now_s: float) -> list[Action]:
        """The engine process is gone, and everything in it."""
        wanted, blamed, before = self._engine.stopping, self._blamed(), self.active
        self._engine = _Engine()
        if wanted:
            self._step_back()
            nothing = [Tell(link.ActiveChanged(None))] if before is not None and not self._target() else []
            return [*nothing, StartEngine(0.0)]
        delay_s = self._supervisor.crashed(blamed.ref.digest if blamed else None, now_s)
        actions: list[Action] = [Note("engine_crashed", f"the engine process ended: {how}")]
        actions += self._trial_crashed(how, blamed)
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
        trial = self._trial
        if trial is None or trial.probation is None or key is None or key != self._engine.active:
            return []  # a task of the plan before says nothing about the new one
        trial.probation.task_ended(outcome, reason)
        return self._judge(trial, trial.probation)

    def tick(self, now_s: float) -> list[Action]:
        """Time passed."""
        self._watch_running(now_s)
        actions = self._end_overdue_load(now_s)
        trial = self._trial
        if trial is None or trial.probation is None or self._engine.stopping:
            return actions
        trial.probation.tick(now_s)
        return actions + self._judge(trial, trial.probation)

    def _end_overdue_load(self, now_s: float) -> list[Action]:
        """Nothing inside the process can interrupt a load that hangs, so it is ended with the process."""
        engine = self._engine
        key = next(iter(engine.loading), None)
        if key is None or engine.stopping:
            return []
        if engine.first_load is None or engine.first_load[0] != key:
            engine.first_load = (key, now_s)
        if now_s - engine.first_load[1] <= self._load_limit_s:
            return []
        engine.stopping = True
        digest = engine.loading[key].ref.digest
        reason = f"it was not loaded within {self._load_limit_s:g} s, so the engine process was ended"
        note = Note("load_overdue", f"plan {digest[:12]}: {reason}")
        return [note, *self._useless(digest, reason), StopEngine()]

    # -- decisions ------------------------------------------------------------------------------------------

    def _watch_running(self, now_s: float) -> None:
        """Probation begins once the trial's plan runs.

        No swap says so where the plan ran before its attempt began: desired again while it was on probation.
        """
        trial, engine = self._trial, self._engine
        if trial is None or trial.phase is not Phase.ACTIVATING or self.active is None:
            return
        if self.active.ref.digest == trial.digest and engine.asked == engine.active:
            trial.phase = Phase.PROBATION
            trial.probation = Probation(now_s, self._probation)

    def _judge(self, trial: _Trial, probation: Probation) -> list[Action]:
        match probation.verdict:
            case Verdict.OPEN:
                return []
            case Verdict.PASSED:
                self._trial, self._adopted = None, None
                actions: list[Action] = []
                if self._good is not None and self._good.ref.digest != trial.digest:
                    self._fallback = self._good
                    actions.append(KeepFallback(self._good))
                self._good = trial.plan
                return [*actions, Tell(link.ProbationPassed(trial.attempt))]
            case Verdict.FAILED:
                self._trial = None
                self._forsake(trial.digest)
                failed = link.ProbationFailed(trial.attempt, probation.reason)
                return [Tell(failed), *self._pursue()]

    def _forsake(self, digest: Digest) -> None:
        """What ran on from an earlier attempt has failed in a later one, or brought the engine down."""
        if self._adopted is not None and self._adopted.ref.digest == digest:
            self._adopted = None

    def _step_back(self) -> None:
        """What was loaded is lost with the engine process: load it again."""
        trial = self._trial
        if trial is not None and trial.phase is Phase.STAGED:
            trial.phase = Phase.STAGING
        elif trial is not None and trial.phase is Phase.PROBATION:
            trial.phase, trial.probation = Phase.ACTIVATING, None

    def _trial_crashed(self, how: str, blamed: RunnablePlan | None) -> list[Action]:
        trial = self._trial
        if trial is None:
            return []
        if blamed is not trial.plan:
            self._step_back()
            return []
        self._trial = None
        if trial.phase is Phase.PROBATION:
            reason = f"the engine crashed under it: {how}"
        else:
            reason = f"the engine crashed while it was loaded: {how}"
        told = link.ProbationFailed if trial.runs else link.PlanRefused
        return [Tell(told(trial.attempt, reason))]

    def _blamed(self) -> RunnablePlan | None:
        """Under which plan the engine process ended: the newcomer if it loaded or ran, else the one that ran.

        What the process said before it ended has been heard, so a plan whose activation it did not report
        has not run.
        """
        trial, engine = self._trial, self._engine
        if trial is not None:
            if trial.phase is Phase.PROBATION or engine.key_of(trial.digest, engine.loading) is not None:
                return trial.plan
        return self.active or next(iter(engine.loading.values()), None)

    def _useless(self, digest: Digest, reason: str) -> list[Action]:
        """A plan does not check or load."""
        self._unusable[digest] = reason
        actions: list[Action] = []
        trial = self._trial
        if trial is not None and trial.digest == digest:
            self._trial = None
            told = link.ProbationFailed if trial.runs else link.PlanRefused
            actions.append(Tell(told(trial.attempt, reason)))
        if self._good is not None and self._good.ref.digest == digest:
            actions.append(Note("last_good_unusable", reason))
            actions.append(Tell(link.RestoreFailed(reason)))
            if self.active is None and self._target() is None:
                actions.append(Tell(link.ActiveChanged(None)))
        return actions

    def _target(self) -> RunnablePlan | None:
        if self._trial is not None and self._trial.runs:
            return self._trial.plan
        for plan in (self._adopted, self._good, self._fallback):
            if plan is None or plan.ref.digest in self._unusable:
                continue
            if not self._supervisor.condemned(plan.ref.digest):
                return plan
        return None

    def _pursue(self) -> list[Action]:
        """The next steps towards the target and the trial; asking again changes nothing."""
        return self._pursue_trial() + self._pursue_target() + self._tidy()

    def _pursue_trial(self) -> list[Action]:
        trial = self._trial
        if trial is None or trial.runs:
            return []
        if trial.digest not in self._checked:
            return self._check(trial.plan)
        if trial.phase is Phase.VERIFYING:
            return [Tell(link.PlanVerified(trial.attempt))]
        if (
            trial.phase is Phase.STAGING
            and self._engine.key_of(trial.digest, self._engine.loaded) is not None
        ):
            trial.phase = Phase.STAGED
            return [Tell(link.PlanStaged(trial.attempt))]
        return self._load(trial.plan) if trial.phase is Phase.STAGING else []

    def _pursue_target(self) -> list[Action]:
        engine, target = self._engine, self._target()
        if not engine.up or engine.stopping:
            return self._check(target) if target is not None else []
        if target is None:
            if engine.active is None:
                return []
            engine.stopping = True
            return [StopEngine()]
        key = engine.key_of(target.ref.digest, engine.loaded)
        if key is None:
            return self._load(target)
        if engine.asked == key:
            return []
        engine.asked = key
        engine.kept.add(key)
        return [SwapTo(key)]

    def _load(self, plan: RunnablePlan) -> list[Action]:
        digest = plan.ref.digest
        if digest not in self._checked:
            return self._check(plan)
        engine = self._engine
        known = {**engine.loading, **engine.loaded}
        if not engine.up or engine.stopping or engine.key_of(digest, known) is not None:
            return []
        key = PlanKey(self._next_key)
        self._next_key += 1
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
        self._checked = {digest: models for digest, models in self._checked.items() if digest in held}
        self._unusable = {digest: reason for digest, reason in self._unusable.items() if digest in held}
        engine, trial, target = self._engine, self._trial, self._target()
        wanted = {plan.ref.digest for plan in (trial.plan if trial else None, target) if plan is not None}
        unwanted = [
            key
            for key, plan in engine.loaded.items()
            if key not in engine.kept and plan.ref.digest not in wanted
        ]
        engine.kept.update(unwanted)
        return [UnloadPlan(key) for key in unwanted]
