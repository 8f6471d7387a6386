"""Operator and stage times as devices measured them, in the form that `shared.search` takes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from shared.ids import Digest, OpId
from shared.messages.telemetry import OperatorTiming
from shared.plan import ExecutorOptions
from shared.search.analytic import DeviceRates
from shared.search.costs import CostTable, MeasuredStage, fitted


class Measurements(Protocol):
    """The part of the store that costs come from."""

    def operator_costs(
        self, device_class: str, artifact: Digest, batch: int = 1
    ) -> dict[int, OperatorTiming]:
        """Measured operators of an artifact on a device class."""
        ...

    def stage_costs(
        self, device_class: str, executor: ExecutorOptions, batches: Iterable[int]
    ) -> list[MeasuredStage]:
        """Measured stages of a device class."""
        ...


def device_costs(
    store: Measurements,
    device_class: str,
    executor: ExecutorOptions,
    models: Sequence[tuple[Digest, int]],
) -> CostTable:
    """All that a device class has measured of these (artifact, batch) under these options."""
    table = cost_table(
        (artifact, store.operator_costs(device_class, artifact, batch)) for artifact, batch in models
    )
    stages = store.stage_costs(device_class, executor, {batch for _, batch in models})
    return fitted(replace(table, stages=tuple(stages)))


def cost_table(
    measured: Iterable[tuple[Digest, Mapping[int, OperatorTiming]]], rates: DeviceRates | None = None
) -> CostTable:
    """The table over all artifacts; an operator without a measurement keeps its estimate.

    A time of zero is kept: an operator that only passes a tensor on costs nothing worth measuring.
    """
    return CostTable(
        measured_s={
            (artifact, OpId(operator)): timing.median_us / 1e6
            for artifact, timings in measured
            for operator, timing in timings.items()
            if timing.median_us >= 0
        },
        rates=rates or DeviceRates(),
    )
