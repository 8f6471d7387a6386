"""Element types between ONNX, numpy and torch, and the three precisions that a model can run in."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper

from stageloom.edge_agent.lowering.errors import Unsupported


class Precision(Enum):
    """How 32-bit floating point values of a model are held and multiplied."""

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

TORCH_OF_NAME: dict[str, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8,
    "uint64": torch.uint64, "uint32": torch.uint32, "uint16": torch.uint16, "uint8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
"""By the name that a graph's tensors carry."""

UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""Types that torch stores but hardly computes with; see `registry.widened`."""

_VIEWED: dict[torch.dtype, tuple[type, torch.dtype]] = {
    torch.bfloat16: (np.uint16, torch.uint16),
    torch.float8_e4m3fn: (np.uint8, torch.uint8),
    torch.float8_e5m2: (np.uint8, torch.uint8),
    torch.float8_e4m3fnuz: (np.uint8, torch.uint8),
    torch.float8_e5m2fnuz: (np.uint8, torch.uint8),
}
"""Types that numpy holds only as an extension: they pass as bits."""

_OF_EXTENSION = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
}


def onnx_dtype(code: int) -> torch.dtype:
    """The torch type of an ONNX element type.

    Raises:
        Unsupported: torch has none (strings, 4-bit and 2-bit numbers).
    """
    if code not in TORCH_OF_ONNX:
        known = code in TensorProto.DataType.values()
        name = TensorProto.DataType.Name(code).lower() if known else f"type {code}"
        raise Unsupported(f"{name} values")
    return TORCH_OF_ONNX[code]


def tensor_from_numpy(array: np.ndarray) -> torch.Tensor:
    """A tensor on the CPU with the array's values; never shares read-only memory.

    Raises:
        Unsupported: torch has no such element type.
    """
    dtype = _OF_EXTENSION.get(array.dtype.name)
    if dtype is not None:
        bits, stored = _VIEWED[dtype]
        flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(bits).copy())
        assert flat.dtype == stored
        return flat.view(dtype).reshape(array.shape)
    if array.dtype.kind not in "fiubc" or array.dtype.name not in (*TORCH_OF_NAME, "complex64", "complex128"):
        raise Unsupported(f"{array.dtype.name} values")
    return torch.from_numpy(np.array(array, order="C"))


def numpy_from_tensor(value: torch.Tensor) -> np.ndarray:
    """A copy of a tensor's values; types that numpy lacks come as the extension types that onnx uses."""
    value = value.detach().cpu().contiguous()
    if value.dtype in _VIEWED:
        import ml_dtypes

        extension = next(name for name, dtype in _OF_EXTENSION.items() if dtype == value.dtype)
        bits = value.view(_VIEWED[value.dtype][1]).numpy().copy()
        array: np.ndarray = bits.view(getattr(ml_dtypes, extension))
        return array
    array = value.resolve_conj().numpy().copy()
    return array


def tensor_from_proto(proto: onnx.TensorProto) -> torch.Tensor:
    """An initializer's values on the CPU.

    Raises:
        Unsupported: torch has no such element type.
    """
    onnx_dtype(proto.data_type)
    return tensor_from_numpy(numpy_helper.to_array(proto))


@contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """While inside, products of float32 matrices and convolutions use TF32 or do not, as `precision` says.

    The setting is the process's: threads that run, measure or capture at once must agree on it.
    """
    before = [place.fp32_precision for place in _places()]
    use_tf32(precision is Precision.TF32)
    try:
        yield
    finally:
        _set_fp32(before)


def use_tf32(on: bool) -> None:
    """Whether products of float32 matrices and convolutions may use TF32; for the whole process."""
    _set_fp32(["tf32" if on else "ieee"] * 3)


def allows_tf32() -> bool:
    """Whether convolutions may use TF32 now."""
    return bool(_places()[1].fp32_precision == "tf32")


def _places() -> tuple[Any, Any, Any]:
    """What has a precision: matrix products, convolutions, recurrent layers."""
    backends: Any = torch.backends  # whose stubs do not know these settings
    return backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn


def _set_fp32(precisions: Sequence[str]) -> None:
    """The older settings first, which write some of the newer ones, so that both say the same.

    Inductor and users' code still read the older ones, and torch raises where the two differ.
    """
    matmul, convolution, _ = precisions
    backends: Any = torch.backends
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are the older ones
        backends.cuda.matmul.allow_tf32 = matmul == "tf32"
        backends.cudnn.allow_tf32 = convolution == "tf32"
    for place, precision in zip(_places(), precisions, strict=True):
        place.fp32_precision = precision
