"""What the store knows of a measured operator."""

from typing import NamedTuple


class OperatorCost(NamedTuple):
    """One operator on a device class: median and spread of so many runs, and when (wall clock)."""

    operator: int
    median_us: float
    spread_us: float
    runs: int
    measured_at_us: int
