"""A straight line of kernels over registers: how one unit, or a whole small model, runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from edge_agent.lowering.node import Kernel
from edge_agent.lowering.trace import Traced


@dataclass(frozen=True, slots=True)
class _Step:
    kernel: Kernel
    reads: tuple[int, ...]
    makes: tuple[int, ...]  # -1 for an output that nobody names
    inplace: bool  # may overwrite the register it reads first


class Program:
    """Runs traced nodes in order. Holds no state between runs: threads and streams may share it.

    `inputs` and `outputs` are value names; an output may also be a tensor that is known beforehand.
    """

    def __init__(
        self,
        traced: Sequence[Traced],
        inputs: Sequence[str],
        outputs: Sequence[str | Tensor],
        metas: Mapping[str, Tensor],
    ) -> None:
        self.traced = tuple(traced)
        self._first: list[Tensor | None] = [None] * len(inputs)
        self._place = {name: place for place, name in enumerate(inputs)}
        self._num_inputs = len(inputs)
        steps = [self._step(t) for t in traced]
        self._outputs = tuple(self._literal(o) if isinstance(o, Tensor) else self._place[o] for o in outputs)
        overwrites = _overwriting(traced, inputs, {o for o in outputs if isinstance(o, str)}, metas)
        self._steps = tuple(
            _Step(t.kernel, reads, makes, i in overwrites)
            for i, (t, (reads, makes)) in enumerate(zip(traced, steps, strict=True))
        )
        self._direct = self._written_directly()

    def run(self, args: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs, each in memory of its own or, for a pure view, in that of an argument."""
        registers = [*args, *self._first[self._num_inputs :]]
        for step in self._steps:
            self._execute(step, registers)
        return tuple(registers[place] for place in self._outputs)  # type: ignore[misc]

    def run_into(self, args: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Write the outputs into `outs`: tensors of their shapes and types, of any strides, that overlap
        neither each other nor `args`."""
        registers = [*args, *self._first[self._num_inputs :]]
        written: set[int] = set()
        for index, step in enumerate(self._steps):
            output = self._direct.get(index)
            if output is None:
                self._execute(step, registers)
                continue
            out = outs[output]
            if step.inplace and registers[step.reads[0]] is out:
                self._execute(step, registers)
            else:
                assert step.kernel.into is not None
                step.kernel.into(out, *[registers[r] for r in step.reads])
                registers[step.makes[0]] = out
            written.add(output)
        for position, place in enumerate(self._outputs):
            value = registers[place]
            if value is not outs[position]:
                outs[position].copy_(value)  # type: ignore[arg-type]

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

    def _step(self, traced: Traced) -> tuple[tuple[int, ...], tuple[int, ...]]:
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

    def _written_directly(self) -> dict[int, int]:
        """Steps whose result can be written straight into an output's buffer, with that output's position.

        Where the last steps overwrite their argument, the step before them that can writes into the buffer.
        """
        maker = {place: i for i, step in enumerate(self._steps) for place in step.makes if place >= 0}
        direct: dict[int, int] = {}
        for position, place in enumerate(self._outputs):
            chain = []
            index = maker.get(place)
            while index is not None and self._steps[index].inplace:
                chain.append(index)
                index = maker.get(self._steps[index].reads[0])
            if index is not None and self._can_write(index):
                direct |= dict.fromkeys([*chain, index], position)
            elif chain and self._can_write(chain[0]):
                direct[chain[0]] = position
        return direct

    def _can_write(self, index: int) -> bool:
        step = self._steps[index]
        return step.kernel.into is not None and sum(p >= 0 for p in step.makes) == 1


def _overwriting(
    traced: Sequence[Traced], inputs: Sequence[str], outputs: set[str], metas: Mapping[str, Tensor]
) -> set[int]:
    """Steps that may overwrite their first argument: made here, of the result's shape and type, and nothing
    else that is read later, or returned, lies in the same memory."""
    memory = {name: _memory(metas[name]) for t in traced for name in t.makes if name}
    foreign = {_memory(metas[name]) for name in inputs}
    found = set()
    for index, t in enumerate(traced):
        source = t.reads[0] if t.reads else None
        if t.kernel.inplace is None or not isinstance(source, str) or source not in memory:
            continue
        own = memory[source]
        before, after = metas[source], metas[t.makes[0]]
        fits = before.shape == after.shape and before.dtype == after.dtype and source not in outputs
        others = [r for r in t.reads[1:] if isinstance(r, str)]
        later = [r for u in traced[index + 1 :] for r in u.reads if isinstance(r, str)]
        needed = [*others, *later, *outputs]
        made_here = {name for u in traced[index:] for name in u.makes}
        shared = any(memory.get(n) == own for n in needed if n not in made_here)
        if fits and own not in foreign and not shared and _is_dense(before):
            found.add(index)
    return found


def _is_dense(value: Tensor) -> bool:
    """Whether no two elements share a place, as they do in an expanded tensor."""
    return all(stride > 0 for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1)


def _memory(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def lies_in(made: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether a value lies in the memory of one of the others."""
    return _memory(made) in {_memory(source) for source in sources}
