"""Which kernel each operator runs with, and what measuring said of it.

A kernel that is fast for one shape can be several times slower for another (P7), and the search in cudnn
differs from run to run (P6); so every choice is measured once per process, with the strides that the program
will use, logged, and kept: a program built later makes the same one. A choice holds for the layout it was
measured with: what is fast into a packed buffer may be slow, or not run at all, into a slice.

Before an alternative may win, it has to give what the plain kernel gives on random values.
"""

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor

from stageloom.edge_agent.executor.base import OperatorTime, TimingRequest
from stageloom.edge_agent.executor.cuda.streams import Nature
from stageloom.edge_agent.executor.timing import seeded_values, time_in_order
from stageloom.edge_agent.lowering.dtypes import Precision
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


def _call(launch: Callable[[], object]) -> None:
    launch()


@dataclass(frozen=True, slots=True)
class Instruments:
    """What can be measured of a launch."""

    timer: Timer
    demand: Callable[[Callable[[], object]], float] = _unknown  # the largest share of a multiprocessor
    flop_per_byte: float = USUAL_FLOP_PER_BYTE  # that the device reaches; less leaves it waiting for memory
    run: Callable[[Callable[[], object]], None] = _call  # runs a launch once and waits for its end


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel chosen for an operator; `seconds` is the median of each alternative, by name."""

    name: str
    seconds: tuple[tuple[str, float], ...]
    nature: Nature
    wrong: tuple[tuple[str, float], ...] = ()  # alternatives that gave something else, and how far off


_Model: TypeAlias = tuple[Digest, Precision, bool, int]
"""Artifact, precision, channels last, batch."""

_Layouts: TypeAlias = tuple[Hashable, ...]

_ALIGNMENT = 16  # bytes that kernels may take for granted of an address

AGREEMENT = {Precision.FP32: 1e-4, Precision.TF32: 5e-3, Precision.FP16: 1e-2}
"""How far an alternative may be from the plain kernel: norm of the difference over the norm."""

_SEED = 20261127


@dataclass(frozen=True, eq=False, slots=True)
class KernelSite:
    """A unit of a model at a batch, on the tensors that it reads and makes in a program."""

    lowering: ModelLowering
    batch: int
    unit: Unit
    reads: Sequence[Tensor]
    makes: Sequence[Tensor]

    @property
    def layouts(self) -> _Layouts:
        """What a kernel's time depends on, but for the values."""
        tensors = (*self.reads, *self.makes)
        return tuple((tuple(t.shape), t.stride(), t.dtype, t.data_ptr() % _ALIGNMENT) for t in tensors)

    def call(self, way: Alternative) -> Callable[[], object]:
        """What runs the unit by that kernel."""
        return partial(way.run_into, self.reads, self.makes)


@dataclass
class _Known:
    """Of one model at one batch."""

    choices: dict[tuple[tuple[OpId, ...], _Layouts], Choice] = field(default_factory=dict)
    natures: dict[OpId, Nature] = field(default_factory=dict)  # the latest measured, whatever the layout


class KernelChoices:
    """Choices by model, batch, operator and layout; asked and filled by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[_Model, _Known] = {}
        self._alike: dict[Hashable, Choice] = {}  # by signature: other operators' that compute the same

    def way(self, site: KernelSite) -> Alternative:
        """The kernel for a unit on these tensors; the plain one before any was chosen."""
        known = self.choice(site)
        return site.unit.alternatives[0] if known is None else site.unit.way(known.name)

    def several(
        self, lowering: ModelLowering, batch: int, ops: Sequence[OpId], *, merge: bool
    ) -> Unit | None:
        """Several operators as one unit; None where they can only run one by one.

        `merge`: siblings as one convolution (IOS); else a chain that the graph counts as one fused unit.
        """
        try:
            return lowering.merged(batch, ops) if merge else lowering.joined(batch, ops)
        except (ExecutorError, ValueError) as error:
            log.info("operators %s run one by one: %s", list(ops), error)
            return None

    def natures(self, lowering: ModelLowering, batch: int) -> dict[OpId, Nature]:
        """What was measured of the operators, for the issue order."""
        with self._lock:
            known = self._known.get(_key(lowering, batch))
            return {} if known is None else dict(known.natures)

    def all_choices(self) -> list[Choice]:
        """Every choice, once per operator and layout."""
        with self._lock:
            return [choice for known in self._known.values() for choice in known.choices.values()]

    def choice(self, site: KernelSite) -> Choice | None:
        """What was chosen for a unit on tensors of this layout, None before it was measured."""
        with self._lock:
            known = self._known.get(_key(site.lowering, site.batch))
            return None if known is None else known.choices.get((site.unit.ops, site.layouts))

    def measure(self, site: KernelSite, instruments: Instruments) -> Choice:
        """Time every alternative of a unit on these tensors, keep the fastest that is right and ask what it
        demands; a second call is free, and so is one for another operator that computes the same.

        The tensors hold afterwards what they held before.

        Raises:
            RuntimeError: the plain kernel cannot run; another that cannot is left out.
        """
        known = self.choice(site)
        if known is not None:
            return known
        unit, layouts = site.unit, site.layouts
        alike = None if unit.signature is None else (site.lowering.precision, unit.signature, layouts)
        with self._lock:
            choice = self._alike.get(alike) if alike is not None else None
        if choice is None:
            choice = _measured(site, instruments)
            log.info(
                "kernel artifact=%s batch=%d operators=%s chosen=%s us=%s wrong=%s memory_bound=%s "
                "demand=%.2f",
                site.lowering.artifact.digest[:12],
                site.batch,
                list(unit.ops),
                choice.name,
                {way: round(took_s * 1e6, 1) for way, took_s in choice.seconds},
                dict(choice.wrong),
                choice.nature.memory_bound,
                choice.nature.demand,
            )
        with self._lock:
            if alike is not None:
                self._alike[alike] = choice
            found = self._known.setdefault(_key(site.lowering, site.batch), _Known())
            found.choices[unit.ops, layouts] = choice
            found.natures[unit.ops[0]] = choice.nature
        return choice


def _measured(site: KernelSite, instruments: Instruments) -> Choice:
    unit = site.unit
    offered = [way for way in unit.alternatives if way.fits(site.reads, site.makes)]
    wrong: dict[str, float] = {}
    if len(offered) > 1:
        tolerance = AGREEMENT[site.lowering.precision]
        wrong = wrong_ones(offered, site.reads, site.makes, tolerance, instruments)
    seconds = tuple(
        (way.name, taken_s)
        for way in offered
        if way.name not in wrong and (taken_s := _median_s(way, site, instruments.timer)) is not None
    )
    name, fastest_s = min(seconds, key=lambda pair: pair[1])
    nature = Nature(
        seconds=fastest_s,
        memory_bound=is_memory_bound(site.lowering, site.batch, unit, instruments.flop_per_byte),
        demand=instruments.demand(site.call(unit.way(name))),
    )
    for way, error in wrong.items():
        log.warning(
            "operators %s: the kernel %s differs from the plain one by %.1e", list(unit.ops), way, error
        )
    return Choice(name, seconds, nature, tuple(wrong.items()))


def wrong_ones(
    offered: Sequence[Alternative],
    reads: Sequence[Tensor],
    makes: Sequence[Tensor],
    tolerance: float,
    instruments: Instruments,
) -> dict[str, float]:
    """The alternatives that give something else than the first one, and how far off they are.

    They run on random values and into buffers of NaN, so that what is not written is seen. One that writes
    between the elements of a slice is infinitely far off. All of that holds afterwards what it held before.
    """
    held: list[tuple[Tensor, Tensor]] = []
    wrong: dict[str, float] = {}
    touched = [*reads, *map(_span, makes)]
    instruments.run(lambda: held.extend((tensor, tensor.clone()) for tensor in touched))
    try:
        instruments.run(partial(_fill, reads))
        plain, *others = offered
        wanted = _results(plain, reads, makes, instruments)
        for way in others:
            try:
                made = _results(way, reads, makes, instruments)
            except RuntimeError:
                continue  # timing it says so
            error = max(_difference(one, two) for one, two in zip(made, wanted, strict=True))
            if not error <= tolerance:
                wrong[way.name] = error
    finally:
        instruments.run(partial(_restore, held))
    return wrong


def _results(
    way: Alternative, reads: Sequence[Tensor], makes: Sequence[Tensor], instruments: Instruments
) -> list[Tensor]:
    """Copies of what it makes; infinite where it wrote anything else."""
    made: list[Tensor] = []

    def run() -> None:
        spans = [_span(tensor).view(torch.uint8) for tensor in makes]
        for tensor in makes:
            tensor.fill_(torch.nan)
        before = [span.clone() for span in spans]
        way.run_into(reads, makes)
        copies = [tensor.to(torch.float32, copy=True) for tensor in makes]  # the next one writes there
        for tensor in makes:
            tensor.fill_(torch.nan)
        alone = all(torch.equal(span, old) for span, old in zip(spans, before, strict=True))
        made.extend(copies if alone else [torch.full_like(copy, torch.inf) for copy in copies])

    instruments.run(run)
    return made


def _span(tensor: Tensor) -> Tensor:
    """All memory from its first element to its last, in one row."""
    last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,), tensor.storage_offset())


def _fill(reads: Sequence[Tensor]) -> None:
    for number, tensor in enumerate(reads):
        generator = torch.Generator(tensor.device).manual_seed(_SEED + number)
        tensor.normal_(generator=generator)


def _restore(held: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, before in held:
        tensor.copy_(before)


def _difference(made: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm; NaN or infinite where something was not written."""
    return float(torch.linalg.vector_norm(made - wanted) / torch.linalg.vector_norm(wanted))


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


def _median_s(way: Alternative, site: KernelSite, timer: Timer) -> float | None:
    """What an alternative takes; None where it cannot run. The first is the plain one, which must."""
    unit = site.unit
    try:
        return median(timer(site.call(way)))
    except RuntimeError as error:  # a library has no kernel for this shape, type or layout
        if way is unit.alternatives[0]:
            raise
        log.info("operators %s have no kernel %s: %s", list(unit.ops), way.name, error)
        return None


def _key(lowering: ModelLowering, batch: int) -> _Model:
    return (lowering.artifact.digest, lowering.precision, lowering.channels_last, batch)


Lap = Callable[[Callable[[], object], bool], float]
"""Runs a launch, which can be captured or not, and returns the seconds that it took on the device."""


def time_units(
    lowering: ModelLowering, request: TimingRequest, idle: Callable[[], bool], lap: Lap
) -> tuple[OperatorTime, ...]:
    """Time per operator, as `time_in_order`, in the arithmetic that `lap` chooses. [num_operators]

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

    with torch.inference_mode():
        for tensor, drawn in seeded_values(graph, graph.inputs, request.batch).items():
            values[tensor] = lowered.allocate(tensor).copy_(torch.from_numpy(drawn))
        return time_in_order(graph, request, idle, begin, lambda tensor: values.pop(tensor, None))
