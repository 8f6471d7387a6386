"""Operators split in two parts, one for each of two resources (EOP, Xu et al. 2022, equation 1)."""

from enum import Enum
from typing import NamedTuple


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
