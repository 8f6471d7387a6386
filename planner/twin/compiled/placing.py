"""Room for plans, steps and instances in the world's memory, which grows by a factor when a plan needs more.

A plan has an area: a run of records in each of the arrays that belong to plans. The area of a plan that was
released is used again where the next one fits into it.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from stageloom.planner.twin.compiled import layout
from stageloom.planner.twin.compiled.layout import MAX_BITS, NEVER, NOBODY, Records, World
from stageloom.planner.twin.compiled.tables import Tables
from stageloom.planner.twin.device_file import DeviceFile
from stageloom.shared.errors import PlanError

Room = dict[str, int]

MAX_SCALE: Final = 1 << 10
_GROWTH: Final = 4

_AREAS: Final = ("targets", "tracks", "slots", "links", "combined", "members", "pairs", "times")


@dataclass(frozen=True)
class Area:
    """Where one plan's records are: the first and the number of each kind, by the array's name."""

    first: Room
    room: Room


class Memory:
    """The world of one twin. `block` is what the kernels get, `world` the same as arrays."""

    def __init__(self, num_models: int, device: DeviceFile, noise: npt.NDArray[np.float64]) -> None:
        """A device without plans. `noise`: factors, by step; at most `layout`'s number of them."""
        self._most_members = 0  # of any combined block so far
        self._allot(1)
        self._need({"models": num_models})
        clock = self.world.clock[0]
        clock.num_models, clock.num_noise = num_models, len(noise)
        clock.active, clock.slow = NOBODY, 1.0
        clock.interference, clock.beside_s = device.lanes_interference, device.beside_s
        clock.next_end_s, clock.next_ending, clock.tightest_s = NEVER, NOBODY, NEVER
        self.world.noise[: len(noise)] = noise
        self.world.models.next_s = -NEVER
        self.world.models.deadline_s = NEVER
        self.areas: list[Area] = []

    def _allot(self, scale: int) -> None:
        self._scale = scale
        self.block: Records = layout.records(layout.memory_type(scale), 1)
        self.world: World = layout.views(self.block)
        self.world.lanes.running = self.world.lanes.pending = NOBODY

    def copy(self) -> "Memory":
        """The same, to go on by itself."""
        other = object.__new__(Memory)
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
            raise PlanError("the plan is too large for the compiled twin", remedy="use the reference twin")
        before = self.world
        self._allot(_GROWTH * self._scale)
        for name, old, new in zip(World._fields, before, self.world, strict=True):
            if name != "queues":
                new[tuple(slice(length) for length in old.shape)] = old
        for model, launcher in enumerate(self.world.models):
            order = (launcher.head + np.arange(launcher.queued)) % before.queues.shape[1]
            if launcher.queued:
                self.world.queues[model, : launcher.queued] = before.queues[model, order]
            launcher.head = 0

    def _need(self, lengths: Room, columns: Room | None = None) -> None:
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
        index = self._area_for(room_of(tables))
        members = int(tables.combined["num_members"].max())
        columns = {
            "queues": int(tables.targets["max_tasks"].max()) + 1,
            "riders": members,
            "rows": int(tables.targets["batch"].max()),
        }
        self._most_members = max(self._most_members, members)
        num_instances = sum(area.room["slots"] for area in self.areas) + num_steps * self._most_members
        self._need({"instances": num_instances}, columns)
        clock = self.world.clock[0]
        clock.max_load, clock.num_lanes, clock.num_steps = max_load, num_lanes, num_steps
        clock.num_instances = max(int(clock.num_instances), num_instances)
        self._write(index, tables)
        return index

    def _area_for(self, room: Room) -> int:
        for index, area in enumerate(self.areas):
            if not self.world.plans[index].loaded and all(area.room[name] >= room[name] for name in room):
                return index
        if len(self.areas) == MAX_BITS:
            raise PlanError("too many plans are in flight on the twin", remedy="let it run between deploys")
        first = {name: sum(area.room[name] for area in self.areas) for name in room}
        self._need({"plans": len(self.areas) + 1, **{name: first[name] + room[name] for name in room}})
        self.areas.append(Area(first, room))
        clock = self.world.clock[0]
        clock.num_plans = len(self.areas)
        clock.num_combined = first["combined"] + room["combined"]
        return len(self.areas) - 1

    def _write(self, index: int, tables: Tables) -> None:
        """Write a plan's records; indices count from the world's first records then."""
        first = self.areas[index].first
        for kind, field, shift in (
            ("plan", "first_combined", first["combined"]),
            ("plan", "first_slot", first["slots"]),
            ("plan", "first_target", first["targets"]),
            ("targets", "plan", index),
            ("targets", "first_track", first["tracks"]),
            ("tracks", "plan", index),
            ("tracks", "target", first["targets"]),
            ("tracks", "first_slot", first["slots"]),
            ("slots", "track", first["tracks"]),
            ("slots", "home", first["combined"]),
            ("slots", "first_freed", first["links"]),
            ("slots", "first_read", first["links"]),
            ("slots", "first_held", first["links"]),
            ("combined", "plan", index),
            ("combined", "first_member", first["members"]),
            ("combined", "first_pair", first["pairs"]),
            ("combined", "first_time", first["times"]),
            ("members", "slot", first["slots"]),
        ):
            getattr(tables, kind)[field] += shift
        self.world.plans[index] = tables.plan[0]
        for name in _AREAS[:-1]:
            records = getattr(tables, name)
            getattr(self.world, name)[first[name] : first[name] + len(records)] = records


def room_of(tables: Tables) -> Room:
    """How many records of each kind a plan needs."""
    return {name: tables.num_times if name == "times" else len(getattr(tables, name)) for name in _AREAS}
