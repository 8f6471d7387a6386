"""Lower nodes to kernels in order: fold constants, and give every other value a shape.

Shapes come from running each kernel on meta tensors, which have shape and strides but no contents, so they
hold for every batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import onnx
import torch
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import CHANNELS_LAST, Precision, Unsupported
from stageloom.edge_agent.lowering.node import (
    Constant,
    Input,
    Kernel,
    Made,
    Node,
    Spec,
    WeightStore,
    known_constant,
    lower_node,
)

_CPU = torch.device("cpu")
_META = torch.device("meta")
_ERROR_CHARS = 160


@dataclass(frozen=True, slots=True)
class TracedNode:
    """A node with its kernel. `reads` holds names of values, tensors on the device, or None."""

    node: Node
    kernel: Kernel
    reads: tuple[str | Tensor | None, ...]
    makes: tuple[str, ...]  # names of its outputs, empty where it names none


def spec_of(value: Tensor, *, channels_last: bool) -> Spec:
    """Return the spec of a meta tensor; `channels_last` allows that memory order."""
    order = CHANNELS_LAST.get(value.ndim) if channels_last else None
    return Spec(
        tuple(value.shape), value.dtype, order is not None and value.is_contiguous(memory_format=order)
    )


def empty(spec: Spec, device: torch.device) -> Tensor:
    """Return a tensor of this shape, type and memory order, uninitialised."""
    order = CHANNELS_LAST[len(spec.shape)] if spec.channels_last else torch.contiguous_format
    return torch.empty(spec.shape, dtype=spec.dtype, device=device, memory_format=order)


class NodeTracer:
    """The values of a model by name, while its nodes are lowered in order."""

    def __init__(
        self,
        store: WeightStore,
        constants: Mapping[str, Constant],
        *,
        opset: int,
        batch: int,
        channels_last: bool,
    ) -> None:
        self.store = store
        self.metas: dict[str, Tensor] = {}  # of values that exist while running
        self.memory: dict[str, int] = {}  # values with the same number lie in the same memory
        self._numbers = count()
        self.overlapping: set[str] = set()  # values of which several elements share a place, as if expanded
        self._constants = dict(constants)
        self._opset = opset
        self._batch = batch
        self._channels_last = channels_last
        self._folding = WeightStore(_CPU, Precision.FP32)

    def add_input(self, name: str, spec: Spec) -> None:
        """Add a value that no traced node makes."""
        self.metas[name] = empty(spec, _META)
        self.memory[name] = next(self._numbers)

    def constant(self, name: str) -> Constant | None:
        """Return the value if it is known beforehand."""
        return self._constants.get(name)

    def spec(self, name: str) -> Spec:
        """Return shape, type and memory order of a value while running."""
        return spec_of(self.metas[name], channels_last=self._channels_last)

    def settle(self, name: str, *, channels_last: bool) -> bool:
        """Set a value's memory order from here on; return whether it has that order already."""
        made = self.metas[name]
        order = channels_last and self._channels_last and made.ndim in CHANNELS_LAST
        self.metas[name] = settled = empty(Spec(tuple(made.shape), made.dtype, order), _META)
        return made.stride() == settled.stride()

    def visit(self, proto: onnx.NodeProto) -> TracedNode | None:
        """Lower one node; return None if its values are known now.

        Raises:
            Unsupported: it cannot be lowered. Its outputs stay unknown.
        """
        inputs = [self._input(name) for name in proto.input]
        if all(i is None or i.constant is not None for i in inputs):
            self._fold(proto, inputs)
            return None
        shaping = Node(proto, self._opset, inputs, self.store, _META)
        kernel = lower_node(shaping, proto.domain)
        if isinstance(kernel, tuple):
            self._know(proto, kernel)
            return None
        metas = [None if i is None or k in shaping.taken else self._meta(i) for k, i in enumerate(inputs)]
        made = _outputs(_called(proto.op_type, _shaping(kernel, metas), metas))
        sources = {
            _storage(self.metas[i.name]): self.memory[i.name]
            for i in inputs
            if i is not None and i.constant is None
        }
        for name, value in zip(proto.output, made, strict=False):
            if name and value is not None:
                self.metas[name] = value
                own = sources.get(_storage(value))
                self.memory[name] = next(self._numbers) if own is None else own
                if any(s == 0 and n > 1 for n, s in zip(value.shape, value.stride(), strict=True)):
                    self.overlapping.add(name)
        if missing := [name for name in proto.output if name and name not in self.metas]:
            raise Unsupported(f"{proto.op_type} with its output {list(proto.output).index(missing[0])}")
        node = Node(proto, self._opset, inputs, self.store, self.store.device)
        real = lower_node(node, proto.domain)
        assert isinstance(real, Kernel)
        reads = tuple(None if i is None or k in node.taken else self._read(i) for k, i in enumerate(inputs))
        return TracedNode(node, real, reads, tuple(proto.output))

    def _input(self, name: str) -> Input | None:
        if not name:
            return None
        known = self._constants.get(name)
        if known is not None:
            return Input(name, Spec(known.shape, self.store.runtime_dtype(known.dtype)), known)
        if name not in self.metas:
            raise Unsupported(f"a value that is not lowered: {name!r}")
        return Input(name, self.spec(name))

    def _meta(self, value: Input) -> Tensor:
        return self.metas[value.name] if value.constant is None else empty(value.spec, _META)

    def _read(self, value: Input) -> str | Tensor:
        return value.name if value.constant is None else self.store.tensor(value.constant)

    def _fold(self, proto: onnx.NodeProto, inputs: Sequence[Input | None]) -> None:
        """Compute a node of constant inputs, on the CPU and in the model's own types."""
        own = [
            None if i is None or i.constant is None
            else Input(i.name, Spec(i.constant.shape, i.constant.dtype), i.constant)
            for i in inputs
        ]  # fmt: skip
        node = Node(proto, self._opset, own, self._folding, _CPU)
        kernel = lower_node(node, proto.domain)
        if isinstance(kernel, tuple):
            self._know(proto, kernel)
            return
        values = [
            None if i is None or i.constant is None or k in node.taken else i.constant.value
            for k, i in enumerate(own)
        ]
        self._know(proto, _outputs(_called(proto.op_type, kernel.run, values)))

    def _know(self, proto: onnx.NodeProto, values: Sequence[Tensor | None]) -> None:
        for name, value in zip(proto.output, values, strict=False):
            if name and value is not None:
                self._constants[name] = known_constant(("computed", name, self._batch), value)


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _shaping(kernel: Kernel, metas: Sequence[Tensor | None]) -> Callable[..., Made]:
    """Return a function that gives the kernel's outputs their shapes; in place if the kernel can.

    On meta tensors `torch.relu` and the like are decomposed in Python, which takes a millisecond each; the
    in-place forms are not.
    """
    inplace = kernel.inplace
    if inplace is None or len(metas) != 1:
        return kernel.run
    return lambda value: inplace(torch.empty_like(value))


def _called(
    kind: str, run: Callable[..., Made], values: Sequence[Tensor | None]
) -> "Tensor | tuple[Tensor | None, ...]":
    try:
        return run(*values)
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:_ERROR_CHARS]
        raise Unsupported(f"{kind}: {reason}") from error


def _outputs(made: "Tensor | tuple[Tensor | None, ...]") -> tuple[Tensor | None, ...]:
    return (made,) if isinstance(made, Tensor) else tuple(made)
