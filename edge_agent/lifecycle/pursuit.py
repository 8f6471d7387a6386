"""Which plan is to run, and the next steps towards that. Pure.

The target is the candidate once it is to run, else the incumbent: the good plan, or the fallback before it.
Whatever has happened, `_pursue` gives the orders that are missing; giving them again changes nothing.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from stageloom.edge_agent.ingest.messages import ModelSignature
from stageloom.edge_agent.lifecycle.engine_view import EngineView, Supervisor
from stageloom.edge_agent.lifecycle.events import (
    Action,
    CheckPlan,
    LoadInEngine,
    PlanStaged,
    StopEngine,
)
from stageloom.edge_agent.lifecycle.facts import PlanFacts
from stageloom.edge_agent.lifecycle.output_runner import OutputRunner
from stageloom.edge_agent.lifecycle.probation import Probation
from stageloom.edge_agent.lifecycle.states import LOCAL_EPOCH, AttemptId, PlanRef, RunnablePlan
from stageloom.edge_agent.lifecycle.trial_runner import TrialRunner
from stageloom.edge_agent.lifecycle.waiting import WaitingLog
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.engine.trial import TrialRecord, TrialResult
from stageloom.shared.engine.windows import Side
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import DeviceState, Origin
from stageloom.shared.messages.telemetry import PlanActivated

_NEVER: AttemptId = (0, 0)
_RATES_S = 10.0


_FIRST_S: Final = 1.0


_LONGEST_S: Final = 60.0


class Unusable(NamedTuple):
    """Why a plan does not run here."""

    reason: str
    may_pass: bool  # by itself: a plan that did not load may load later, one that is not legal stays so


class Restoring:
    """When last-known-good that did not load is tried again: after 1, 2, 4, ... 60 s, without an end.

    A GPU's driver may come later than the agent, and memory may be short for a while.
    """

    def __init__(self, patience_s: float, now_s: float) -> None:
        """It has just failed for the first time; for `patience_s` that is no verdict."""
        self.told = False  # the core knows
        self._verdict_s = now_s + patience_s
        self._delay_s = _FIRST_S
        self._again_s = now_s + self._delay_s

    def overdue(self, now_s: float) -> bool:
        """Whether it has failed for so long that the core must know."""
        return now_s >= self._verdict_s

    def due(self, now_s: float) -> bool:
        """Whether to try now; if so, the next try is due later."""
        if now_s < self._again_s:
            return False
        self._delay_s = min(2 * self._delay_s, _LONGEST_S)
        self._again_s = now_s + self._delay_s
        return True


_DOING: Final = {DeviceState.RECEIVED: "verifying", DeviceState.VERIFIED: "staging"}


@dataclass
class Candidate:
    """The plan of an attempt, the state of the attempt that is worked on here, and what watches it there."""

    attempt: AttemptId
    plan: RunnablePlan
    state: DeviceState
    guarded: bool = False
    idle: bool = False  # nothing came before it ran, so that there is nothing to compare with
    probation: Probation | None = None
    runner: TrialRunner | OutputRunner | None = None

    @property
    def digest(self) -> Digest:
        return self.plan.ref.digest

    @property
    def local(self) -> bool:
        """The plan was made here: no generation names it."""
        return self.attempt[0] == LOCAL_EPOCH

    @property
    def runs(self) -> bool:
        """It runs or is to run next, for good."""
        return self.state is DeviceState.PROBATION

    def side_of(self, plan: RunnablePlan) -> Side:
        """Which of a trial's two plans it is."""
        return Side.CANDIDATE if plan.ref.digest == self.digest else Side.CONTROL

    @property
    def in_window(self) -> bool:
        """It runs in a trial, or has won it and waits for the word to stay."""
        return self.runner is not None and self.runner.side is Side.CANDIDATE


class Outcomes(Protocol):
    """What became of a plan, for the owner of the durable state, whose actions come back."""

    def verified(self, attempt: AttemptId) -> list[Action]: ...

    def staged(self, staged: PlanStaged) -> list[Action]: ...

    def trial_begins(self, attempt: AttemptId, record: TrialRecord, lasts: str) -> list[Action]: ...

    def trial_decided(
        self, attempt: AttemptId, control: Digest | None, result: TrialResult
    ) -> list[Action]: ...

    def passed(self, attempt: AttemptId) -> list[Action]: ...

    def failed(self, attempt: AttemptId, reason: str) -> list[Action]: ...

    def restore_failed(self, reason: str) -> list[Action]: ...

    def active_changed(self, active: PlanRef | None) -> None: ...

    def artifact_gone(self, digest: Digest) -> None: ...

    def forgot(self) -> None: ...


class Pursuit:
    """What is known of plans here, which of them is to run, and the next steps towards it."""

    outcomes: Outcomes

    def __init__(
        self,
        supervisor: Supervisor,
        fallback: RunnablePlan | None,
        waiting: WaitingLog,
    ) -> None:
        self._supervisor = supervisor
        self._waiting = waiting
        self._good: RunnablePlan | None = None
        self._fallback = fallback
        self._adopted: RunnablePlan | None = None  # runs on although its attempt was abandoned
        self._candidate: Candidate | None = None
        self._engine = EngineView()
        self._keys = itertools.count(1)
        self._served: Mapping[str, ModelSignature] = {}
        self._checking: set[Digest] = set()
        self._checked: dict[Digest, PlanFacts] = {}
        self._unusable: dict[Digest, Unusable] = {}
        self._announced: Digest | None = None  # the plan that was last said to run outside of windows
        self._exchanging = False  # one plan gives way before the other is loaded: both do not fit

    # -- what others ask ------------------------------------------------------------------------------------

    @property
    def active(self) -> RunnablePlan | None:
        return self._engine.running

    @property
    def models(self) -> Mapping[str, ModelSignature]:
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
    def engine_stopping(self) -> bool:
        """The engine process was told to end, and has not yet."""
        return self._engine.stopping

    @property
    def loading(self) -> bool:
        """A plan is being loaded, which may take the engine's time."""
        return bool(self._engine.loading)

    @property
    def tries_plan(self) -> bool:
        """A plan is loaded, or its outputs are compared: if the engine process ends, it is that plan."""
        return self.loading or isinstance(self.runner, OutputRunner)

    @property
    def exchanging(self) -> bool:
        """One plan gives way to another; tasks wait in the engine's queues meanwhile."""
        return self._exchanging

    @property
    def phase(self) -> str | None:
        """What is being done about the present attempt, as `TrialStatus.phase` spells it."""
        candidate = self._candidate
        if candidate is None:
            return None
        if candidate.runs and candidate.probation is None:
            return "activating"
        return _DOING.get(candidate.state, candidate.state.value)

    @property
    def tried(self) -> RunnablePlan | None:
        """The plan of an attempt that has not won: on its way, or on trial beside the incumbent."""
        candidate = self._candidate
        return candidate.plan if candidate is not None and not candidate.runs else None

    @property
    def runner(self) -> TrialRunner | OutputRunner | None:
        """The trial that runs, if one does."""
        runner = self._candidate.runner if self._candidate else None
        return None if runner is None or runner.over else runner

    @property
    def trouble(self) -> str:
        """Why last-known-good does not run; empty where it does, or is on its way."""
        found = self._unusable.get(self._good.ref.digest) if self._good is not None else None
        return found.reason if found is not None else ""

    def plan_of(self, key: PlanKey) -> RunnablePlan | None:
        """The plan behind a key of the present engine process."""
        return self._engine.loaded.get(key) or self._engine.loading.get(key)

    def facts_of(self, digest: Digest) -> PlanFacts | None:
        """What is known of a plan that was checked."""
        return self._checked.get(digest)

    def needed(self) -> set[Digest]:
        """Artifacts that a plan held here names."""
        return {need.digest for plan in self._held() for need in plan.artifacts}

    def _held(self) -> list[RunnablePlan]:
        """Every plan that has a part to play, here or in the engine process."""
        candidate, engine = self._candidate, self._engine
        plans = [self._good, self._fallback, self._adopted, candidate.plan if candidate else None]
        return [
            *(plan for plan in plans if plan is not None),
            *engine.loaded.values(),
            *engine.loading.values(),
        ]

    # -- steps towards the target ---------------------------------------------------------------------------

    def _target(self) -> RunnablePlan | None:
        candidate = self._candidate
        if candidate is not None and (candidate.runs or candidate.in_window):
            return candidate.plan
        return self.incumbent

    @property
    def incumbent(self) -> RunnablePlan | None:
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
        if candidate.state is DeviceState.RECEIVED:
            return self.outcomes.verified(candidate.attempt)
        if candidate.state is not DeviceState.VERIFIED or not self._at_rest():
            return []
        key = engine.key_of(candidate.digest, engine.loaded)
        if key in engine.freed:
            return []
        if key is None and candidate.digest not in engine.crowded:
            if engine.stale and engine.up and not engine.stopping and engine.running is None:
                engine.stopping = True  # a newcomer is judged by a fresh process
                return [StopEngine()]
            return self._load(candidate.plan)
        candidate.state = DeviceState.STAGED
        return self.outcomes.staged(self._staged(candidate))

    def _at_rest(self) -> bool:
        """What is to run runs, or nothing is: a newcomer must not hold it up, nor be compared with a hole."""
        target = self._target()
        return target is None or (self.active is not None and self.active.ref.digest == target.ref.digest)

    def _staged(self, candidate: Candidate) -> PlanStaged:
        control = self._control_for(candidate.digest)
        if control is None:
            running = None if self.active is None else self._checked.get(self.active.ref.digest)
            ours = self._checked[candidate.digest]
            if running is None:
                return PlanStaged(candidate.attempt, alone=True)
            return PlanStaged(
                candidate.attempt,
                interface=ours.new_interface(running),
                versions=ours.new_versions(running),
            )
        ours, theirs = self._checked[candidate.digest], self._checked[control.ref.digest]
        arrivals_per_s = self._waiting.last_arrivals_per_s(_RATES_S)
        return PlanStaged(
            candidate.attempt,
            control.ref.digest,
            ours.same_but_intervals(theirs),
            ours.starves(arrivals_per_s),
        )

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
        return [LoadInEngine(key, plan)]

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
        self._unusable = {digest: found for digest, found in self._unusable.items() if digest in held}
        engine, candidate = self._engine, self._candidate
        plans = [candidate.plan if candidate else None, self._target()]
        if candidate is not None and not candidate.runs:
            plans.append(self.incumbent)
        wanted = {plan.ref.digest for plan in plans if plan is not None}
        return engine.unload(
            key
            for key, plan in list(engine.loaded.items())
            if key not in (engine.asked, engine.active) and plan.ref.digest not in wanted
        )

    def _control_for(self, digest: Digest) -> RunnablePlan | None:
        """The plan that runs, if this one can be compared with it."""
        running = self.active
        ours = self._checked.get(digest)
        theirs = self._checked.get(running.ref.digest) if running is not None else None
        return running if ours and theirs and ours.compares_with(theirs) else None

    def _announce(self) -> list[Action]:
        """Say what runs, outside of the windows of a trial."""
        plan = self.active
        if plan is None or self.runner is not None:
            return []
        ref = self._ref_of(plan)
        actions: list[Action] = []
        if not (self._candidate and self._candidate.in_window):  # the core knows, once it has the verdict
            self.outcomes.active_changed(ref)
        if self._announced != ref.digest:
            self._announced = ref.digest
            candidate = self._candidate
            desired = candidate is not None and candidate.digest == ref.digest and not candidate.local
            attempt = candidate.attempt if candidate is not None and desired else _NEVER
            actions.append(PlanActivated(ref.digest, ref.origin, *attempt))
        return actions

    def _ref_of(self, plan: RunnablePlan) -> PlanRef:
        """The plan as reports name it."""
        ref = plan.ref
        return PlanRef(ref.digest, Origin.FALLBACK, ref.local_counter) if plan is self._fallback else ref
