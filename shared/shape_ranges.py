"""Ranges of shapes: what tensors of a model with open dimensions may be."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_STEP: Final = 32
"""Networks that halve their images five times want sizes that are multiples of this."""


@dataclass(frozen=True, slots=True)
class ShapeRanges:
    """What a graph with open dimensions says beside its tensors, whose shapes are the largest."""

    smallest: tuple[tuple[int, ...], ...]  # per tensor [num_tensors]; an output's of all runs at import
    largest_tensor_bytes: int  # of the values inside, at the largest inputs

    def to_wire(self) -> list[Any]:
        """Lists of integers."""
        return [[list(shape) for shape in self.smallest], self.largest_tensor_bytes]

    @classmethod
    def from_wire(cls, row: Any) -> "ShapeRanges":
        """Rebuild what `to_wire` wrote.

        Raises:
            TypeError, ValueError: it is something else.
        """
        smallest, largest_tensor_bytes = row
        if type(smallest) is not list or any(type(shape) is not list for shape in smallest):
            raise TypeError("the smallest shapes are no lists")
        numbers = [largest_tensor_bytes, *(size for shape in smallest for size in shape)]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise TypeError("a range holds something else than whole numbers")
        return cls(tuple(map(tuple, smallest)), largest_tensor_bytes)

    def problem(self, largest: Sequence[Sequence[int]]) -> str:
        """Why these are no ranges up to the largest shapes, in words, or an empty string."""
        if len(self.smallest) != len(largest):
            return "its ranges are not those of its tensors"
        for low, high in zip(self.smallest, largest, strict=True):
            if not within(low, (0,) * len(low), high):
                return f"a range begins at {list(low)[:16]} and ends at {list(high)[:16]}"
        return ""


def within(shape: Sequence[int], smallest: Sequence[int], largest: Sequence[int]) -> bool:
    """Whether each dimension of a shape lies between two others', the ends included."""
    if not len(shape) == len(smallest) == len(largest):
        return False
    return all(low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True))


def middle_shape(smallest: Sequence[int], largest: Sequence[int]) -> tuple[int, ...]:
    """The shape half-way between two, down to a multiple of 32 where the range holds one below."""
    middles = ((low, (low + high) // 2) for low, high in zip(smallest, largest, strict=True))
    return tuple(
        max(low, middle - middle % _STEP) if low < middle >= _STEP else middle for low, middle in middles
    )


def shape_text(shape: Sequence[int]) -> str:
    """`1x3x224x224`; a scalar is `scalar`."""
    return range_text(shape, shape)


def range_text(smallest: Sequence[int], largest: Sequence[int]) -> str:
    """`1..6x3x48x16..2400`; a scalar is `scalar`."""
    bounds = zip(smallest, largest, strict=True)
    return "x".join(str(low) if low == high else f"{low}..{high}" for low, high in bounds) or "scalar"
