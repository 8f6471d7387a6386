"""One ONNX node as the function that lowers it sees it, and what lowering it gives."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
import torch
from onnx import helper
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import onnx_dtype
from stageloom.edge_agent.lowering.errors import NeedsConstant, Unsupported
from stageloom.edge_agent.lowering.weights import Constant, WeightStore

Made: TypeAlias = Tensor | tuple[Tensor | None, ...]
"""One tensor, or one per output of the node; None where the node names no such output."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and type of a value while running."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool = False  # of 4 or 5 dimensions whose channels should lie next to each other in memory


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a node: known beforehand (`constant`) or only while running."""

    name: str
    spec: Spec
    constant: Constant | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """How one node runs. Every function takes the node's inputs in order, None where one is absent or was
    taken as a constant while lowering; none of them changes its inputs, but for `inplace`.
    """

    run: Callable[..., Made]
    into: Callable[..., object] | None = None
    """`into(out, *args)` writes the node's only output into `out`, of any strides, and allocates nothing."""
    inplace: Callable[..., Tensor] | None = None
    """`inplace(*args)` overwrites its first argument and returns it."""
    reshapes: bool = False
    """The result has the first argument's elements in the same row-major order."""
    detail: object | None = None
    """What `kernels` knows this node by, where several nodes can run as one."""


@dataclass(frozen=True, slots=True)
class Known:
    """The values of a node that follow from shapes alone, on the CPU: nothing is left to run."""

    values: tuple[Tensor, ...]


class Node:
    """What a lowering function may know of its node: attributes, inputs, and where its tensors will live.

    `device` is the meta device while only shapes are wanted.
    """

    def __init__(
        self,
        proto: onnx.NodeProto,
        opset: int,
        inputs: Sequence[Input | None],
        store: WeightStore,
        device: torch.device,
    ) -> None:
        self.kind: str = proto.op_type
        self.opset = opset
        self.inputs = tuple(inputs)
        self.outputs: tuple[str, ...] = tuple(proto.output)
        self.device = device
        self.taken: set[int] = set()
        self._store = store
        self._attributes: Mapping[str, Any] = {a.name: a for a in proto.attribute}

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute as Python or numpy holds it, text as str; `default` where it is absent."""
        found = self._attributes.get(name)
        if found is None:
            return default
        value = helper.get_attribute_value(found)
        if isinstance(value, bytes):
            return value.decode()
        return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value

    def integer(self, name: str, default: int) -> int:
        """An integer attribute."""
        return int(self.attribute(name, default))

    def number(self, name: str, default: float) -> float:
        """A floating point attribute."""
        return float(self.attribute(name, default))

    def text(self, name: str, default: str) -> str:
        """A text attribute."""
        return str(self.attribute(name, default))

    def integers(self, name: str) -> list[int] | None:
        """A list of integers, None where it is absent."""
        found = self.attribute(name)
        return None if found is None else [int(x) for x in found]

    def has(self, index: int) -> bool:
        """Whether the node names an input at `index`."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def wants(self, index: int) -> bool:
        """Whether the node names an output at `index`."""
        return index < len(self.outputs) and bool(self.outputs[index])

    def spec(self, index: int) -> Spec:
        """Shape and type of an input that is there."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None:
            raise Unsupported(f"{self.kind} without its input {index}")
        return found.spec

    def shape(self, index: int) -> tuple[int, ...]:
        """Shape of an input."""
        return self.spec(index).shape

    def rank(self, index: int) -> int:
        """Number of dimensions of an input."""
        return len(self.spec(index).shape)

    def dtype(self, index: int) -> torch.dtype:
        """Type of an input while running."""
        return self.spec(index).dtype

    def axis(self, name: str, default: int, rank: int | None = None) -> int:
        """An axis attribute counted from the front."""
        rank = self.rank(0) if rank is None else rank
        return self.integer(name, default) % max(rank, 1)

    def real(self, code: int) -> torch.dtype:
        """What a value of an ONNX element type is held in while running."""
        dtype = onnx_dtype(code)
        return self._store.runtime_dtype(dtype) if self._at_run_time else dtype

    @property
    def _at_run_time(self) -> bool:
        """Whether this node runs with the model; else it is folded now, in the model's own types."""
        return any(i is not None and i.constant is None for i in self.inputs)

    def is_constant(self, index: int) -> bool:
        """Whether an input is there and known beforehand."""
        found = self.inputs[index] if index < len(self.inputs) else None
        return found is not None and found.constant is not None

    def constant(self, index: int) -> np.ndarray:
        """The value of an input that decides a shape or the like, as the model holds it.

        Raises:
            NeedsConstant: it is computed at run time.
        """
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None:
            raise Unsupported(f"{self.kind} without its input {index}")
        if found.constant is None:
            raise NeedsConstant(self.kind, found.name)
        self.taken.add(index)
        value = found.constant.value
        if value.dtype == torch.bfloat16:
            value = value.float()
        array: np.ndarray = value.numpy()
        return array

    def constant_list(self, index: int) -> list[int] | None:
        """The integers of a constant input, None where it is absent.

        Raises:
            NeedsConstant: it is computed at run time.
        """
        return [int(x) for x in self.constant(index).reshape(-1)] if self.has(index) else None

    def take(self, index: int) -> Tensor | None:
        """A constant input on the device, to keep in the kernel; None where it is absent or not constant."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None or found.constant is None:
            return None
        self.taken.add(index)
        return self._placed(self._store.tensor(found.constant))

    def derive(self, index: int, what: Hashable, make: Callable[[Tensor], Tensor]) -> Tensor | None:
        """What `make` computes from a constant input, kept once per model by `what`; None as with `take`."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None or found.constant is None:
            return None
        self.taken.add(index)
        value = found.constant.value
        return self._placed(self._store.derived((what, found.constant.key), lambda: make(value)))

    def derive_all(
        self, indices: Sequence[int], what: Hashable, make: Callable[..., Tensor]
    ) -> Tensor | None:
        """As `derive`, from several inputs; None, and nothing is taken, unless all of them are constant."""
        found = [self.inputs[i] for i in indices]
        constants = [i.constant for i in found if i is not None and i.constant is not None]
        if len(constants) != len(indices):
            return None
        self.taken |= set(indices)
        key = (what, *(c.key for c in constants))
        return self._placed(self._store.derived(key, lambda: make(*(c.value for c in constants))))

    def made(self, value: Tensor) -> Tensor:
        """A small tensor of the kernel's own, moved to where the node runs."""
        return value.to(self.device)

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to("meta") if self.device.type == "meta" else tensor
