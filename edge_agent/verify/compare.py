"""The two numbers of a comparison: how far results differ, and how much the outputs depend on the input."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

MAX_DIFFERENCE = 1e-4
MIN_SENSITIVITY = 1e-2


def relative_difference(found: "np.ndarray", expected: "np.ndarray") -> float:
    """Norm of the difference over the norm of the reference, in float64.

    Infinite where it cannot be small: another shape or type, a value that is no finite number on either side,
    or something found where the reference is zero.
    """
    import numpy as np

    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    wide_found, wide_expected = found.astype(np.float64), expected.astype(np.float64)
    if not (np.isfinite(wide_found).all() and np.isfinite(wide_expected).all()):
        return math.inf
    norm = float(np.linalg.norm(wide_expected))
    gap = float(np.linalg.norm(wide_found - wide_expected))
    if gap == 0.0:
        return 0.0
    return gap / norm if norm > 0.0 else math.inf


def sensitivity(
    one: "Mapping[str, np.ndarray]", other: "Mapping[str, np.ndarray]", names: Iterable[str]
) -> float:
    """The smallest relative change over `names` between two inputs' results; 0 where one is not finite.

    The change is the norm of the difference over the larger of the two norms, so it lies in 0..2. Without
    any name it is 0: nothing could differ.
    """
    return min((_change(one[name], other[name]) for name in names), default=0.0)


def _change(one: "np.ndarray", other: "np.ndarray") -> float:
    import numpy as np

    left, right = one.astype(np.float64), other.astype(np.float64)
    if left.shape != right.shape or not (np.isfinite(left).all() and np.isfinite(right).all()):
        return 0.0
    larger = max(float(np.linalg.norm(left)), float(np.linalg.norm(right)))
    return float(np.linalg.norm(left - right)) / larger if larger > 0.0 else 0.0
