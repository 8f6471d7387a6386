"""How far a device may move what the planner counts on. Pure.

Some numbers that a device sends decide numbers that the planner stores and sends to others: a device that
knows a newer epoch makes the planner begin one above it. So no device may take the planner near the end of
what the wire holds. What one asks for must lie within reach of what is stored, and below `CEILING`, half of
the wire's range: the planner itself counts on by one, and never comes to the end of the other half.
"""

from typing import Final

from stageloom.shared.messages.base import MOST
from stageloom.shared.messages.control import (
    Alarm,
    ControlToPlanner,
    Heartbeat,
    Hello,
    LocalPlan,
    Report,
    Reported,
)
from stageloom.shared.messages.telemetry import TelemetryBatch

CEILING: Final = MOST // 2
EPOCHS_AHEAD: Final = 1_000
"""Each is a restored backup of the planner's database."""

GENERATIONS_AHEAD: Final = 1_000_000
"""Pushes to one device that a restored database may have forgotten."""

CHANGES_AHEAD: Final = 1 << 32
"""Changes of a device's report, or plans of its own, between two that the planner knows."""

SEQUENCES: Final = 1 << 40
"""Rows of one boot: ten thousand a second for three years."""


def beyond_reach(message: ControlToPlanner, *, epoch: int, generation: int, known: Report | None) -> str:
    """Why a message counts further than its sender can have come; empty where it does not.

    Args:
        message: what a device says.
        epoch: the planner's.
        generation: the newest one desired of the device, 0 for none.
        known: the newest report of the device on record.
    """
    known = known or _NOTHING
    limits = (
        epoch + EPOCHS_AHEAD,
        max(generation, known.generation) + GENERATIONS_AHEAD,
        known.revision + CHANGES_AHEAD,
        known.local_counter + CHANGES_AHEAD,
    )
    for name, value, limit in zip(_NAMES, _counters(message), limits, strict=True):
        if value > limit or value > CEILING:
            return f"it says {name} {value}, and cannot be beyond {min(limit, CEILING)}"
    return ""


_NOTHING: Final = Report()
_NAMES: Final = ("epoch", "generation", "revision", "local counter")


def _counters(message: ControlToPlanner) -> tuple[int, int, int, int]:
    """The counters in a message that the planner goes by, in the order of `_NAMES`; 0 where it has none."""
    match message:
        case Heartbeat():
            return message.epoch, message.generation, message.revision, 0
        case Hello(report=report) | Reported(report=report):
            return report.epoch, report.generation, report.revision, report.local_counter
        case LocalPlan():
            return message.epoch, message.generation, 0, message.local_counter
        case Alarm():
            return 0, 0, 0, 0


def rows_beyond_reach(batch: TelemetryBatch) -> str:
    """`beyond_reach` for telemetry, whose rows count from 0 in each boot."""
    numbers = [one.last for one in batch.ranges]
    numbers += [number for one in batch.ledgers for number in (one.produced, one.dropped)]
    highest = max(numbers, default=0)
    if highest < SEQUENCES:
        return ""
    return f"it counts {highest} telemetry rows in one boot, and cannot be beyond {SEQUENCES}"
