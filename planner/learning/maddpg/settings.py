"""How MADDPG is trained; TOP's figures are those of its section VI-B."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from stageloom.shared.errors import SettingError


class Superblocks(str, Enum):
    """What becomes of more than H blocks in one interval."""

    SPLIT = "split"  # into parts of at most H; what was executed is stored, its reward is a little less
    PAPER = "paper"  # nothing runs, the reward is 0, the state stays (V-D)


class Scale(str, Enum):
    """In what a latency enters its z-score."""

    LOG = "log"  # of its seconds: a backlog's seconds do not hide the milliseconds that a plan gains
    PLAIN = "plain"  # seconds, as in the paper


class Gain(str, Enum):
    """The term of equation 2 that is weighted by a."""

    UTILISATION = "utilisation"  # the paper's: busy share of the device
    THROUGHPUT = "throughput"  # tasks completed per second


class Start(str, Enum):
    """What the untrained actors say."""

    BEST_SEED = "best_seed"  # the best of the rivals' plans that seed the replay
    ALONE = "alone"  # every block alone, launched as fast as can be
    PAPER = "paper"  # about 0.5 everywhere, as random weights have it


@dataclass(frozen=True, slots=True, kw_only=True)
class MaddpgSettings:
    """Counted in transitions and updates, so that a seed gives the same policy on the same machine."""

    transitions: int = 2000  # in all, those that seed the replay among them
    learn_from: int = 200  # transitions before the first update; the paper: 2000, when the replay is full
    updates_per_transition: float = 1.0
    actor_every: int = 2  # updates of the critics per update of the actors (Fujimoto et al. 2018)
    actor_after: int = 100  # updates of the critics before the first one of the actors
    gamma: float = 0.95
    learning_rate: float = 1e-3
    actor_learning_rate: float = 1e-4  # the paper: as the critics'
    batch: int = 100
    replay: int = 2000
    target_rate: float = 0.01  # how fast the target networks follow
    a: float = 0.4  # equation 2: utilisation,
    b: float = 0.4  # latency,
    c: float = 0.2  # variance of the queues
    gain: Gain = Gain.UTILISATION
    latency: Scale = Scale.LOG
    log_variance: bool = True  # log1p of the variance; False: as it is, as in the paper
    superblocks: Superblocks = Superblocks.SPLIT
    superblock_penalty: float = 0.05  # of the reward, where all blocks are beyond H
    printed_critic: bool = False  # equation 3 as printed: y times the gradient of Q, which never settles
    actors: tuple[int, int] = (500, 128)
    critics: tuple[int, int, int] = (1024, 512, 300)
    start: Start = Start.BEST_SEED
    pull: float = 1.0
    """Weight of the mean square of what the actors are off the best plan so far, in intervals, beside the
    worth that the critics see, as a share of its size; 0: they follow the critics alone, as in the paper."""

    seeded: bool = True
    """Rivals' plans are evaluated first and compete with those that are met; False: only what the untrained
    actors say is, as in the paper."""

    seed_share: float = 0.5  # of `learn_from` that are rivals' plans as they are; the rest has noise
    noise: float = 0.1  # standard deviation, at first,
    noise_end: float = 0.03  # and at last
    noise_share: float = 0.1  # of an action row's numbers that get noise in a step
    uniform_share: float = 0.0
    """Of the steps that take uniform actions instead of the policy's, until the first update; from there it
    falls to 0. The paper does not say how it explores."""

    step_s: float = 1.0  # seconds of the device per transition (TOP runs 10 s)
    episode_steps: int = 20
    validate_every: int = 200  # transitions
    validation_steps: int = 10  # of `step_s` each, per seed
    validation_seeds: int = 2
    candidates: int = 4  # plans met in training that each validation looks at again

    def __post_init__(self) -> None:
        shares = (self.gamma, self.target_rate, self.noise_share, self.seed_share, self.uniform_share)
        counts = (self.transitions, self.learn_from, self.batch, self.episode_steps, self.actor_every)
        if not all(0.0 <= share <= 1.0 for share in shares) or min(counts) < 1 or not self.step_s > 0.0:
            raise SettingError(f"no training with {self}")
        if self.replay < self.learn_from:
            raise SettingError(
                f"a replay of {self.replay} transitions never holds the {self.learn_from} to learn from",
                remedy="raise one or lower the other",
            )

    @classmethod
    def of_length(cls, transitions: int) -> "MaddpgSettings":
        """A training of so many transitions; where they are few, learning begins after half of them."""
        return cls(transitions=transitions, learn_from=min(cls().learn_from, max(transitions // 2, 1)))

    @classmethod
    def paper(cls, **changes: Any) -> "MaddpgSettings":
        """TOP as printed, as far as it can be run (equation 3 as printed is a flag of its own)."""
        printed: dict[str, Any] = {
            "learn_from": 2000,
            "transitions": 8000,
            "actor_every": 1,
            "actor_after": 0,
            "latency": Scale.PLAIN,
            "log_variance": False,
            "superblocks": Superblocks.PAPER,
            "start": Start.PAPER,
            "pull": 0.0,
            "actor_learning_rate": 1e-3,
            "seeded": False,
            "seed_share": 0.0,
            "uniform_share": 1.0,
            "step_s": 10.0,
        }
        return cls(**{**printed, **changes})

    def plain(self) -> dict[str, Any]:
        """The fields as JSON takes them."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return plain

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "MaddpgSettings":
        """What `plain` gave.

        Raises:
            SettingError: a field is unknown or cannot be read.
        """
        kinds: dict[str, Any] = {name: type(getattr(cls(), name)) for name in cls.__slots__}
        try:
            return cls(**{name: kinds[name](value) for name, value in plain.items()})
        except (KeyError, TypeError, ValueError) as error:
            raise SettingError(f"no setting of a training: {error}") from error
