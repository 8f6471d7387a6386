"""A bound plan as records, and room for plans, steps and instances in the world's memory.

`plan_tables` makes the records that the kernels read of a plan, as they are before the first launch.
`WorldMemory` places them. A plan has an area: a run of records in each of the arrays that belong to plans.
The area of a released plan is used again where the next one fits into it; a full memory grows by a factor.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stageloom.planner.twin.compiled import layout
from stageloom.planner.twin.compiled.layout import MAX_BITS, NEVER, NOBODY, Records, World
from stageloom.planner.twin.device_file import DeviceFile
from stageloom.planner.twin.lanes import crowded_from
from stageloom.shared.bound import BoundModel, BoundPlan
from stageloom.shared.errors import PlanError
from stageloom.shared.plan import MAX_LANES, Member, QueueRule, StepChoice, Wait

MAX_PROGRAMS_PER_BLOCK: Final = 1 << 16
"""Masks of one combined block times the buckets of its members: its times are a dense table."""

_CHOICES: Final = {
    StepChoice.RATIO: layout.RATIO,
    StepChoice.ROUND_ROBIN: layout.ROUND_ROBIN,
    StepChoice.WEIGHTED: layout.WEIGHTED,
    StepChoice.DEADLINE: layout.BY_DEADLINE,
}
_WAITS: Final = {
    Wait.NONE: layout.WAIT_NONE,
    Wait.ALL: layout.WAIT_ALL,
    Wait.TIMEOUT: layout.WAIT_TIMEOUT,
}


Tables: TypeAlias = dict[str, Records]
"""The records of one plan by the array that they belong in; indices count from the plan's own first ones."""


def plan_tables(bound: BoundPlan, key: int, executors: Sequence[int]) -> Tables:
    """Work out the records of a plan.

    `executors`: per model a number; its instances move only between plans that have the same. [num_models]

    Raises:
        PlanError: the plan is too large for bit masks and dense tables.
    """
    plan = bound.plan
    _check(bound)
    by_deadline = plan.step_choice is StepChoice.DEADLINE and plan.wait is Wait.NONE
    targets, tracks, slots, links, slot_of = _tracks(bound, by_deadline, executors)
    combined, members, pairs, num_times = _combined(bound, slots, slot_of)
    head = _filled(
        layout.PLAN,
        [
            {
                "key": key,
                "wait_timeout_s": plan.wait_timeout_us * 1e-6,
                "loaded": 1,
                "lanes": plan.lanes,
                "run_ahead": plan.run_ahead,
                "step_choice": _CHOICES[plan.step_choice],
                "wait": _WAITS[plan.wait],
                "waits": plan.wait is not Wait.NONE,
                "by_deadline": by_deadline,
                "num_combined": len(combined),
                "num_slots": len(slots),
            }
        ],
    )
    return {
        "plans": head,
        "targets": _filled(layout.TARGET, targets),
        "tracks": _filled(layout.TRACK, tracks),
        "slots": _filled(layout.SLOT, slots),
        "links": _filled(layout.LINK, links),
        "combined": _filled(layout.COMBINED, combined),
        "members": _filled(layout.MEMBER, members),
        "pairs": _filled(layout.PAIR, pairs),
        "times": np.zeros(num_times, layout.TIME),
    }


_Row = dict[str, float]


def _filled(kind: "np.dtype[np.void]", rows: list[_Row]) -> Records:
    """Records from rows, which have the same fields; a field that they lack is 0."""
    filled = np.zeros(len(rows), kind)
    for name in rows[0] if rows else ():
        filled[name] = [row[name] for row in rows]
    return filled


def _check(bound: BoundPlan) -> None:
    plan = bound.plan
    if plan.lanes > MAX_LANES or plan.lanes * plan.run_ahead > MAX_BITS:
        raise PlanError(
            f"{plan.lanes} lanes of {plan.run_ahead} steps are more than {MAX_LANES} or {MAX_BITS} steps"
        )
    for model in plan.models:
        if max(model.replicas, model.num_blocks) > MAX_BITS:
            raise PlanError(f"model {model.name!r} has more than {MAX_BITS} replicas or blocks")
    for index, combined in enumerate(bound.combined):
        if math.prod(_radix(bound.models[m.model]) for m in combined.members) > MAX_PROGRAMS_PER_BLOCK:
            raise PlanError(
                f"combined block {index} has more than {MAX_PROGRAMS_PER_BLOCK} programs",
                remedy="use the reference twin",
            )


def _radix(model: BoundModel) -> int:
    """In how many ways a member can take part in a step: not at all, or with one of its buckets."""
    return 1 + len(model.buckets)


def _first_lanes(bound: BoundPlan, model: int, replica: int) -> int:
    """The lanes in which a replica's first block may run, as a mask."""
    return bound.lanes_of(bound.home[Member(model, replica, 0)][0])


def _queue_bound(model: BoundModel) -> int:
    """How many tasks of this model its queue holds: all are of one size."""
    queue = model.plan.queue
    return min(
        queue.max_tasks, queue.max_bytes // model.input_bytes if model.input_bytes else queue.max_tasks
    )


def _tracks(
    bound: BoundPlan, by_deadline: bool, executors: Sequence[int]
) -> tuple[list[_Row], list[_Row], list[_Row], list[_Row], dict[Member, int]]:
    """Targets, tracks, slots, the lists that slots refer to, and the slot of each member."""
    targets: list[_Row] = []
    tracks: list[_Row] = []
    slots: list[_Row] = []
    links: list[_Row] = []
    slot_of: dict[Member, int] = {}
    for index, model in enumerate(bound.models):
        plan = model.plan
        targets.append(
            {
                "first_track": len(tracks),
                "replicas": plan.replicas,
                "free": (1 << plan.replicas) - 1,
                "batch": plan.batch,
                "executor": executors[index],
                "interval_s": plan.launch_interval_us * 1e-6,
                "lanes_share": bound.plan.lanes / len(bound.models),
                "delay_s": plan.batch_max_delay_us * 1e-6,
                "work_conserving": plan.work_conserving,
                "max_tasks": _queue_bound(model),
                "drop_oldest": plan.queue.rule is QueueRule.DROP_OLDEST,
                "in_order": bound.plan.lanes == 1 and not by_deadline,
                "apart": len({_first_lanes(bound, index, one) for one in range(plan.replicas)}) > 1,
                "at_once": not by_deadline and (plan.replicas == 1 or bound.plan.wait is not Wait.NONE),
            }
        )
        lists = [_listed(links, model, block) for block in range(plan.num_blocks)]
        for replica in range(plan.replicas):
            for block in range(plan.num_blocks):
                slot_of[Member(index, replica, block)] = len(slots)
                slots.append(
                    {
                        "track": len(tracks),
                        "block": block,
                        "start": model.blocks[block].start,
                        "holder": NOBODY,
                        "held": NOBODY,
                        **lists[block],
                    }
                )
            tracks.append(
                {
                    "model": index,
                    "target": index,
                    "replica": replica,
                    "first_slot": len(slots) - plan.num_blocks,
                    "blocks": plan.num_blocks,
                    "newest": NOBODY,
                    "newest_id": NOBODY,
                }
            )
    return targets, tracks, slots, links, slot_of


def _listed(links: list[_Row], model: BoundModel, block: int) -> _Row:
    """Append the slots that a block frees, reads and holds; returns where they begin."""
    row: _Row = {}
    lists = _slots_of(model.slot_readers, block)
    for name, found in zip(("freed", "held", "read"), (*lists, model.slot_reads[block]), strict=True):
        row[f"first_{name}"], row[f"num_{name}"] = len(links), len(found)
        links.extend({"block": s} for s in found)
    return row


@lru_cache(maxsize=4096)
def _slots_of(last: tuple[int, ...], block: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which slots a block frees, and which an instance at it holds; see
    `stageloom.shared.engine.slots.Track`."""
    freed = tuple(slot for slot in range(len(last)) if last[slot] == block)
    return freed, tuple(slot for slot in range(block + 1) if last[slot] >= block)


def _combined(
    bound: BoundPlan, slots: list[_Row], slot_of: dict[Member, int]
) -> tuple[list[_Row], list[_Row], list[_Row], int]:
    """Combined blocks, their members downstream first, and pairs; enters in each slot where it belongs."""
    combined: list[_Row] = []
    members: list[_Row] = []
    pairs: list[_Row] = []
    num_times = 0
    for index, block in enumerate(bound.combined):
        at = {member: position for position, member in enumerate(block.members)}
        stride = 1
        for member, position in at.items():
            slots[slot_of[member]].update(home=index, bit=1 << position, stride=stride)
            stride *= _radix(bound.models[member.model])
        order = sorted(block.members, key=lambda member: (-member.block, member))
        first_pair = len(pairs)
        for member in order:
            last = bound.models[member.model].slot_readers
            if member.block + 1 < len(last):
                freer = at.get(member._replace(block=last[member.block + 1]))
                if freer is not None:
                    pairs.append({"bit": 1 << at[member], "freer": 1 << freer})
        full = (1 << len(order)) - 1
        combined.append(
            {
                "index": index,
                "lanes": bound.plan.lanes,
                "own": bound.lanes_of(index),
                "run_ahead": bound.plan.run_ahead,
                "max_skips": bound.plan.max_skips,
                "num_members": len(order),
                "full": full,
                "next_free": full,
                "first_member": len(members),
                "first_pair": first_pair,
                "num_pairs": len(pairs) - first_pair,
                "first_time": num_times,
                "since_s": NEVER,
                "urgent_s": NEVER,
                "lane": NOBODY,
                "stride": 1.0 / sum(bound.plan.models[member.model].weight for member in order),
            }
        )
        members.extend({"slot": slot_of[member], "bit": 1 << at[member]} for member in order)
        num_times += stride
    return combined, members, pairs, num_times


def program_of(bound: BoundPlan, combined: int, number: int) -> tuple[int, tuple[int, ...]]:
    """Mask and buckets of a combined block's program by its place in the table of times."""
    mask, buckets = 0, []
    for position, member in enumerate(bound.combined[combined].members):
        model = bound.models[member.model]
        number, level = divmod(number, _radix(model))
        if level:
            mask |= 1 << position
            buckets.append(model.buckets[level - 1])
    return mask, tuple(buckets)


def loaded_programs(bound: BoundPlan, combined: int) -> tuple[int, ...]:
    """The programs asked for when the plan is loaded: all members, with the largest buckets and with 1."""
    largest = smallest = 0
    stride = 1
    for member in bound.combined[combined].members:
        model = bound.models[member.model]
        largest += stride * len(model.buckets)
        smallest += stride
        stride *= _radix(model)
    return tuple(dict.fromkeys((largest, smallest)))


MAX_SCALE: Final = 1 << 6
"""The next size would be a record of 8 GiB, and numpy has none of 2 GiB."""

_GROWTH: Final = 4

Area: TypeAlias = dict[str, slice]
"""Where one plan's records are, by the array's name."""

_REFERENCES: Final = {
    "plans": {"first_combined": "combined", "first_slot": "slots", "first_target": "targets"},
    "targets": {"plan": "plans", "first_track": "tracks"},
    "tracks": {"plan": "plans", "target": "targets", "first_slot": "slots"},
    "slots": {
        "track": "tracks",
        "home": "combined",
        "first_freed": "links",
        "first_read": "links",
        "first_held": "links",
    },
    "combined": {"plan": "plans", "first_member": "members", "first_pair": "pairs", "first_time": "times"},
    "members": {"slot": "slots"},
}
"""Fields that are indices into other arrays."""


class WorldMemory:
    """The world of one twin. `block` is what the kernels get, `world` the same as arrays."""

    def __init__(
        self, num_models: int, device: DeviceFile, noise: npt.NDArray[np.float64], patience_s: float
    ) -> None:
        """A device without plans. `noise`: factors, by step; at most `layout`'s number of them.

        `patience_s`: after it a task without a deadline counts as due.
        """
        self._most_members = 0  # of any combined block so far
        self._allot(1)
        self._need({"models": num_models})
        clock = self.world.clock[0]
        clock.num_models, clock.num_noise = num_models, len(noise)
        clock.active, clock.slow = NOBODY, 1.0
        clock.interference, clock.crowded = device.lanes_interference, crowded_from(device)
        clock.beside_s, clock.item_beside_s = device.beside_s, device.item_beside_s
        clock.next_end_s, clock.next_ending = NEVER, NOBODY
        self.world.noise[: len(noise)] = noise
        self.world.models.last_s = self.world.models.next_s = -NEVER
        self.world.models.deadline_s = self.world.models.tightest_s = NEVER
        self.world.models.patience_s = patience_s
        self.world.models.turn_s = -NEVER
        self.areas: list[Area] = []

    def _allot(self, scale: int) -> None:
        self._scale = scale
        self.block: Records = layout.records(layout.memory_type(scale), 1)
        self.world: World = layout.views(self.block)
        self.world.lanes.free_s = -NEVER
        self.world.lanes.running = self.world.lanes.pending = NOBODY

    def copy(self) -> "WorldMemory":
        """The same, to go on by itself."""
        other = object.__new__(WorldMemory)
        other._scale, other._most_members = self._scale, self._most_members
        other.block = self.block.copy()
        other.world = layout.views(other.block)
        other.areas = list(self.areas)
        return other

    def double(self) -> None:
        """Have more room of everything.

        Raises:
            PlanError: there is much already.
        """
        if self._scale >= MAX_SCALE:
            raise PlanError(
                "the plan is too large for the compiled twin",
                remedy="give it shorter queues or smaller batches, or use the reference twin",
            )
        before = self.world
        self._allot(_GROWTH * self._scale)
        for name, old in vars(before).items():
            if name != "queues":
                getattr(self.world, name)[tuple(slice(length) for length in old.shape)] = old
        for model, launcher in enumerate(self.world.models):
            order = (launcher.head + np.arange(launcher.queued)) % before.queues.shape[1]
            if launcher.queued:
                self.world.queues[model, : launcher.queued] = before.queues[model, order]
            launcher.head = 0

    def _need(self, lengths: Mapping[str, int], columns: Mapping[str, int] | None = None) -> None:
        """Grow until arrays have so many rows, and some so many columns."""
        while any(len(getattr(self.world, name)) < length for name, length in lengths.items()) or any(
            getattr(self.world, name).shape[1] < length for name, length in (columns or {}).items()
        ):
            self.double()

    def place(self, tables: Tables, *, lanes: int, run_ahead: int) -> int:
        """Write a plan's records into an area that is free; its index.

        Raises:
            PlanError: the plan is too large, or too many are in flight.
        """
        clock = self.world.clock[0]
        max_load = max(int(clock.max_load), run_ahead)
        num_lanes = max(int(clock.num_lanes), lanes)
        num_steps = num_lanes * max_load
        if num_steps > MAX_BITS:
            raise PlanError(
                f"{num_lanes} lanes of {max_load} steps are more than {MAX_BITS} steps",
                remedy="deploy it on a twin that had no deeper plan before",
            )
        index = self._area_for({name: len(records) for name, records in tables.items()})
        members = int(tables["combined"]["num_members"].max())
        columns = {
            "queues": int(tables["targets"]["max_tasks"].max()) + 1,
            "riders": members,
            "rows": int(tables["targets"]["batch"].max()),
        }
        self._most_members = max(self._most_members, members)
        num_instances = self._end("slots") + num_steps * self._most_members
        self._need({"instances": num_instances}, columns)
        clock = self.world.clock[0]
        clock.max_load, clock.num_lanes, clock.num_steps = max_load, num_lanes, num_steps
        clock.num_instances = max(int(clock.num_instances), num_instances)
        self._write(index, tables)
        return index

    def _end(self, name: str) -> int:
        """How much of an array the areas take."""
        return self.areas[-1][name].stop if self.areas else 0

    def _area_for(self, room: Mapping[str, int]) -> int:
        """The index of an area that is free and has so much room, perhaps a new one."""
        for index, area in enumerate(self.areas):
            fits = all(area[name].stop - area[name].start >= room[name] for name in room)
            if fits and not self.world.plans[index].loaded:
                return index
        if len(self.areas) == MAX_BITS:
            raise PlanError("too many plans are in flight on the twin", remedy="let it run between deploys")
        new = {name: slice(self._end(name), self._end(name) + room[name]) for name in room}
        self._need({name: area.stop for name, area in new.items()})
        self.areas.append(new)
        clock = self.world.clock[0]
        clock.num_plans, clock.num_combined = len(self.areas), new["combined"].stop
        return len(self.areas) - 1

    def _write(self, index: int, tables: Tables) -> None:
        """Write a plan's records; indices count from the world's first records then. Times are not filled."""
        first = {name: area.start for name, area in self.areas[index].items()}
        for name, references in _REFERENCES.items():
            for field, other in references.items():
                tables[name][field] += first[other]
        for name, records in tables.items():
            if name != "times":
                getattr(self.world, name)[first[name] : first[name] + len(records)] = records
