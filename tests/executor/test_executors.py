"""Several executors in one engine process: each plan runs on the one that it names."""

import threading
from collections.abc import Callable, Mapping

import pytest

from stageloom.edge_agent.executor.base import Executor
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

    def __init__(self, name: str, asked: Callable[[], None]) -> None:
        super().__init__()
        self.name = name
        self.closed = False
        self.asked = asked

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        if self.name == "broken":
            raise ExecutorError("it does not load")
        super().load(key, bound, artifacts)

    def stated_bytes(self, bound: BoundPlan, *, alone: bool = False) -> int:
        self.asked()
        return super().stated_bytes(bound, alone=alone)

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
        self.while_asked: Callable[[], None] = lambda: None

    def __call__(self, name: str) -> Played:
        if name == "absent":
            raise ExecutorError("executor 'absent' cannot be loaded", remedy="pip install it")
        self.all.append(Played(name, lambda: self.while_asked()))
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


def test_a_device_is_lost_where_one_executor_says_so_and_others_need_have_none(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors = Executors(made)
    executors.load(ONE, plan_on("a"), {})
    executors.load(OTHER, plan_on("b"), {})
    assert not executors.lost()
    monkeypatch.setattr(made.all[1], "lost", lambda: True, raising=False)
    assert executors.lost()


def test_a_device_that_was_lost_in_a_load_stays_lost_though_its_executor_is_closed(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*asked: object) -> None:
        raise ExecutorError("an illegal memory access was encountered")

    executors = Executors(made)
    executors.load(ONE, plan_on("a"), {})
    executors.stated_bytes(plan_on("b"))
    monkeypatch.setattr(made.all[-1], "load", fail)
    monkeypatch.setattr(made.all[-1], "lost", lambda: True, raising=False)
    with pytest.raises(ExecutorError, match="illegal"):
        executors.load(OTHER, plan_on("b"), {})
    assert made.all[-1].closed and executors.lost()


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


def test_an_executor_that_is_asked_for_bytes_is_not_closed_by_a_plan_that_goes_meanwhile(made: Made) -> None:
    executors = Executors(made)
    executors.load(ONE, plan_on("a"), {})
    executors.load(OTHER, plan_on("b"), {})
    made.while_asked = lambda: executors.unload(OTHER)
    assert executors.stated_bytes(plan_on("c")) == 0
    assert [(one.name, one.closed) for one in made.all] == [("a", False), ("b", True), ("c", False)]
    executors.load(THIRD, plan_on("a"), {})
    assert made.all[2].closed, "nobody needs it any more"


class Locked(dict[PlanKey, tuple[Executor, ...]]):
    """Plans that are forgotten under a lock only, since others go through them under it."""

    lock: threading.Lock

    def __delitem__(self, key: PlanKey) -> None:
        assert self.lock.locked()
        super().__delitem__(key)


def test_a_plan_is_forgotten_while_no_thread_goes_through_them(made: Made) -> None:
    executors = Executors(made)
    plans = Locked()
    executors._all_of, plans.lock = plans, executors._lock
    executors.load(ONE, plan_on("a"), {})
    executors.load(OTHER, plan_on("a"), {})
    with pytest.raises(ExecutorError):
        executors.load(THIRD, plan_on("broken"), {})
    executors.unload(ONE)
    assert list(plans) == [OTHER]


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
