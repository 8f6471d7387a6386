"""Several executors in one engine process: each plan runs on the one that it names."""

from collections.abc import Mapping

import pytest

from stageloom.edge_agent.executor.executors import Executors
from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import Digest, StepId, TaskId
from stageloom.shared.plan import ExecutorOptions, Member
from tests.engine.plans import chains

ONE, OTHER, THIRD = PlanKey(1), PlanKey(2), PlanKey(3)


class Played(NullExecutor):
    """A null executor under another name, that says whether it was closed."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.closed = False

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        if self.name == "broken":
            raise ExecutorError("it does not load")
        super().load(key, bound, artifacts)

    @property
    def held_bytes(self) -> int:
        return 10 * len(self._plans)

    def close(self) -> None:
        super().close()
        self.closed = True


class Made:
    """The executors that were made, oldest first."""

    def __init__(self) -> None:
        self.all: list[Played] = []

    def __call__(self, name: str) -> Played:
        if name == "absent":
            raise ExecutorError("executor 'absent' cannot be loaded", remedy="pip install it")
        self.all.append(Played(name))
        return self.all[-1]


@pytest.fixture
def made() -> Made:
    return Made()


def plan_on(executor: str) -> BoundPlan:
    return chains(2, executor=ExecutorOptions(name=executor))


def step(number: int, plan: PlanKey, instance: int) -> Step:
    """The first block of an instance."""
    member = StepMember(0, Member(0, 0, 0), InstanceId(instance), (TaskId(number),), False)
    return Step(StepId(number), 0, ProgramKey(plan, 0, 1, (1,)), (member,), ())


def run(executors: Executors, number: int, plan: PlanKey) -> None:
    executors.issue(step(number, plan, number), {InstanceId(number): [{}]})
    executors.wait(StepId(number))


def test_each_step_runs_on_the_executor_that_its_plan_names(made: Made) -> None:
    executors = Executors(made)
    executors.load(ONE, plan_on("a"), {})
    executors.load(OTHER, plan_on("b"), {})
    for number, plan in enumerate((ONE, OTHER, OTHER, ONE)):
        run(executors, number, plan)
    assert [[record.step for record in one.history] for one in made.all] == [[0, 3], [1, 2]]
    assert executors.held_bytes == 20
    assert executors.runs("a") and executors.runs("b") and not executors.runs("c")


def test_an_instance_is_forgotten_wherever_it_ran(made: Made) -> None:
    executors = Executors(made)
    executors.load(ONE, plan_on("a"), {})
    executors.load(OTHER, plan_on("b"), {})
    run(executors, 0, ONE)
    run(executors, 1, OTHER)
    executors.drop(InstanceId(0))
    executors.drop(InstanceId(1))
    assert [one._next_block for one in made.all] == [{}, {}]


def test_an_executor_without_a_plan_is_closed_once_another_has_one(made: Made) -> None:
    executors = Executors(made)
    executors.load(ONE, plan_on("a"), {})
    executors.unload(ONE)
    assert not made.all[0].closed, "its plan may come back"
    executors.load(OTHER, plan_on("a"), {})
    assert len(made.all) == 1
    executors.load(THIRD, plan_on("b"), {})
    executors.unload(OTHER)
    assert [one.closed for one in made.all] == [True, False]
    executors.load(ONE, plan_on("a"), {})
    assert [one.name for one in made.all] == ["a", "b", "a"]


@pytest.mark.parametrize("name", ["broken", "absent"])
def test_an_executor_that_fails_leaves_the_other_as_it_was(made: Made, name: str) -> None:
    executors = Executors(made)
    executors.load(ONE, plan_on("a"), {})
    with pytest.raises(ExecutorError):
        executors.load(OTHER, plan_on(name), {})
    assert [one.closed for one in made.all] == [False, True][: len(made.all)]
    assert not executors.runs(name)
    run(executors, 0, ONE)


def test_tracing_holds_for_executors_made_before_and_after(made: Made) -> None:
    executors = Executors(made)
    executors.load(ONE, plan_on("a"), {})
    executors.tracing = True
    executors.load(OTHER, plan_on("b"), {})
    assert [one.tracing for one in made.all] == [True, True]
    executors.tracing = False
    assert [one.tracing for one in made.all] == [False, False]


def test_close_ends_every_executor_and_more_plans_may_come(made: Made) -> None:
    executors = Executors(made)
    executors.load(ONE, plan_on("a"), {})
    executors.load(OTHER, plan_on("b"), {})
    executors.close()
    assert all(one.closed for one in made.all)
    executors.load(ONE, plan_on("a"), {})
    run(executors, 0, ONE)
