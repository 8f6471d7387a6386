"""What an operator costs where nothing was measured: a roofline of a device that small kernels do not fill.

Williams et al. 2009: an operator takes the longer of computing at the device's peak and of moving its bytes
at the device's bandwidth. A kernel with fewer threads than the device holds at once reaches only that share
of the peak (its *occupancy*, one thread per element it makes), and leaves the rest to what runs beside it.
That rest is all that operator parallelism can gain, so an estimate without it makes all schedules look alike.

Two numbers per operator follow: its seconds alone, launch included, and its *work*, the seconds that the
whole device would need for it. A quarter of the threads is taken to be enough to fill the memory bus.
"""

from dataclasses import dataclass
from math import prod
from typing import Final

from stageloom.shared.graph import Graph
from stageloom.shared.ids import OpId

MEMORY_FILLS_AT: Final = 0.25
"""Occupancy at which the memory bus is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Assumed rates of a device without measurements: about one core of a small CPU."""

    flop_per_s: float = 2e10
    bytes_per_s: float = 8e9
    launch_s: float = 2e-5  # one operator's fixed cost
    barrier_s: float = 2e-5  # what ends a stage of more than one group
    contention: float = 1.0  # nothing is known to overlap until it was measured
    threads: int = 0  # that the device holds at once; 0: unknown, every operator fills it


def roofline_s(rates: DeviceRates, flop: int, moved_bytes: int, elements: int) -> float:
    """Seconds of one kernel with nothing beside it: the launch, plus the longer of computing and moving.

    `elements` are those that it makes, each by a thread.
    """
    share = _occupancy(rates, elements)
    bus = min(share / MEMORY_FILLS_AT, 1.0)
    return rates.launch_s + max(flop / (rates.flop_per_s * share), moved_bytes / (rates.bytes_per_s * bus))


def alone_s(graph: Graph, op: OpId, rates: DeviceRates, batch: int = 1) -> float:
    """Seconds of one operator with nothing beside it, over `batch` rows.

    Weights are read once, everything else is there once per row.
    """
    moved = _moved_bytes(graph, op, batch)
    return roofline_s(rates, graph.operators[op].flop * batch, moved, elements_of(graph, op) * batch)


def work_s(graph: Graph, op: OpId, rates: DeviceRates, batch: int = 1) -> float:
    """Return the seconds that the whole device would need for the operator; at most `alone_s`."""
    flop, moved = graph.operators[op].flop * batch, _moved_bytes(graph, op, batch)
    return max(flop / rates.flop_per_s, moved / rates.bytes_per_s)


def occupancy(graph: Graph, op: OpId, rates: DeviceRates) -> float:
    """Return the share of the device's threads that the operator can use, above 0."""
    return _occupancy(rates, elements_of(graph, op))


def elements_of(graph: Graph, op: OpId) -> int:
    """Return the number of elements of the operator's outputs."""
    return sum(prod(graph.tensors[tensor].shape) for tensor in graph.operators[op].outputs)


def _occupancy(rates: DeviceRates, elements: int) -> float:
    return min(max(elements, 1) / rates.threads, 1.0) if rates.threads else 1.0


def _moved_bytes(graph: Graph, op: OpId, batch: int) -> int:
    operator = graph.operators[op]
    row = sum(graph.tensors[tensor].nbytes for tensor in (*operator.inputs, *operator.outputs))
    return operator.weight_bytes + row * batch
