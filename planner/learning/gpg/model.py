"""GPG's networks in torch, with the names and the arithmetic of `stageloom.shared.policy.gpg.network`.

TOP, section VI-B: h and g of both layers 64-32, the policy 500-128, the value network of an action
1024-512-300, ReLU. The critic stays here; a checkpoint for use holds the rest.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stageloom.shared.policy.gpg.network import OPERATOR_FEATURES, STATE_FEATURES

WIDTH: Final = 32
HIDDEN: Final = 64
SEEN: Final = WIDTH + STATE_FEATURES
ACTOR: Final = (500, 128)
VALUE: Final = (256, 128)
CRITIC: Final = (1024, 512, 300)


Level: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Operators with the same longest chain above them, and per edge into them its place among these and the
operator that it comes from."""


class StateBatch(NamedTuple):
    """States of several blocks, all operators and all states numbered through."""

    rows: Tensor  # [num_ops, OPERATOR_FEATURES]
    levels: Sequence[tuple[Tensor, Tensor, Tensor]]  # as Level
    leaf_state: Tensor  # per leaf its state
    leaf_op: Tensor  # per leaf its operator
    state_rows: Tensor  # [num_states, STATE_FEATURES]


class GpgModel(nn.Module):
    """Everything with parameters: theta* of equation 8, the value, and omega of equation 7."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = _layers(OPERATOR_FEATURES, (), WIDTH)
        self.g1 = _layers(WIDTH, (HIDDEN,), WIDTH)
        self.h1 = _layers(WIDTH, (HIDDEN,), WIDTH)
        self.g2 = _layers(WIDTH, (HIDDEN,), WIDTH)
        self.h2 = _layers(WIDTH, (HIDDEN,), WIDTH)
        self.actor = _layers(SEEN, ACTOR, 1)
        self.value = _layers(SEEN, VALUE, 1)
        self.critic = _layers(SEEN + 1, CRITIC, 1)

    def embed(self, batch: StateBatch) -> Tensor:
        """Equation 5. [num_ops, WIDTH]"""
        own = self.raw(batch.rows)
        found = torch.zeros_like(own)
        passed = torch.zeros_like(own)
        for ops, child, parent in batch.levels:
            above = torch.zeros(len(ops), WIDTH).index_add(0, child, passed[parent])
            new = self.h1(above) + own[ops]
            found = found.index_copy(0, ops, new)
            passed = passed.index_copy(0, ops, self.g1(new))
        return found

    def see(self, batch: StateBatch) -> Tensor:
        """Equation 6, with the state's row beside it. [num_states, SEEN]"""
        terms = self.g2(self.embed(batch))
        empty = torch.zeros(len(batch.state_rows), WIDTH)
        z = self.h2(empty.index_add(0, batch.leaf_state, terms[batch.leaf_op]))
        return torch.cat([z, batch.state_rows], dim=1)

    def act(self, seen: Tensor) -> Tensor:
        """The action, 0 < m < 1. [num_states]"""
        found: Tensor = torch.sigmoid(self.actor(seen)[:, 0])
        return found

    def worth(self, seen: Tensor) -> Tensor:
        """The share of the block's seconds that a state will still take. [num_states]"""
        return _between(seen, self.value(seen)[:, 0])

    def judge(self, seen: Tensor, action: Tensor, *, bounded: bool) -> Tensor:
        """q of a state and an action; `bounded` where the reward is minus latency. [num_states]"""
        found: Tensor = self.critic(torch.cat([seen, action[:, None]], dim=1))[:, 0]
        return -_between(seen, found) if bounded else found

    def exported(self) -> dict[str, NDArray[np.float32]]:
        """What the forward pass without torch needs."""
        return {
            name: value.detach().numpy().copy()
            for name, value in self.state_dict().items()
            if not name.startswith("critic")
        }


def _between(seen: Tensor, head: Tensor) -> Tensor:
    """`features.state_rows` puts the seconds left first, and the least that they can take second."""
    rest, least = seen[:, WIDTH], seen[:, WIDTH + 1]
    return torch.where(rest > 0.0, least + (rest - least) * head, torch.zeros_like(rest))


def _layers(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    sizes = [inputs, *hidden, outputs]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
