"""Which stored tensors are weights, and what part each plays. Pure.

Only what this table names is ever replaced: a shape, an epsilon, an exponent or a resize scale is a stored
tensor too, and often one with equal elements.
"""

from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What a stored tensor does in its operator."""

    WEIGHT = "weight"  # summed over with the input; drawn with the variance of one over its fan-in
    BIAS = "bias"  # added; chosen so that the output is centred
    GAIN = "gain"  # multiplied; stays away from zero
    SHIFT = "shift"  # added, not measured
    MEAN = "mean"  # BatchNormalization's statistics, measured
    VARIANCE = "variance"
    SLOPE = "slope"  # of PRelu, between 0 and 1
    TABLE = "table"  # rows picked by an index


@dataclass(frozen=True, slots=True)
class Linear:
    """Where the weight of a linear operator has its axes; None: not separable, one scale for all."""

    weight: int  # input index of the weight
    bias: int | None  # input index of the bias
    weight_axis: int | None  # output channels in the weight
    output_axis: int | None  # output channels in the output


_BY_INPUT: dict[str, dict[int, Role]] = {
    "Conv": {1: Role.WEIGHT, 2: Role.BIAS},
    "ConvTranspose": {1: Role.WEIGHT, 2: Role.BIAS},
    "Gemm": {0: Role.WEIGHT, 1: Role.WEIGHT, 2: Role.BIAS},
    "MatMul": {0: Role.WEIGHT, 1: Role.WEIGHT},
    "BatchNormalization": {1: Role.GAIN, 2: Role.SHIFT, 3: Role.MEAN, 4: Role.VARIANCE},
    "InstanceNormalization": {1: Role.GAIN, 2: Role.SHIFT},
    "GroupNormalization": {1: Role.GAIN, 2: Role.SHIFT},
    "LayerNormalization": {1: Role.GAIN, 2: Role.SHIFT},
    "RMSNormalization": {1: Role.GAIN},
    "PRelu": {1: Role.SLOPE},
    "Gather": {0: Role.TABLE},
    "LSTM": {1: Role.WEIGHT, 2: Role.WEIGHT, 3: Role.SHIFT},
    "GRU": {1: Role.WEIGHT, 2: Role.WEIGHT, 3: Role.SHIFT},
    "RNN": {1: Role.WEIGHT, 2: Role.WEIGHT, 3: Role.SHIFT},
}
_BY_KIND = {"Add": Role.SHIFT, "Sub": Role.SHIFT, "Sum": Role.SHIFT, "Mul": Role.GAIN, "Div": Role.GAIN}


def role_of(kind: str, index: int, size: int) -> Role | None:
    """The role of a stored tensor with `size` elements at input `index` of an operator, None if it has none.

    A single number in arithmetic is part of a formula (an epsilon, a temperature), not a weight.
    """
    if kind in _BY_KIND:
        return _BY_KIND[kind] if size > 1 else None
    return _BY_INPUT.get(kind, {}).get(index)


def linear_of(kind: str, weight_index: int, *, transposed: bool) -> Linear | None:
    """The axes of a linear operator whose weight is input `weight_index`; None for other operators."""
    if kind == "Conv":
        return Linear(1, 2, 0, 1)
    if kind == "ConvTranspose":
        return Linear(1, 2, None, None)  # groups interleave its output channels
    if kind == "Gemm" and weight_index == 1:
        return Linear(1, 2, 0 if transposed else 1, 1)
    if kind == "MatMul" and weight_index == 1:
        return Linear(1, None, -1, -1)
    if kind in ("Gemm", "MatMul"):
        return Linear(0, 2 if kind == "Gemm" else None, None, None)
    return None
