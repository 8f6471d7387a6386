"""What computing in bfloat16 does to a model: its weights and inputs rounded to it, and the rest in float32.

bfloat16 keeps 8 bits of a float32 number's 24: a step is at most 2^-8 of the number. How far such steps at a
model's edges move its inner tensors says how much the model makes of rounding, whoever computes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 numbers rounded to the nearest bfloat16, ties to even; other types as they are. [...]"""
    if values.dtype != np.float32:
        return values
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) & np.uint32(0xFFFF0000)
    made: np.ndarray = np.where(np.isfinite(values), rounded.view(np.float32), values)
    return made.reshape(values.shape)


def with_rounded_weights(model: "onnx.ModelProto") -> "onnx.ModelProto":
    """A copy of the model whose float32 weights are rounded to bfloat16."""
    import onnx
    from onnx import numpy_helper

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for weight in copy.graph.initializer:
        if weight.data_type == onnx.TensorProto.FLOAT:
            rounded = to_bfloat16(numpy_helper.to_array(weight))
            weight.CopyFrom(numpy_helper.from_array(rounded, weight.name))
    return copy


@dataclass(slots=True)
class LargestAgree:
    """How often the largest element along an output's last axis is the reference's: the class, the token."""

    same: int = 0
    rows: int = 0

    def add(self, actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
        """Count the rows of outputs of one task; integers and single elements have no largest one."""
        for name, wanted in expected.items():
            found = actual.get(name)
            if found is None or found.shape != wanted.shape or wanted.dtype.kind != "f":
                continue
            if wanted.ndim and wanted.size and wanted.shape[-1] > 1:
                agree = found.argmax(axis=-1) == wanted.argmax(axis=-1)
                self.same += int(agree.sum())
                self.rows += agree.size

    @property
    def share(self) -> float | None:
        """None where there was nothing to count."""
        return self.same / self.rows if self.rows else None
