"""A model's weights as tensors on the device, each once, whatever the batch or the kernel that reads it."""

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import onnx
import torch

from stageloom.edge_agent.lowering.dtypes import Precision, tensor_from_proto

FP16_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class Constant:
    """A value known before anything runs, on the CPU and in the model's own type.

    `key` names it among all constants of one model: equal keys, equal values. Weights have their name as key,
    what was computed from shapes its value's name and the batch.
    """

    key: Hashable
    value: torch.Tensor


class WeightStore:
    """Constants of one model on one device in one precision; shared by all batches of it. Thread-safe.

    float32 becomes float16 where the precision says so; what float16 cannot hold (a mask's -3.4e38) becomes
    its largest finite value, so that a Softmax over it stays finite.
    """

    def __init__(self, device: torch.device, precision: Precision) -> None:
        self.device = device
        self.precision = precision
        self._made: dict[Hashable, torch.Tensor] = {}
        self._lock = threading.RLock()

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors on the device; what two share counts once."""
        with self._lock:
            storages = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._made.values()
            }
        return sum(storages.values())

    def runtime_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What a value of the model's type `dtype` is held in while running."""
        if self.precision is Precision.FP16 and dtype == torch.float32:
            return torch.float16
        return dtype

    def tensor(self, constant: Constant) -> torch.Tensor:
        """The constant on the device in the precision's type."""
        return self.derived(("as it is", constant.key), lambda: constant.value)

    def derived(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make` computes on the CPU, converted and moved; only the first who asks by `key` computes."""
        with self._lock:
            if key not in self._made:
                self._made[key] = self._moved(make())
            return self._made[key]

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        dtype = self.runtime_dtype(value.dtype)
        if dtype != value.dtype:
            value = value.clamp(-FP16_MAX, FP16_MAX).to(dtype)
        return value.to(self.device)


def initializers(model: onnx.ModelProto) -> Mapping[str, onnx.TensorProto]:
    """The stored weights by name."""
    return {proto.name: proto for proto in model.graph.initializer}


def stored_constant(proto: onnx.TensorProto) -> Constant:
    """An initializer as a constant.

    Raises:
        Unsupported: torch has no such element type.
    """
    return Constant(("weight", proto.name), tensor_from_proto(proto))
