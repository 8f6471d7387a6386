"""Lowering: both kinds of schedule become one launch list that every executor understands."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import (
    OWN_RESOURCE,
    Group,
    Launch,
    Schedule,
    Stage,
    StageSchedule,
    StreamSchedule,
)


class Barrier(Enum):
    """What follows a stage."""

    FULL = "full"  # all groups of a stage end before any of the next begins (IOS, TOP)
    DATA = "data"  # a group waits only for the groups whose results it reads


@dataclass(frozen=True, slots=True)
class Item:
    """One run of operators on one stream: nothing in between waits, or is waited for by another stream.

    All operators of an item belong to one member, so that one session or kernel sequence can run it, and no
    path leaves an item and comes back. `merge` items hold sibling operators that become one launch.
    """

    member: int
    ops: tuple[int, ...]  # in run order, in the combined block's numbering
    stream: int
    waits: tuple[int, ...]  # earlier items, on other streams, that must have ended; ascending
    stage: int  # index of the (first) stage it comes from; the launch position for stream schedules
    merge: bool = False
    resource: int = OWN_RESOURCE  # the plan's resource that runs it


LaunchList = tuple[Item, ...]


def lower(
    schedule: Schedule, graph: CombinedGraph, mask: int, *, barrier: Barrier = Barrier.FULL
) -> LaunchList:
    """Restrict a legal schedule to the active members in `mask` and lower it; empty stages are dropped.

    Items are in issue order: a wait names an earlier item. Operators that follow each other on one stream,
    with no barrier in between, share an item. Lowering orders nothing that the schedule leaves open: a
    stream schedule keeps its streams' orders and its data dependencies, and no more.
    """
    active = graph.active_ops(mask)
    if isinstance(schedule, StreamSchedule):
        return _lower_streams(schedule, graph, active)
    return _lower_stages(_active_stages(schedule, active), graph, barrier)


def _active_stages(schedule: StageSchedule, active: int) -> list[tuple[int, Stage]]:
    """The stages that the active operators leave, with their numbers; group i runs on stream i.

    A group is active or not as a whole.
    """
    stages = []
    for index, stage in enumerate(schedule.stages):
        left = stage.active(active)
        if left.groups and left.merge:
            left = Stage((left.operators,), merge=True)
        if left.groups:
            stages.append((index, left))
    return stages


def _lower_stages(stages: list[tuple[int, Stage]], graph: CombinedGraph, barrier: Barrier) -> LaunchList:
    stream_of = {
        op: stream for _, stage in stages for stream, group in enumerate(stage.groups) for op in group
    }
    items: list[Item] = []
    item_of: dict[int, int] = {}
    previous: list[int] = []  # the items of the stage before
    for index, stage in stages:
        current: list[int] = []
        for stream, group in enumerate(stage.groups):
            if barrier is Barrier.FULL:
                waits = [item for item in previous if items[item].stream != stream]
            else:
                waits = _data_waits(group, stream, graph, item_of, items)
            member = graph.member_of[group[0]]
            joins = (
                len(stage.groups) == 1
                and not waits
                and bool(items)
                and _can_grow(items[-1], member, stage)
                and items[-1].resource == stage.resource(stream)
                and (barrier is Barrier.FULL or not _read_elsewhere(items[-1], graph, stream_of))
            )
            if joins:
                items[-1] = replace(items[-1], ops=items[-1].ops + group)
            else:
                on = stage.resource(stream)
                items.append(Item(member, group, stream, tuple(waits), index, stage.merge, on))
            item_of.update(dict.fromkeys(group, len(items) - 1))
            current.append(len(items) - 1)
        previous = current
    return tuple(items)


def _can_grow(item: Item, member: int, stage: Stage) -> bool:
    return item.member == member and item.stream == 0 and not item.merge and not stage.merge


def _read_elsewhere(item: Item, graph: CombinedGraph, stream_of: dict[int, int]) -> bool:
    """Whether another stream will wait for this item, and so should not wait for anything appended to it."""
    readers = 0
    for op in item.ops:
        readers |= graph.successors[op]
    return any(stream_of[reader] != item.stream for reader in bits(readers))


def _data_waits(
    ops: Group, stream: int, graph: CombinedGraph, item_of: dict[int, int], items: list[Item]
) -> list[int]:
    """The items on other streams that made what `ops` read; the latest per stream suffices."""
    latest: dict[int, int] = {}
    for op in ops:
        for before in bits(graph.predecessors[op]):
            item = item_of.get(before)  # none: in the group itself
            if item is not None and items[item].stream != stream:
                other = items[item].stream
                latest[other] = max(item, latest.get(other, -1))
    return sorted(latest.values())


def _lower_streams(schedule: StreamSchedule, graph: CombinedGraph, active: int) -> LaunchList:
    waits = _stream_waits([launch for launch in schedule.launches if active >> launch.op & 1], graph)
    waited_for = {op for ops in waits.values() for op in ops}
    items: list[Item] = []
    item_of: dict[int, int] = {}
    tail: dict[int, int] = {}  # per stream its last item
    for position, launch in enumerate(schedule.launches):
        if launch.op not in waits:
            continue
        member = graph.member_of[launch.op]
        last = tail.get(launch.stream)
        if (
            last is None
            or waits[launch.op]
            or items[last].ops[-1] in waited_for
            or items[last].member != member
        ):
            earlier = tuple(sorted(item_of[op] for op in waits[launch.op]))
            items.append(Item(member, (launch.op,), launch.stream, earlier, position))
            last = tail[launch.stream] = len(items) - 1
        else:
            items[last] = replace(items[last], ops=(*items[last].ops, launch.op))
        item_of[launch.op] = last
    return tuple(items)


def _stream_waits(launches: Sequence[Launch], graph: CombinedGraph) -> dict[int, list[int]]:
    """Per operator those on other streams that it has to wait for: the fewest that imply all it depends on.

    A vector clock says what each operator's end implies: per stream, how many of its launches have ended.
    """
    waits: dict[int, list[int]] = {}
    launched: dict[int, int] = {}  # per operator its position among all launches
    place: dict[int, tuple[int, int]] = {}  # per operator its stream, and its number there from 1
    clock_of: dict[int, dict[int, int]] = {}
    stream_clock: dict[int, dict[int, int]] = {}
    for position, launch in enumerate(launches):
        clock = dict(stream_clock.get(launch.stream, {}))
        waits[launch.op] = []
        # The latest first: it may have waited for the others.
        for before in sorted(bits(graph.predecessors[launch.op]), key=launched.__getitem__, reverse=True):
            stream, number = place[before]
            if clock.get(stream, 0) >= number:
                continue
            waits[launch.op].append(before)
            for other, ended in clock_of[before].items():
                clock[other] = max(ended, clock.get(other, 0))
        clock[launch.stream] = clock.get(launch.stream, 0) + 1
        launched[launch.op] = position
        place[launch.op] = (launch.stream, clock[launch.stream])
        clock_of[launch.op] = stream_clock[launch.stream] = clock
    return waits
