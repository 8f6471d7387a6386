"""Element types by the protocol's names and by numpy's."""

from functools import cache
from typing import Any, Final

import numpy as np

from stageloom.shared.errors import InputError

PROTOCOL_NAMES: Final = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
}
"""By numpy's name: every type that an engine's tensor may have."""

NUMPY_NAMES: Final = {protocol: name for name, protocol in PROTOCOL_NAMES.items()}
BINARY_ONLY: Final = frozenset({"FP16", "BF16"})
"""For which the protocol has no numbers in JSON, nor a field in gRPC's contents."""


@cache
def numpy_type(protocol_name: str) -> "np.dtype[Any]":
    """numpy's type.

    Raises:
        InputError: no model takes or gives this type, or BF16 is one that numpy does not know here.
    """
    name = NUMPY_NAMES.get(protocol_name)
    if name is None:
        known = ", ".join(NUMPY_NAMES)
        raise InputError(f"datatype {protocol_name[:32]!r} is none that a model takes", remedy=f"use {known}")
    if name == "bfloat16":
        try:
            import ml_dtypes  # onnx brings it
        except ImportError as error:
            raise InputError("BF16 needs the package ml_dtypes", remedy="pip install ml_dtypes") from error
        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)
