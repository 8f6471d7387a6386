"""A unit: one operator of the graph (or a few that run as one), ready to run on the device.

An executor plans memory from `output_specs`, and runs a unit in one of two ways:

- `run(args)` returns tensors that torch allocates; where `view` is set they lie in the arguments' memory and
  nothing runs on the device;
- `run_into(args, outs)` writes into buffers that the caller owns, of any strides: a slice of a Concat's
  buffer, for one. Inside, at most scratch memory is allocated, on the current stream.

`alternatives` are kernels that give the same result up to rounding. The first always works; which is fastest
depends on shape, device and library version, so an executor times them and takes `unit.choose(name)`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor

from stageloom.edge_agent.lowering.node import Spec
from stageloom.shared.ids import OpId, TensorId

Run: TypeAlias = Callable[[Sequence[Tensor]], "tuple[Tensor, ...]"]
RunInto: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to compute a unit."""

    name: str
    run: Run
    run_into: RunInto


@dataclass(frozen=True, slots=True)
class Unit:
    """See the module's text. Arguments come in the order of `inputs`, results in the order of `outputs`."""

    ops: tuple[OpId, ...]
    inputs: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]
    input_specs: tuple[Spec, ...]
    output_specs: tuple[Spec, ...]
    alternatives: tuple[Alternative, ...]
    view: bool = False
    foreign: str = ""  # why it runs in onnxruntime, on the host: such a unit cannot be captured

    def run(self, args: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs, in memory that torch allocates or, for a view, in the arguments'."""
        return self.alternatives[0].run(args)

    def run_into(self, args: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Write the outputs into `outs`, which overlap neither each other nor `args`."""
        self.alternatives[0].run_into(args, outs)

    def choose(self, name: str) -> "Unit":
        """The same unit with the alternative of that name first.

        Raises:
            KeyError: there is none of that name.
        """
        chosen = next((a for a in self.alternatives if a.name == name), None)
        if chosen is None:
            raise KeyError(name)
        others = tuple(a for a in self.alternatives if a is not chosen)
        return replace(self, alternatives=(chosen, *others))
