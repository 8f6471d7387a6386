"""What two versions of a model give for the same inputs, compared element by element.

One tolerance serves all outputs. Of floating-point outputs, the difference of two elements is
`|new - old| / (1 + |old|)`, absolute near zero and relative far from it, and an output's is the largest over
its elements. Of outputs of integers and truth values, such as labels, it is the share of elements that
differ. An output agrees if its difference is at most the tolerance. Two NaN are equal, and so are two
infinities of one sign; with anything else they differ infinitely, and so do outputs of different shapes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stageloom.shared.messages.outputs import MAX_DIMENSIONS, OutputsVerdict

if TYPE_CHECKING:
    import numpy

_MAX_TEXT: Final = 128
_MAX_COUNT: Final = 1_000_000


@dataclass(slots=True)
class _Output:
    """One output of one model so far."""

    elements: int = 0
    agreeing: int = 0
    whole: bool = False
    difference: float = 0.0  # the largest of an element
    max_abs: float = 0.0
    max_rel: float = 0.0
    index: tuple[int, ...] = ()
    old: str = ""
    new: str = ""

    @property
    def agreement(self) -> float:
        return self.agreeing / self.elements if self.elements else 1.0

    @property
    def judged(self) -> float:
        """What the tolerance bounds."""
        return 1.0 - self.agreement if self.whole else self.difference


class OutputComparison:
    """Takes the outputs of one input after the other."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self._inputs: dict[str, int] = {}
        self._outputs: dict[tuple[str, str], _Output] = {}

    def take(
        self, model: str, old: "Mapping[str, numpy.ndarray]", new: "Mapping[str, numpy.ndarray]"
    ) -> None:
        """What both versions of a model gave for one input, by the outputs' names."""
        self._inputs[model] = self._inputs.get(model, 0) + 1
        for name in sorted(old.keys() | new.keys()):
            output = self._outputs.setdefault((model, name), _Output())
            if name not in old or name not in new or old[name].shape != new[name].shape:
                _differ_in_shape(output, old.get(name), new.get(name))
            elif old[name].size:
                _compare(output, old[name], new[name], self.tolerance)

    def inputs_of(self, model: str) -> int:
        """Inputs taken so far."""
        return self._inputs.get(model, 0)

    def verdict(self) -> OutputsVerdict:
        """Of everything taken so far, of one input at least."""
        inputs = min(min(self._inputs.values(), default=0), _MAX_COUNT)
        known = {key: output for key, output in self._outputs.items() if output.elements}
        if not known:
            return OutputsVerdict(self.tolerance, inputs, True)
        (model, name), worst = max(known.items(), key=lambda item: item[1].judged)
        return OutputsVerdict(
            self.tolerance,
            inputs,
            worst.judged <= self.tolerance,
            model[:_MAX_TEXT],
            name[:_MAX_TEXT],
            _finite(worst.judged),
            _finite(worst.max_abs),
            _finite(worst.max_rel),
            worst.agreement,
            tuple(min(at, _MAX_COUNT) for at in worst.index[:MAX_DIMENSIONS]),
            worst.old,
            worst.new,
        )


def _finite(value: float) -> float | None:
    return value if value < 1e300 else None


def _differ_in_shape(output: _Output, old: "numpy.ndarray | None", new: "numpy.ndarray | None") -> None:
    sizes = [array.size for array in (old, new) if array is not None]
    output.elements += max(*sizes, 1)
    output.whole = False
    output.difference = output.max_abs = output.max_rel = math.inf
    output.index = ()
    output.old, output.new = (
        "missing" if array is None else "x".join(map(str, array.shape)) or "a scalar" for array in (old, new)
    )


def _compare(output: _Output, old: "numpy.ndarray", new: "numpy.ndarray", tolerance: float) -> None:
    """Two arrays of one shape with an element at least."""
    import numpy as np

    whole = old.dtype.kind in "biu" and new.dtype.kind in "biu"
    before, after = old.astype(np.float64), new.astype(np.float64)
    with np.errstate(all="ignore"):
        equal = (old == new) | (np.isnan(before) & np.isnan(after))
        gap = np.abs(after - before)
        larger = np.maximum(np.abs(before), np.abs(after))
        differences = [gap, gap / np.where(larger > 0.0, larger, 1.0), gap / (1.0 + np.abs(before))]
    finite = np.isfinite(before) & np.isfinite(after)
    gap, relative, scaled = (np.where(equal, 0.0, np.where(finite, one, np.inf)) for one in differences)
    if whole:  # integers beyond 2^53 may differ although their doubles do not
        scaled = np.where(equal, 0.0, np.maximum(scaled, np.finfo(np.float64).tiny))
    output.whole = whole
    output.elements += old.size
    output.agreeing += int(np.count_nonzero(equal if whole else scaled <= tolerance))
    output.max_abs = max(output.max_abs, float(gap.max()))
    output.max_rel = max(output.max_rel, float(relative.max()))
    largest = np.unravel_index(int(scaled.argmax()), scaled.shape)
    if not output.old or float(scaled[largest]) > output.difference:
        output.difference = float(scaled[largest])
        output.index = tuple(int(at) for at in largest)
        output.old, output.new = _element(old[largest]), _element(new[largest])


def _element(value: "numpy.generic") -> str:
    plain = value.item() if not isinstance(value, float) else float(value)
    return f"{plain:.9g}" if isinstance(plain, float) else str(plain)[:_MAX_TEXT]
