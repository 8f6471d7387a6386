"""What parts of a model's operators cost on one executor, relative to the operators themselves."""

from collections.abc import Mapping
from dataclasses import dataclass

from stageloom.shared.partition import Axis
from stageloom.shared.search.patterns import fitted_pattern


@dataclass(frozen=True, kw_only=True)
class PartCosts:
    """Measured parts, and what a split costs beside them, on resources that share memory.

    `samples_s`: seconds by extent, per operator and axis, the whole extent included. `border`: what an
    operator takes longer where a session begins with it, as a share of its own seconds.
    """

    samples_s: Mapping[tuple[int, Axis], Mapping[int, float]]
    border: float
    handover_s: float
    copy_bytes_per_s: float

    def share(self, op: int, axis: Axis, part: float) -> float:
        """Seconds of a part over those of the whole; `part` is its share of the extent, in (0, 1).

        What was not measured is taken to be linear.
        """
        samples = self.samples_s.get((op, axis))
        if not samples:
            return part
        whole = max(samples)
        pattern = fitted_pattern(samples)
        return pattern(max(1, round(part * whole))) / pattern(whole)
