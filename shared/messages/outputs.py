"""What a comparison of two versions' outputs found, as messages carry it."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from stageloom.shared.messages.base import Real, ShortText, SmallCount

DEFAULT_TOLERANCE: Final = 0.01

Tolerance = Annotated[float, Meta(ge=0.0, le=1e9)]
"""How far outputs may differ, see `stageloom.shared.output_comparison`."""

MAX_DIMENSIONS: Final = 16


class OutputsVerdict(Struct, frozen=True, array_like=True):
    """What was compared, and the output that differs most.

    `inputs`: of each model's tasks, at least. `difference` is that of `stageloom.shared.output_comparison`;
    it and the largest absolute and relative differences are None where they are no finite number.
    `agreement`: the share of elements within the tolerance, or that are equal. `index` is where the
    elements `old` and `new` stand; it is empty where shapes differ, and nothing is in `output` where no
    output has an element.
    """

    tolerance: Tolerance
    inputs: SmallCount
    agrees: bool
    model: ShortText = ""
    output: ShortText = ""
    difference: Real | None = 0.0
    max_abs: Real | None = 0.0
    max_rel: Real | None = 0.0
    agreement: Real = 1.0
    index: Annotated[tuple[SmallCount, ...], Meta(max_length=MAX_DIMENSIONS)] = ()
    old: ShortText = ""
    new: ShortText = ""

    def text(self) -> str:
        """One line for people."""
        if self.agrees:
            return f"the outputs agree over {self.inputs} inputs, within {self.tolerance:g}"
        at = f" at {list(self.index)}" if self.index else ""
        return (
            f"outputs_differ: {self.output!r} of {self.model!r}{at} is {self.new}, was {self.old}; "
            f"{1.0 - self.agreement:.2%} of its elements differ over {self.inputs} inputs, "
            f"tolerance {self.tolerance:g}"
        )
