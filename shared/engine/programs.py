"""Which programs a combined block has, which are being prepared, and which to ask for."""

from enum import Enum

from stageloom.shared.engine.steps import PlanKey, ProgramKey

MAX_REMEMBERED = 4096  # programs remembered per combined block; the others are looked at anew each time


class ProgramStatus(Enum):
    """How far a program is."""

    UNASKED = "unasked"
    PREPARING = "preparing"
    READY = "ready"
    FAILED = "failed"  # never asked for again; its members run one after another


class Program:
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
    """The programs of one combined block, by mask and buckets."""

    __slots__ = ("_combined", "_plan", "_programs")

    def __init__(self, plan: PlanKey, combined: int) -> None:
        self._plan = plan
        self._combined = combined
        self._programs: dict[tuple[int, tuple[int, ...]], Program] = {}

    def find(self, mask: int, buckets: tuple[int, ...]) -> Program:
        """The program for the active members in `mask`; `buckets` ascending by position."""
        pair = (mask, buckets)
        found = self._programs.get(pair)
        if found is None:
            found = Program(ProgramKey(self._plan, self._combined, mask, buckets))
            if len(self._programs) < MAX_REMEMBERED:
                self._programs[pair] = found
        return found
