"""The device as an environment sees it: the part of `planner.twin.interface.Device` that training needs.

Any of the three views of a device will do; training runs on the simulated one.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from shared.bound import BoundPlan
from shared.engine.stats import Counts, EngineGlance


class ModelWindow(Protocol):
    """One model during a window."""

    @property
    def submitted(self) -> int:
        """Tasks that arrived."""
        ...

    @property
    def ended(self) -> Counts:
        """How tasks ended."""
        ...

    @property
    def latencies_s(self) -> Sequence[float]:
        """Of completed tasks, from arrival to answer."""
        ...


class Window(Protocol):
    """What a device did between two instants; what waits at its end waits at the beginning of the next."""

    @property
    def seconds(self) -> float:
        """How long."""
        ...

    @property
    def models(self) -> Sequence[ModelWindow]:
        """In the plan's order. [W]"""
        ...

    @property
    def utilisation(self) -> float:
        """Of the device, 0 to 1."""
        ...

    @property
    def glances(self) -> Sequence[EngineGlance]:
        """The queues and the progress now and then, oldest first, at least one."""
        ...


class Device(Protocol):
    """A device with its arrivals. Starts without a plan, with empty queues."""

    def deploy(self, bound: BoundPlan) -> None:
        """Go over to a plan; what is queued and in flight is carried over."""
        ...

    def run(self, seconds: float, *, sample_at_s: Sequence[float] | None = None) -> Window:
        """Serve for so long; `sample_at_s`: when to glance, counted from now."""
        ...


MakeDevice = Callable[[int], Device]
"""A fresh device with the arrivals of a seed. Picklable, as workers make their own."""
