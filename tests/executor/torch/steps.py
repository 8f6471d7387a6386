"""Runs plans on an executor step by step, the way a core would, and says what should come out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stageloom.edge_agent.executor.base import Executor, Rows
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, PlanKey, Step
from stageloom.shared.plan import Member, Plan
from tests.executor.contract.schedules import bound_of
from tests.executor.models import difference, reference

KEY = PlanKey(1)
TOLERANCE = 1e-4


def load(executor: Executor, plan: Plan, artifacts: Sequence[Artifact], key: PlanKey = KEY) -> BoundPlan:
    """Load a plan under a key, all of it for this executor."""
    bound = bound_of(replace(plan, executor=replace(plan.executor, name=executor.name)), artifacts)
    executor.load(key, bound, {artifact.digest: artifact for artifact in artifacts})
    return bound


def run(
    executor: Executor, step: Step, feeds: Mapping[InstanceId, Rows] | None = None
) -> dict[InstanceId, Rows]:
    """Prepare, issue and wait for one step."""
    if not step.fallback:
        executor.prepare(step.program)
    executor.issue(step, feeds or {})
    return dict(executor.wait(step.id).outputs)


def halves(artifact: Artifact) -> tuple[int, ...]:
    """One cut in the middle."""
    cuts = artifact.graph.partition("paper")
    return (cuts[len(cuts) // 2],)


def thirds(artifact: Artifact) -> tuple[int, ...]:
    """Two cuts."""
    cuts = artifact.graph.partition("paper")
    return (cuts[len(cuts) // 3], cuts[2 * len(cuts) // 3])


def members(blocks: int, replica: int = 0, model: int = 0) -> list[Member]:
    """All blocks of one replica."""
    return [Member(model, replica, block) for block in range(blocks)]


def answer_of(artifact: Artifact, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The logits of the whole model in onnxruntime."""
    return reference(artifact, inputs, ["logits"])["logits"]


def wrong(artifact: Artifact, inputs: dict[str, np.ndarray], rows: Rows) -> bool:
    """Whether the only task's logits are not the whole model's."""
    (row,) = rows
    return not difference(row["logits"], answer_of(artifact, inputs)) < TOLERANCE
