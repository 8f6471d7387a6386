"""What the networks are pulled towards: by imitation, and by equations 7 and 8 of TOP.

As printed, equation 7 moves omega against delta * grad q, which is right only for delta = q - (u + gamma q').
Here delta = u + gamma q' - q and its square falls. As in DDPG (Lillicrap et al. 2016), which TOP's equations
amount to, u + gamma q' comes from target networks and transitions from a replay memory; omega learns from z,
which theta* alone shapes. A batch holds several blocks' states, with operators and states numbered through.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stageloom.planner.learning.gpg.lessons import BlockRows, Lesson, StateRows
from stageloom.planner.learning.gpg.model import WIDTH, GpgModel, StateBatch
from stageloom.shared.policy.gpg.network import Floats


def batch_of(parts: Sequence[tuple[BlockRows, StateRows]]) -> StateBatch:
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
        places = _before([len(ops) for (ops, _, _), _ in deep])
        levels.append(
            (
                _joined([ops + shift for (ops, _, _), shift in deep]),
                _joined([child + place for ((_, child, _), _), place in zip(deep, places, strict=True)]),
                _joined([parent + shift for (_, _, parent), shift in deep]),
            )
        )
    return StateBatch(
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
    return torch.from_numpy(np.concatenate(values))


def _joined(values: Sequence[NDArray[np.int64]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(values))


def _before(sizes: Sequence[int]) -> list[int]:
    """Per part how much lies before it."""
    return [0, *np.cumsum(sizes).tolist()][: len(sizes)]


_SCALE: Final = 100.0  # shares of a block's seconds differ by hundredths


@dataclass(frozen=True)
class Episode:
    """One roll-out: state t + 1 follows state t, nothing follows the last."""

    block: BlockRows
    masks: tuple[int, ...]  # operators left [num_stages]
    states: StateRows
    action: Floats  # [num_stages]
    reward: Floats
    worth: Floats  # the least seconds still to take that are known of, as a share; empty: none known


def imitated(model: GpgModel, lessons: Sequence[Lesson]) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of value, actor and critic."""
    seen = model.see(batch_of([(lesson.block, lesson.states) for lesson in lessons]))
    sizes = [len(lesson.states.rows) for lesson in lessons]
    worth = _worth_loss(model, seen, joined([lesson.worth for lesson in lessons]))
    acted = shifted([lesson.acted for lesson in lessons], sizes)
    action = joined([lesson.action for lesson in lessons])
    judged = shifted([lesson.judged for lesson in lessons], sizes)
    tried = joined([lesson.judged_action for lesson in lessons])
    found = model.judge(seen.detach()[judged], tried, bounded=True)
    critic = _SCALE * ((found + joined([lesson.judged_worth for lesson in lessons])) ** 2).mean()
    return worth, ((model.act(seen[acted]) - action) ** 2).mean(), critic


def reinforced(
    model: GpgModel, target: GpgModel, episodes: Sequence[Episode], *, gamma: float, bounded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `imitated`, from what was tried."""
    batch = batch_of([(episode.block, episode.states) for episode in episodes])
    seen = model.see(batch)
    reward = joined([episode.reward for episode in episodes])
    sizes = [len(episode.reward) for episode in episodes]
    last = torch.zeros(len(reward), dtype=torch.bool)
    last[torch.from_numpy(np.cumsum(sizes) - 1)] = True
    with torch.no_grad():
        seen_then = target.see(batch)
        follows = target.judge(seen_then, target.act(seen_then), bounded=bounded).roll(-1)
        goal = reward + gamma * torch.where(last, torch.zeros_like(follows), follows)
    found = model.judge(seen.detach(), joined([episode.action for episode in episodes]), bounded=bounded)
    critic = ((goal - found) ** 2).mean()
    model.critic.requires_grad_(False)  # equation 8 moves theta*, not omega, and by dq/dm alone
    actor = -model.judge(seen.detach(), model.act(seen), bounded=bounded).mean()
    model.critic.requires_grad_(True)
    known = [len(episode.worth) == len(episode.reward) for episode in episodes]
    if not all(known):
        return torch.zeros(()), actor, critic
    return _worth_loss(model, seen, joined([episode.worth for episode in episodes])), actor, critic


def _worth_loss(model: GpgModel, seen: Tensor, worth: Tensor) -> Tensor:
    """Squared error, less severe where more is left: an error then matters to more choices, but is larger."""
    rest = seen[:, WIDTH].clamp_min(1e-3)
    return _SCALE * ((model.worth(seen) - worth) ** 2 / rest).mean()
