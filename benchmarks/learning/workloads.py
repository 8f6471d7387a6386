"""Devices and workloads: TOP's table II on the twin's device files, and the same scaled to each device."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Final

from stageloom.planner.twin.arrivals import Periodic, Process
from stageloom.planner.twin.device_file import DeviceFile
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import bind
from stageloom.shared.search.compose import ModelChoice, compose

MEMBERS_MAX: Final = {"nano": 2, "tx2": 2, "xavier_nx": 3, "a100": 4}
"""Devices with TOP's H (section VI-B)."""

MIX: Final = (("inception_v3", 30.0), ("resnet50", 60.0), ("squeezenet_bypass", 120.0))
SINGLE: Final = ("inception_v3", 240.0)
_FASTER: Final = {"a100": 2.0}
"""TOP doubles the rates on its server."""

JITTER: Final = 0.2
"""Of the period: sensors that sample at a fixed frequency, but not with one clock."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tasks per second of each model, periodic with jitter."""

    name: str
    rates: tuple[tuple[str, float], ...]

    @property
    def models(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(name for name, _ in self.rates)

    def arrivals(self) -> dict[str, Process]:
        """Per model."""
        return {name: Periodic(rate_per_s=rate, jitter_s=JITTER / rate) for name, rate in self.rates}


def workloads(device: DeviceFile, times: StepTimes, models: Sequence[ModelChoice]) -> tuple[Workload, ...]:
    """The paper's mix; the same mix at 0.8 and at 1.1 of the device's capacity; one model alone.

    Capacity is what the device serves one operator after another, whole models, without a gap.
    """
    faster = _FASTER.get(device.name, 1.0)
    paper = tuple((name, rate * faster) for name, rate in MIX)
    capacity = 1.0 / fsum(
        rate * whole_s(times, model) for (_, rate), model in zip(paper, models, strict=True)
    )
    return (
        Workload(name="paper", rates=paper),
        *(
            Workload(
                name=f"capacity_{share}",
                rates=tuple((name, share * capacity * rate) for name, rate in paper),
            )
            for share in (0.8, 1.1)
        ),
        Workload(name="single", rates=((SINGLE[0], SINGLE[1] * faster),)),
    )


def whole_s(times: StepTimes, model: ModelChoice) -> float:
    """Seconds of one task of a model, uncut, one operator after another."""
    bound = bind(compose([model]), {model.artifact: model.graph})
    return times.of_plan(bound).step(0, 1, (1,)).seconds
