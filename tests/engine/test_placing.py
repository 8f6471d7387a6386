"""Blocks of a plan that places them: where they run, what is copied, what is learned, and planted defects."""

from dataclasses import replace

import pytest

from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.engine.core import EngineCore
from stageloom.shared.engine.history import DurationHistory
from stageloom.shared.engine.placing import footprint, kind_on
from stageloom.shared.engine.residency import Bus
from stageloom.shared.engine.steps import Action, CopySlot, FinishTask, Outcome, PlanKey, Step, Task
from stageloom.shared.ids import StepId, TaskId
from stageloom.shared.plan import ExecutorOptions, Place, PlacementPolicy, Resource, StepChoice
from tests.engine.memory import Wrong
from tests.engine.plans import chains
from tests.engine.simulator import Scenario
from tests.engine.test_placed import DEFECTS

POLICIES = [one for one in PlacementPolicy if one is not PlacementPolicy.FIXED]


def halves(
    policy: PlacementPolicy = PlacementPolicy.DMDA, *, replicas: int = 4, memory: int = 1, **rules: object
) -> BoundPlan:
    """A model of two blocks: the head on resource 0, the tail there or on resource 1, by another executor."""
    bound = chains(2, fields={"replicas": replicas}, lanes=2)
    combined = tuple(
        replace(one, resources=(0,), further_places=(Place(1, 1),) if one.members[0].block else ())
        for one in bound.plan.combined
    )
    plan = replace(
        bound.plan,
        combined=combined,
        further_executors=(ExecutorOptions(name="slow"),),
        resources=(Resource(), Resource(memory=memory)),
        lane_resources=(0, 1),
        placement=policy,
        **rules,  # type: ignore[arg-type]
    )
    return bind(plan, {model.plan.artifact: model.graph for model in bound.models})


def known(bound: BoundPlan, head_s: float, tail_s: float, slow_tail_s: float) -> DurationHistory:
    """A history in which the three have been measured."""
    history = DurationHistory()
    home = {combined.members[0].block: index for index, combined in enumerate(bound.combined)}
    for block, resource, seconds in ((0, 0, head_s), (1, 0, tail_s), (1, 1, slow_tail_s)):
        for _ in range(3):
            what = footprint(bound, home[block], 1, (1,))
            history.add(what, kind_on(bound, home[block], resource), seconds)
    return history


class Rig:
    """A core with a plan; the test says when steps and copies end."""

    def __init__(
        self, bound: BoundPlan, history: DurationHistory | None = None, bus: Bus | None = None
    ) -> None:
        self.core = EngineCore(history=history, bus=bus)
        self.now = 0.0
        self.steps: dict[StepId, Step] = {}
        self.copies: list[CopySlot] = []
        self.ended: dict[TaskId, Outcome] = {}
        self._tasks = 0
        self.do(self.core.load(PlanKey(0), bound, 0.0))
        self.do(self.core.activate(PlanKey(0), 0.0))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Step):
                self.steps[action.id] = action
            elif isinstance(action, CopySlot):
                self.copies.append(action)
            elif isinstance(action, FinishTask):
                self.ended[action.task] = action.outcome

    def submit(self, deadline_s: float | None = None) -> TaskId:
        task = TaskId(self._tasks)
        self._tasks += 1
        new = Task(id=task, models=("a",), nbytes=1, deadline_s=deadline_s)
        self.do(self.core.submit(new, self.now))
        return task

    def end(self, lane: int, compute_s: float | None = None, error: str | None = None) -> Step:
        """The lane's oldest step ends."""
        step = next(one for one in self.steps.values() if one.lane == lane)
        del self.steps[step.id]
        self.do(self.core.step_done(step.id, self.now, error, compute_s))
        return step

    def end_copy(self) -> CopySlot:
        copy = self.copies.pop(0)
        self.do(self.core.copy_done(copy.id, self.now))
        return copy

    def where(self) -> list[tuple[int, int, int]]:
        """Lane, block and variant of the steps in flight."""
        return [(s.lane, s.members[0].member.block, s.program.variant) for s in self.steps.values()]


def test_a_tail_goes_where_it_ends_first_and_waits_there_for_its_copy() -> None:
    """
    1. Two tasks: the head of the first runs, the other's is booked behind it.
    2. The first head ends: its tail would wait for a head of 1 s and take 0.5 s here, and 1.2 s there.
    3. Its tensors are copied at once; the step comes when the copy has ended, by the other executor.
    """
    bound = halves()
    rig = Rig(bound, known(bound, 1.0, 0.5, 1.2))
    rig.submit()
    rig.submit()
    assert rig.where() == [(0, 0, 0)]
    rig.now = 1.0
    rig.end(0, 1.0)
    (copy,) = rig.copies
    assert (copy.slot[1].block, copy.node) == (1, 1)
    assert rig.where() == [(0, 0, 0)]
    rig.end_copy()
    assert rig.where() == [(0, 0, 0), (1, 1, 1)]
    rig.now = 2.2
    rig.end(1, 1.2)
    assert rig.ended == {TaskId(0): Outcome.COMPLETED}


def test_an_idle_fast_resource_keeps_its_tail() -> None:
    bound = halves()
    rig = Rig(bound, known(bound, 1.0, 0.5, 1.2))
    rig.submit()
    rig.end(0, 1.0)
    assert rig.where() == [(0, 1, 0)] and not rig.copies


def test_on_one_memory_nothing_is_copied() -> None:
    bound = halves(memory=0)
    rig = Rig(bound, known(bound, 1.0, 0.5, 1.2))
    rig.submit()
    rig.submit()
    rig.end(0, 1.0)
    assert rig.where() == [(0, 0, 0), (1, 1, 1)] and not rig.copies


def test_a_long_transfer_keeps_a_tail_at_home() -> None:
    bound = halves()
    rig = Rig(bound, known(bound, 1.0, 0.5, 1.2), Bus(latency_s=1.0))
    rig.submit()
    rig.submit()
    rig.now = 1.0
    rig.end(0, 1.0)
    assert not rig.copies


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_what_comes_on_both_resources(policy: PlacementPolicy) -> None:
    """Uncalibrated at first: each way is tried until it is known, then tails are shared out."""
    rig = Rig(halves(policy))
    ran = set()
    for _ in range(40):
        rig.submit()
    while rig.steps or rig.copies:
        while rig.copies:
            rig.end_copy()
        ran.update(rig.where())
        rig.now += 0.5
        lane = next(iter(rig.steps.values())).lane
        rig.end(lane, 1.0 if lane == 0 else 1.5)
    assert set(rig.ended.values()) == {Outcome.COMPLETED} and len(rig.ended) == 40
    assert ran == {(0, 0, 0), (0, 1, 0), (1, 1, 1)}


def test_what_a_step_took_is_learned_unless_it_failed() -> None:
    bound = halves()
    rig = Rig(bound)
    kind = kind_on(bound, 0, 0)
    what = footprint(bound, 0, 1, (1,))
    for took in (1.0, 2.0):
        rig.submit()
        rig.end(0, took)
        while rig.steps or rig.copies:
            if rig.copies:
                rig.end_copy()
            else:
                rig.end(next(iter(rig.steps.values())).lane, 1.0)
    rig.submit()
    rig.end(0, 9.0, error="broke")
    assert [row.numbers for row in rig.core.history.rows() if (row.footprint, row.kind) == (what, kind)] == [
        (1.0, 2.0)
    ]


def test_within_a_resource_the_earliest_deadline_goes_first() -> None:
    """Three tails are placed on the slow resource; the one that is due first overtakes the one that waits."""
    bound = halves(PlacementPolicy.EAGER, step_choice=StepChoice.DEADLINE, memory=0)
    only_there = tuple(
        replace(one, resources=(1,), executor=1, further_places=()) if one.members[0].block else one
        for one in bound.plan.combined
    )
    dm = replace(bound.plan, combined=only_there, placement=PlacementPolicy.DM)
    rig = Rig(bind(dm, {model.plan.artifact: model.graph for model in bound.models}))
    due = {rig.submit(deadline_s): deadline_s for deadline_s in (50.0, 90.0, 70.0)}
    for _ in due:
        rig.end(0, 1.0)
    order = [rig.end(1, 1.0).members[0].tasks[0] for _ in due]
    assert [due[task] for task in order] == [50.0, 70.0, 90.0]


def test_a_task_that_is_cancelled_while_its_tensors_are_copied_leaves_nothing_booked() -> None:
    bound = halves(replicas=1)
    rig = Rig(bound, known(bound, 1.0, 5.0, 1.2))
    first = rig.submit()
    rig.end(0, 1.0)
    assert rig.copies
    rig.do(rig.core.cancel(first, rig.now))
    placement = rig.core._plans[PlanKey(0)].placement
    assert placement is not None
    assert [worker.tasks for worker in placement.placer.workers] == [0, 0]
    rig.submit()
    assert not rig.steps, "the next head would overwrite the slot while it is copied"
    rig.end_copy()
    rig.end(0, 1.0)
    rig.end_copy()
    rig.end(1, 1.0)
    assert rig.ended[TaskId(1)] is Outcome.COMPLETED


def test_a_batch_that_shrinks_while_it_waits_is_learned_of_as_what_ran() -> None:
    """
    1. Four tasks of one block, in batches of two, on one lane: two run alone, the others wait together.
    2. The batch is placed behind the second step, and one of its tasks is cancelled.
    """
    bound = chains(1, fields={"replicas": 2, "batch": 2}, lanes=2)
    plan = replace(
        bound.plan,
        combined=tuple(replace(one, resources=(0,)) for one in bound.plan.combined),
        resources=(Resource(), Resource()),
        lane_resources=(0, 1),
        placement=PlacementPolicy.DMDA,
    )
    rig = Rig(bind(plan, {model.plan.artifact: model.graph for model in bound.models}))
    *_, third, fourth = [rig.submit() for _ in range(4)]
    rig.end(0, 1.0)
    rig.do(rig.core.cancel(fourth, rig.now))
    rig.end(0, 1.0)
    assert rig.end(0, 7.0).members[0].tasks == (third,)
    (row,) = rig.core.history.rows()
    assert (row.footprint, row.numbers) == (footprint(bound, 0, 1, (1,)), (1.0, 1.0, 7.0))


def test_only_a_copy_in_flight_can_end() -> None:
    rig = Rig(halves())
    with pytest.raises(ValueError, match="copy 7 is not in flight"):
        rig.core.copy_done(StepId(7), 0.0)


FOUND: dict[str, tuple[type[AssertionError], str]] = {
    "missing copy": (Wrong, "where it is not valid"),
    "stale residency": (Wrong, "where it is not valid"),
    "exp_start not renewed": (AssertionError, "exp_start lies in the past"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_simulated_engine_finds_what_is_planted(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device finds wrong data by what lies in its memory, the audit what was not taken back."""
    owner, methods, _ = DEFECTS[defect]
    for name, method in methods.items():
        monkeypatch.setattr(owner, name, method)
    error, words = FOUND.get(defect, (AssertionError, "taken back"))
    assert words in next(filter(None, (_outcome(error, Scenario(seed)) for seed in range(300))), "")


def _outcome(error: type[AssertionError], scenario: Scenario) -> str:
    try:
        scenario.run()
    except error as caught:
        return str(caught)
    return ""
