"""What the core remembers of instances, steps and programs. Mutable, and private to the engine."""

import math
from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct

from stageloom.shared.engine.patience import wanted_by_s
from stageloom.shared.engine.steps import InstanceId, PlanKey, ProgramKey, Task
from stageloom.shared.ids import StepId, TaskId

if TYPE_CHECKING:
    from stageloom.shared.engine.slots import CombinedState, PlanState, Slot, Track


MAX_REMEMBERED = 4096  # programs remembered per combined block; the others are never prepared


class ProgramStatus(Enum):
    """How far a program is."""

    UNASKED = "unasked"
    PREPARING = "preparing"
    READY = "ready"
    FAILED = "failed"  # never asked for again; its members run one after another


class ProgramState:
    """A program and how far it is."""

    __slots__ = ("key", "on_demand", "ready", "status")

    def __init__(self, key: ProgramKey) -> None:
        self.key = key
        self.on_demand = False  # asked for when a step needed it, not when the plan was loaded
        self.status = ProgramStatus.UNASKED
        self.ready = False  # the status is READY: asked in every step

    def settle(self, status: ProgramStatus) -> None:
        """It was prepared, or that failed."""
        self.status = status
        self.ready = status is ProgramStatus.READY


class ProgramTable:
    """The programs of one combined block, by mask, buckets and variant."""

    __slots__ = ("_combined", "_plan", "_programs")

    def __init__(self, plan: PlanKey, combined: int) -> None:
        self._plan = plan
        self._combined = combined
        self._programs: dict[tuple[int, tuple[int, ...], int], ProgramState] = {}

    def find(self, mask: int, buckets: tuple[int, ...], variant: int) -> ProgramState:
        """The program for the active members in `mask`; `buckets` ascending by position."""
        key = (mask, buckets, variant)
        found = self._programs.get(key)
        if found is None:
            found = ProgramState(ProgramKey(self._plan, self._combined, mask, buckets, variant))
            if len(self._programs) < MAX_REMEMBERED:
                self._programs[key] = found
            else:  # nobody would know it again once it is ready: it would count as being prepared for ever
                found.settle(ProgramStatus.FAILED)
        return found


class Instance:
    """Tasks of one model in flight. `block` is where it is in logical time, `passed` in physical time."""

    __slots__ = (
        "block",
        "bucket",
        "deadline_s",
        "id",
        "live",
        "moved_after",
        "over",
        "passed",
        "ready_s",
        "rows",
        "started",
        "task_ids",
        "track",
        "turn_s",
        "wanted_by_s",
    )

    def __init__(
        self, id: InstanceId, track: "Track", rows: list[Task], now: float, turn_s: float = -math.inf
    ) -> None:
        self.id = id
        self.track = track
        self.block = 0  # its input lies ready in this block's slot; the number of blocks once all are issued
        self.passed = 0  # blocks whose step has ended
        self.ready_s = now  # when `block` became ready
        self.over = False  # completed, failed or dead: nothing is left to be answered
        self.moved_after: tuple[StepId, ...] = ()  # what its last move waits for
        self.started = False  # block 0 was issued: rows are fixed from then on
        self.rows = rows
        self.live = len(rows)  # rows whose task has not ended; 0 means that the instance is dead
        self.bucket = 1
        self.task_ids: tuple[TaskId, ...] = ()
        self.deadline_s = math.inf
        self.wanted_by_s = math.inf  # what it is ranked by
        self.turn_s = turn_s  # of its rows without a deadline
        self.fit()

    def fit(self) -> None:
        """Work out what follows from the rows."""
        rows = self.rows
        if len(rows) == 1:  # the usual case, on the hot path
            self.task_ids = (rows[0].id,)
            self.deadline_s = rows[0].deadline_s
            self.wanted_by_s = wanted_by_s(rows[0], self.turn_s)
            self.bucket = 1
            return
        self.task_ids = tuple(row.id for row in rows)
        self.deadline_s = min(row.deadline_s for row in rows)
        self.wanted_by_s = min(wanted_by_s(row, self.turn_s) for row in rows)
        self.bucket = self.track.bound.bucket_for(len(rows))

    def rank(self) -> bool:
        """Work out again by when it is wanted once it has started and lost a row; whether that changed."""
        live = [row for row in self.rows if not row.ended]
        before = self.deadline_s, self.wanted_by_s
        self.deadline_s = min(row.deadline_s for row in live)
        self.wanted_by_s = min(wanted_by_s(row, self.turn_s) for row in live)
        return before != (self.deadline_s, self.wanted_by_s)


COPY_LANE = 63
"""Stands for the lane of a copy: none that a plan has."""


class StepRecord(Struct):
    """A step in flight, or a copy: then `lane` is `COPY_LANE`, and `combined` waits for it."""

    combined: "CombinedState"
    lane: int
    members: "list[tuple[Instance, Slot]]"  # with the slot of the block that it runs
    last: bool  # some member runs its model's last block
    holds: "tuple[PlanState, ...]"  # plans that must outlive this step
    issued_s: float
    waiters: "dict[CombinedState, None]" = {}  # combined blocks with a member that must come after it
    task: int | None = None  # of the plan's placement: that it runs, or copies for

    def carries(self, instance: Instance) -> bool:
        """Whether the instance is one of its members."""
        return any(one is instance for one, _ in self.members)
