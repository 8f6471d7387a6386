"""Graphs to be split over a pair of devices, every time modelled: a roofline of each device, part by part.

A part reads its share of what the operator reads along the axis, and of the rest all; weights shrink along
channels only. Nothing here was measured.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, prod
from typing import Final

from stageloom.planner.twin.device_file import DeviceFile
from stageloom.planner.twin.device_pair import DevicePair
from stageloom.shared.graph import Graph, Operator
from stageloom.shared.partition import Axis
from stageloom.shared.search.analytic import DeviceRates, roofline_s
from stageloom.shared.search.split_problem import (
    AxisTimes,
    BorderJoins,
    Joins,
    OperatorBytes,
    PartSeconds,
    Reads,
    SplitProblem,
    SplittableOperator,
    chains_of,
)

TILE: Final = 16
"""Channels that a kernel takes at once, where there are several tiles of them."""

ALL_CHANNELS: Final = frozenset({"conv2d", "Conv", "dense", "Gemm", "MatMul", "batch_matmul"})
"""Kinds that read all channels of their input for each of their output."""

NEVER_CHANNELS: Final = frozenset({"softmax", "mean", "split", "reshape", "Softmax"})
"""Kinds that compute along the last axis, or move elements across it."""

MOVES: Final = frozenset({"transpose", "upsampling", "Transpose", "Resize"})
"""Kinds whose axes are not their input's."""

POOLS: Final = frozenset({"max_pool", "avg_pool", "depthwise", "MaxPool", "AveragePool", "Conv"})

ShareSeconds = Callable[["Shares", int], float]
"""Seconds of a part of an operator on a resource (0 or 1)."""


@dataclass(frozen=True, slots=True)
class Shares:
    """A part of an operator: which, along which axis, and its share."""

    graph: Graph
    op: int
    batch: int
    axis: Axis | None = None
    share: float = 1.0

    @property
    def operator(self) -> Operator:
        return self.graph.operators[self.op]

    @property
    def flop(self) -> float:
        return self.operator.flop * self.batch * self.share

    @property
    def elements(self) -> float:
        made = sum(prod(self.graph.tensors[one].shape) for one in self.operator.outputs)
        return made * self.batch * self.share

    @property
    def moved_bytes(self) -> float:
        """What it reads and makes."""
        weights = self.operator.weight_bytes * (self.share if self.axis is Axis.CHANNELS else 1.0)
        everything = self.axis is Axis.CHANNELS and self.operator.kind in ALL_CHANNELS
        read = _bytes(self.graph, self.operator.inputs) * self.batch * (1.0 if everything else self.share)
        return weights + read + _bytes(self.graph, self.operator.outputs) * self.batch * self.share


def _bytes(graph: Graph, tensors: tuple[int, ...]) -> int:
    return sum(graph.tensors[one].nbytes for one in tensors)


def all_cores(device: DeviceFile) -> DeviceRates:
    """The rates of a device, of a processor with all its cores."""
    rates = device.rates()
    return replace(rates, flop_per_s=rates.flop_per_s * max(device.cores, 1))


def roofline(pair: DevicePair) -> ShareSeconds:
    """Every part at the roofline of its device, launch included."""
    rates = all_cores(pair.fast), all_cores(pair.slow)

    def seconds(part: Shares, resource: int) -> float:
        return roofline_s(rates[resource], ceil(part.flop), ceil(part.moved_bytes), ceil(part.elements))

    return seconds


def joined_by(pair: DevicePair, graph: Graph, batch: int) -> BorderJoins:
    """What changes sides goes over the pair's bus."""
    return BorderJoins(
        operators=[_bytes_of(graph, op, batch) for op in range(len(graph.operators))],
        barrier_s=pair.barrier_s,
        latency_s=pair.bus.latency_s,
        bytes_per_s=pair.bus.bytes_per_s,
    )


def problem_of(graph: Graph, batch: int, part_s: ShareSeconds, joins: Joins) -> SplitProblem:
    """All operators with all axes that they may be split along."""
    chains, stages = chains_of(graph)
    operators = [_operator(graph, op, batch, part_s) for op in range(len(graph.operators))]
    return SplitProblem(operators=operators, joins=joins, chains=chains, stages=stages)


def extents_of(shape: tuple[int, ...], batch: int) -> dict[Axis, int]:
    """Extents along the axes, of a tensor [batch, channels, rows, columns] or [batch, rows..., channels]."""
    extents = {Axis.BATCH: batch, Axis.CHANNELS: shape[1] if len(shape) == 4 else shape[-1]}
    if len(shape) > 2:
        extents[Axis.ROWS] = shape[2] if len(shape) == 4 else shape[1]
    return extents


def _operator(graph: Graph, op: int, batch: int, part_s: ShareSeconds) -> SplittableOperator:
    operator = graph.operators[op]
    whole = Shares(graph, op, batch)
    extents = extents_of(graph.tensors[operator.outputs[0]].shape, batch) if operator.outputs else {}
    axes = []
    for axis, extent in extents.items():
        if extent < 2 or (axis is not Axis.BATCH and operator.kind in NEVER_CHANNELS):
            continue
        tile = TILE if axis is Axis.CHANNELS and extent >= 2 * TILE else 1
        parts = _part(whole, axis, extent, part_s, 0), _part(whole, axis, extent, part_s, 1)
        axes.append(AxisTimes(axis, extent, parts, (tile, tile)))
    return SplittableOperator((part_s(whole, 0), part_s(whole, 1)), tuple(axes))


def _part(whole: Shares, axis: Axis, extent: int, part_s: ShareSeconds, resource: int) -> PartSeconds:
    @cache
    def seconds(own: int) -> float:
        part = replace(whole, axis=axis, share=own / extent)
        return part_s(part, resource) if own else 0.0

    return seconds


def _bytes_of(graph: Graph, op: int, batch: int) -> OperatorBytes:
    operator = graph.operators[op]
    made = graph.tensors[operator.outputs[0]].shape if operator.outputs else (1, 1)
    windowed = operator.kind in POOLS or operator.kind in ALL_CHANNELS
    given = graph.tensors[operator.inputs[0]].shape if windowed else made
    return OperatorBytes(
        input_bytes=batch * _bytes(graph, operator.inputs),
        output_bytes=batch * _bytes(graph, operator.outputs),
        input_extents=extents_of(given, batch),
        output_extents=extents_of(made, batch),
        reads=_reads(operator, given, made),
    )


def _reads(operator: Operator, given: tuple[int, ...], made: tuple[int, ...]) -> Mapping[Axis, Reads]:
    reads = {Axis.BATCH: Reads(Axis.BATCH)}
    if operator.kind in NEVER_CHANNELS | MOVES or len(given) != len(made) or len(made) < 3:
        return reads
    if operator.kind not in ALL_CHANNELS:
        reads[Axis.CHANNELS] = Reads(Axis.CHANNELS)
    if operator.convolution is not None and len(made) == 4:
        one = operator.convolution
        window = one.dilations[0] * (one.kernel[0] - 1) + 1
        reads[Axis.ROWS] = Reads(Axis.ROWS, one.strides[0], window, one.before[0])
    elif operator.kind in POOLS and len(made) == 4:
        stride = max(given[2] // made[2], 1)
        reads[Axis.ROWS] = Reads(Axis.ROWS, stride, 3, 1)
    elif operator.kind != "batch_matmul":
        reads[Axis.ROWS] = Reads(Axis.ROWS)
    return reads
