"""What comes into a step from outside."""

from collections.abc import Mapping

from stageloom.edge_agent.executor.base import Rows
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, Step, StepMember
from stageloom.shared.errors import ExecutorError


def bucket_of(step: Step, member: StepMember) -> int:
    """The batch that the member's program was built for."""
    rank = (step.program.mask & ((1 << member.position) - 1)).bit_count()
    return step.program.buckets[rank]


def check_feeds(bound: BoundPlan, step: Step, feeds: Mapping[InstanceId, Rows]) -> None:
    """Raises:
    ExecutorError: inputs are missing or have another shape or type than the graph's.
    """
    for member in step.members:
        if member.member.block:
            continue
        graph = bound.models[member.member.model].graph
        rows = feeds.get(member.instance, ())
        if len(rows) != len(member.tasks):
            raise ExecutorError(f"step {step.id} begins instance {member.instance} without its inputs")
        for described in (graph.tensors[t] for t in graph.inputs):
            for row in rows:
                array = row[described.name]
                if array.shape != described.shape or array.dtype.name != described.dtype:
                    raise ExecutorError(
                        f"input {described.name!r} is {array.dtype} {list(array.shape)}, "
                        f"not {described.dtype} {list(described.shape)}"
                    )
