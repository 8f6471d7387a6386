"""One device seen three ways: the twin, an engine in this process, an agent over the wire."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

from stageloom.planner.twin.window import Window
from stageloom.shared.bound import BoundPlan

SAMPLE_EVERY_S: Final = 0.1
"""As often as an agent looks at its queues."""


def usual_samples(seconds: float) -> list[float]:
    """When a device looks at its queues in a window of so many seconds where nobody says when."""
    return [SAMPLE_EVERY_S * (one + 1) for one in range(int(seconds / SAMPLE_EVERY_S + 1e-9))]


class Device(Protocol):
    """Something that runs plans. What is queued and in flight is carried over between calls."""

    def deploy(self, bound: BoundPlan) -> None:
        """Send new launches to this plan; what is in flight moves over or ends on the old one.

        Raises:
            StageloomError: the device cannot run it; what ran before goes on.
        """
        ...

    def run(self, seconds: float, *, sample_at_s: Sequence[float] | None = None) -> Window:
        """Go on for a while and say what happened.

        `sample_at_s`: when to look at the queues, ascending, counted from now; None: every 0.1 s. A device
        that cannot choose looks when it does.
        """
        ...


MakeDevice: TypeAlias = Callable[[int], Device]
"""A fresh device, with empty queues and the arrivals of a seed. Picklable, as workers make their own."""
