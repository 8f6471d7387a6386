"""The numbers of a comparison: how far two results lie apart, and how much outputs depend on inputs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

MAX_DIFFERENCE = 1e-4
MIN_SENSITIVITY = 1e-2

_QUANTISED = ("int8", "uint8")


def relative_difference(found: "np.ndarray", expected: "np.ndarray", floor: float = 0.0) -> float:
    """How far two tensors lie apart; 0 where all elements are equal.

    Floats: norm of the difference over norm of the reference, in float64, or over `floor` where that is
    larger. Bytes: the same over the norm of the reference less its mean, as a zero point may lie anywhere.
    Other integers and booleans: the share of elements that differ, as an index has no size.

    Infinite where it cannot be small: another shape or type, a value that is no finite number on either side,
    or something found where the reference has no scale.
    """
    import numpy as np

    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    if found.dtype.kind in "biu" and found.dtype.name not in _QUANTISED:
        return float((found != expected).mean()) if found.size else 0.0
    wide_found, wide_expected = found.astype(np.float64), expected.astype(np.float64)
    if not (np.isfinite(wide_found).all() and np.isfinite(wide_expected).all()):
        return math.inf
    gap = float(np.linalg.norm(wide_found - wide_expected))
    if gap == 0.0:
        return 0.0
    if found.dtype.name in _QUANTISED:
        wide_expected -= wide_expected.mean()
    scale = max(float(np.linalg.norm(wide_expected)), floor)
    return gap / scale if scale > 0.0 else math.inf


def sensitivity(
    one: "Mapping[str, np.ndarray]", other: "Mapping[str, np.ndarray]", names: Iterable[str]
) -> float:
    """The smallest relative change over `names` between two inputs' results; 0 where one is not finite.

    Without any name it is 0: nothing could differ.
    """
    return min((change(one[name], other[name]) for name in names), default=0.0)


def change(one: "np.ndarray", other: "np.ndarray") -> float:
    """Norm of the difference over the larger of the two norms, in 0..2; 0 where a value is not finite."""
    import numpy as np

    left, right = one.astype(np.float64), other.astype(np.float64)
    if left.shape != right.shape or not (np.isfinite(left).all() and np.isfinite(right).all()):
        return 0.0
    larger = max(float(np.linalg.norm(left)), float(np.linalg.norm(right)))
    return float(np.linalg.norm(left - right)) / larger if larger > 0.0 else 0.0


def smallest_share(gaps: Sequence[float], share: float) -> float:
    """The gap that this share of all inputs, and two of them, do not exceed; the largest for few inputs."""
    place = max(2, math.ceil(share * len(gaps))) - 1
    return sorted(gaps)[min(place, len(gaps) - 1)]
