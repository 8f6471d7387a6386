"""Lowering: both kinds of schedule become one launch list that every executor understands."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from shared.bitmask import bits
from shared.blocks import CombinedGraph
from shared.schedule import Schedule, StageSchedule, StreamSchedule


class Barrier(Enum):
    """What follows a stage."""

    FULL = "full"  # all groups of a stage end before any of the next begins (IOS, TOP)
    DATA = "data"  # a group waits only for the groups whose results it reads


@dataclass(frozen=True, slots=True)
class Item:
    """One run of operators on one stream, with nothing to wait for in between.

    All operators of an item belong to one member, so that one session or kernel sequence can run it.
    `merge` items hold sibling operators that become one launch.
    """

    member: int
    ops: tuple[int, ...]  # in run order, in the combined block's numbering
    stream: int
    waits: tuple[int, ...]  # earlier items, on other streams, that must have ended; ascending
    stage: int  # index of the (first) stage it comes from; the launch position for stream schedules
    merge: bool = False


LaunchList = tuple[Item, ...]


def lower(
    schedule: Schedule, graph: CombinedGraph, mask: int, *, barrier: Barrier = Barrier.FULL
) -> LaunchList:
    """Restrict a schedule to the active members in `mask` and lower it; empty stages are dropped.

    Items are in issue order: a wait names an earlier item. Operators that follow each other on one stream,
    with no barrier in between, share an item.
    """
    active = graph.active_ops(mask)
    if isinstance(schedule, StreamSchedule):
        return _lower_streams(schedule, graph, active)
    return _lower_stages(schedule, graph, active, barrier)


def _lower_stages(schedule: StageSchedule, graph: CombinedGraph, active: int, barrier: Barrier) -> LaunchList:
    items: list[Item] = []
    item_of: dict[int, int] = {}
    previous: list[int] = []  # the last item of each stream of the stage before
    for index, stage in enumerate(schedule.stages):
        groups = [kept for group in stage.groups if (kept := tuple(op for op in group if active >> op & 1))]
        if not groups:
            continue
        if stage.merge and len(groups) > 1:
            groups = [tuple(op for group in groups for op in group)]
        current: list[int] = []
        for stream, group in enumerate(groups):
            waits = (
                [item for item in previous if items[item].stream != stream]
                if barrier is Barrier.FULL
                else _data_waits(group, stream, graph, item_of, items)
            )
            member = graph.member_of[group[0]]
            last = items[-1] if items else None
            alone = len(groups) == 1 and not stage.merge
            joins = last is not None and alone and previous == [len(items) - 1] and not waits
            if (
                last is not None
                and joins
                and last.member == member
                and last.stream == stream
                and not last.merge
            ):
                items[-1] = Item(member, last.ops + group, stream, last.waits, last.stage)
            else:
                items.append(Item(member, group, stream, tuple(waits), index, stage.merge))
            item_of.update(dict.fromkeys(group, len(items) - 1))
            current.append(len(items) - 1)
        previous = current
    return tuple(items)


def _lower_streams(schedule: StreamSchedule, graph: CombinedGraph, active: int) -> LaunchList:
    items: list[Item] = []
    item_of: dict[int, int] = {}
    tail: dict[int, int] = {}  # per stream its last item
    closed: set[int] = set()  # items that another item waits for: nothing may be appended to them
    for index, launch in enumerate(schedule.launches):
        if not active >> launch.op & 1:
            continue
        member = graph.member_of[launch.op]
        waits = _data_waits((launch.op,), launch.stream, graph, item_of, items)
        last = tail.get(launch.stream)
        if last is not None and not waits and last not in closed and items[last].member == member:
            kept = items[last]
            items[last] = Item(member, (*kept.ops, launch.op), launch.stream, kept.waits, kept.stage)
        else:
            items.append(Item(member, (launch.op,), launch.stream, tuple(waits), index))
            last = tail[launch.stream] = len(items) - 1
        closed.update(waits)
        item_of[launch.op] = last
    return tuple(items)


def _data_waits(
    ops: Sequence[int], stream: int, graph: CombinedGraph, item_of: dict[int, int], items: list[Item]
) -> list[int]:
    """The items on other streams that made what `ops` read; the latest per stream suffices."""
    latest: dict[int, int] = {}
    for op in ops:
        for before in bits(graph.predecessors[op]):
            item = item_of.get(before)
            if item is not None and items[item].stream != stream:
                other = items[item].stream
                latest[other] = max(item, latest.get(other, -1))
    return sorted(latest.values())
