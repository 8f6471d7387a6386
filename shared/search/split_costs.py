"""Costs of a plan's split operators, and of whole ones on other resources, from those of the operators.

Costs are kept by artifact and operator. A plan that splits a model numbers its operators anew, under a key
of its own (`BoundModel.graph_key`), so that nothing measured of one graph is taken for the other. Here the
costs of an artifact are told under that key, each on the executor of the resource that the plan gives it: an
operator that is whole costs what it did, and a half its share of what its operators cost. Of a model that is
not split the groups on other resources alone are told, in the plan's own table, under the artifact.

That share is what was measured of parts (`CostTable.parts`); where nothing was, the share of the extent,
EOP's linear pattern. With parts a join costs a hand-over, the copy of halves that do not lie one behind the
other, and that sessions begin anew at the halves and behind them; so does a group of whole operators that is
away. Without, it is estimated by its bytes.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from stageloom.shared.bound import BoundPlan
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.partition import Axis
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.schedule import OWN_RESOURCE, StageSchedule
from stageloom.shared.search.costs import CostTable
from stageloom.shared.split_graph import SplitOrigin, SplitRole


def split_costs(costs: CostTable, bound: BoundPlan) -> CostTable:
    """The costs with those of the plan's split models and of groups on other resources; the same table where
    there are neither."""
    if not bound.splits and not bound.names_resources:
        return costs
    measured_at = dict(costs.measured_at)
    found: dict[tuple[Digest, OpId], float] = {}
    for number, model in enumerate(bound.models):
        if model.origins:
            measured_at[model.graph_key] = costs.measured_at.get(model.plan.artifact, 1)
        found |= _PlacedModel(costs, bound, number).operators_s()
    tables = {
        executor: replace(table, measured_s={**table.measured_s, **found}, measured_at=measured_at)
        for executor, table in costs.beside.items()
    }
    return replace(costs, measured_s={**costs.measured_s, **found}, measured_at=measured_at, beside=tables)


class _PlacedModel:
    """One model of a plan, and where its operators run."""

    def __init__(self, costs: CostTable, bound: BoundPlan, number: int) -> None:
        self._costs = costs
        self._model = bound.models[number]
        self._splits = {split.first: split for split in self._model.plan.splits}
        self._under: dict[int, ExecutorOptions] = {}
        self._away: set[int] = set()
        self._begins_away: set[int] = set()
        for op, executor, away, begins in _placed(bound, number):
            self._under[op] = executor
            if away:
                self._away.add(op)
            if away and begins:
                self._begins_away.add(op)

    def operators_s(self) -> dict[tuple[Digest, OpId], float]:
        """Seconds of the derived graph's operators, or of those away from home, as far as they are known."""
        found = {}
        for op in range(len(self._model.origins)) if self._model.origins else sorted(self._away):
            origin = self._model.origin(op)
            seconds = self._join_s(op, origin) if origin.role is SplitRole.JOIN else self._part_s(op, origin)
            if seconds is not None:
                found[self._model.graph_key, OpId(op)] = seconds
        return found

    def _table(self, op: int) -> CostTable:
        executor = self._under.get(op)
        return self._costs if executor is None else self._costs.under(executor)

    def _part_s(self, op: int, origin: SplitOrigin) -> float | None:
        """An operator, or half of some."""
        table, artifact = self._table(op), self._model.plan.artifact
        parts = table.parts.get(artifact)
        part, axis = self._extent(origin), self._axis(origin)
        total_s = 0.0
        for place, own in enumerate(origin.ops):
            whole_s = table.measured_s.get((artifact, own))
            if whole_s is None:
                return None
            share = 1.0 if axis is None else part if parts is None else parts.share(own, axis, part)
            total_s += whole_s * share
            if parts is not None and not place and (axis is not None or op in self._begins_away):
                total_s += whole_s * parts.border * share
        if parts is not None and axis is None and op in self._begins_away:
            total_s += parts.handover_s
        return total_s

    def _join_s(self, op: int, origin: SplitOrigin) -> float | None:
        """The hand-over of a split, the copy of its halves, and the border of what follows."""
        parts = self._table(op).parts.get(self._model.plan.artifact)
        if parts is None:
            return None
        graph = self._model.graph
        copied = sum(
            graph.tensors[tensor].nbytes
            for tensor, *_ in origin.halves
            if prod(graph.tensors[tensor].shape[: origin.dim]) > 1
        )
        following = self._model.origins[op + 1] if op + 1 < len(self._model.origins) else None
        border_s = 0.0
        if following is not None and following.role is SplitRole.WHOLE:
            key = self._model.plan.artifact, following.ops[0]
            border_s = parts.border * self._table(op + 1).measured_s.get(key, 0.0)
        # A stage of several groups costs its barrier already, which a hand-over was measured with.
        handover_s = max(parts.handover_s - self._costs.rates.barrier_s, 0.0)
        return handover_s + copied / parts.copy_bytes_per_s + border_s

    def _axis(self, origin: SplitOrigin) -> Axis | None:
        """Of a half."""
        return None if origin.role is SplitRole.WHOLE else self._splits[origin.ops[0]].axis

    def _extent(self, origin: SplitOrigin) -> float:
        """The part of the output's extent that an operator of the derived graph makes."""
        if origin.role is SplitRole.WHOLE:
            return 1.0
        tensor, *_ = origin.halves[0]
        first = origin.boundary / self._model.graph.tensors[tensor].shape[origin.dim]
        return 1.0 - first if origin.second else first


def _placed(bound: BoundPlan, number: int) -> Iterator[tuple[int, ExecutorOptions, bool, bool]]:
    """Operators of a model's derived graph, the executor that runs each, whether its group names a resource,
    and whether the group begins there."""
    for index, combined in enumerate(bound.combined):
        schedule = combined.plan.schedule
        if not isinstance(schedule, StageSchedule):
            continue
        for stage in schedule.stages:
            for place, group in enumerate(stage.groups):
                resource = stage.resource(place)
                executor = bound.group_executor(index, 0, resource)
                away = resource != OWN_RESOURCE
                for op in group:
                    if combined.members[combined.graph.member_of[op]].model == number:
                        yield combined.graph.model_op(op), executor, away, op == group[0]
