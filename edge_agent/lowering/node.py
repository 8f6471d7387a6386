"""Lowering one ONNX node: what a lowering function sees, what it returns, and which one lowers what.

A lowering function takes a `Node` and returns a `Kernel`, or simply the function to run. It runs once per
node while a model is lowered, reads attributes and constants there, and closes over what it computed:

    @operator("LeakyRelu")
    def leaky_relu(node: Node) -> Lowered:
        slope = node.number("alpha", 0.01)
        return lambda x: functional.leaky_relu(x, slope)

The function to run depends on its arguments only: it keeps no state between runs, and no shape depends on
values. A lowering function raises `Unsupported` for what it cannot lower. `families/` has a file per family.
"""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
import onnx
import torch
from onnx import helper
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import (
    UNSIGNED,
    NeedsConstant,
    Precision,
    Unsupported,
    onnx_dtype,
    tensor_from_proto,
)

FP16_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class Constant:
    """A value known before the model runs, on the CPU and in the model's own type.

    `key` identifies it among all constants of one model: equal keys, equal values. The key of a weight is its
    name, that of a value computed from shapes its name and the batch. Large weights are read from the
    artifact every time: they would lie in memory beside what the device has of them.
    """

    key: Hashable
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def value(self) -> torch.Tensor:
        """The values; not to be changed."""
        return self.read()


def known_constant(key: Hashable, value: torch.Tensor) -> Constant:
    """Return a value as a constant that keeps it."""
    return Constant(key, tuple(value.shape), value.dtype, lambda: value)


class WeightStore:
    """Constants of one model on one device in one precision; shared by all batches of it. Thread-safe.

    In FP16 float32 becomes float16, and values that float16 cannot hold (a mask's -3.4e38) its largest finite
    value, so that a Softmax over them stays finite.
    """

    def __init__(self, device: torch.device, precision: Precision) -> None:
        self.device = device
        self.precision = precision
        self._made: dict[Hashable, torch.Tensor] = {}
        self._lock = threading.RLock()

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the tensors on the device; shared storage counts once."""
        with self._lock:
            storages = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._made.values()
            }
        return sum(storages.values())

    def runtime_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type that values of the model's type `dtype` have while running."""
        if self.precision is Precision.FP16 and dtype == torch.float32:
            return torch.float16
        return dtype

    def tensor(self, constant: Constant) -> torch.Tensor:
        """Return the constant on the device, in the type of the precision."""
        return self.derived(("as it is", constant.key), lambda: constant.value)

    def derived(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return `make()` converted and moved to the device; computed once per `key`."""
        with self._lock:
            if key not in self._made:
                self._made[key] = self._moved(make())
            return self._made[key]

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        dtype = self.runtime_dtype(value.dtype)
        if dtype != value.dtype:
            value = value.clamp(-FP16_MAX, FP16_MAX).to(dtype)
        return value.to(self.device)


_KEPT_BYTES = 64 << 10


def stored_constant(proto: onnx.TensorProto, again: Callable[[], onnx.TensorProto] | None = None) -> Constant:
    """Return an initializer as a constant; `again` parses one once more that is too large to be kept.

    Raises:
        Unsupported: torch has no such element type.
    """
    key, value = ("weight", proto.name), tensor_from_proto(proto)
    if again is None or value.nbytes <= _KEPT_BYTES:
        return known_constant(key, value)
    return Constant(key, tuple(value.shape), value.dtype, lambda: tensor_from_proto(again()))


Made: TypeAlias = Tensor | tuple[Tensor | None, ...]
"""One tensor, or one per output of the node; None for an output that the node does not name."""


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
    """The functions that run one node. Each takes the node's inputs in order, None for an input that is
    absent or was taken as a constant while lowering. Only `inplace` changes an input.
    """

    run: Callable[..., Made]
    into: Callable[..., object] | None = None
    """`into(out, *args)` writes the only output into `out`, of any strides, and allocates nothing."""
    inplace: Callable[..., Tensor] | None = None
    """`inplace(*args)` overwrites its first argument and returns it."""
    reshapes: bool = False
    """The result has the first argument's elements in the same row-major order."""
    detail: object | None = None
    """Parameters for `kernels`, which runs several nodes as one."""


KnownValues: TypeAlias = tuple[Tensor, ...]
"""The outputs of a node that follow from shapes alone, on the CPU: nothing is left to run."""


class Node:
    """A node as its lowering function sees it: attributes, inputs, and the device of its tensors.

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
        """Return an attribute as a Python or numpy value, text as str; `default` if it is absent."""
        proto = self._attributes.get(name)
        if proto is None:
            return default
        value = helper.get_attribute_value(proto)
        if isinstance(value, bytes):
            return value.decode()
        return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value

    def integer(self, name: str, default: int) -> int:
        return int(self.attribute(name, default))

    def number(self, name: str, default: float) -> float:
        return float(self.attribute(name, default))

    def text(self, name: str, default: str) -> str:
        return str(self.attribute(name, default))

    def integers(self, name: str) -> list[int] | None:
        """Return a list attribute; None if it is absent."""
        value = self.attribute(name)
        return None if value is None else [int(x) for x in value]

    def has(self, index: int) -> bool:
        """Whether the node names an input at `index`."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def wants(self, index: int) -> bool:
        """Whether the node names an output at `index`."""
        return index < len(self.outputs) and bool(self.outputs[index])

    def spec(self, index: int) -> Spec:
        """Shape and type of an input that is there."""
        return self._input(index).spec

    def _input(self, index: int) -> Input:
        source = self.inputs[index] if index < len(self.inputs) else None
        if source is None:
            raise Unsupported(f"{self.kind} without its input {index}")
        return source

    def shape(self, index: int) -> tuple[int, ...]:
        return self.spec(index).shape

    def rank(self, index: int) -> int:
        return len(self.spec(index).shape)

    def dtype(self, index: int) -> torch.dtype:
        return self.spec(index).dtype

    def axis(self, name: str, default: int, rank: int | None = None) -> int:
        """An axis attribute counted from the front."""
        rank = self.rank(0) if rank is None else rank
        return self.integer(name, default) % max(rank, 1)

    def real(self, code: int) -> torch.dtype:
        """Return the type that values of an ONNX element type have while running."""
        dtype = onnx_dtype(code)
        return self._store.runtime_dtype(dtype) if self._at_run_time else dtype

    @property
    def _at_run_time(self) -> bool:
        """Whether the node runs with the model; else it is folded now, in the model's own types."""
        return any(i is not None and i.constant is None for i in self.inputs)

    def is_constant(self, index: int) -> bool:
        """Whether an input is there and known beforehand."""
        return self._constant(index) is not None

    def _constant(self, index: int) -> Constant | None:
        source = self.inputs[index] if index < len(self.inputs) else None
        return None if source is None else source.constant

    def constant(self, index: int) -> np.ndarray:
        """Return the value of an input that decides a shape or the like, in the model's own type.

        Raises:
            NeedsConstant: it is computed at run time.
        """
        source = self._input(index)
        if source.constant is None:
            raise NeedsConstant(self.kind, source.name)
        self.taken.add(index)
        value = source.constant.value
        if value.dtype == torch.bfloat16:
            value = value.float()
        array: np.ndarray = value.numpy()
        return array

    def scalar(self, index: int) -> Any:
        """Return the only element of a constant input, as a Python number.

        Raises:
            NeedsConstant: it is computed at run time.
        """
        return self.constant(index).reshape(()).item()

    def constant_list(self, index: int) -> list[int] | None:
        """Return the integers of a constant input; None if it is absent.

        Raises:
            NeedsConstant: it is computed at run time.
        """
        return [int(x) for x in self.constant(index).reshape(-1)] if self.has(index) else None

    def take(self, index: int) -> Tensor | None:
        """Return a constant input on the device; None if it is absent or not constant."""
        constant = self._constant(index)
        if constant is None:
            return None
        self.taken.add(index)
        return self._placed(self._store.tensor(constant))

    def derive(self, index: int, what: Hashable, make: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return `make` of a constant input, kept once per model under `what`; None as with `take`."""
        return self.derive_all([index], what, make)

    def derive_all(
        self, indices: Sequence[int], what: Hashable, make: Callable[..., Tensor]
    ) -> Tensor | None:
        """As `derive`, of several inputs; None, and no input is taken, if one is not constant."""
        constants = [c for index in indices if (c := self._constant(index)) is not None]
        if len(constants) != len(indices):
            return None
        self.taken |= set(indices)
        key = (what, *(c.key for c in constants))
        return self._placed(self._store.derived(key, lambda: make(*(c.value for c in constants))))

    def made(self, value: Tensor) -> Tensor:
        """Move a small tensor of the kernel to the device on which the node runs."""
        return value.to(self.device)

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to("meta") if self.device.type == "meta" else tensor


Lowered: TypeAlias = Kernel | KnownValues | Callable[..., Made]
Lowering: TypeAlias = Callable[[Node], Lowered]

FAMILIES = (
    "attention", "convolution", "elementwise", "indexing", "linear_algebra", "normalisation", "quantise",
    "recurrent", "reduction", "resize", "shape",
)  # fmt: skip

_STANDARD_DOMAINS = ("", "ai.onnx")
_registered: dict[str, tuple[Lowering, bool]] = {}


def operator(*kinds: str, wide: bool = False) -> Callable[[Lowering], Lowering]:
    """Register a function for operator types.

    `wide`: torch does not compute in uint16, uint32 and uint64; such values pass as int64 and are cut back to
    their own bits. Sums, differences and products are right; comparisons, quotients and orders of uint64
    values of 2^63 and more are not.
    """

    def add(function: Lowering) -> Lowering:
        for kind in kinds:
            if kind in _registered:
                raise ValueError(f"{kind} is lowered twice")
            _registered[kind] = (function, wide)
        return function

    return add


def operators() -> tuple[str, ...]:
    """Every operator type that is lowered, in alphabetical order."""
    _load()
    return tuple(sorted(_registered))


def lower_node(node: Node, domain: str) -> Kernel | KnownValues:
    """Lower a node: return its kernel, or its values if they follow from shapes alone.

    Raises:
        Unsupported: nothing lowers this operator, or not with these attributes and constants.
    """
    _load()
    if domain not in _STANDARD_DOMAINS:
        raise Unsupported(f"{domain}.{node.kind}")
    if node.kind not in _registered:
        raise Unsupported(node.kind)
    function, wide = _registered[node.kind]
    try:
        lowered = function(node)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # a form nobody met yet
        raise Unsupported(f"{node.kind}: {type(error).__name__} {error}") from error
    if isinstance(lowered, tuple):
        return lowered
    kernel = lowered if isinstance(lowered, Kernel) else Kernel(lowered)
    if any(i is not None and i.spec.dtype in UNSIGNED for i in node.inputs):
        return Kernel(widened(kernel.run)) if wide else Kernel(kernel.run)
    return kernel


def widened(run: Callable[..., Made]) -> Callable[..., Made]:
    """Return `run` with unsigned arguments passed as int64."""

    def over_int64(*args: Tensor | None) -> Made:
        own = next(a.dtype for a in args if a is not None and a.dtype in UNSIGNED)
        wide = [a.to(torch.int64) if a is not None and a.dtype in UNSIGNED else a for a in args]
        made = run(*wide)
        if isinstance(made, Tensor):
            return _narrow(made, own)
        return tuple(None if value is None else _narrow(value, own) for value in made)

    return over_int64


def _narrow(value: Tensor, own: torch.dtype) -> Tensor:
    return value.to(own) if value.dtype == torch.int64 else value


@cache
def _load() -> None:
    """Import the families, which register themselves, before the first node is lowered."""
    for family in FAMILIES:
        import_module(f"stageloom.edge_agent.lowering.families.{family}")
