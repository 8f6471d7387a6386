"""Actors and critics in torch; all agents' networks of a kind are one batch of matrices.

TOP, section VI-B: critics of 1024, 512 and 300 hidden units, actors of 500 and 128, ReLU. A critic reads the
state and the actions of all agents (Lowe et al. 2017), an actor the state. One update of W + 1 agents is so a
few large products instead of many small ones. Outputs of the actors are padded to the widest agent's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stageloom.planner.learning.maddpg.rewards import Floats

LAST_SCALE = 0.01
"""Of the actors' last weights: at first what they say hardly depends on the state."""


@dataclass
class Stack:
    """One multi-layer network per agent."""

    weights: list[Tensor]  # per layer [agents, inputs, outputs]
    biases: list[Tensor]  # per layer [agents, 1, outputs]

    @classmethod
    def drawn(cls, agents: int, sizes: Sequence[int], random: np.random.Generator) -> "Stack":
        """Weights as torch's own linear layers start out: uniform within 1 / sqrt(inputs)."""

        def uniform(bound: float, *shape: int) -> Tensor:
            return torch.from_numpy(random.uniform(-bound, bound, shape).astype(np.float32))

        weights, biases = [], []
        for before, after in pairwise(sizes):
            weights.append(uniform(before**-0.5, agents, before, after))
            biases.append(uniform(before**-0.5, agents, 1, after))
        return cls(weights, biases)

    @property
    def tensors(self) -> list[Tensor]:
        """All parameters."""
        return [*self.weights, *self.biases]

    def require_grad(self) -> "Stack":
        """Make it trainable."""
        for tensor in self.tensors:
            tensor.requires_grad_(True)
        return self

    def copy(self) -> "Stack":
        """Other memory, no gradients: a target network."""
        return Stack(*([one.detach().clone() for one in row] for row in (self.weights, self.biases)))

    def frozen(self) -> "Stack":
        """The same memory without gradients: what an actor's update sees of the critics."""
        return Stack(*([one.detach() for one in row] for row in (self.weights, self.biases)))

    def follow(self, other: "Stack", rate: float) -> None:
        """The soft update of a target network."""
        with torch.no_grad():
            torch._foreach_lerp_(self.tensors, [one.detach() for one in other.tensors], rate)

    def __call__(self, rows: Tensor) -> Tensor:
        """[agents, rows, inputs] -> [agents, rows, outputs]"""
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            rows = torch.baddbmm(bias, rows, weight)
            if layer < last:
                rows = torch.relu(rows)
        return rows

    def saved(self) -> dict[str, list[Tensor]]:
        """For `torch.save`."""
        return {key: [one.detach().clone() for one in getattr(self, key)] for key in ("weights", "biases")}

    def restore(self, saved: Mapping[str, Sequence[Tensor]]) -> None:
        """Go on where `saved` was, in place, so that an optimiser keeps hold of it."""
        with torch.no_grad():
            for key in ("weights", "biases"):
                for mine, its in zip(getattr(self, key), saved[key], strict=True):
                    mine.copy_(its)


@dataclass
class Actors:
    """The actors, and where each one's actions lie in the action row."""

    agents: Sequence[int]  # actions per agent
    stack: Stack
    places: tuple[Tensor, Tensor] = field(init=False)  # agent and output of each action of the row

    def __post_init__(self) -> None:
        self.places = (
            torch.cat([torch.full((width,), agent) for agent, width in enumerate(self.agents)]),
            torch.cat([torch.arange(width) for width in self.agents]),
        )

    @classmethod
    def drawn(
        cls, agents: Sequence[int], state_width: int, hidden: Sequence[int], random: np.random.Generator
    ) -> "Actors":
        """Untrained ones."""
        return cls(agents, Stack.drawn(len(agents), (state_width, *hidden, max(agents)), random))

    def start_at(self, actions: Sequence[float]) -> None:
        """Say these, whatever the state is, almost. `actions`: an action row, within (0, 1)"""
        row = torch.tensor(actions, dtype=torch.float64).clamp(0.01, 0.99)
        with torch.no_grad():
            self.stack.weights[-1].mul_(LAST_SCALE)
            self.stack.biases[-1][self.places[0], 0, self.places[1]] = torch.logit(row).to(torch.float32)

    def logits(self, states: Tensor) -> Tensor:
        """Action rows before the sigmoid. [rows, state_width] -> [rows, action_width]"""
        wide = self.stack(states.expand(len(self.agents), *states.shape))
        return wide[self.places[0], :, self.places[1]].T

    def rows(self, states: Tensor) -> Tensor:
        """Action rows. [rows, state_width] -> [rows, action_width]"""
        return torch.sigmoid(self.logits(states))

    def exported(self) -> dict[str, Floats]:
        """What the forward pass without torch needs; see `stageloom.shared.policy.maddpg.network`."""
        found: dict[str, NDArray[Any]] = {}
        last = len(self.stack.weights) - 1
        for agent, width in enumerate(self.agents):
            for layer, (weight, bias) in enumerate(zip(self.stack.weights, self.stack.biases, strict=True)):
                used = width if layer == last else weight.shape[2]
                found[f"actor.{agent}.{layer}.weight"] = weight[agent, :, :used].detach().numpy().T.copy()
                found[f"actor.{agent}.{layer}.bias"] = bias[agent, 0, :used].detach().numpy().copy()
        return found
