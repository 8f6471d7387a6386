"""Spaces and networks small enough to work out by hand."""

import numpy as np

from stageloom.shared.digest import digest_of
from stageloom.shared.policy.gpg.network import Floats
from stageloom.shared.policy.maddpg.network import MaddpgNetwork
from stageloom.shared.policy.maddpg.space import IntervalMap, ModelSpace, Space


def space(
    *blocks: int, members_max: int = 2, samples: int = 2, replicas: int = 1, scale: float = 0.0
) -> Space:
    """Models of so many blocks each."""
    return Space(
        device_class="toy",
        models=tuple(
            ModelSpace(artifact=digest_of([at]), cuts=tuple(range(1, count)), replicas=replicas)
            for at, count in enumerate(blocks)
        ),
        members_max=members_max,
        samples=samples,
        interval_map=IntervalMap.GEOMETRIC,
        deviation_scale=scale,
    )


def arrays(space: Space, hidden: tuple[int, int] = (3, 2), seed: int = 0) -> dict[str, Floats]:
    """An untrained network's numbers."""
    random = np.random.default_rng(seed)
    found: dict[str, Floats] = {}
    for agent, outputs in enumerate(space.agents):
        sizes = (space.state_width, *hidden, outputs)
        for layer in range(3):
            shape = (sizes[layer + 1], sizes[layer])
            found[f"actor.{agent}.{layer}.weight"] = random.normal(0.0, 0.5, shape).astype(np.float32)
            found[f"actor.{agent}.{layer}.bias"] = random.normal(0.0, 0.5, shape[0]).astype(np.float32)
    return found


def network(space: Space, seed: int = 0) -> MaddpgNetwork:
    """An untrained network."""
    return MaddpgNetwork(arrays(space, seed=seed), space.agents)


def saying(space: Space, actions: tuple[float, ...]) -> MaddpgNetwork:
    """A network that says this, whatever it sees. `actions`: [action_width], within (0, 1)"""
    numbers = {name: np.zeros_like(values) for name, values in arrays(space).items()}
    logits = np.log(np.array(actions) / (1.0 - np.array(actions)))
    first = 0
    for agent, count in enumerate(space.agents):
        numbers[f"actor.{agent}.2.bias"] = logits[first : first + count].astype(np.float32)
        first += count
    return MaddpgNetwork(numbers, space.agents)
