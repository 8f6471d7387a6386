"""Pairs of inputs with differing contents, for any number and types of tensors.

White noise is a poor input: global pooling averages it away and the outputs hardly depend on it. Therefore
the contents change from pair to pair: low-frequency patterns, noise, other scales, and sub-ranges of
integers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from stageloom.shared.errors import InputError, SettingError
from stageloom.shared.graph import Tensor

if TYPE_CHECKING:
    import numpy as np

Feeds: TypeAlias = "dict[str, np.ndarray]"
"""Input tensors by name, each with its batch-1 shape."""

MAX_PAIRS = 16
_COARSE = 4  # cells per axis of a low-frequency pattern
_SCALES = (1.0, 0.25, 4.0)
_SMALL_INTEGERS = {"uint8": (0, 255), "int8": (-128, 127)}
_INTEGER_RANGE = (0, 1)  # without a given range: valid ids of every table, valid masks and flags
_FLOATS = {"float16", "float32", "float64"}


@dataclass(frozen=True, slots=True)
class ValueRange:
    """The values an input may take, both ends included."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not -math.inf < self.low <= self.high < math.inf:
            raise InputError(
                f"the range {self.low}:{self.high} holds no value", remedy="write LO:HI with LO <= HI"
            )


def parse_ranges(texts: Iterable[str]) -> dict[str, ValueRange]:
    """Parse texts `NAME=LO:HI`, both ends included.

    Raises:
        SettingError: the text is no range. InputError: the range is empty.
    """
    ranges: dict[str, ValueRange] = {}
    for text in texts:
        name, equals, bounds = text.rpartition("=")  # names of tensors may hold any character
        if not equals or not name:
            raise SettingError(
                f"--range {text[:60]!r} names no input", remedy="write --range input_ids=0:30521"
            )
        if name in ranges:
            raise SettingError(f"--range names {name[:60]!r} twice", remedy="name every input once")
        low, colon, high = bounds.partition(":")
        try:
            if not colon:
                raise ValueError
            ranges[name] = ValueRange(float(low), float(high))
        except ValueError:
            raise SettingError(
                f"{bounds[:40]!r} is no range", remedy="write LO:HI, for example 0:1"
            ) from None
    return ranges


def check_ranges(tensors: Sequence[Tensor], ranges: Mapping[str, ValueRange]) -> None:
    """Check that inputs of these types and ranges can be drawn.

    Raises:
        InputError: a range names no input or leaves its type, or an input has a type that cannot be fed.
    """
    for tensor in tensors:
        if tensor.dtype == "bfloat16":
            raise InputError(
                f"input {tensor.name!r} has the type bfloat16, which cannot be fed",
                remedy="export the model with float32 inputs",
            )
    known = {tensor.name: tensor for tensor in tensors}
    for name, values in ranges.items():
        if name not in known:
            raise InputError(f"the model has no input {name!r}", remedy=f"its inputs are {', '.join(known)}")
        dtype = known[name].dtype
        text = f"the range {values.low:g}:{values.high:g} of {name!r}"
        low, high = _limits(dtype)
        if not low <= values.low <= values.high <= high:
            raise InputError(f"{text} leaves its type {dtype}", remedy=f"stay in {low:g}:{high:g}")
        if dtype not in _FLOATS and math.ceil(values.low) > math.floor(values.high):
            raise InputError(f"{text} holds no whole number", remedy="give whole numbers")


def _limits(dtype: str) -> tuple[float, float]:
    """Return the smallest and the largest value of a type."""
    import numpy as np

    if dtype == "bool":
        return 0, 1
    if dtype in _FLOATS:
        return float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def draw_pair(
    tensors: Sequence[Tensor], ranges: Mapping[str, ValueRange], attempt: int, rng: "np.random.Generator"
) -> tuple[Feeds, Feeds]:
    """Draw two sets of inputs for one comparison; `attempt` (0, 1, ...) selects the kind of content."""
    return (
        {t.name: _draw(t, ranges.get(t.name), attempt, False, rng) for t in tensors},
        {t.name: _draw(t, ranges.get(t.name), attempt, True, rng) for t in tensors},
    )


def _draw(
    tensor: Tensor, values: ValueRange | None, attempt: int, second: bool, rng: "np.random.Generator"
) -> "np.ndarray":
    import numpy as np

    if tensor.dtype in _FLOATS:
        drawn = _real(tensor.shape, values, attempt, second, rng)
    elif tensor.dtype == "bool" and values is None:
        drawn = rng.random(tensor.shape) < (0.5, 0.2, 0.8)[(attempt + second) % 3]
    else:
        drawn = _whole(tensor, values, attempt, second, rng)
    return np.asarray(drawn, tensor.dtype)  # numpy draws a scalar as a number


def _real(
    shape: tuple[int, ...],
    values: ValueRange | None,
    attempt: int,
    second: bool,
    rng: "np.random.Generator",
) -> "np.ndarray":
    """Draw values of about unit variance times a scale or, with a range, values inside it."""
    pattern = _pattern(shape, rng)
    noise = rng.standard_normal(shape)
    kinds = (pattern + 0.3 * noise, pattern, noise + rng.standard_normal(), 0.5 * pattern + noise)
    drawn = kinds[(attempt + (2 if second and attempt % 2 else 0)) % len(kinds)]
    if values is not None:
        squashed = drawn / (1.0 + abs(drawn))  # inside -1..1
        return (values.low + values.high) / 2 + squashed * (values.high - values.low) / 2
    return drawn * _SCALES[(attempt // len(kinds) + second * (attempt > 0)) % len(_SCALES)]


def _pattern(shape: tuple[int, ...], rng: "np.random.Generator") -> "np.ndarray":
    """Draw levels on a coarse grid and stretch it to `shape`, so that values vary slowly along long axes."""
    import numpy as np

    pattern = rng.standard_normal([min(size, _COARSE) for size in shape])
    for axis, size in enumerate(shape):
        cells = pattern.shape[axis]
        pattern = np.take(pattern, np.arange(size) * cells // max(size, 1), axis=axis)
    return pattern


def _whole(
    tensor: Tensor, values: ValueRange | None, attempt: int, second: bool, rng: "np.random.Generator"
) -> "np.ndarray":
    """Draw uniformly over the range; after the first attempt over differing sub-ranges."""
    low, high = _SMALL_INTEGERS.get(tensor.dtype, _INTEGER_RANGE)
    if values is not None:
        low, high = math.ceil(values.low), math.floor(values.high)
    if attempt:
        middle = (low + high) // 2
        low, high = (low, middle) if bool(attempt % 2) != second else (min(middle + 1, high), high)
    return rng.integers(low, high, size=tensor.shape, endpoint=True)
