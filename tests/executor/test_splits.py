"""Operators split over two resources, on executors with sessions: equal to the whole model."""

import numpy as np

from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId
from stageloom.shared.partition import Axis, Split
from stageloom.shared.plan import CombinedBlock, Member, ModelPlan, Plan, Resource, decode_plan
from stageloom.shared.split_graph import derive
from stageloom.shared.split_schedule import split_schedule
from tests.executor.contract.schedules import StepMaker
from tests.executor.drive import KEY, load, run
from tests.executor.models import artifact_of, difference, random_inputs, reference

TOLERANCE = 1e-4


def split_plan(artifact: Artifact, splits: tuple[Split, ...], batch: int = 1) -> Plan:
    """A plan of one model in one block, its halves on resources 0 and 1; the lane is on 0."""
    derived = derive(artifact.graph, splits)
    return Plan(
        models=(ModelPlan(name="m", artifact=artifact.digest, splits=splits, batch=batch),),
        combined=(CombinedBlock((Member(0, 0, 0),), split_schedule(derived.origins)),),
        resources=(Resource(), Resource()),
        lane_resources=(0,),
    )


def outputs_of(
    executor: Executor, bound: BoundPlan, inputs: dict[str, np.ndarray], number: int = 1
) -> dict[str, np.ndarray]:
    steps = StepMaker(KEY, bound)
    steps._next = 100 * number
    made = run(executor, steps.step(0, {0: (InstanceId(number), 1)}), {InstanceId(number): [inputs]})
    return dict(made[InstanceId(number)][0])


def test_one_convolution_split_on_channels_gives_what_the_whole_model_gives() -> None:
    model = artifact_of("squeezenet")
    op = next(i for i, one in enumerate(model.graph.operators) if one.kind == "Conv" and i)
    extent = model.graph.tensors[model.graph.operators[op].outputs[0]].shape[1]
    plan = split_plan(model, (Split(op, op, Axis.CHANNELS, extent // 2),))
    plan = decode_plan(plan.wire, plan.digest)
    executor = OnnxExecutor()
    try:
        bound = load(executor, plan, [model])
        inputs = random_inputs(model.graph, 1)
        wanted = reference(model, inputs, ["logits"])["logits"]
        assert difference(outputs_of(executor, bound, inputs)["logits"], wanted) < TOLERANCE
    finally:
        executor.close()
