"""Driving an executor by hand, one step after another."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stageloom.edge_agent.executor.base import Executor, Rows
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, PlanKey, Step
from stageloom.shared.plan import Plan
from tests.executor.contract.schedules import bound_of

KEY = PlanKey(1)


def load(executor: Executor, plan: Plan, artifacts: Sequence[Artifact], key: PlanKey = KEY) -> BoundPlan:
    """Bind a plan, all of it for this executor, and load it."""
    plan = replace(plan, executor=replace(plan.executor, name=executor.name))
    bound = bound_of(plan, artifacts)
    executor.load(key, bound, {artifact.digest: artifact for artifact in artifacts})
    return bound


def run(executor: Executor, step: Step, feeds: Mapping[InstanceId, Rows]) -> dict[InstanceId, Rows]:
    """Prepare, issue and wait; the outputs of the instances that ended."""
    if not step.fallback:
        executor.prepare(step.program)
    executor.issue(step, feeds)
    return dict(executor.wait(step.id).outputs)


def halves(artifact: Artifact) -> tuple[int, ...]:
    """The cut in the middle of those of the papers."""
    cuts = artifact.graph.partition("paper")
    return (cuts[len(cuts) // 2],)
