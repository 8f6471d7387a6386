"""How far a correct schedule may differ from the reference, tensor by tensor.

onnxruntime gives two results: with its optimisations and without. Their difference on the inputs of a
comparison is the *noise* of a tensor. A schedule may differ by `NOISE_MULTIPLE` times the noise, or by
`MAX_DIFFERENCE` if that is more. The tolerance never exceeds `MAX_TOLERANCE`, nor half of the tensor's change
from input to input: a wrong schedule would pass too.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stageloom.edge_agent.verify.analysis import CHOOSING, Head, Rounding, slope

if TYPE_CHECKING:
    import numpy as np


MAX_DIFFERENCE = 1e-4
MIN_SENSITIVITY = 1e-2

NOISE_MULTIPLE = 5.0
"""Correct schedules differ by up to 1.5 times the noise (docs/architecture.md)."""

MAX_TOLERANCE = 0.1
"""The largest tolerance, however much onnxruntime differs from itself."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """By how much results may differ where the arithmetic is right; relative differences."""

    least: float = MAX_DIFFERENCE
    multiple: float = NOISE_MULTIPLE  # of the noise
    most: float = MAX_TOLERANCE


FLOAT32 = Allowance()

BFLOAT16 = Allowance(least=2.0**-8, multiple=3.0, most=1.0)
"""The noise is what rounding weights and inputs to bfloat16 does in float32. Sessions round what passes
between their operators, too."""

AGREEING_SHARE = 0.25
"""Share of the inputs, at least two, that must agree where rounding may flip an element."""

_NOISY_SHARE = 0.75

Values = Mapping[str, "np.ndarray"]

_QUANTISED = ("int8", "uint8")


def relative_difference(actual: "np.ndarray", expected: "np.ndarray", floor: float = 0.0) -> float:
    """Return the relative difference of two tensors; 0 if all elements are equal.

    Floats: norm of the difference over norm of the reference, in float64, or over `floor` where that is
    larger. Bytes: the same over the norm of the reference less its mean, as a zero point may lie anywhere.
    Other integers and booleans: the share of elements that differ, as an index has no size.

    Infinite where it cannot be small: another shape or type, a value that is no finite number on either side,
    or a difference where the reference has no scale.
    """
    import numpy as np

    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if actual.dtype.kind in "biu" and actual.dtype.name not in _QUANTISED:
        return float((actual != expected).mean()) if actual.size else 0.0
    wide_actual, wide_expected = actual.astype(np.float64), expected.astype(np.float64)
    if not (np.isfinite(wide_actual).all() and np.isfinite(wide_expected).all()):
        return math.inf
    gap = float(np.linalg.norm(wide_actual - wide_expected))
    if gap == 0.0:
        return 0.0
    if actual.dtype.name in _QUANTISED:
        wide_expected -= wide_expected.mean()
    scale = max(float(np.linalg.norm(wide_expected)), floor)
    return gap / scale if scale > 0.0 else math.inf


def sensitivity(
    one: "Mapping[str, np.ndarray]", other: "Mapping[str, np.ndarray]", names: Iterable[str]
) -> float:
    """Return the smallest relative change over `names` between two inputs' results.

    0 where a value is not finite, and without any name: no output could differ.
    """
    return min((change(one[name], other[name]) for name in names), default=0.0)


def change(one: "np.ndarray", other: "np.ndarray") -> float:
    """Divide the norm of the difference by the larger norm; in 0..2, 0 where a value is not finite."""
    import numpy as np

    left, right = one.astype(np.float64), other.astype(np.float64)
    if left.shape != right.shape or not (np.isfinite(left).all() and np.isfinite(right).all()):
        return 0.0
    larger = max(float(np.linalg.norm(left)), float(np.linalg.norm(right)))
    return float(np.linalg.norm(left - right)) / larger if larger > 0.0 else 0.0


def smallest_share(gaps: Sequence[float], share: float) -> float:
    """Return the gap that this share of the inputs, and at least two, do not exceed."""
    place = max(2, math.ceil(share * len(gaps))) - 1
    return sorted(gaps)[min(place, len(gaps) - 1)]


@dataclass(frozen=True, slots=True)
class Standard:
    """The rule for one tensor; the numbers are relative differences."""

    noise: float = 0.0  # of onnxruntime
    tolerance: float = MAX_DIFFERENCE  # passes up to here
    doubtful: float = 0.0  # beyond `tolerance`, but within the noise: cannot be judged up to here
    jumps: bool = False  # rounding may flip an element: seldom, but plainly
    floors: tuple[float, ...] = ()  # per input the least scale of a difference: behind a head that saturates

    def difference(self, which: int, actual: "np.ndarray", expected: "np.ndarray") -> float:
        """Return the relative difference of a result for input `which`."""
        return relative_difference(actual, expected, self.floors[which] if self.floors else 0.0)

    def over_inputs(self, gaps: Sequence[float]) -> float:
        """Return the largest gap or, if the tensor jumps, the one that enough inputs do not exceed.

        A wrong schedule differs on every input.
        """
        return smallest_share(gaps, AGREEING_SHARE) if self.jumps else max(gaps)


def standard_of(
    name: str,
    expected: Sequence[Values],
    plain: Sequence[Values],
    rounding: Rounding,
    heads: Sequence[Head] = (),
    standards: "Mapping[str, Standard]" = {},  # noqa: B006 - read only
    allowance: Allowance = FLOAT32,
) -> Standard:
    """Return the standard of one tensor.

    `expected` and `plain` are onnxruntime's results per input, computed in two ways whose difference is the
    noise: with and without optimisations, or in float32 and rounded as the `allowance` has it. `heads` are
    those that the tensor comes from, and `standards` contains the tensors that they read.
    """
    floors = _floors(name, expected, heads, standards, allowance)
    gaps = [
        relative_difference(other[name], one[name], floors[which] if floors else 0.0)
        for which, (one, other) in enumerate(zip(expected, plain, strict=True))
    ]
    noise = smallest_share(gaps, _NOISY_SHARE) if rounding.jumps else max(gaps)
    exact = expected[0][name].dtype.kind in "biu" and not rounding.jumps
    base = 0.0 if exact else max(allowance.least, rounding.unit)
    wanted = allowance.multiple * noise
    ceiling = max(base, min(allowance.most, change(expected[0][name], expected[1][name]) / 2))
    tolerance = min(max(base, wanted), ceiling)
    doubtful = wanted if ceiling < wanted < math.inf else 0.0
    return Standard(noise, tolerance, doubtful, rounding.jumps, floors)


def _floors(
    name: str,
    expected: Sequence[Values],
    heads: Sequence[Head],
    standards: "Mapping[str, Standard]",
    allowance: Allowance,
) -> tuple[float, ...]:
    """Return per input the least scale of a difference behind saturating heads.

    The input of a head may differ by its own tolerance, which moves the output by at most the slope times
    that; and the kernels of heads round numbers of about 1. The scale is that much over the least allowance.
    """
    import numpy as np

    heads = [head for head in heads if head.kind not in CHOOSING]
    floats = all(expected[0][name].dtype.kind == "f" for head in heads for name in (head.reads, head.makes))
    if not heads or not floats or expected[0][name].dtype.kind != "f":
        return ()
    floors = []
    for values in expected:
        unit = float(np.finfo(values[name].dtype).eps)
        moved = unit * values[name].size ** 0.5
        for head in heads:
            if head.reads in standards:  # else it is an input of the model, and exact
                norm = float(np.linalg.norm(values[head.reads].astype(np.float64)))
                moved += slope(head, values[head.makes]) * standards[head.reads].tolerance * norm
        floors.append(moved / allowance.least)
    return tuple(floors)
