"""Element types between ONNX, numpy and torch, and the three precisions that a model can run in."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper

from stageloom.shared.graph import ITEM_BYTES


class Unsupported(Exception):
    """This node cannot be lowered to torch, so its operator runs in onnxruntime; the text says why."""


class NeedsConstant(Unsupported):
    """A value that decides a shape is computed at run time, but shapes are static."""

    def __init__(self, kind: str, value: str) -> None:
        self.value = value
        super().__init__(f"{kind}: {value!r} decides a shape and is known only while running")


class Precision(Enum):
    """The type of a model's 32-bit floating point values, and the arithmetic of their products."""

    FP32 = "fp32"
    TF32 = "tf32"  # float32 values, products on tensor cores with 10 bits of mantissa; as FP32 on a CPU
    FP16 = "fp16"  # float16 values; kernels add up in float32


TORCH_OF_ONNX: dict[int, torch.dtype] = {
    TensorProto.DOUBLE: torch.float64, TensorProto.FLOAT: torch.float32, TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16, TensorProto.INT64: torch.int64, TensorProto.INT32: torch.int32,
    TensorProto.INT16: torch.int16, TensorProto.INT8: torch.int8, TensorProto.UINT64: torch.uint64,
    TensorProto.UINT32: torch.uint32, TensorProto.UINT16: torch.uint16, TensorProto.UINT8: torch.uint8,
    TensorProto.BOOL: torch.bool, TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2, TensorProto.COMPLEX64: torch.complex64,
    TensorProto.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz, TensorProto.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
    TensorProto.COMPLEX128: torch.complex128,
}  # fmt: skip

TORCH_OF_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
"""Keys are the dtype names of a graph's tensors."""

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory format by number of dimensions."""

UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""Types that torch stores but hardly computes in; see `node.widened`."""

_EXTENSIONS = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
"""Types that numpy has only as extensions: they pass as bits."""


def unhalved(value: torch.Tensor) -> torch.Tensor:
    """Return half precision as float32, which holds its squares and their sums; other types as they are."""
    half = value.is_floating_point() and value.itemsize < 4
    return value.float() if half else value


def onnx_dtype(code: int) -> torch.dtype:
    """Return the torch type of an ONNX element type.

    Raises:
        Unsupported: torch has none (strings, 4-bit and 2-bit numbers).
    """
    if code not in TORCH_OF_ONNX:
        known = code in TensorProto.DataType.values()
        name = TensorProto.DataType.Name(code).lower() if known else f"type {code}"
        raise Unsupported(f"{name} values")
    return TORCH_OF_ONNX[code]


def tensor_from_numpy(array: np.ndarray) -> torch.Tensor:
    """Return a tensor on the CPU with a copy of the array's values.

    Raises:
        Unsupported: torch has no such element type.
    """
    name = array.dtype.name
    if name in _EXTENSIONS:
        bits = np.dtype(f"uint{8 * array.itemsize}")
        flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(bits).copy())
        return flat.view(getattr(torch, name)).reshape(array.shape)
    if array.dtype.kind not in "fiubc" or name not in (*TORCH_OF_NAME, "complex64", "complex128"):
        raise Unsupported(f"{name} values")
    return torch.from_numpy(np.array(array, order="C"))


def numpy_from_tensor(value: torch.Tensor) -> np.ndarray:
    """Return a copy of a tensor's values; types that numpy lacks become the extension types of onnx."""
    value = value.detach().cpu().contiguous()
    name = str(value.dtype).removeprefix("torch.")
    if name in _EXTENSIONS:
        import ml_dtypes

        bits = value.view(getattr(torch, f"uint{8 * value.itemsize}")).numpy().copy()
        array: np.ndarray = bits.view(getattr(ml_dtypes, name))
        return array
    array = value.resolve_conj().numpy().copy()
    return array


def tensor_from_proto(proto: onnx.TensorProto) -> torch.Tensor:
    """Return an initializer's values on the CPU.

    Raises:
        Unsupported: torch has no such element type.
    """
    onnx_dtype(proto.data_type)
    return tensor_from_numpy(numpy_helper.to_array(proto))


_tf32_changes = threading.Lock()
_tf32_wanted = False  # by the last caller of `use_tf32`


def use_tf32(on: bool) -> None:
    """Allow or forbid TF32 for products of float32 matrices and convolutions.

    The setting is process-wide: threads that run, measure or capture at once must agree on it. Inductor and
    users' code still read the older settings, and torch raises an error if those differ from the newer ones.
    """
    global _tf32_wanted
    with _tf32_changes:
        _tf32_wanted = on
        _set_tf32(on)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Forbid TF32 until the process has again what `use_tf32` was last told, by whatever thread.

    What it is told inside holds from then on.
    """
    with _tf32_changes:
        _set_tf32(False)
    try:
        yield
    finally:
        with _tf32_changes:
            _set_tf32(_tf32_wanted)


def _set_tf32(on: bool) -> None:
    """Set the older settings first, as they change some of the newer ones."""
    backends: Any = torch.backends
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are the older ones
        backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = on
    for place in _places():
        place.fp32_precision = "tf32" if on else "ieee"


def allows_tf32() -> bool:
    """Return whether convolutions may use TF32 now.

    Where torch has the newer settings those are asked: the older ones raise an error where they differ.
    """
    places = _places()
    return bool(places[1].fp32_precision == "tf32" if places else torch.backends.cudnn.allow_tf32)


def _places() -> tuple[Any, ...]:
    """Return the settings of matrix products, convolutions and recurrent layers; none before torch 2.9."""
    backends: Any = torch.backends  # whose stubs do not know these settings
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        return ()
    return backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn
