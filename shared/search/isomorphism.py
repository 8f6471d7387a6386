"""Blocks that are the same up to the numbering of their operators: one search serves them all.

Operators are numbered by what they are, not by where the file has them: colours start from the operators'
seconds and are refined by those of predecessors and successors until none changes (Weisfeiler and Leman
1968); then operators follow in topological order, smallest colour and earliest predecessors first. Equal
forms are isomorphic for certain, as they are compared whole. Where refinement cannot tell two operators apart
that no symmetry exchanges, isomorphic blocks may get different forms, and are searched twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from stageloom.shared.bitmask import bits, mask_of
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Schedule, Stage, StageSchedule, stage_of
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits, Scheduler


def by_operators_alone(costs: StageCosts) -> bool:
    """Whether stages cost what their operators and merges say: none is known as a whole, nor may be, and
    no model reads more of an operator than its seconds."""
    return type(costs) is StageCosts and not costs.measured and costs.interference is None


def exchangeable(graph: CombinedGraph, costs: StageCosts) -> list[list[int]]:
    """Members of a combined block that may be exchanged, and the states that are the same because of it.

    Replicas of one model, and blocks of equal cells, have the same operators at the same costs. A state in
    which one of them is further than another then costs what it costs with the two exchanged: of k such
    members up to k! states are searched as one.

    Members that have the same operators at the same costs, two or more together; may be none.
    """
    if graph.num_members == 1 or not by_operators_alone(costs):
        return []
    found: dict[object, list[int]] = {}
    for member in range(graph.num_members):
        start, stop = graph.offsets[member], graph.offsets[member + 1]
        merges = frozenset(
            (mask_of(ops) >> start, seconds) for ops, seconds in costs.merges if start <= min(ops) < stop
        )
        rows = tuple(before >> start for before in graph.predecessors[start:stop])
        seconds = costs.operators_s[start:stop], costs.work_s[start:stop]
        found.setdefault((rows, seconds, merges), []).append(member)
    return [members for members in found.values() if len(members) > 1]


def images(graph: CombinedGraph, classes: Sequence[Sequence[int]], state: int) -> Iterator[int]:
    """Yield the state and its images when members of a class are exchanged, each once.

    All of them are states of the same size: over a level of a search they take as long as it has states.
    """
    fixed = state
    choices = []
    for members in classes:
        parts = []
        for member in members:
            mask = graph.member_mask(member)
            parts.append((state & mask) >> graph.offsets[member])
            fixed &= ~mask
        choices.append(list(_orders(parts)))
    for chosen in product(*choices):
        image = fixed
        for members, parts_chosen in zip(classes, chosen, strict=True):
            for member, part in zip(members, parts_chosen, strict=True):
                image |= part << graph.offsets[member]
        yield image


def _orders(parts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the different orders of numbers that may be equal, ascending, without a look at equal ones twice.

    A dozen replicas have 479 million permutations, of which a few hundred differ.
    """
    order = sorted(parts)
    while True:
        yield tuple(order)
        at = len(order) - 2
        while at >= 0 and order[at] >= order[at + 1]:
            at -= 1
        if at < 0:
            return
        larger = max(place for place in range(at + 1, len(order)) if order[place] > order[at])
        order[at], order[larger] = order[larger], order[at]
        order[at + 1 :] = reversed(order[at + 1 :])


@dataclass(frozen=True, slots=True)
class Form:
    """A renumbered combined block; `order` has the operator at each place."""

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


def translated(schedule: StageSchedule, source: Form, wanted: Form) -> StageSchedule:
    """Translate the schedule of one block to another one of equal form."""
    becomes = dict(zip(source.order, wanted.order, strict=True))

    def renumbered(stage: Stage) -> Stage:
        groups = sorted(
            (tuple(sorted(becomes[op] for op in group)), stage.resource(index))
            for index, group in enumerate(stage.groups)
        )
        return stage_of([group for group, _ in groups], stage.merge, [on for _, on in groups])

    return StageSchedule(tuple(map(renumbered, schedule.stages)))


class Shared:
    """A scheduler that searches isomorphic blocks once, for one plan."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._found: dict[tuple[Any, Limits, Budget], tuple[StageSchedule, Form]] = {}

    def __call__(self, graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> Schedule:
        """Return the scheduler's result, or the translated one of an isomorphic block."""
        wanted = form(graph, costs)
        known = self._found.get((wanted.key, limits, budget))
        if known is not None:
            return translated(*known, wanted)
        schedule = self._scheduler(graph, costs, limits, budget)
        if isinstance(schedule, StageSchedule):
            self._found[wanted.key, limits, budget] = schedule, wanted
        return schedule


def _colours(graph: CombinedGraph, costs: StageCosts) -> list[int]:
    """Return a colour per operator that is independent of the numbering. [num_ops]"""
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
    """Return the rank of each value among the different ones."""
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
    """Return a topological order, member by member, by colour and then by the places of the predecessors."""
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
