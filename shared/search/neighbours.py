"""Neighbours of a plan: what one small change makes of it, before anything is scheduled. Pure.

A local search over plans goes from the best plan to a better neighbour. What changes is the plan's *shape*:
how models are cut, repeated and batched, and which blocks are combined. Rules, launch intervals and queues
stay. Ours; TOP leaves the search over combined blocks to its policy (section V).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum
from itertools import combinations
from random import Random
from typing import Final, NamedTuple, TypeAlias

from stageloom.shared.bound import check_wait
from stageloom.shared.errors import PlanError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import MAX_LANES, Member, ModelPlan, Plan, Wait

Members: TypeAlias = tuple[Member, ...]


BATCH_MAX: Final = 32
"""Tasks at once that a move makes, at most."""

SPLITS_MAX: Final = 127
"""Splits of one combined block: all that one of eight members has; of a larger one, drawn by chance."""


class Move(Enum):
    """What is changed."""

    MOVE = "move"  # a block leaves a combined block for another one
    SPLIT = "split"  # a combined block becomes two
    MERGE = "merge"  # two combined blocks become one
    SWAP = "swap"  # blocks of two combined blocks change places
    REPLICAS = "replicas"  # a model gets an instance more or loses one, where any has several
    CUTS = "cuts"  # a model is cut as another of its partitions is, or at one base cut more or less
    BATCH = "batch"  # a model that can takes twice as many tasks at once, or half


class PlanShape(NamedTuple):
    """What moves change of a plan. Members of a combined block ascend, and so do the combined blocks."""

    models: tuple[ModelPlan, ...]
    combined: tuple[Members, ...]
    lanes: int


class _Regrouped(NamedTuple):
    """Combined blocks in the place of those with these numbers."""

    gone: tuple[int, ...]
    made: tuple[Members, ...]


def shape_of(plan: Plan) -> PlanShape | None:
    """The shape of a plan; None where operators are split, or blocks are bound to resources or executors."""
    bound = plan.resources or plan.further_executors or any(model.splits for model in plan.models)
    return None if bound else _shape(plan.models, [block.members for block in plan.combined], plan.lanes)


def neighbours(
    shape: PlanShape, graphs: Mapping[Digest, Graph], *, members_max: int, wait: Wait, rng: Random
) -> Iterator[tuple[Move, PlanShape]]:
    """Every legal shape that is one move away, once each, in an order drawn by `rng`.

    Splits double in number with every member: of a combined block of more than eight some are drawn.
    The kinds of moves that have any left are equally likely: a plan has thousands of swaps, but few cuts.
    `members_max`: H, of what is combined anew. `wait`: the plan's rule, under which not all blocks combine.
    """
    left: dict[Move, list[_Regrouped | PlanShape]] = {
        Move.MOVE: list(_moves(shape, members_max)),
        Move.SPLIT: list(_splits(shape, rng)),
        Move.MERGE: list(_merges(shape, members_max)),
        Move.SWAP: list(_swaps(shape)),
        Move.REPLICAS: list(_repeated(shape)),
        Move.CUTS: list(_recuts(shape, graphs)),
        Move.BATCH: list(_batches(shape, graphs)),
    }
    for changes in left.values():
        rng.shuffle(changes)
    met = {shape}
    while kinds := [move for move, changes in left.items() if changes]:
        move = rng.choice(kinds)
        change = left[move].pop()
        made = change if isinstance(change, PlanShape) else _regrouped(shape, change)
        if made not in met and _may_wait(made, wait):
            met.add(made)
            yield move, made


def _may_wait(shape: PlanShape, wait: Wait) -> bool:
    if wait is Wait.NONE:
        return True
    try:
        check_wait(shape.combined)
    except PlanError:
        return False
    return True


def _shape(models: tuple[ModelPlan, ...], combined: list[Members], lanes: int) -> PlanShape:
    return PlanShape(models, tuple(sorted(tuple(sorted(members)) for members in combined)), lanes)


def _regrouped(shape: PlanShape, change: _Regrouped) -> PlanShape:
    kept = [members for index, members in enumerate(shape.combined) if index not in change.gone]
    return _shape(shape.models, [*kept, *change.made], shape.lanes)


# Other combined blocks


def _moves(shape: PlanShape, members_max: int) -> Iterator[_Regrouped]:
    """A block that is alone does not move: that is a merge."""
    for source, members in enumerate(shape.combined):
        for member in members if len(members) > 1 else ():
            rest = _without(members, member)
            for target, others in enumerate(shape.combined):
                if target != source and len(others) < members_max:
                    yield _Regrouped((source, target), (rest, (*others, member)))


def _splits(shape: PlanShape, rng: Random) -> Iterator[_Regrouped]:
    """In two parts; the first member stays in the first."""
    for index, (first, *others) in enumerate(shape.combined):
        for leaving in _leaving(others, rng):
            staying = tuple(member for member in others if member not in leaving)
            yield _Regrouped((index,), ((first, *staying), leaving))


def _leaving(others: list[Member], rng: Random) -> Iterator[Members]:
    """Who may leave together; of too many choices some are drawn, every size as likely as another."""
    if 2 ** len(others) - 1 <= SPLITS_MAX:
        for size in range(1, len(others) + 1):
            yield from combinations(others, size)
    else:
        for _ in range(SPLITS_MAX):
            yield tuple(rng.sample(others, rng.randint(1, len(others))))


def _merges(shape: PlanShape, members_max: int) -> Iterator[_Regrouped]:
    for (first, some), (second, others) in combinations(enumerate(shape.combined), 2):
        if len(some) + len(others) <= members_max:
            yield _Regrouped((first, second), ((*some, *others),))


def _swaps(shape: PlanShape) -> Iterator[_Regrouped]:
    for (first, some), (second, others) in combinations(enumerate(shape.combined), 2):
        if len(some) == len(others) == 1:
            continue
        for member in some:
            for other in others:
                made = ((*_without(some, member), other), (*_without(others, other), member))
                yield _Regrouped((first, second), made)


def _without(members: Members, member: Member) -> Members:
    return tuple(one for one in members if one != member)


# Other instances, cuts and batches


def _repeated(shape: PlanShape) -> Iterator[PlanShape]:
    """Lanes stay as many as instances where they were."""
    counts = [model.replicas for model in shape.models]
    if max(counts) == 1:
        return
    for index, model in enumerate(shape.models):
        for replicas in (model.replicas - 1, model.replicas + 1):
            if 1 <= replicas <= MAX_LANES:
                lanes = shape.lanes
                if lanes == min(sum(counts), MAX_LANES):
                    lanes = min(sum(counts) + replicas - model.replicas, MAX_LANES)
                combined = _fewer(shape, index) if replicas < model.replicas else _more(shape, index)
                models = _with_model(shape, index, replace(model, replicas=replicas))
                yield _shape(models, combined, lanes)


def _fewer(shape: PlanShape, model: int) -> list[Members]:
    """The last instance's blocks go."""
    last = shape.models[model].replicas - 1
    kept = [
        tuple(member for member in members if (member.model, member.replica) != (model, last))
        for members in shape.combined
    ]
    return [members for members in kept if members]


def _more(shape: PlanShape, model: int) -> list[Members]:
    """One more instance: its blocks are combined as the last one's are among themselves, else alone."""
    last = shape.models[model].replicas - 1
    made: list[Members] = []
    for members in shape.combined:
        own = [member for member in members if (member.model, member.replica) == (model, last)]
        copied = tuple(member._replace(replica=last + 1) for member in own)
        made += [copied] if own and len(own) == len(members) else [(member,) for member in copied]
    return [*shape.combined, *made]


def _recuts(shape: PlanShape, graphs: Mapping[Digest, Graph]) -> Iterator[PlanShape]:
    for index, model in enumerate(shape.models):
        graph = graphs[model.artifact]
        offered = [cuts for _, cuts in graph.partitions]
        offered += [tuple(sorted({*model.cuts} ^ {cut})) for cut in graph.base_cuts]
        for cuts in sorted({*offered} - {model.cuts}):
            yield _recut(shape, index, cuts)


def _recut(shape: PlanShape, index: int, cuts: tuple[int, ...]) -> PlanShape:
    """A block that begins where one began before takes its place; others are alone."""
    model = shape.models[index]
    before, now = (0, *model.cuts), (0, *cuts)
    number = {start: block for block, start in enumerate(now)}
    combined: list[Members] = []
    for members in shape.combined:
        kept = tuple(
            member if member.model != index else member._replace(block=number[before[member.block]])
            for member in members
            if member.model != index or before[member.block] in number
        )
        combined += [kept] if kept else []
    combined += [
        (Member(index, replica, number[start]),)
        for start in now
        if start not in before
        for replica in range(model.replicas)
    ]
    return _shape(_with_model(shape, index, replace(model, cuts=cuts)), combined, shape.lanes)


def _batches(shape: PlanShape, graphs: Mapping[Digest, Graph]) -> Iterator[PlanShape]:
    """One task waits for no others to join it."""
    for index, model in enumerate(shape.models):
        for batch in (model.batch // 2, 2 * model.batch):
            if 1 <= batch <= BATCH_MAX and graphs[model.artifact].batchable:
                delay_us = model.batch_max_delay_us if batch > 1 else 0
                changed = replace(model, batch=batch, batch_max_delay_us=delay_us)
                yield shape._replace(models=_with_model(shape, index, changed))


def _with_model(shape: PlanShape, index: int, model: ModelPlan) -> tuple[ModelPlan, ...]:
    return (*shape.models[:index], model, *shape.models[index + 1 :])
