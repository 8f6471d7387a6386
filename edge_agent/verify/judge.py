"""Results as they come, held against the standards of their tensors; `verify` and the contract share it."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from stageloom.edge_agent.verify.pairs import Pair
from stageloom.edge_agent.verify.standards import Standard

if TYPE_CHECKING:
    import numpy as np

P = TypeVar("P", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Judged(Generic[P]):
    """What was found of one tensor at one place."""

    place: P
    name: str
    difference: float
    standard: Standard

    @property
    def agrees(self) -> bool:
        """Within its tolerance."""
        return self.difference <= self.standard.tolerance

    @property
    def doubtful(self) -> bool:
        """Beyond it, but onnxruntime differs from itself as much: neither right nor wrong."""
        return self.standard.tolerance < self.difference <= self.standard.doubtful


class Judge(Generic[P]):
    """Collects the differences of one or several models' tensors; `P` says where a tensor was seen."""

    def __init__(self) -> None:
        self._gaps: dict[tuple[P, str], dict[int, float]] = {}
        self._standards: dict[tuple[P, str], Standard] = {}

    def add(self, pair: Pair, place: P, name: str, which: int, found: "np.ndarray | None") -> None:
        """Hold what was found for input `which` against the whole model's; None: nothing was found."""
        standard = pair.standards[name]
        gap = math.inf if found is None else standard.difference(which, found, pair.expected[which][name])
        self._standards[place, name] = standard
        gaps = self._gaps.setdefault((place, name), {})
        gaps[which] = max(gap, gaps.get(which, 0.0))

    def judged(self) -> list[Judged[P]]:
        """Every tensor at every place, in the order in which they came."""
        return [
            Judged(place, name, standard.over_inputs(list(self._gaps[place, name].values())), standard)
            for (place, name), standard in self._standards.items()
        ]
