"""Operator times as a device measured them, in the form that `shared.search` takes."""

from collections.abc import Iterable, Mapping

from shared.ids import Digest, OpId
from shared.messages.telemetry import OperatorTiming
from shared.search.costs import CostTable, DeviceRates


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
