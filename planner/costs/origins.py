"""Where a cost or a schedule comes from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """One measurement: its time is the device's clock, microseconds since 1970."""

    runs: int
    spread_us: float
    measured_on: str
    measured_at_us: int


@dataclass(frozen=True, slots=True)
class FoundBy:
    """A schedule that a scheduler found for a combined block of a device class."""

    scheduler: str
    stage_string: str
    found_at_us: int
