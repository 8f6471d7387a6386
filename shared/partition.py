"""Splitting an operator in two along an axis of its output: the words. Pure.

Xu, Zhang, Wu and Hu, "EOP: Efficient Operator Partition for Deep Learning Inference over Edge Servers"
(VEE 2022), section 3.1: an operator becomes two that work on a part of its tensors each, on two resources,
and a join. An operator here is a run of ONNX nodes; the half [start, stop) of its output is followed back,
node by node, to what must be read of every input and weight (`stageloom.shared.operator_parts`, with the rule
of each kind of node in `stageloom.shared.partition_rules`).

Sums are never split: their rounding would differ. So neither the channels that a convolution adds up nor the
axis that a Softmax normalises is an axis to split on.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from stageloom.shared.errors import PlanError, Unsplittable


class Axis(Enum):
    """Along which axis of its output an operator is split."""

    BATCH = "n"
    CHANNELS = "c"
    ROWS = "h"


class Split(NamedTuple):
    """A run of operators of one model, each split in two parts along one axis and joined after the last.

    `first`..`last` are operator numbers of the artifact's graph (inclusive) that form a chain; `axis` and
    `boundary` are of the last operator's output: part one makes [0, boundary), part two [boundary, extent).
    """

    first: int
    last: int
    axis: Axis
    boundary: int


MAX_SPLITS = 1 << 12
"""Of one model."""

MAX_EXTENT = 1 << 20
"""Of the axis that an operator is split on."""

_SPLIT = re.compile(r"(0|[1-9]\d{0,5})(?:-(0|[1-9]\d{0,5}))?([nch])([1-9]\d{0,6})")


def splits_text(splits: Sequence[Split]) -> str:
    """Splits as plans show them: `12-14c96,20h28`."""
    return ",".join(
        f"{one.first}{f'-{one.last}' if one.last > one.first else ''}{one.axis.value}{one.boundary}"
        for one in splits
    )


def parse_splits(text: str) -> tuple[Split, ...]:
    """The splits that `splits_text` writes.

    Raises:
        PlanError: it is written otherwise.
    """
    found = []
    for word in text.split(",") if text else ():
        match = _SPLIT.fullmatch(word)
        if match is None:
            raise PlanError(f"{word[:40]!r} is no split", remedy="write it as 12-14c96 or 20h28")
        first, last, axis, boundary = match.groups()
        found.append(Split(int(first), int(last or first), Axis(axis), int(boundary)))
    if splits_text(found) != text:
        raise PlanError("the splits are not in canonical form", remedy="write them as `splits_text` does")
    return tuple(found)


CHANNELS_FIRST = frozenset({
    "Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "DeformConv", "BatchNormalization",
    "InstanceNormalization", "GroupNormalization", "LRN", "MaxPool", "AveragePool", "LpPool", "GlobalMaxPool",
    "GlobalAveragePool", "GlobalLpPool", "Resize", "Upsample",
})  # fmt: skip
"""Kinds whose tensors of rank 3 are [batch, channels, length], not [batch, rows, features]."""


def dimension_of(axis: Axis, kind: str, rank: int) -> int | None:
    """The dimension that an axis is of the output of an operator, whose leading node is of `kind`.

    n is the first. From rank 4 on, and of kinds that have channels first, c and h are the next two. Of rank 3
    otherwise h are the rows and c the columns, of rank 2 c the columns. None: the output has no such axis.
    """
    if axis is Axis.BATCH:
        return 0 if rank >= 1 else None
    if rank == 2:
        return 1 if axis is Axis.CHANNELS else None
    if rank < 3:
        return None
    channels = 1 if rank > 3 or kind in CHANNELS_FIRST else 2
    return channels if axis is Axis.CHANNELS else 3 - channels


class AxisRange(NamedTuple):
    """The part [start, stop) of a tensor along one dimension; all of every other."""

    dim: int
    start: int
    stop: int

    @property
    def extent(self) -> int:
        """Its size along the dimension."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """What splitting reads of an ONNX node; an absent input or output is an empty name."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, int | str | tuple[int, ...]] = field(default_factory=dict)
    domain: str = ""

    def integer(self, name: str, default: int) -> int:
        """An integer attribute."""
        value = self.attributes.get(name, default)
        return value if isinstance(value, int) else default

    def integers(self, name: str) -> tuple[int, ...]:
        """A list attribute; empty where it is absent."""
        value = self.attributes.get(name, ())
        return value if isinstance(value, tuple) else ()


@dataclass(frozen=True)
class NodeRun:
    """The nodes of one or several operators that follow each other, in a topological order."""

    nodes: tuple[OnnxNode, ...]
    shapes: Mapping[str, tuple[int, ...]]  # of every value, weights included, where it is known
    weights: frozenset[str]  # values that are constants
    numbers: Mapping[str, tuple[int, ...]]  # the integers of small constants: shapes, axes, sizes
    outputs: tuple[str, ...]  # of the last operator
    crossing: frozenset[str] = frozenset()  # values that one operator of a chain hands to the next
    opset: int = 17

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises:
        Unsplittable: inference does not know it.
        """
        if name not in self.shapes:
            raise Unsplittable("axis", f"the shape of {name[:80]!r} is not known")
        return self.shapes[name]


class NodeReads(NamedTuple):
    """What a rule says of a node, of which a part of the output is wanted; see `NodePart`."""

    reads: tuple[AxisRange | None, ...]
    kept: tuple[int, ...] | None = None  # None: all
    attributes: Mapping[str, int | str | tuple[int, ...]] = MappingProxyType({})
    numbers: Mapping[int, tuple[int, ...]] = MappingProxyType({})
