"""An executable definition of a legal schedule: every violation, in words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stageloom.shared.bitmask import bits, mask_of
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.graph import Graph
from stageloom.shared.partition import Axis, Split, splits_text
from stageloom.shared.partition_rules import RULES
from stageloom.shared.schedule import Schedule, StageSchedule, StreamSchedule, resources_named
from stageloom.shared.split_graph import split_dimension


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: `rule` is a fixed word to test for, `detail` is for people."""

    rule: str
    detail: str


def violations(
    schedule: Schedule,
    graph: CombinedGraph,
    *,
    r: int | None = None,
    s: int | None = None,
    resources: int | None = None,
) -> list[Violation]:
    """All violations of `schedule` over `graph`; an empty list means legal.

    `r` bounds the operators per group and `s` the groups per stage (IOS, section 4.3) where asked, and
    `resources` is how many the plan has.
    """
    if isinstance(schedule, StageSchedule):
        return [
            *_coverage(_stage_ops(schedule), graph),
            *_stage_rules(schedule, graph, r, s),
            *_resource_rules(schedule, resources),
        ]
    ops = [launch.op for launch in schedule.launches]
    return [*_coverage(ops, graph), *_launch_order(schedule, graph)]


def _stage_ops(schedule: StageSchedule) -> list[int]:
    return [op for stage in schedule.stages for op in stage.operators]


def _coverage(ops: list[int], graph: CombinedGraph) -> Iterator[Violation]:
    seen: set[int] = set()
    for op in ops:
        if not 0 <= op < graph.size:
            yield Violation("unknown", f"operator {op} is not one of 0..{graph.size - 1}")
        elif op in seen:
            yield Violation("repeated", f"operator {op} runs more than once")
        seen.add(op)
    for op in range(graph.size):
        if op not in seen:
            yield Violation("missing", f"operator {op} never runs")


def _stage_rules(
    schedule: StageSchedule, graph: CombinedGraph, r: int | None, s: int | None
) -> Iterator[Violation]:
    done = 0
    for index, stage in enumerate(schedule.stages):
        if not stage.groups or not all(stage.groups):
            yield Violation("empty", f"stage {index} has no operator, or an empty group")
        if s is not None and len(stage.groups) > s:
            yield Violation("groups", f"stage {index} has {len(stage.groups)} groups, more than s = {s}")
        for group in stage.groups:
            if r is not None and len(group) > r:
                yield Violation("operators", f"a group of stage {index} has {len(group)} operators, r = {r}")
        known = [tuple(op for op in group if 0 <= op < graph.size) for group in stage.groups]
        yield from _group_rules(index, known, done, graph)
        if stage.merge and not _is_merge(known, graph):
            yield Violation("merge", f"stage {index} merges operators that may not run as one launch")
        done |= mask_of(op for group in known for op in group)


def _resource_rules(schedule: StageSchedule, resources: int | None) -> Iterator[Violation]:
    for index, stage in enumerate(schedule.stages):
        if stage.resources and (stage.merge or len(stage.resources) != len(stage.groups)):
            yield Violation("resource", f"stage {index} does not name one resource for each of its groups")
    if resources is None:
        return
    for one in sorted(resources_named(schedule)):
        if not 0 <= one < resources:
            yield Violation("resource", f"a group runs on resource {one} of a plan with {resources}")


def split_violations(splits: Sequence[Split], graph: Graph, cuts: Sequence[int]) -> list[Violation]:
    """All violations of a model's splits that its graph shows; `cuts` are the plan's.

    What only the nodes of an operator show, an executor refuses when it loads the plan: an axis that a node
    of the operator does not let through, a boundary that cuts a group, halves that overlap in a chain.
    """
    found: list[Violation] = []
    behind = 0
    for split in splits:
        if not behind <= split.first <= split.last < len(graph.operators):
            found.append(Violation("order", f"{_words(split)} is not behind the one before, or not there"))
            continue
        behind = split.last + 1
        found += _split_rules(split, graph, cuts)
    return found


def _split_rules(split: Split, graph: Graph, cuts: Sequence[int]) -> Iterator[Violation]:
    last = graph.operators[split.last]
    run = range(split.first, split.last + 1)
    if graph.ranges is not None:
        yield Violation("axis", f"{_words(split)} is of a model with open dimensions")
        return
    for op in run:
        operator = graph.operators[op]
        if operator.opaque or operator.kind not in RULES:
            yield Violation("axis", f"{_words(split)}: operator {op}, {operator.kind[:40]}, is not split")
    dim = split_dimension(graph, split)
    if dim is None:
        yield Violation("axis", f"{_words(split)}: the output has no axis {split.axis.value}")
        return
    extents = {_extent(graph, tensor, dim) for tensor in last.outputs}
    if len(extents) != 1:
        yield Violation("axis", f"{_words(split)}: the outputs differ in extent")
    for extent in extents:
        if not 0 < split.boundary < extent:
            yield Violation("boundary", f"{_words(split)}: the boundary is not inside 0..{extent}")
    groups = last.attributes.groups
    if split.axis is Axis.CHANNELS and last.kind == "Conv" and groups > 1:
        filters = max(1, max(extents) // groups)
        if split.boundary % filters:
            yield Violation("boundary", f"{_words(split)}: a group has {filters} channels, and is not cut")
    if any(split.first < cut <= split.last for cut in cuts):
        yield Violation("aligned", f"{_words(split)}: the plan cuts the model inside")
    for op in run[:-1]:
        for tensor in graph.operators[op].outputs:
            outside = any(reader not in run for reader in graph.consumers[tensor])
            if outside or tensor in graph.outputs:
                yield Violation("aligned", f"{_words(split)}: what operator {op} makes is wanted elsewhere")
        if not any(graph.predecessors[reader] >> op & 1 for reader in run):
            yield Violation("aligned", f"{_words(split)}: operator {op} does not lead to the last one")


def _extent(graph: Graph, tensor: int, dim: int) -> int:
    shape = graph.tensors[tensor].shape
    return shape[dim] if dim < len(shape) else 0


def _words(split: Split) -> str:
    return f"split {splits_text([split])}"


def _group_rules(
    index: int, groups: list[tuple[int, ...]], done: int, graph: CombinedGraph
) -> Iterator[Violation]:
    stage = mask_of(op for group in groups for op in group)
    for group in groups:
        own = mask_of(group)
        others = stage & ~own
        earlier = done
        for op in group:
            before = graph.predecessors[op]
            if before & others:
                yield Violation("dependent", f"stage {index}: operator {op} depends on another group of it")
            if before & ~earlier & ~others:
                yield Violation("order", f"stage {index}: operator {op} runs before one it depends on")
            earlier |= 1 << op
        if group and not _connected(own, graph):
            yield Violation("connected", f"stage {index}: group {list(group)} is not connected")


def _is_merge(groups: list[tuple[int, ...]], graph: CombinedGraph) -> bool:
    """Whether several groups of one operator each may run as one launch."""
    return all(len(group) == 1 for group in groups) and graph.may_merge([op for (op,) in groups])


def _connected(mask: int, graph: CombinedGraph) -> bool:
    reached = mask & -mask
    frontier = reached
    while frontier:
        grown = 0
        for op in bits(frontier):
            grown |= (graph.predecessors[op] | graph.successors[op]) & mask
        frontier = grown & ~reached
        reached |= grown
    return reached == mask


def _launch_order(schedule: StreamSchedule, graph: CombinedGraph) -> Iterator[Violation]:
    done = 0
    for launch in schedule.launches:
        if not 0 <= launch.op < graph.size:
            continue
        if graph.predecessors[launch.op] & ~done:
            yield Violation("order", f"operator {launch.op} is launched before one it depends on")
        done |= 1 << launch.op
