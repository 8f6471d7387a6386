"""Several blocks' states as one batch: operators and states are numbered through."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from stageloom.planner.learning.gpg.lessons import BlockRows, StateRows
from stageloom.planner.learning.gpg.model import Batch


def batch_of(parts: Sequence[tuple[BlockRows, StateRows]]) -> Batch:
    """Levels of the same depth run together, whatever block they belong to."""
    ops_before = _before([block.graph.size for block, _ in parts])
    states_before = _before([len(states.rows) for _, states in parts])
    levels = []
    for depth in range(max(len(block.levels) for block, _ in parts)):
        deep = [
            (block.levels[depth], shift)
            for (block, _), shift in zip(parts, ops_before, strict=True)
            if depth < len(block.levels)
        ]
        places = _before([len(level.ops) for level, _ in deep])
        levels.append(
            (
                _joined([level.ops + shift for level, shift in deep]),
                _joined([level.child + place for (level, _), place in zip(deep, places, strict=True)]),
                _joined([level.parent + shift for level, shift in deep]),
            )
        )
    return Batch(
        torch.from_numpy(np.concatenate([block.rows for block, _ in parts])),
        levels,
        _joined([states.leaf_state + shift for (_, states), shift in zip(parts, states_before, strict=True)]),
        _joined([states.leaf_op + shift for (_, states), shift in zip(parts, ops_before, strict=True)]),
        torch.from_numpy(np.concatenate([states.rows for _, states in parts])),
    )


def shifted(places: Sequence[NDArray[np.int64]], sizes: Sequence[int]) -> torch.Tensor:
    """Places within each part as places within the batch; `sizes` are the parts'."""
    return _joined([own + shift for own, shift in zip(places, _before(sizes), strict=True)])


def joined(values: Sequence[NDArray[np.float32]]) -> torch.Tensor:
    """Numbers of all parts."""
    return torch.from_numpy(np.concatenate(values))


def _joined(values: Sequence[NDArray[np.int64]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(values))


def _before(sizes: Sequence[int]) -> list[int]:
    """Per part how much lies before it."""
    return [0, *np.cumsum(sizes).tolist()][: len(sizes)]
