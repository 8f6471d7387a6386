"""What the policy sees (TOP, equation 1), and the actors' forward pass over plain arrays; equal to torch's.

The state stacks n samples of progress and deviation. Ours: a deviation d in seconds of queued work enters as
asinh(d / scale). The paper's raw task counts reach hundreds beside progress bits of 0 and 1.
`Space.deviation_scale` 0 leaves deviations as they are.

W + 1 actors, each a network of two hidden layers (TOP, VI-B: 500 and 128, ReLU), map the whole state to their
own actions through a sigmoid. A pass is one product per layer for all actors: all read the same state, so
their first layers are the columns of one matrix; the second are a stack; the third are the diagonal blocks of
one matrix, whose product is the action row. What remains is the time to read every weight once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from stageloom.shared.errors import InputError
from stageloom.shared.matmul import matmul
from stageloom.shared.policy.gpg.network import Floats
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.policy.queues import PolicySample


def state_of(space: Space, samples: Sequence[PolicySample]) -> Floats:
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


LAYERS = 3


@dataclass(frozen=True)
class MaddpgNetwork:
    """The trained numbers: `actor.I.N.weight` [outputs, inputs] and `actor.I.N.bias` [outputs]."""

    arrays: Mapping[str, Floats]
    agents: tuple[int, ...]  # actions per agent

    def actions(self, state: Floats) -> Floats:
        """The action row of a state. [state_width] -> [action_width], within [0, 1]"""
        (first, first_bias), (second, second_bias), (third, third_bias) = self._layers
        hidden = _relu(matmul(state, first), first_bias)
        hidden = _relu(matmul(second, hidden.reshape(len(self.agents), -1, 1)), second_bias)
        return _sigmoid(matmul(third, hidden.reshape(-1)), third_bias)

    @cached_property
    def _layers(self) -> tuple[tuple[Floats, Floats], ...]:
        """Per layer the weights and biases of all actors.

        [state, agents * h1] and [agents * h1]: this way round it is read a sixth faster, at TOP's sizes;
        [agents, h2, h1] and [agents, h2, 1]; [actions, agents * h2] and [actions].
        """
        import numpy as np

        first = np.concatenate(self._all(0, "weight"))
        return (
            (np.ascontiguousarray(first.T), np.concatenate(self._all(0, "bias"))),
            (np.stack(self._all(1, "weight")), np.stack(self._all(1, "bias"))[:, :, None]),
            (_diagonal(self._all(2, "weight")), np.concatenate(self._all(2, "bias"))),
        )

    def _all(self, layer: int, kind: str) -> list[Floats]:
        """These numbers of every actor."""
        return [self.arrays[f"actor.{agent}.{layer}.{kind}"] for agent in range(len(self.agents))]


def _diagonal(blocks: Sequence[Floats]) -> Floats:
    """One matrix with these along its diagonal and 0 elsewhere."""
    import numpy as np

    found = np.zeros(np.sum([block.shape for block in blocks], axis=0), np.float32)
    row = column = 0
    for block in blocks:
        rows, columns = block.shape
        found[row : row + rows, column : column + columns] = block
        row, column = row + rows, column + columns
    return found


def _relu(sums: Floats, biases: Floats) -> Floats:
    """In place."""
    import numpy as np

    sums += biases
    return np.maximum(sums, np.float32(0.0), out=sums)  # numpy takes longer to convert 0.0 than to compare


def _sigmoid(sums: Floats, biases: Floats) -> Floats:
    """In place, and without the exponential, which overflows."""
    import numpy as np

    sums += biases
    sums *= np.float32(0.5)
    np.tanh(sums, out=sums)
    sums += np.float32(1.0)
    sums *= np.float32(0.5)
    return sums


def problem_of(space: Space, arrays: Mapping[str, Floats]) -> str:
    """Why these arrays are no network for a space; empty where they are."""
    if len(arrays) != 2 * LAYERS * len(space.agents):
        return f"{len(arrays)} arrays, not those of {len(space.agents)} actors"
    hidden: tuple[int, ...] = ()
    for agent, outputs in enumerate(space.agents):
        width, widths = space.state_width, []
        for layer in range(LAYERS):
            weight = arrays.get(f"actor.{agent}.{layer}.weight")
            bias = arrays.get(f"actor.{agent}.{layer}.bias")
            if weight is None or bias is None or weight.ndim != 2 or bias.shape != weight.shape[:1]:
                return f"layer {layer} of actor {agent} is missing or broken"
            if weight.shape[1] != width:
                return f"layer {layer} of actor {agent} takes {weight.shape[1]} numbers, not {width}"
            width = weight.shape[0]
            widths.append(width)
        if width != outputs:
            return f"actor {agent} gives {width} actions, not {outputs}"
        if hidden and tuple(widths[:-1]) != hidden:
            return f"actor {agent} has layers of another width than the first"
        hidden = tuple(widths[:-1])
    return ""
