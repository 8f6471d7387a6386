"""Kernels in a straight line over registers, and the units that executors run.

A unit is one operator of the graph, or several that run as one. An executor plans memory from `output_specs`
and runs a unit in one of two ways:

- `run(args)` returns tensors that torch allocates; if `view` is set they lie in the arguments' memory and no
  kernel runs on the device;
- `run_into(args, outs)` writes into the caller's buffers, of any strides: a slice of a Concat's buffer, for
one.
  At most scratch memory is allocated, on the current stream.

`alternatives` are kernels with the same result up to rounding. The first always works; which is fastest
depends on shapes, strides, device and library version, so an executor times them and takes `unit.way(name)`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from stageloom.edge_agent.lowering.node import Kernel, Spec
from stageloom.edge_agent.lowering.trace import NodeTracer, TracedNode
from stageloom.shared.ids import OpId, TensorId


@dataclass(frozen=True, slots=True)
class _Step:
    kernel: Kernel
    reads: tuple[int, ...]
    makes: tuple[int, ...]  # -1 for an output that nobody names
    inplace: bool  # may overwrite the register it reads first


@dataclass(frozen=True, slots=True)
class _Target:
    """The output buffer that a step may write directly, viewed in `shape` if that is given."""

    output: int
    shape: tuple[int, ...] | None

    def of(self, outs: Sequence[Tensor]) -> Tensor | None:
        """Return the buffer; None if it cannot be viewed in that shape."""
        out = outs[self.output]
        if self.shape is None:
            return out
        return out.view(self.shape) if out.is_contiguous() else None


class KernelProgram:
    """Runs traced nodes in order, without state between runs: threads and streams may share it.

    `inputs` and `outputs` are names of values; an output may also be a tensor that is known beforehand.
    """

    def __init__(
        self,
        traced: Sequence[TracedNode],
        inputs: Sequence[str],
        outputs: Sequence[str | Tensor],
        trace: NodeTracer,
    ) -> None:
        self._first: list[Tensor | None] = [None] * len(inputs)
        self._place = {name: place for place, name in enumerate(inputs)}
        self._num_inputs = len(inputs)
        places = [self._step(t) for t in traced]
        self._outputs = tuple(self._literal(o) if isinstance(o, Tensor) else self._place[o] for o in outputs)
        overwrites = _overwriting(traced, inputs, {o for o in outputs if isinstance(o, str)}, trace)
        self._steps = tuple(
            _Step(t.kernel, reads, makes, i in overwrites)
            for i, (t, (reads, makes)) in enumerate(zip(traced, places, strict=True))
        )
        shapes = {place: tuple(trace.metas[name].shape) for name, place in self._place.items()}
        self._targets = self._written_directly(shapes)

    def run(self, args: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs, each in its own memory or, for a view, in that of an argument."""
        registers = [*args, *self._first[self._num_inputs :]]
        for step in self._steps:
            self._execute(step, registers)
        return tuple(registers[place] for place in self._outputs)  # type: ignore[misc]

    def run_into(self, args: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Write the outputs into `outs`: tensors of their shapes and types, of any strides, that overlap
        neither each other nor `args`."""
        registers = [*args, *self._first[self._num_inputs :]]
        done: set[int] = set()  # outputs that lie in their buffers already
        for index, step in enumerate(self._steps):
            target = self._targets.get(index)
            out = None if target is None else target.of(outs)
            if target is None or out is None:
                self._execute(step, registers)
                continue
            if step.kernel.reshapes and target.output in done:
                registers[step.makes[0]] = out
            elif step.inplace and target.output in done:
                self._execute(step, registers)
            elif step.kernel.into is not None:
                step.kernel.into(out, *[registers[r] for r in step.reads])
                registers[step.makes[0]] = out
                done.add(target.output)
            else:
                self._execute(step, registers)
        for position, place in enumerate(self._outputs):
            if position not in done:
                outs[position].copy_(registers[place])  # type: ignore[arg-type]

    @staticmethod
    def _execute(step: _Step, registers: list[Tensor | None]) -> None:
        args = [registers[r] for r in step.reads]
        if step.inplace:
            registers[step.makes[0]] = step.kernel.inplace(*args)  # type: ignore[misc]
            return
        made = step.kernel.run(*args)
        if isinstance(made, Tensor):
            registers[step.makes[0]] = made
            return
        for place, value in zip(step.makes, made, strict=False):
            if place >= 0:
                registers[place] = value

    def _step(self, traced: TracedNode) -> tuple[tuple[int, ...], tuple[int, ...]]:
        reads = tuple(self._place[r] if isinstance(r, str) else self._literal(r) for r in traced.reads)
        makes = []
        for name in traced.makes:
            makes.append(len(self._first) if name else -1)
            if name:
                self._place[name] = len(self._first)
                self._first.append(None)
        return reads, tuple(makes)

    def _literal(self, value: Tensor | None) -> int:
        self._first.append(value)
        return len(self._first) - 1

    def _written_directly(self, shapes: Mapping[int, tuple[int, ...]]) -> dict[int, _Target]:
        """Return the steps whose result can be written directly into an output's buffer.

        If the last steps overwrite or only reshape their argument, the step before them writes into the
        buffer or, if it cannot, the first of them that can.
        """
        maker = {place: i for i, step in enumerate(self._steps) for place in step.makes if place >= 0}
        targets: dict[int, _Target] = {}
        for position, place in enumerate(self._outputs):
            reshaped = False
            chain: list[tuple[int, _Target]] = []  # from the output backwards
            index = maker.get(place)
            while index is not None:
                step = self._steps[index]
                chain.append((index, _Target(position, shapes[step.makes[0]] if reshaped else None)))
                if not (step.kernel.reshapes or step.inplace):
                    break
                reshaped |= step.kernel.reshapes
                index = maker.get(step.reads[0])
            while chain and not self._can_write(chain[-1][0]):
                chain.pop()
            if chain:
                targets |= chain
        return targets

    def _can_write(self, index: int) -> bool:
        step = self._steps[index]
        return step.kernel.into is not None and sum(p >= 0 for p in step.makes) == 1


def _overwriting(
    traced: Sequence[TracedNode], inputs: Sequence[str], outputs: set[str], trace: NodeTracer
) -> set[int]:
    """Return the steps that may overwrite their first argument: it is made here, has the result's shape and
    type, and shares its memory with no value that is read later or returned."""
    memory = {name: trace.memory[name] for t in traced for name in t.makes if name}
    taken = {trace.memory[name] for name in inputs}
    steps = set()
    for index, t in enumerate(traced):
        source = t.reads[0] if t.reads else None
        if t.kernel.inplace is None or not isinstance(source, str) or source not in memory:
            continue
        before, after = trace.metas[source], trace.metas[t.makes[0]]
        fits = before.shape == after.shape and before.dtype == after.dtype
        later = [r for u in traced[index + 1 :] for r in u.reads if isinstance(r, str)]
        others = [r for r in t.reads[1:] if isinstance(r, str)]
        made_after = {name for u in traced[index:] for name in u.makes}
        needed = [n for n in (*others, *later, *outputs) if n not in made_after]
        shared = any(memory.get(n) == memory[source] for n in needed)
        if fits and not shared and memory[source] not in taken and source not in trace.overlapping:
            steps.add(index)
    return steps


Run: TypeAlias = Callable[[Sequence[Tensor]], "tuple[Tensor, ...]"]
RunInto: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
Fits: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], bool]


def _always(args: Sequence[Tensor], outs: Sequence[Tensor]) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Alternative:
    """A way to compute a unit."""

    name: str
    run: Run
    run_into: RunInto
    fits: Fits = _always  # whether it is worth trying on such arguments and buffers


@dataclass(frozen=True, slots=True)
class Unit:
    """An operator, or several as one; arguments are in the order of `inputs`, results of `outputs`."""

    ops: tuple[OpId, ...]
    inputs: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]
    input_specs: tuple[Spec, ...]
    output_specs: tuple[Spec, ...]
    alternatives: tuple[Alternative, ...]
    view: bool = False
    foreign: str = ""  # why it runs in onnxruntime, on the host: such a unit cannot be captured
    signature: Hashable = None  # units with the same one and the same layouts take the same time

    def run(self, args: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs, in memory that torch allocates or, for a view, in that of the arguments."""
        return self.alternatives[0].run(args)

    def run_into(self, args: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Write the outputs into `outs`, which overlap neither each other nor `args`."""
        self.alternatives[0].run_into(args, outs)

    def way(self, name: str) -> Alternative:
        """Return the alternative of that name.

        Raises:
            KeyError: there is none.
        """
        found = next((a for a in self.alternatives if a.name == name), None)
        if found is None:
            raise KeyError(name)
        return found
