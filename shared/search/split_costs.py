"""Costs of a plan's split operators from those of the operators themselves.

Costs are kept by artifact and operator. A plan that splits a model numbers its operators anew, under a key
of its own (`BoundModel.graph_key`), so that nothing measured of one graph is taken for the other. Here the
costs of an artifact are told under that key: an operator that is whole costs what it did, a half its share of
what its operators cost, by its extent (EOP's linear pattern). A join has no measured cost and is estimated by
its bytes. Resources of a plan are taken to be equally fast.
"""

from dataclasses import replace

from stageloom.shared.bound import BoundModel, BoundPlan
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.search.costs import CostTable
from stageloom.shared.split_graph import SplitOrigin, SplitRole


def split_costs(costs: CostTable, bound: BoundPlan) -> CostTable:
    """The costs with those of the plan's split models beside them; the same table where no model is split."""
    models = [model for model in bound.models if model.origins]
    if not models:
        return costs
    measured_s, measured_at = dict(costs.measured_s), dict(costs.measured_at)
    for model in models:
        measured_at[model.graph_key] = costs.measured_at.get(model.plan.artifact, 1)
        measured_s |= _of_model(costs, model)
    beside = {executor: split_costs(table, bound) for executor, table in costs.beside.items()}
    return replace(costs, measured_s=measured_s, measured_at=measured_at, beside=beside)


def _of_model(costs: CostTable, model: BoundModel) -> dict[tuple[Digest, OpId], float]:
    found: dict[tuple[Digest, OpId], float] = {}
    for op, origin in enumerate(model.origins):
        known = [costs.measured_s.get((model.plan.artifact, one)) for one in origin.ops]
        if origin.role is SplitRole.JOIN or None in known:
            continue
        whole_s = sum(seconds for seconds in known if seconds is not None)
        found[model.graph_key, OpId(op)] = whole_s * _share(model, origin)
    return found


def _share(model: BoundModel, origin: SplitOrigin) -> float:
    """The part of the operators' work that one of the derived graph's does."""
    if origin.role is SplitRole.WHOLE:
        return 1.0
    tensor, *_ = origin.halves[0]
    first = origin.boundary / model.graph.tensors[tensor].shape[origin.dim]
    return 1.0 - first if origin.second else first
