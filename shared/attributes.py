"""What an operator does to its input's shape, as far as a learned policy reads it (TOP, section V-C)."""

from dataclasses import dataclass
from typing import Any, Final

ACTIVATIONS: Final = ("identity", "relu", "sigmoid", "tanh", "other")
"""What follows the leading node pointwise; `identity` for nothing."""

POOLINGS: Final = ("none", "max", "avg", "global max", "global avg")
"""The operator's pooling type."""

MAX_AXES: Final = 16
MAX_VALUE: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Attributes:
    """Attributes of a convolution or a pool, by ONNX's rules; empty or at their defaults for others."""

    kernel: tuple[int, ...] = ()  # [num_axes], as the strides
    strides: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()  # before each axis, then behind; 0 where `auto_pad` decides [2 * num_axes]
    groups: int = 1
    activation: str = "identity"  # one of ACTIVATIONS
    pooling: str = "none"  # one of POOLINGS

    def problem(self) -> str:
        """The first bound that does not hold, in words, or an empty string."""
        numbers = (*self.kernel, *self.strides, *self.pads, self.groups)
        if max(len(self.kernel), len(self.strides)) > MAX_AXES or len(self.pads) > 2 * MAX_AXES:
            return "more axes than a tensor has"
        if not all(0 <= number < MAX_VALUE for number in numbers):
            return "an attribute out of range"
        if self.activation not in ACTIVATIONS or self.pooling not in POOLINGS:
            return "an unknown activation or pooling"
        return ""

    def to_wire(self) -> list[Any]:
        """Positional; empty where every attribute is at its default."""
        if self == Attributes():
            return []
        return [
            list(self.kernel),
            list(self.strides),
            list(self.pads),
            self.groups,
            ACTIVATIONS.index(self.activation),
            POOLINGS.index(self.pooling),
        ]

    @staticmethod
    def from_wire(wire: Any) -> "Attributes":
        """Nothing is converted: only what `to_wire` writes is read.

        Raises:
            TypeError, ValueError: it is something else.
        """
        if wire == []:
            return Attributes()
        kernel, strides, pads, groups, activation, pooling = wire
        for values in (kernel, strides, pads, [groups, activation, pooling]):
            if type(values) is not list or not all(type(value) is int and value >= 0 for value in values):
                raise TypeError("an operator's attributes are no whole numbers")
        if activation >= len(ACTIVATIONS) or pooling >= len(POOLINGS):
            raise ValueError("an operator has an unknown activation or pooling")
        found = Attributes(
            tuple(kernel), tuple(strides), tuple(pads), groups, ACTIVATIONS[activation], POOLINGS[pooling]
        )
        if problem := found.problem():
            raise ValueError(f"an operator has {problem}")
        return found
