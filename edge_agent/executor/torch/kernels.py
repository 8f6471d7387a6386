"""Which kernel each operator runs with, and what measuring said of it.

A kernel that is fast for one shape can be several times slower for another (P7), and the search in cudnn
differs from run to run (P6); so every choice is measured once per process, with the strides that the program
will use, logged, and kept: a program built later makes the same one.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from stageloom.edge_agent.executor.base import OperatorTime, TimingRequest
from stageloom.edge_agent.executor.cuda.streams import Nature
from stageloom.edge_agent.executor.timing import seeded_values, time_in_order
from stageloom.edge_agent.lowering.batch import LoweredModel
from stageloom.edge_agent.lowering.dtypes import Precision, arithmetic
from stageloom.edge_agent.lowering.model import ModelLowering
from stageloom.edge_agent.lowering.program import Alternative, Unit
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import Digest, OpId, TensorId

log = logging.getLogger(__name__)

Timer = Callable[[Callable[[], object]], Sequence[float]]
"""Runs a launch again and again and returns the seconds that each took."""

USUAL_FLOP_PER_BYTE = 20.0
"""What a device computes for every byte that it moves, where that was not measured."""


def _unknown(launch: Callable[[], object]) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Instruments:
    """What can be measured of a launch."""

    timer: Timer
    demand: Callable[[Callable[[], object]], float] = _unknown  # the largest share of a multiprocessor
    flop_per_byte: float = USUAL_FLOP_PER_BYTE  # that the device reaches; less leaves it waiting for memory


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel chosen for an operator; `seconds` is the median of each alternative, by name."""

    name: str
    seconds: tuple[tuple[str, float], ...]
    nature: Nature


_Model = tuple[Digest, Precision, bool, int]  # artifact, precision, channels last, batch


class KernelChoices:
    """Choices by model, batch and operator; asked and filled by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chosen: dict[_Model, dict[tuple[OpId, ...], Choice]] = {}

    def applied(self, lowering: ModelLowering, batch: int) -> LoweredModel:
        """The model at a batch with the kernels that are chosen so far."""
        lowered = lowering.at_batch(batch)
        with self._lock:
            chosen = dict(self._chosen.get(_key(lowering, batch), {}))
        if not chosen:
            return lowered
        units = tuple(
            unit.choose(chosen[unit.ops].name) if unit.ops in chosen else unit for unit in lowered.units
        )
        return replace(lowered, units=units)

    def several(
        self, lowering: ModelLowering, batch: int, ops: Sequence[OpId], *, merge: bool
    ) -> Unit | None:
        """Several operators as one unit, with its chosen kernel; None where they can only run one by one.

        `merge`: siblings as one convolution (IOS); else a chain that the graph counts as one fused unit.
        """
        try:
            unit = lowering.merged(batch, ops) if merge else lowering.joined(batch, ops)
        except (ExecutorError, ValueError) as error:
            log.info("operators %s run one by one: %s", list(ops), error)
            return None
        known = self.choice(lowering, batch, unit.ops)
        return unit if known is None else unit.choose(known.name)

    def natures(self, lowering: ModelLowering, batch: int) -> dict[OpId, Nature]:
        """What was measured of the operators, for the issue order."""
        with self._lock:
            chosen = self._chosen.get(_key(lowering, batch), {})
            return {ops[0]: choice.nature for ops, choice in chosen.items()}

    def choice(self, lowering: ModelLowering, batch: int, ops: tuple[OpId, ...]) -> Choice | None:
        """What was chosen for an operator, None before it was measured."""
        with self._lock:
            return self._chosen.get(_key(lowering, batch), {}).get(ops)

    def measure(
        self,
        lowering: ModelLowering,
        batch: int,
        unit: Unit,
        reads: Sequence[Tensor],
        makes: Sequence[Tensor],
        instruments: Instruments,
    ) -> Choice:
        """Time every alternative of a unit on these tensors, keep the fastest and ask what it demands; a
        second call is free.

        Raises:
            RuntimeError: the plain kernel cannot run; another that cannot is left out.
        """
        known = self.choice(lowering, batch, unit.ops)
        if known is not None:
            return known
        seconds = tuple(
            (alternative.name, taken_s)
            for alternative in unit.alternatives
            if (taken_s := _median_s(alternative, unit, reads, makes, instruments.timer)) is not None
        )
        name, fastest_s = min(seconds, key=lambda pair: pair[1])
        best = next(alternative for alternative in unit.alternatives if alternative.name == name)
        nature = Nature(
            seconds=fastest_s,
            memory_bound=is_memory_bound(lowering, batch, unit, instruments.flop_per_byte),
            demand=instruments.demand(_bound(best, reads, makes)),
        )
        log.info(
            "kernel artifact=%s batch=%d operators=%s chosen=%s us=%s memory_bound=%s demand=%.2f",
            lowering.artifact.digest[:12],
            batch,
            list(unit.ops),
            name,
            {way: round(took_s * 1e6, 1) for way, took_s in seconds},
            nature.memory_bound,
            nature.demand,
        )
        choice = Choice(name, seconds, nature)
        with self._lock:
            self._chosen.setdefault(_key(lowering, batch), {})[unit.ops] = choice
        return choice


def is_memory_bound(lowering: ModelLowering, batch: int, unit: Unit, flop_per_byte: float) -> bool:
    """Whether it computes less for the bytes that it moves than the device could meanwhile.

    The shares that it reaches of the device's two rates compare as these do: its time is in both.
    """
    graph = lowering.artifact.graph
    flop = batch * sum(graph.operators[op].flop for op in unit.ops)
    weights = sum(graph.operators[op].weight_bytes for op in unit.ops)
    tensors = sum(graph.tensors[t].nbytes for t in (*unit.inputs, *unit.outputs))
    moved = weights + batch * tensors
    if lowering.precision is Precision.FP16:
        moved //= 2  # the graph counts four bytes an element
    return flop < flop_per_byte * moved


def _median_s(
    alternative: Alternative, unit: Unit, reads: Sequence[Tensor], makes: Sequence[Tensor], timer: Timer
) -> float | None:
    """What an alternative takes; None where it cannot run. The first is the plain one, which must."""
    try:
        return median(timer(_bound(alternative, reads, makes)))
    except RuntimeError as error:  # a library has no kernel for this shape, type or layout
        if alternative is unit.alternatives[0]:
            raise
        log.info("operators %s have no kernel %s: %s", list(unit.ops), alternative.name, error)
        return None


def _bound(
    alternative: Alternative, reads: Sequence[Tensor], makes: Sequence[Tensor]
) -> Callable[[], object]:
    return lambda: alternative.run_into(reads, makes)


def _key(lowering: ModelLowering, batch: int) -> _Model:
    return (lowering.artifact.digest, lowering.precision, lowering.channels_last, batch)


Lap = Callable[[Callable[[], object], bool], float]
"""Runs a launch, which can be captured or not, and returns the seconds that it took on the device."""


def time_units(
    lowering: ModelLowering, request: TimingRequest, idle: Callable[[], bool], lap: Lap
) -> tuple[OperatorTime, ...]:
    """Time per operator, as `time_in_order`. [num_operators]

    Raises:
        ExecutorError: an operator cannot run alone.
    """
    lowered = lowering.at_batch(request.batch)
    graph = lowering.artifact.graph
    values: dict[TensorId, Tensor] = {}

    def begin(op: int) -> Callable[[], float]:
        unit = lowered.units[op]
        reads = [values[t] for t in unit.inputs]
        makes = [lowered.allocate(t) for t in unit.outputs]
        values.update(zip(unit.outputs, makes, strict=True))
        return partial(lap, partial(unit.run_into, reads, makes), not unit.foreign)

    with torch.inference_mode(), arithmetic(lowering.precision):
        for tensor, drawn in seeded_values(graph, graph.inputs, request.batch).items():
            values[tensor] = lowered.allocate(tensor).copy_(torch.from_numpy(drawn))
        return time_in_order(graph, request, idle, begin, lambda tensor: values.pop(tensor, None))
