"""The actors' forward pass over plain arrays; equal to torch's, without torch.

W + 1 actors, each a network of two hidden layers (TOP, VI-B: 500 and 128, ReLU) from the whole state to its
own actions through a sigmoid. All read the same state, so their first layers are one matrix, and the rest is
done for all actors at once, outputs padded to the widest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shared.policy.gpg.features import Floats
from shared.policy.maddpg.space import Space

LAYERS = 3


@dataclass(frozen=True)
class MaddpgNetwork:
    """The trained numbers: `actor.I.N.weight` [outputs, inputs] and `actor.I.N.bias` [outputs]."""

    arrays: Mapping[str, Floats]
    agents: tuple[int, ...]  # actions per agent

    @cached_property
    def _layers(self) -> tuple[tuple[Floats, Floats], ...]:
        """[state, agents * h1], [agents, h1, h2], [agents, h2, widest]; biases to match."""
        import numpy as np

        count, widest = len(self.agents), max(self.agents)
        first = np.concatenate([self._weight(agent, 0).T for agent in range(count)], axis=1)
        first_bias = np.concatenate([self._bias(agent, 0) for agent in range(count)])
        second = np.stack([self._weight(agent, 1).T for agent in range(count)])
        second_bias = np.stack([self._bias(agent, 1) for agent in range(count)])[:, None]
        third = np.zeros((count, second.shape[2], widest), np.float32)
        third_bias = np.zeros((count, 1, widest), np.float32)
        for agent, width in enumerate(self.agents):
            third[agent, :, :width] = self._weight(agent, 2).T
            third_bias[agent, 0, :width] = self._bias(agent, 2)
        return (
            (np.ascontiguousarray(first), first_bias),
            (np.ascontiguousarray(second), second_bias),
            (third, third_bias),
        )

    @cached_property
    def _places(self) -> tuple[Floats, Floats]:
        """Agent and output of each action of the row."""
        import numpy as np

        agents = np.concatenate([np.full(width, agent) for agent, width in enumerate(self.agents)])
        return agents, np.concatenate([np.arange(width) for width in self.agents])

    def actions(self, state: Floats) -> Floats:
        """The action row of a state. [state_width] -> [action_width], within [0, 1]"""
        import numpy as np

        (first, first_bias), (second, second_bias), (third, third_bias) = self._layers
        hidden = np.maximum(state @ first + first_bias, 0.0).reshape(len(self.agents), 1, -1)
        hidden = np.maximum(hidden @ second + second_bias, 0.0)
        logits = (hidden @ third + third_bias)[:, 0]
        found: Floats = 1.0 / (1.0 + np.exp(-logits[self._places]))
        return found

    def _weight(self, agent: int, layer: int) -> Floats:
        return self.arrays[f"actor.{agent}.{layer}.weight"]

    def _bias(self, agent: int, layer: int) -> Floats:
        return self.arrays[f"actor.{agent}.{layer}.bias"]


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
