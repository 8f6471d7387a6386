"""Which costs hold for a device: those of its class, or its own."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Calibration:
    """`costs_key` is what costs and schedules are kept under: the device class, or the device's own key.

    Steps that the device served before `steps_since_us`, by its own clock, say nothing of these costs.
    `ratio`: what steps took over what they should have, when that was found at `at_us`; 1, at 0, where
    nothing was ever found.
    """

    device_class: str
    costs_key: str
    steps_since_us: int = 0
    ratio: float = 1.0
    at_us: int = 0

    @property
    def own(self) -> bool:
        """Whether the device has costs of its own."""
        return self.costs_key != self.device_class

    @property
    def taught_by(self) -> tuple[str, ...]:
        """Whose stages teach beside its own how groups hinder each other: that outlasts a drift."""
        return (self.device_class,) if self.own else ()
