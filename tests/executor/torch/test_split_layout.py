"""Where the halves of split operators lie in a program of torch."""

from stageloom.edge_agent.executor.torch.plans import TorchPlans
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.partition import Axis, Split
from stageloom.shared.split_graph import SplitRole
from tests.executor.installed import installed
from tests.executor.models import artifact_of
from tests.executor.split_cases import bound_split, split_plan


def test_the_join_of_channels_copies_nothing() -> None:
    artifact = artifact_of("squeezenet")
    ops = [op for op, one in enumerate(artifact.graph.operators) if one.kind == "Conv"]
    splits = tuple(Split(op, op, Axis.CHANNELS, 2) for op in ops)
    executor = installed("torch_cpu")
    assert isinstance(executor, TorchPlans)
    try:
        plan = split_plan(artifact, splits, executors=("torch_cpu", "torch_cpu"))
        bound = bound_split(artifact, plan)
        executor.load(PlanKey(1), bound, {artifact.digest: artifact})
        slices = executor._plans[PlanKey(1)].recipe(0, {0: 1}).layout.slices
    finally:
        executor.close()
    placed = {value.tensor for value in slices}
    joins = [origin for origin in bound.models[0].origins if origin.role is SplitRole.JOIN]
    halves = {half for origin in joins for _, *both in origin.halves for half in both}
    assert len(halves) == 2 * len(ops) and halves <= placed
