"""What the engine relies on in every executor, whether it computes or not."""

import random
import threading
from collections.abc import Iterator

import pytest

from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.executor.executors import EXECUTORS, make_executor
from stageloom.shared.engine.steps import InstanceId
from stageloom.shared.errors import ExecutorError, PlanError
from stageloom.shared.plan import Member
from tests.executor.contract.schedules import (
    StepMaker,
    bound_of,
    graph_of,
    plan_of,
    random_stages,
    random_streams,
)
from tests.executor.drive import KEY, halves, load, run
from tests.executor.installed import installed
from tests.executor.models import artifact_of, random_inputs


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.gpu) if name.endswith("_cuda") else name for name in EXECUTORS
    ]
)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Every executor that this machine has; one whose packages are not installed is skipped."""
    made = installed(request.param)
    yield made
    made.close()


def test_outputs_leave_with_the_last_block_and_only_then(executor: Executor) -> None:
    model = artifact_of("squeezenet")
    bound = load(executor, plan_of([model], [halves(model)], [[Member(0, 0, 0)], [Member(0, 0, 1)]]), [model])
    steps = StepMaker(KEY, bound)
    one = InstanceId(1)
    first = run(executor, steps.step(0, {0: (one, 1)}), {one: [random_inputs(model.graph, 1)]})
    assert first == {}
    (row,) = run(executor, steps.step(1, {0: (one, 1)}), {})[one]
    assert row["logits"].shape == (1, 1000)


def test_a_step_waits_for_the_steps_it_names(executor: Executor) -> None:
    """1. Block 0 is issued on lane 0. 2. Block 1 is issued and waited for on lane 1. 3. Block 0 runs last."""
    model = artifact_of("squeezenet")
    bound = load(executor, plan_of([model], [halves(model)], [[Member(0, 0, 0)], [Member(0, 0, 1)]]), [model])
    steps = StepMaker(KEY, bound)
    one = InstanceId(1)
    first = steps.step(0, {0: (one, 1)})
    second = steps.step(1, {0: (one, 1)}, after=[first.id], lane=1)
    for step in (first, second):
        executor.prepare(step.program)
    executor.issue(first, {one: [random_inputs(model.graph, 1)]})
    executor.issue(second, {})
    ended: list[int] = []
    late = threading.Thread(target=lambda: ended.append(executor.wait(second.id).outputs != {}))
    late.start()
    late.join(0.05)
    assert not ended or executor.name.endswith("_cuda"), "a device runs what was issued, waited for or not"
    executor.wait(first.id)
    late.join(30)
    assert ended == [True]


def test_an_instance_that_is_dropped_leaves_nothing_behind(executor: Executor) -> None:
    model = artifact_of("squeezenet")
    bound = load(executor, plan_of([model], [halves(model)], [[Member(0, 0, 0)], [Member(0, 0, 1)]]), [model])
    steps = StepMaker(KEY, bound)
    one = InstanceId(1)
    run(executor, steps.step(0, {0: (one, 1)}), {one: [random_inputs(model.graph, 1)]})
    executor.drop(one)
    with pytest.raises(ExecutorError):
        run(executor, steps.step(1, {0: (one, 1)}), {})


def test_tracing_times_every_item_of_the_launch_list(executor: Executor) -> None:
    model = artifact_of("googlenet")
    cuts = [()]
    schedule = random_stages(graph_of([model], cuts, [Member(0, 0, 0)]), random.Random(3))
    bound = load(executor, plan_of([model], cuts, [[Member(0, 0, 0)]], [schedule]), [model])
    executor.tracing = True
    step = StepMaker(KEY, bound).step(0, {0: (InstanceId(1), 1)})
    executor.prepare(step.program)
    executor.issue(step, {InstanceId(1): [random_inputs(model.graph, 1)]})
    result = executor.wait(step.id)
    assert sorted(group.item for group in result.groups) == list(range(len(result.groups)))
    # Where streams are measured a program may keep to one of them (P12).
    assert {group.stream for group in result.groups} > {0} or executor.name == "torch_cuda"
    assert all(result.started_s <= g.started_s <= g.ended_s <= result.ended_s for g in result.groups)


def test_an_unknown_executor_names_those_there_are() -> None:
    with pytest.raises(ExecutorError, match="'tpu'; use one of null, onnx"):
        make_executor("tpu")


def test_a_schedule_of_an_illegal_order_never_reaches_an_executor() -> None:
    model = artifact_of("squeezenet")
    graph = graph_of([model], [()], [Member(0, 0, 0)])
    backwards = random_streams(graph, random.Random(1))
    broken = type(backwards)(tuple(reversed(backwards.launches)))
    with pytest.raises(PlanError, match="violations"):
        bound_of(plan_of([model], [()], [[Member(0, 0, 0)]], [broken]), [model])
