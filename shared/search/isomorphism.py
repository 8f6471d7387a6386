"""Blocks that are the same up to the numbering of their operators: one search serves them all.

Operators are numbered by what they are, not by where the file has them: colours start from the operators'
seconds and are refined by those of predecessors and successors until none changes (Weisfeiler and Leman
1968); then operators follow in topological order, smallest colour and earliest predecessors first. Equal
forms are isomorphic for certain, as they are compared whole. Where refinement cannot tell two operators apart
that no symmetry exchanges, isomorphic blocks may get different forms, and are searched twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stageloom.shared.bitmask import bits, mask_of
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Schedule, Stage, StageSchedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits, Scheduler
from stageloom.shared.search.symmetry import by_operators_alone


@dataclass(frozen=True, slots=True)
class Form:
    """A combined block renumbered; `order` says which operator came to each place."""

    key: tuple[Any, ...]  # equal for isomorphic blocks; hashable
    order: tuple[int, ...]  # [num_ops]


def form(graph: CombinedGraph, costs: StageCosts) -> Form:
    """The form of a block; members stay in their order, and their operators among themselves.

    Costs that say something of whole stages keep the numbering: only equal numbers are then equal blocks.
    """
    if not by_operators_alone(costs):
        return Form((graph.offsets, graph.predecessors, costs), tuple(range(graph.size)))
    order = _order(graph, _colours(graph, costs))
    place = {op: index for index, op in enumerate(order)}
    predecessors = tuple(mask_of(place[one] for one in bits(graph.predecessors[op])) for op in order)
    renumbered = StageCosts(
        tuple(costs.operators_s[op] for op in order),
        costs.contention,
        costs.barrier_s,
        merges=tuple(sorted((tuple(sorted(place[op] for op in ops)), s) for ops, s in costs.merges)),
        work_s=tuple(costs.work_s[op] for op in order) if costs.work_s else (),
    )
    return Form((graph.offsets, predecessors, renumbered), order)


def translated(schedule: StageSchedule, found: Form, wanted: Form) -> StageSchedule:
    """The schedule of one block as that of another one of an equal form."""
    becomes = dict(zip(found.order, wanted.order, strict=True))
    return StageSchedule(
        tuple(
            Stage(
                tuple(sorted(tuple(sorted(becomes[op] for op in group)) for group in stage.groups)),
                stage.merge,
            )
            for stage in schedule.stages
        )
    )


class Shared:
    """A scheduler that searches isomorphic blocks once, for one plan."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._found: dict[tuple[Any, Limits, Budget], tuple[StageSchedule, Form]] = {}

    def __call__(self, graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> Schedule:
        """The scheduler's answer, or that to an isomorphic block, translated."""
        wanted = form(graph, costs)
        known = self._found.get((wanted.key, limits, budget))
        if known is not None:
            return translated(*known, wanted)
        schedule = self._scheduler(graph, costs, limits, budget)
        if isinstance(schedule, StageSchedule):
            self._found[wanted.key, limits, budget] = schedule, wanted
        return schedule


def _colours(graph: CombinedGraph, costs: StageCosts) -> list[int]:
    """Per operator a number that depends on no numbering. [num_ops]"""
    work_s = costs.work_s or (0.0,) * graph.size
    colours = _ranks([(graph.member_of[op], costs.operators_s[op], work_s[op]) for op in range(graph.size)])
    while True:
        around = [
            (
                colours[op],
                sorted(colours[one] for one in bits(graph.predecessors[op])),
                sorted(colours[one] for one in bits(graph.successors[op])),
            )
            for op in range(graph.size)
        ]
        finer = _ranks(around)
        if max(finer, default=0) == max(colours, default=0):
            return finer
        colours = finer


def _ranks(values: Sequence[Any]) -> list[int]:
    """Per value its place among the different ones, ascending."""
    found: list[int] = [0] * len(values)
    rank = -1
    previous = None
    for index in sorted(range(len(values)), key=values.__getitem__):
        if values[index] != previous:
            rank += 1
            previous = values[index]
        found[index] = rank
    return found


def _order(graph: CombinedGraph, colours: Sequence[int]) -> tuple[int, ...]:
    """A topological order, member by member, by colour and then by the places of the predecessors."""
    place: dict[int, int] = {}
    missing = [before.bit_count() for before in graph.predecessors]
    ready = [op for op in range(graph.size) if not missing[op]]

    def key(op: int) -> tuple[int, int, list[int], int]:
        before = sorted(place[one] for one in bits(graph.predecessors[op]))
        return graph.member_of[op], colours[op], before, op

    while ready:
        op = min(ready, key=key)
        ready.remove(op)
        place[op] = len(place)
        for successor in bits(graph.successors[op]):
            missing[successor] -= 1
            if not missing[successor]:
                ready.append(successor)
    return tuple(place)
