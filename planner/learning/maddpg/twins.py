"""Twins to train on: devices that a worker makes for itself, by seed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from stageloom.planner.twin.arrivals import Process, entered_anywhere
from stageloom.planner.twin.device_file import DeviceFile
from stageloom.planner.twin.reference import Twin
from stageloom.planner.twin.times import StepTimes
from stageloom.planner.twin.window import Device
from stageloom.shared.search.costs import CostTable


@dataclass(frozen=True)
class TwinDevices:
    """Makes twins of one device; all of a process share what steps take.

    Compiled ones by default, with every program ready at once: a plan is not judged by being new. The
    reference twin is slower and, like an engine, runs a program's first steps member by member.
    """

    device: DeviceFile
    costs: CostTable
    arrivals: Mapping[str, Process]
    deadlines_s: Mapping[str, float] = field(default_factory=dict)
    compiled: bool = True

    @cached_property
    def _times(self) -> StepTimes:
        return StepTimes(self.device, self.costs)

    def __call__(self, seed: int) -> Device:
        """A twin with empty queues and the arrivals of a seed."""
        arrivals = entered_anywhere(self.arrivals, seed)
        if not self.compiled:
            return Twin(self._times, arrivals, seed=seed, deadlines_s=self.deadlines_s)
        from stageloom.planner.twin.compiled.twin import CompiledTwin  # numba only where it is used

        return CompiledTwin(self._times, arrivals, seed=seed, deadlines_s=self.deadlines_s, prepared=True)

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "_times"}
