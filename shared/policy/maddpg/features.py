"""What the policy sees: n samples of progress and deviation, stacked (TOP, equation 1).

Ours: a deviation d in seconds of queued work enters as asinh(d / scale). The paper's raw task counts reach
hundreds beside progress bits of 0 and 1. `Space.deviation_scale` 0 leaves deviations as they are.
"""

from collections.abc import Sequence
from itertools import chain

from stageloom.shared.errors import InputError
from stageloom.shared.policy.gpg.features import Floats
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.policy.samples import Sample


def state_of(space: Space, samples: Sequence[Sample]) -> Floats:
    """The newest n samples, oldest first; rows that are missing count as idle. [state_width]

    Raises:
        InputError: a sample is of other blocks than the space's.
    """
    import numpy as np

    newest = samples[-space.samples :]
    for sample in newest:
        if sample.shape != space.blocks:
            raise InputError(
                f"a sample shows blocks {sample.shape}, the policy reads {space.blocks}",
                remedy="ask again once the plan that the policy knows is running",
            )
    rows = np.zeros((space.samples, space.row_width), np.float32)
    progress, deviations = rows[:, : -space.num_models], rows[:, -space.num_models :]
    if newest:
        bits = bytes(chain.from_iterable(chain.from_iterable(sample.progress for sample in newest)))
        progress[-len(newest) :] = np.frombuffer(bits, np.uint8).reshape(len(newest), -1)
        deviations[-len(newest) :] = [sample.deviation for sample in newest]
    if space.deviation_scale:
        deviations /= np.float32(space.deviation_scale)
        np.arcsinh(deviations, out=deviations)
    return rows.reshape(-1)
