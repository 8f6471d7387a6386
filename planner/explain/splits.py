"""The splits of a plan in figures: what each half takes, and what the model takes without them. Pure."""

from collections.abc import Iterator

from stageloom.planner.replan.predict import block_costs, step_s
from stageloom.planner.schema.explanation import SplitExplanation
from stageloom.shared.bound import BoundModel, BoundPlan
from stageloom.shared.ids import OpId
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.split_costs import split_costs
from stageloom.shared.split_graph import SplitOrigin, SplitRole


def explain_splits(bound: BoundPlan, costs: CostTable) -> Iterator[SplitExplanation]:
    """Every split of every model, in order; `costs` are those of the plan's executors."""
    table = split_costs(costs, bound)
    for model in bound.models:
        splits = {split.first: split for split in model.plan.splits}
        for op, origin in enumerate(model.origins):
            if origin.role is not SplitRole.FIRST:
                continue
            split = splits[origin.ops[0]]
            first, last = (model.source.operators[one] for one in (split.first, split.last))
            halves = [
                1e6 * table.operator_s(model.graph_key, model.graph, OpId(half)) for half in (op, op + 1)
            ]
            yield SplitExplanation(
                model=model.plan.name,
                first=split.first,
                last=split.last,
                names=first.name if split.first == split.last else f"{first.name} ... {last.name}",
                axis=split.axis.value,
                boundary=split.boundary,
                extent=_extent(model, origin),
                halves_us=(halves[0], halves[1]),
                whole_us=1e6 * _whole_s(model, origin, costs),
                measured=parts_measured(model, origin, costs),
            )


def unsplit_s(bound: BoundPlan, costs: CostTable, predicted_s: float) -> float | None:
    """Busy seconds as `predict` has them for one task of each model, were no operator split.

    None where no model is split, or one is in a combined block with others.
    """
    total_s = predicted_s
    for index, combined in enumerate(bound.combined):
        models = [bound.models[member.model] for member in combined.members]
        if not any(model.origins for model in models):
            continue
        if len(models) > 1:
            return None
        (model,) = models
        split_s = step_s(
            block_costs(bound, index, costs), combined.graph, combined.plan.schedule, combined.full_mask
        )
        under = costs.under(bound.executor_of(index))
        block = model.blocks[combined.members[0].block]
        ops = sorted({own for op in block.operators for own in model.origin(op).ops})
        whole_s = sum(under.operator_s(model.plan.artifact, model.source, op) for op in ops)
        total_s += (whole_s - split_s) / (model.plan.replicas * model.plan.batch)
    return total_s if bound.splits else None


def _extent(model: BoundModel, origin: SplitOrigin) -> int:
    tensor, *_ = origin.halves[0]
    return model.graph.tensors[tensor].shape[origin.dim]


def _whole_s(model: BoundModel, origin: SplitOrigin, costs: CostTable) -> float:
    return sum(costs.operator_s(model.plan.artifact, model.source, op) for op in origin.ops)


def parts_measured(model: BoundModel, origin: SplitOrigin, costs: CostTable) -> bool:
    """Whether parts of all operators of a split were measured on each executor of the plan."""
    split = next(one for one in model.plan.splits if one.first == origin.ops[0])
    return all(
        (parts := table.parts.get(model.plan.artifact)) is not None
        and all((op, split.axis) in parts.samples_s for op in origin.ops)
        for table in (costs, *costs.beside.values())
    )
