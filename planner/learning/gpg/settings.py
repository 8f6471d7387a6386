"""How GPG is trained; TOP's figures are those of its section VI-B."""

from dataclasses import dataclass
from enum import Enum


class Reward(Enum):
    """What a stage is worth."""

    LATENCY = "latency"
    """Minus its seconds over the block's seconds one operator after another; the sum is the schedule's."""

    PAPER = "paper"
    """TOP's exp(-milliseconds): more stages, more reward, so that it teaches the sequential schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Counted in steps, so that a seed gives the same policy."""

    seed: int = 0
    imitation_steps: int = 500  # one new block each; 0: no imitation
    episodes: int = 300  # of reinforcement learning, one new block each
    reward: Reward = Reward.LATENCY
    gamma: float = 1.0  # TOP: 0.95
    learning_rate: float = 1e-3  # TOP's; falls to a tenth of it
    updates: int = 4  # of the networks, after each step
    blocks_per_update: int = 12
    kept_lessons: int = 300
    replay: int = 2000  # TOP's: transitions kept
    noise: float = 0.15  # of the action, standard deviation
    look_ahead_share: float = 0.5  # of an episode's actions that the look-ahead takes, not the actor
    target_rate: float = 0.02  # how fast the target networks follow
    validation_blocks: int = 16
    validate_every: int = 50
    patience: int = 6  # validations without a better one before the end

    @property
    def steps(self) -> int:
        """Of both kinds."""
        return self.imitation_steps + self.episodes
