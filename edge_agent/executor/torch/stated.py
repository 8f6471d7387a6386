"""What a plan will take on the device, worked out before anything is lowered.

Tensors are counted as the graph has them. The executor knows more after lowering (views, concatenations in
place), so that what it takes is at most this, but for scratch memory inside kernels.
"""

from functools import lru_cache
from math import prod

from edge_agent.executor.torch.layout import Call, Form, Kind, lay_out
from edge_agent.executor.torch.recipe import staged, with_ends
from edge_agent.executor.torch.streams import fold_streams, streams_per_lane
from edge_agent.lowering.dtypes import Precision
from shared.bound import BoundCombined, BoundModel, BoundPlan
from shared.graph import Graph
from shared.ids import Digest, TensorId
from shared.launch_list import lower


def stated_weight_bytes(bound: BoundPlan) -> dict[tuple[Digest, Precision], int]:
    """Bytes of every artifact's weights."""
    precision = Precision(bound.plan.executor.precision)
    return {
        (model.plan.artifact, precision): _halved(
            sum(o.weight_bytes for o in model.graph.operators), precision
        )
        for model in bound.models
    }


@lru_cache(maxsize=32)
def stated_plan_bytes(bound: BoundPlan) -> int:
    """Bytes of borders and arenas: what `buffers.PlanBuffers` allocates."""
    borders = sum(model.plan.replicas * _border_bytes(model) for model in bound.models)
    arenas = [_arena_bytes(bound, combined) for combined in bound.combined]
    asides = sum(
        model.plan.batch * sum(model.graph.tensors[t].nbytes for t in model.blocks[member.block].makes)
        for combined in bound.combined
        for position, member in enumerate(combined.members)
        if staged(combined, bound.models, combined.full_mask, position)
        for model in [bound.models[member.model]]
    )
    return borders + asides + (max(arenas) if bound.plan.lanes == 1 else sum(arenas))


def _border_bytes(model: BoundModel) -> int:
    graph = model.graph
    slots = {t for block in model.blocks for t in block.live_in}
    return model.plan.batch * sum(graph.tensors[t].nbytes for t in (*slots, *graph.inputs, *graph.outputs))


def _arena_bytes(bound: BoundPlan, combined: BoundCombined) -> int:
    """What the full mask needs at its largest batch, or a member alone where that is more."""
    full = lower(combined.plan.schedule, combined.graph, combined.full_mask, barrier=bound.plan.barrier)
    folded = fold_streams(full, streams_per_lane(bound.plan.lanes))
    needed = _laid_out(bound, combined, folded)
    for position in range(len(combined.members)):
        one = lower(combined.plan.schedule, combined.graph, 1 << position, barrier=bound.plan.barrier)
        needed = max(needed, _laid_out(bound, combined, fold_streams(one, 1)))
    return needed


def _laid_out(bound: BoundPlan, combined: BoundCombined, items: "tuple") -> int:  # type: ignore[type-arg]
    calls = []
    borders: set[tuple[int, TensorId]] = set()
    forms: dict[tuple[int, TensorId], Form] = {}
    ended = with_ends(items)
    for index, item in enumerate(ended):
        if not item.ops:
            continue
        member = combined.members[item.member]
        model = bound.models[member.model]
        block = model.blocks[member.block]
        for op in item.ops:
            operator = model.graph.operators[combined.graph.model_op(op)]
            reads = tuple((item.member, t) for t in operator.inputs)
            makes = tuple((item.member, t) for t in operator.outputs)
            borders |= {
                v
                for v in (*reads, *makes)
                if v[1] in block.live_in or (v[1] in block.makes and not _last(model, block.index))
            }
            forms |= {v: _form(model.graph, v[1], model.plan.batch) for v in (*reads, *makes)}
            calls.append(Call(index, Kind.KERNEL, reads, makes))
    return lay_out(ended, calls, borders, forms).plan.nbytes


def _last(model: BoundModel, block: int) -> bool:
    return block + 1 == len(model.blocks)


def _form(graph: Graph, tensor: TensorId, batch: int) -> Form:
    found = graph.tensors[tensor]
    return Form(found.shape, (), batch * found.nbytes * max(1, prod(found.shape[:0])))


def _halved(nbytes: int, precision: Precision) -> int:
    return nbytes // 2 if precision is Precision.FP16 else nbytes
