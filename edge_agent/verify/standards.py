"""What each tensor is held to: how far a right schedule may be from the reference, and why.

onnxruntime itself gives two answers: with its optimisations and without. How far these lie apart on the very
inputs of a comparison is the *noise* of a tensor, and `NOISE_MULTIPLE` times the noise is what a schedule may
differ by where that is more than `MAX_DIFFERENCE`. It never passes with more than `MAX_TOLERANCE`, nor with
half of what the tensor changes from input to input: there a wrong schedule would pass too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stageloom.edge_agent.verify.compare import MAX_DIFFERENCE, change, relative_difference, smallest_share
from stageloom.edge_agent.verify.heads import CHOOSING, Head, slope
from stageloom.edge_agent.verify.rounding import Rounding

if TYPE_CHECKING:
    import numpy as np

NOISE_MULTIPLE = 5.0
"""Right schedules differ by up to 1.5 times the noise, as docs/architecture.md tells."""

MAX_TOLERANCE = 0.1
"""No more than this passes, however much onnxruntime differs from itself."""

AGREEING_SHARE = 0.25
"""Of the inputs of a tensor that may jump: so many must agree, and two at least."""

_NOISY_SHARE = 0.75

Values = Mapping[str, "np.ndarray"]


@dataclass(frozen=True, slots=True)
class Standard:
    """The rule for one tensor; the numbers are relative differences."""

    noise: float = 0.0  # of onnxruntime
    tolerance: float = MAX_DIFFERENCE  # passes up to here
    doubtful: float = 0.0  # beyond `tolerance`, but within the noise: cannot be judged up to here
    jumps: bool = False  # rounding may flip an element: seldom, but plainly
    floors: tuple[float, ...] = ()  # per input the least scale of a difference: behind a head that saturates

    def difference(self, which: int, found: "np.ndarray", expected: "np.ndarray") -> float:
        """How far a result for input `which` lies from the reference."""
        return relative_difference(found, expected, self.floors[which] if self.floors else 0.0)

    def over_inputs(self, gaps: Sequence[float]) -> float:
        """One number from those of all inputs: the largest, or what enough of them keep to if it jumps.

        A wrong schedule is wrong whatever the numbers are, so it differs on every input.
        """
        return smallest_share(gaps, AGREEING_SHARE) if self.jumps else max(gaps)


def standard_of(
    name: str,
    expected: Sequence[Values],
    plain: Sequence[Values],
    rounding: Rounding,
    heads: Sequence[Head] = (),
    standards: "Mapping[str, Standard]" = {},  # noqa: B006 - read only
) -> Standard:
    """The standard of one tensor.

    `expected` and `plain` are onnxruntime's results per input with and without optimisations; `heads` those
    that the tensor comes from, and `standards` has what these read.
    """
    floors = _floors(name, expected, heads, standards)
    gaps = [
        relative_difference(other[name], one[name], floors[which] if floors else 0.0)
        for which, (one, other) in enumerate(zip(expected, plain, strict=True))
    ]
    noise = smallest_share(gaps, _NOISY_SHARE) if rounding.jumps else max(gaps)
    exact = expected[0][name].dtype.kind in "biu" and not rounding.jumps
    base = 0.0 if exact else max(MAX_DIFFERENCE, rounding.unit)
    wanted = NOISE_MULTIPLE * noise
    ceiling = max(base, min(MAX_TOLERANCE, change(expected[0][name], expected[1][name]) / 2))
    tolerance = min(max(base, wanted), ceiling)
    doubtful = wanted if ceiling < wanted < math.inf else 0.0
    return Standard(noise, tolerance, doubtful, rounding.jumps, floors)


def _floors(
    name: str, expected: Sequence[Values], heads: Sequence[Head], standards: "Mapping[str, Standard]"
) -> tuple[float, ...]:
    """Per input the scale on which a difference behind saturating heads counts.

    What the heads read may differ by its own tolerance, which moves what they make by at most the slope times
    that; and their kernels round numbers of about 1. That much is `MAX_DIFFERENCE` of the scale.
    """
    import numpy as np

    heads = [head for head in heads if head.kind not in CHOOSING]
    floats = all(expected[0][name].dtype.kind == "f" for head in heads for name in (head.reads, head.makes))
    if not heads or not floats or expected[0][name].dtype.kind != "f":
        return ()
    found = []
    for values in expected:
        unit = float(np.finfo(values[name].dtype).eps)
        moved = unit * values[name].size ** 0.5
        for head in heads:
            if head.reads in standards:  # else it is an input of the model, and exact
                norm = float(np.linalg.norm(values[head.reads].astype(np.float64)))
                moved += slope(head, values[head.makes]) * standards[head.reads].tolerance * norm
        found.append(moved / MAX_DIFFERENCE)
    return tuple(found)
