"""What a plan will take on the device, worked out before anything is lowered.

Tensors are counted as the graph has them. The executor knows more after lowering (views, concatenations in
place), so that what it takes is at most this, but for scratch memory inside kernels.
"""

from functools import lru_cache
from math import prod

from stageloom.edge_agent.executor.cuda.layout import Call, CallKind, TensorForm, lay_out
from stageloom.edge_agent.executor.cuda.memory_plan import masks_to_hold
from stageloom.edge_agent.executor.cuda.recipe import staged, with_ends
from stageloom.edge_agent.executor.cuda.streams import fold_streams, streams_per_lane
from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.shared.bound import BoundCombined, BoundModel, BoundPlan
from stageloom.shared.ids import Digest, OpId, TensorId
from stageloom.shared.launch_list import LaunchList, lower
from stageloom.shared.merge import merged
from stageloom.shared.schedule import StageSchedule

_Place = tuple[int, TensorId]


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
    """Bytes of borders and arenas, and of the stacked kernels of merge stages."""
    borders = sum(model.plan.replicas * _border_bytes(model) for model in bound.models)
    arenas = [_arena_bytes(bound, combined) for combined in bound.combined]
    asides = sum(
        model.plan.batch * sum(model.graph.tensors[t].nbytes for t in model.blocks[member.block].makes)
        for combined in bound.combined
        for position, member in enumerate(combined.members)
        if staged(combined, bound.models, combined.full_mask, position)
        for model in [bound.models[member.model]]
    )
    buffers = borders + asides + (max(arenas) if bound.plan.lanes == 1 else sum(arenas))
    return buffers + _halved(_merged_bytes(bound), Precision(bound.plan.executor.precision))


def _merged_bytes(bound: BoundPlan) -> int:
    """Kernels and biases of every merge stage; replicas share them."""
    stages: dict[tuple[int, tuple[OpId, ...]], int] = {}
    for combined in bound.combined:
        schedule = combined.plan.schedule
        for stage in schedule.stages if isinstance(schedule, StageSchedule) else ():
            if not stage.merge:
                continue
            model = combined.members[combined.graph.member_of[stage.operators[0]]].model
            graph = bound.models[model].graph
            ops = tuple(sorted(combined.graph.model_op(op) for op in stage.operators))
            one = merged(graph, ops)
            channels = graph.tensors[one.input].shape[1]
            stages[model, ops] = 4 * sum(one.filters) * (channels * prod(one.convolution.kernel) + 1)
    return sum(stages.values())


def _border_bytes(model: BoundModel) -> int:
    graph = model.graph
    slots = {t for block in model.blocks for t in block.live_in}
    return model.plan.batch * sum(graph.tensors[t].nbytes for t in (*slots, *graph.inputs, *graph.outputs))


def _arena_bytes(bound: BoundPlan, combined: BoundCombined) -> int:
    """What any mask needs at its largest batch, or a member alone where that is more."""
    needed = 0
    for mask in masks_to_hold(len(combined.members)):
        items = lower(combined.plan.schedule, combined.graph, mask, barrier=bound.plan.barrier)
        folded = fold_streams(items, streams_per_lane(bound.plan.lanes))
        needed = max(needed, _laid_out(bound, combined, folded))
    for position in range(len(combined.members)):
        one = lower(combined.plan.schedule, combined.graph, 1 << position, barrier=bound.plan.barrier)
        needed = max(needed, _laid_out(bound, combined, fold_streams(one, 1)))
    return needed


def _laid_out(bound: BoundPlan, combined: BoundCombined, items: LaunchList) -> int:
    """Bytes of what lies between borders, with a buffer for every tensor."""
    calls: list[Call[_Place]] = []
    borders: set[_Place] = set()
    forms: dict[_Place, TensorForm] = {}
    ended = with_ends(items)
    for index, item in enumerate(ended):
        for op in item.ops:
            member = combined.members[item.member]
            model = bound.models[member.model]
            operator = model.graph.operators[combined.graph.model_op(op)]
            reads = tuple((item.member, t) for t in operator.inputs)
            makes = tuple((item.member, t) for t in operator.outputs)
            for place in (*reads, *makes):
                forms[place] = _form(model, place[1])
                if _crosses(model, member.block, place[1]):
                    borders.add(place)
            calls.append(Call(index, CallKind.KERNEL, reads, makes))
    return lay_out(ended, calls, borders, forms).plan.nbytes


def _crosses(model: BoundModel, block: int, tensor: TensorId) -> bool:
    """Whether a tensor has a buffer at a border; outputs of the last block may need one in the arena, too."""
    last = block + 1 == len(model.blocks)
    return tensor in model.blocks[block].live_in or (not last and tensor in model.blocks[block].makes)


def _form(model: BoundModel, tensor: TensorId) -> TensorForm:
    found = model.graph.tensors[tensor]
    return TensorForm(found.shape, (), model.plan.batch * found.nbytes)


def _halved(nbytes: int, precision: Precision) -> int:
    return nbytes // 2 if precision is Precision.FP16 else nbytes
