"""An executable definition of a legal schedule: every violation, in words."""

from collections.abc import Iterator
from dataclasses import dataclass

from stageloom.shared.bitmask import bits, mask_of
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Schedule, StageSchedule, StreamSchedule


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: `rule` is a fixed word to test for, `detail` is for people."""

    rule: str
    detail: str


def violations(
    schedule: Schedule, graph: CombinedGraph, *, r: int | None = None, s: int | None = None
) -> list[Violation]:
    """All violations of `schedule` over `graph`; an empty list means legal.

    `r` bounds the operators per group and `s` the groups per stage (IOS, section 4.3) where asked.
    """
    if isinstance(schedule, StageSchedule):
        return [*_coverage(_stage_ops(schedule), graph), *_stage_rules(schedule, graph, r, s)]
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
