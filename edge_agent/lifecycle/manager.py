"""The plan manager: which plan the engine process should run, and how to get there. Pure.

The core knows what is desired; the engine process runs plans by key. `good` is last-known-good, `fallback`
the good plan before it. The *candidate* is the plan of one attempt on its way from verification over staging
and perhaps a trial to probation. Whatever happens, the manager works towards its target: the candidate once
it is to be activated, else the incumbent (the good plan or the fallback), else nothing. A method returns
what to do next.
"""

import itertools
from random import Random

from stageloom.edge_agent.lifecycle.engine_view import EngineView, Supervisor
from stageloom.edge_agent.lifecycle.events import (
    Action,
    JournalNote,
    KeepFallback,
    StartEngine,
    StopEngine,
)
from stageloom.edge_agent.lifecycle.facts import PlanFacts
from stageloom.edge_agent.lifecycle.output_runner import OutputRunner
from stageloom.edge_agent.lifecycle.probation import Probation, ProbationConfig, unloaded
from stageloom.edge_agent.lifecycle.pursuit import (
    Candidate,
    Pursuit,
    Restoring,
    Unusable,
)
from stageloom.edge_agent.lifecycle.states import AttemptId, RunnablePlan
from stageloom.edge_agent.lifecycle.trial_runner import TrialRunner
from stageloom.edge_agent.lifecycle.waiting import WaitingLog
from stageloom.edge_agent.worker.messages import OutputsCompared, PlanTooLarge, WindowMeasured
from stageloom.shared.engine.interval_guard import GuardVerdict
from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.engine.trial import TrialConfig, TrialRecord, TrialResult, Verdict, crowding
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import DeviceState

_CROWDED_TRIES = 5
"""A second apart; where what is measured leaves a plan no room for longer, another runs in its place."""

_LATELY_S = 30.0
"""A device to which no task came for so long is idle."""


class PlanManager(Pursuit):
    """Has the engine process run the plan that it is to run; hears the core's orders and that process."""

    def __init__(
        self,
        supervisor: Supervisor,
        fallback: RunnablePlan | None = None,
        *,
        waiting: WaitingLog | None = None,
        rng: Random | None = None,
        probation: ProbationConfig | None = None,
        trial: TrialConfig | None = None,
        load_limit_s: float = 120.0,
        restore_patience_s: float = 300.0,
    ) -> None:
        """`waiting` is filled by the owner; `rng` draws the order of a trial's windows.

        An engine process that loads one plan for `load_limit_s` is taken to hang. Last-known-good may fail to
        load for `restore_patience_s`, and no verdict is told.
        """
        super().__init__(supervisor, fallback, waiting or WaitingLog())
        self.last_pause_s: float | None = None  # of the last exchange
        self._probation = probation or ProbationConfig()
        self._trial = trial or TrialConfig()
        self._load_limit_s = load_limit_s
        self._restore_patience_s = restore_patience_s
        self._rng = rng or Random(0)
        self._windows = itertools.count(1)
        self._decided: tuple[AttemptId, Digest | None, TrialResult] | None = None  # until the next attempt
        self._restoring: Restoring | None = None  # while last-known-good does not load

    # -- what the core asks for -----------------------------------------------------------------------------

    def restore(self, plan: RunnablePlan) -> list[Action]:
        """Run last-known-good, whatever became of it before."""
        self._good, self._adopted = plan, None
        self._restoring = None
        self._unusable.pop(plan.ref.digest, None)
        if self._candidate is not None and self._candidate.runs:
            self._candidate = None
        return self._pursue()

    def verify(self, attempt: AttemptId, plan: RunnablePlan) -> list[Action]:
        """Check a plan; answered by `verified` or `failed`."""
        return self._begin(attempt, plan, DeviceState.RECEIVED) + self._pursue()

    def stage(self, attempt: AttemptId, plan: RunnablePlan) -> list[Action]:
        """Load a plan beside the one that runs; answered by `staged` or `failed`."""
        return self._begin(attempt, plan, DeviceState.VERIFIED) + self._pursue()

    def run_trial(
        self, attempt: AttemptId, plan: RunnablePlan, environment: str, at_us: int, now_s: float
    ) -> list[Action]:
        """Compare the staged plan with the one that runs; `at_us` is the wall clock."""
        if self._decided is not None and self._decided[0] == attempt:
            return self.outcomes.trial_decided(*self._decided)
        candidate = self._candidate
        if candidate is not None and candidate.attempt == attempt and candidate.runner is not None:
            return candidate.runner.again()
        control = self._control_for(plan.ref.digest)
        if candidate is None or candidate.state is not DeviceState.STAGED or control is None:
            return self._trial_lost(attempt, "the plan to compare with does not run any more")
        candidate.state = DeviceState.TRIAL
        record = TrialRecord(
            candidate=plan.ref.digest, control=control.ref.digest, environment=environment, began_us=at_us
        )
        candidate.runner = self._runner(attempt, record)
        return self._advance(candidate, candidate.runner.begin(now_s))

    def compare_outputs(
        self,
        attempt: AttemptId,
        plan: RunnablePlan,
        tolerance: float,
        environment: str,
        at_us: int,
        now_s: float,
    ) -> list[Action]:
        """Compare what the staged plan's new versions give with what those that run give; as `run_trial`."""
        if self._decided is not None and self._decided[0] == attempt:
            return self.outcomes.trial_decided(*self._decided)
        candidate, engine, digest = self._candidate, self._engine, plan.ref.digest
        if candidate is not None and candidate.attempt == attempt and candidate.runner is not None:
            return candidate.runner.again()
        running = self.active
        if candidate is None or candidate.state is not DeviceState.STAGED or running is None:
            return self._trial_lost(attempt, "the plan to compare with does not run any more")
        if (crowded := engine.crowded.get(digest)) is not None:
            held_bytes = crowded.memory_bytes - crowded.room_bytes
            reason = crowding(held_bytes, crowded.added_bytes, crowded.memory_bytes)
            result = TrialResult(verdict=Verdict.REFUSED, reason=reason)
            return self.outcomes.trial_decided(attempt, running.ref.digest, result)
        key, control = engine.key_of(digest, engine.loaded), engine.active
        models = self._checked[digest].new_versions(self._checked[running.ref.digest])
        if key is None or control is None or not models:
            return self._trial_lost(attempt, "the plan to compare with does not run any more")
        candidate.state = DeviceState.TRIAL
        record = TrialRecord(
            candidate=digest, control=running.ref.digest, environment=environment, began_us=at_us
        )
        candidate.runner = OutputRunner(
            record,
            models,
            (control, key),
            tolerance=tolerance,
            begins=lambda lasts: self.outcomes.trial_begins(attempt, record, lasts),
            number=next(self._windows),
            config=self._trial,
        )
        return self._advance(candidate, candidate.runner.begin(now_s))

    def outputs_compared(self, report: OutputsCompared, now_s: float) -> list[Action]:
        """What the engine process found."""
        candidate = self._candidate
        if candidate is None or not isinstance(candidate.runner, OutputRunner):
            return []
        return self._advance(candidate, candidate.runner.compared(report, now_s))

    def trial_recorded(self, attempt: AttemptId, now_s: float) -> list[Action]:
        """The record is durable: the candidate may run."""
        if self._decided is not None and self._decided[0] == attempt:
            return self.outcomes.trial_decided(*self._decided)
        candidate = self._candidate
        if candidate is None or candidate.attempt != attempt or candidate.runner is None:
            return self._trial_lost(attempt, "the trial was lost")
        return self._advance(candidate, candidate.runner.recorded(now_s))

    def _trial_lost(self, attempt: AttemptId, reason: str) -> list[Action]:
        result = TrialResult(verdict=Verdict.ABANDONED, reason=reason)
        return self.outcomes.trial_decided(attempt, None, result)

    def activate(
        self, attempt: AttemptId, plan: RunnablePlan, *, guarded: bool = False, idle: bool = False
    ) -> list[Action]:
        """Swap and watch; answered by `passed` or `failed`. `guarded` and `idle`: see `Probation`."""
        candidate = self._candidate
        if candidate is not None and candidate.attempt == attempt and candidate.runs:
            return []
        actions = self._begin(attempt, plan, DeviceState.PROBATION)
        assert self._candidate is not None
        self._candidate.guarded, self._candidate.idle = guarded, idle
        return actions + self._pursue()

    def abandon(self, attempt: AttemptId) -> list[Action]:
        """A newer generation took its place: free what is staged, let what runs run."""
        candidate = self._candidate
        if candidate is None or candidate.attempt != attempt:
            return []
        self._candidate = self._decided = None
        if candidate.runs:
            self._adopted = candidate.plan
        return self._pursue() if candidate.runner is not None else self._tidy()

    def environment_changed(self) -> list[Action]:
        """No guard compares with how long tasks waited in another environment."""
        self._waiting.environment_changed()
        return []

    def shut_down(self, now_s: float) -> list[Action]:
        """The agent is told to stop: a trial ends without a verdict, and the plan may be tried again."""
        candidate = self._candidate
        if candidate is None or candidate.runner is None:
            return []
        return self._advance(candidate, candidate.runner.abandon("the agent was stopped", now_s))

    def _begin(self, attempt: AttemptId, plan: RunnablePlan, state: DeviceState) -> list[Action]:
        actions: list[Action] = []
        if self._candidate is not None and self._candidate.attempt != attempt:
            actions = self.abandon(self._candidate.attempt)
        self._candidate = Candidate(attempt, plan, state)
        self._decided = None
        self._unusable.pop(plan.ref.digest, None)
        return actions

    # -- trials ---------------------------------------------------------------------------------------------

    def _runner(self, attempt: AttemptId, record: TrialRecord) -> TrialRunner:
        engine, digest = self._engine, record.candidate
        crowded = engine.crowded.get(digest)
        key, active = engine.key_of(digest, engine.loaded), engine.active
        control_bytes = engine.stated_bytes.get(active, 0) if active is not None else 0
        return TrialRunner(
            record,
            tuple(self._checked[digest].artifacts),
            control_bytes=crowded.memory_bytes - crowded.room_bytes if crowded else control_bytes,
            candidate_bytes=crowded.added_bytes if crowded else engine.stated_bytes.get(key or PlanKey(0), 0),
            memory_bytes=crowded.memory_bytes if crowded else max(engine.memory_bytes, control_bytes),
            begins=lambda lasts: self.outcomes.trial_begins(attempt, record, lasts),
            guarded_s=self._probation.guarded_s,
            lately=any(self._waiting.last_arrivals_per_s(_LATELY_S).values()),
            rng=self._rng,
            numbers=self._windows,
            config=self._trial,
        )

    def _advance(self, candidate: Candidate, actions: list[Action]) -> list[Action]:
        """Carry out what the trial wants, and follow it to the plan that it launches into."""
        runner, engine = candidate.runner, self._engine
        assert runner is not None
        if runner.result is not None and self._candidate is candidate:
            decided = (candidate.attempt, runner.record.control, runner.result)
            if self._decided != decided:
                self._decided = decided
                actions = actions + self.outcomes.trial_decided(*decided)
            if runner.result.verdict not in (Verdict.COMMIT, Verdict.IDLE):
                self._candidate = None
            if runner.stalled and engine.up and not engine.stopping:
                engine.stopping = True
                actions.append(StopEngine())
        return actions + self._pursue()

    def measured(self, figures: WindowMeasured, now_s: float) -> list[Action]:
        candidate = self._candidate
        if candidate is None or candidate.runner is None:
            return []
        return self._advance(candidate, candidate.runner.measured(figures, now_s))

    def arrivals_moved(self, since_s: float) -> None:
        """Other tasks come since that instant: what was found before it says nothing of these."""
        self._waiting.arrivals_moved(since_s)
        if isinstance(runner := self.runner, TrialRunner):
            runner.arrivals_moved(since_s)

    def settled(self, key: PlanKey, now_s: float) -> list[Action]:
        """Nothing is in flight but on this plan: its window may begin."""
        candidate, plan = self._candidate, self._engine.loaded.get(key)
        if candidate is None or candidate.runner is None or plan is None:
            return []
        return self._advance(candidate, candidate.runner.settled(candidate.side_of(plan), now_s))

    def drained(self) -> list[Action]:
        """Nothing is in flight: one plan may give way to another."""
        engine = self._engine
        return engine.unload(engine.loaded) if engine.draining and self._exchanging else []

    # -- what happened --------------------------------------------------------------------------------------

    def checked(self, facts: PlanFacts) -> list[Action]:
        """The plan is legal and its artifacts are whole."""
        self._checking.discard(facts.digest)
        self._checked[facts.digest] = facts
        return self._pursue()

    def check_failed(
        self, digest: Digest, reason: str, damaged: frozenset[Digest], *, may_pass: bool = False
    ) -> list[Action]:
        """It is not; `damaged` artifacts were removed. `may_pass`: one could not be read, which may pass."""
        self._checking.discard(digest)
        for artifact in damaged:
            self.outcomes.artifact_gone(artifact)
        candidate = self._candidate
        if damaged and candidate is not None and candidate.digest == digest and not candidate.runs:
            # The plan is not to blame: the core fetches again and asks again.
            self._candidate = None
            self.outcomes.forgot()
        return self._useless(digest, reason, may_pass=may_pass) + self._pursue()

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
        engine = self._engine
        plan = engine.loading.pop(PlanKey(sizes.key), None)
        if plan is None:
            return []
        if sizes.alone_bytes > sizes.memory_bytes:
            reason = (
                f"it needs {sizes.alone_bytes} bytes, and there are {sizes.memory_bytes} for plans; "
                "make one with fewer replicas, smaller batches or fewer models, or raise `memory_bytes`"
            )
            return self._useless(plan.ref.digest, reason, may_pass=True) + self._pursue()
        engine.crowded[plan.ref.digest] = sizes
        engine.tries = 0 if engine.loaded else engine.tries + 1
        instead = self.incumbent
        if engine.tries < _CROWDED_TRIES or instead is None or instead.ref.digest == plan.ref.digest:
            return self._pursue()
        reason = (
            f"it needs {sizes.added_bytes} bytes, and what is being measured leaves {sizes.room_bytes} of "
            f"{sizes.memory_bytes}; push the plan again once profiles and comparisons of outputs have ended"
        )
        return self._useless(plan.ref.digest, reason, may_pass=True) + self._pursue()

    def load_failed(self, key: PlanKey, reason: str) -> list[Action]:
        """The engine process could not load or activate it; what ran before still runs."""
        engine = self._engine
        plan = engine.loading.pop(key, None)
        if plan is not None:
            return self._useless(plan.ref.digest, reason, may_pass=True) + self._pursue()
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
        if candidate is not None and runner is not None:
            return actions + self._advance(candidate, runner.activated(candidate.side_of(plan), now_s))
        self._watch_running(now_s)
        return [*actions, *self._announce(), *self._pursue()]

    def _exchanged(self, plan: RunnablePlan, paused_s: float) -> list[Action]:
        """Count the pause of an exchange that has ended."""
        if not self._exchanging:
            return []
        self._exchanging, self.last_pause_s = False, paused_s
        text = f"plan {plan.ref.digest[:12]} runs after a pause of {paused_s * 1e3:.0f} ms: both did not fit"
        return [JournalNote("swap_pause", text)]

    def released(self, key: PlanKey) -> list[Action]:
        """The engine process has freed it."""
        self._engine.released(key)
        return self._pursue()

    def ready(self) -> list[Action]:
        """A fresh engine process takes commands."""
        self._engine = EngineView(up=True)
        return self._pursue()

    def exited(self, how: str, now_s: float, *, measuring: bool = False) -> list[Action]:
        """The engine process is gone, and everything in it; `measuring`: a profile request is to blame."""
        wanted, before = self._engine.stopping, self.active
        blamed = None if measuring else self._blamed()
        self._engine = EngineView()
        self._exchanging, self._announced = False, None
        if wanted:
            actions = self._step_back(how, now_s)
            if before is not None and not self._target():
                self.outcomes.active_changed(None)
            return [*actions, StartEngine(0.0)]
        delay_s = self._supervisor.crashed(blamed.ref.digest if blamed else None, now_s)
        doing = " as it measured" if measuring else ""
        actions = [JournalNote("engine_crashed", f"the engine process ended{doing}: {how}")]
        actions += self._candidate_crashed(how, blamed, now_s)
        if blamed is not None:
            self._forsake(blamed.ref.digest)
        if blamed is not None and self._supervisor.condemned(blamed.ref.digest):
            reason = f"the engine crashed {self._supervisor.max_crashes} times under it, last: {how}"
            actions.append(JournalNote("plan_condemned", f"plan {blamed.ref.digest[:12]}: {reason}"))
            if blamed is self._good:
                actions += self.outcomes.restore_failed(reason)
        if self._target() is None:
            self.outcomes.active_changed(None)
        self.outcomes.forgot()
        return [*actions, StartEngine(delay_s)]

    def task_ended(self, outcome: Outcome, reason: str, key: PlanKey | None) -> list[Action]:
        """A task ended in the engine process, on the plan `key`; None: it never ran."""
        candidate = self._candidate
        if candidate is None or candidate.probation is None or key is None or key != self._engine.active:
            return []  # a task of the plan before says nothing about the new one
        candidate.probation.task_ended(outcome, reason)
        return self._judge(candidate, candidate.probation)

    def tick(self, now_s: float) -> list[Action]:
        """Look at what has taken too long: a load, a trial, probation, last-known-good that does not load."""
        self._watch_running(now_s)
        actions = self._end_overdue_load(now_s) + self._restore_again(now_s) + self._load_again(now_s)
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
        engine, limit_s = self._engine, self._load_limit_s
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
        note = JournalNote("load_overdue", f"plan {digest[:12]}: {reason}")
        return [note, *self._useless(digest, reason, may_pass=True), StopEngine()]

    def _restore_again(self, now_s: float) -> list[Action]:
        """Last-known-good did not load: try it in a fresh engine process while nothing else is to run."""
        good, engine, instead = self._good, self._engine, self._target()
        failed = self._unusable.get(good.ref.digest) if good is not None else None
        if good is None or failed is None or not failed.may_pass:
            if failed is not None or self.active == good:
                self._restoring = None
            return []
        if self._restoring is None:
            self._restoring = Restoring(self._restore_patience_s, now_s)
        restoring = self._restoring
        actions: list[Action] = []
        replaced = instead is not None and self.active == instead
        if not restoring.told and (replaced or restoring.overdue(now_s)):
            restoring.told = True
            actions += self.outcomes.restore_failed(failed.reason)
        idle = engine.up and not (engine.stopping or engine.loading) and self._candidate is None
        if instead is None and idle and restoring.due(now_s):
            self._unusable = {one: found for one, found in self._unusable.items() if not found.may_pass}
            engine.stopping = True
            actions.append(StopEngine())
        return actions

    def _load_again(self, now_s: float) -> list[Action]:
        """What is to run found no room though no plan is loaded: what is measured takes it, and will end."""
        engine, target = self._engine, self._target()
        if target is None or target.ref.digest not in engine.crowded or engine.stopping:
            return []
        if engine.loaded or engine.loading or now_s < engine.again_s:
            return []
        engine.again_s = now_s + 1.0
        engine.crowded.clear()
        return self._pursue()

    # -- decisions ------------------------------------------------------------------------------------------

    def _watch_running(self, now_s: float) -> None:
        """Probation begins once the candidate runs.

        No swap says so where the plan ran before its attempt began: desired again while it was on probation,
        or activated in the last window of its trial.
        """
        candidate, engine = self._candidate, self._engine
        if candidate is None or not candidate.runs or candidate.probation is not None or self.active is None:
            return
        if self.active.ref.digest == candidate.digest and engine.asked == engine.active:
            waiting = self._waiting if candidate.guarded else None
            config = self._probation
            if candidate.idle:
                config = unloaded(config, self._trial.brake_age_s)
            candidate.probation = Probation(now_s, config, waiting)

    def _judge(self, candidate: Candidate, probation: Probation) -> list[Action]:
        match probation.verdict:
            case GuardVerdict.OPEN:
                return []
            case GuardVerdict.KEEP:
                self._candidate, self._adopted = None, None
                self._supervisor.pardon(candidate.digest)
                actions: list[Action] = []
                if self._good is not None and self._good.ref.digest != candidate.digest:
                    self._fallback = self._good
                    actions.append(KeepFallback(self._good))
                self._good = candidate.plan
                return actions + self.outcomes.passed(candidate.attempt)
            case GuardVerdict.ROLL_BACK:
                self._forsake(candidate.digest)
                return self._failed(candidate, probation.reason) + self._pursue()

    def _forsake(self, digest: Digest) -> None:
        """What ran on from an earlier attempt has failed in a later one, or brought the engine down."""
        if self._adopted is not None and self._adopted.ref.digest == digest:
            self._adopted = None

    def _step_back(self, how: str, now_s: float, *, blameless: bool = False) -> list[Action]:
        """What was loaded is lost with the engine process: load it again. A trial has ended.

        `blameless`: it ended at no plan, and a trial has no verdict.
        """
        candidate = self._candidate
        if candidate is None:
            return []
        if candidate.runner is not None and not candidate.runner.over:
            if blameless:
                reason = f"the engine ended as it measured: {how}"
                return self._advance(candidate, candidate.runner.abandon(reason, now_s))
            return self._advance(candidate, candidate.runner.crashed(how, now_s))
        if candidate.state is DeviceState.STAGED:
            candidate.state = DeviceState.VERIFIED
        candidate.probation = None
        return []

    def _candidate_crashed(self, how: str, blamed: RunnablePlan | None, now_s: float) -> list[Action]:
        candidate = self._candidate
        if candidate is None:
            return []
        if candidate.runner is not None or blamed is not candidate.plan:
            return self._step_back(how, now_s, blameless=blamed is None)
        if candidate.probation is not None:
            reason = f"the engine crashed under it: {how}"
        else:
            reason = f"the engine crashed while it was loaded: {how}"
        return self._failed(candidate, reason)

    def _failed(self, candidate: Candidate, reason: str) -> list[Action]:
        """The attempt is over: what runs beside it is what runs, though it may not be last-known-good."""
        self._candidate = None
        actions = self.outcomes.failed(candidate.attempt, reason)
        if self.active is not None and self.active.ref.digest != candidate.digest:
            self.outcomes.active_changed(self._ref_of(self.active))
        return actions

    def _blamed(self) -> RunnablePlan | None:
        """Under which plan the engine process ended: the newcomer if it loaded or ran, else the one that ran.

        What the process said before it ended has been heard, so a plan whose activation it did not report
        has not run.
        """
        candidate, incumbent = self._candidate, self.incumbent
        loads = next(iter(self._engine.loading.values()), None)  # the others wait for their turn
        if candidate is not None:
            compares = isinstance(self.runner, OutputRunner)  # it runs beside what is active
            changes = self.runner is not None and self.runner.settling  # steps of both are in flight
            loaded = loads is not None and loads.ref.digest == candidate.digest
            if candidate.probation is not None or loaded or compares or changes:
                return candidate.plan
        if loads is not None and (incumbent is None or loads.ref.digest != incumbent.ref.digest):
            return loads  # for an attempt that has ended
        return self.active or loads

    def _useless(self, digest: Digest, reason: str, *, may_pass: bool = False) -> list[Action]:
        """A plan does not check or load; `may_pass`: it may later."""
        self._unusable[digest] = Unusable(reason, may_pass)
        self._engine.stale |= may_pass and self.active is None
        actions: list[Action] = []
        candidate = self._candidate
        if candidate is not None and candidate.digest == digest:
            actions += self._failed(candidate, reason)
        if self._good is not None and self._good.ref.digest == digest:
            if self._restoring is None:  # else it was said before, and is being tried again
                actions.append(JournalNote("last_good_unusable", reason))
            if not may_pass:
                actions += self.outcomes.restore_failed(reason)
        incumbents = (self._adopted, self._good, self._fallback)
        if any(plan is not None and plan.ref.digest == digest for plan in incumbents):
            if self.active is None and self._target() is None:
                self.outcomes.active_changed(None)
        return actions
