"""Trains GPG: lessons, then episodes, with a validation every so often; resume, curves, the best as a
checkpoint.

Every step draws its own block and its own random numbers from the seed and the step's number, so equal seeds
give equal policies on one machine, and an interrupted run goes on as if it had not been interrupted.
"""

import copy
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stageloom.planner.learning.gpg.lessons import BlockRows, Drawing, Lesson, StateRows, lesson
from stageloom.planner.learning.gpg.losses import Episode, imitated, reinforced
from stageloom.planner.learning.gpg.model import GpgModel
from stageloom.planner.schema.training import GpgValidation
from stageloom.shared.errors import InputError
from stageloom.shared.ids import Digest
from stageloom.shared.policy.gpg.checkpoint import GpgCheckpoint, encode
from stageloom.shared.policy.gpg.choose import LookAhead, acted, best_ending, looked_ahead, ranked, schedule_s
from stageloom.shared.policy.gpg.network import EncodedBlock, GpgNetwork
from stageloom.shared.search.endings import GroupRule
from stageloom.shared.search.interface import TOP_LIMITS
from stageloom.shared.search.stages import Stages, Strategy


class Reward(Enum):
    """What a stage is worth."""

    LATENCY = "latency"
    """Minus its seconds over the block's seconds one operator after another; the sum is the schedule's."""

    PAPER = "paper"
    """TOP's exp(-milliseconds): more stages, more reward, so that it teaches the sequential schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpgSettings:
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
        return self.imitation_steps + self.episodes

    def plain(self) -> dict[str, Any]:
        """Plain values by field name, for JSON."""
        return {**asdict(self), "reward": self.reward.value}


_QUICK = LookAhead(around=4, spread=8, improved=1, sweeps=1)
_ACTOR_WEIGHT = 0.5  # beside the value, in the losses of what they share


@dataclass
class Trainer:
    """All that a run needs to go on; `saved` and `restore` carry it over."""

    drawing: Drawing
    settings: GpgSettings
    step: int = 0
    history: list[GpgValidation] = field(default_factory=list)
    best_ratio: float = float("inf")
    since_best: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.settings.seed)
        self.model = GpgModel()
        self.target = copy.deepcopy(self.model)
        self.best = GpgNetwork(self.model.exported())
        critic = list(self.model.critic.parameters())
        rest = [value for name, value in self.model.named_parameters() if not name.startswith("critic")]
        self._optimisers = [
            torch.optim.Adam(group, lr=self.settings.learning_rate) for group in (rest, critic)
        ]
        self._lessons: deque[Lesson] = deque(maxlen=self.settings.kept_lessons)
        self._episodes: deque[tuple[int, Episode]] = deque()
        self._losses: list[dict[str, float]] = []

    @property
    def done(self) -> bool:
        """Whether all steps are done, or the last validations brought nothing better."""
        return self.step >= self.settings.steps or self.since_best >= self.settings.patience

    @property
    def phase(self) -> str:
        """What the next step does."""
        return "imitation" if self.step < self.settings.imitation_steps else "reinforcement"

    def advance(self) -> None:
        random = self._random(self.step)
        if self.step < self.settings.imitation_steps:
            self._lessons.append(self._lesson(self.step))
        else:
            self._episodes.append((self.step, self._episode(random)))
            while sum(len(one.masks) for _, one in self._episodes) > self.settings.replay:
                self._episodes.popleft()
        for _ in range(self.settings.updates):
            self._update(random)
        self.step += 1
        if self.step % self.settings.validate_every == 0 or self.step == self.settings.steps:
            self.validate()

    def saved(self) -> dict[str, Any]:
        """Plain values and tensors, for `torch.save`."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "target": self.target.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            "best": {name: torch.from_numpy(value) for name, value in self.best.arrays.items()},
            "best_ratio": self.best_ratio,
            "since_best": self.since_best,
            "history": [
                [validation.step, validation.phase, validation.ratio, validation.losses]
                for validation in self.history
            ],
            "losses": self._losses,
            "episodes": [
                [step, [str(mask) for mask in one.masks], one.action.tolist(), one.worth.tolist()]
                for step, one in self._episodes
            ],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on where `saved` was; lessons and episodes are drawn again from the seed."""
        self.step = saved["step"]
        self.model.load_state_dict(saved["model"])
        self.target.load_state_dict(saved["target"])
        for one, state in zip(self._optimisers, saved["optimisers"], strict=True):
            one.load_state_dict(state)
        self.best = GpgNetwork({name: value.numpy() for name, value in saved["best"].items()})
        self.best_ratio, self.since_best = saved["best_ratio"], saved["since_best"]
        self.history = [
            GpgValidation(step=step, phase=phase, ratio=ratio, losses=losses)
            for step, phase, ratio, losses in saved["history"]
        ]
        self._losses = list(saved["losses"])
        last = min(self.step, self.settings.imitation_steps)
        for step in range(max(last - self.settings.kept_lessons, 0), last):
            self._lessons.append(self._lesson(step))
        for step, masks, action, worth in saved["episodes"]:
            stages, block = self._drawn(self._random(step))
            masks = tuple(map(int, masks))
            self._episodes.append((step, self._as_episode(stages, block, masks, action, worth)))

    def _random(self, step: int) -> Random:
        return Random(f"{self.settings.seed}:{step}")

    def _lesson(self, step: int) -> Lesson:
        random = Random(f"{self.settings.seed}:lesson:{step}")
        return lesson(*self.drawing.draw(random), random)

    def _drawn(self, random: Random) -> tuple[Stages, BlockRows]:
        graph, costs = self.drawing.draw(random)
        stages = Stages(graph, costs, TOP_LIMITS, GroupRule.CONNECTED, Strategy.PARALLEL)
        return stages, BlockRows.of(graph, costs)

    def _episode(self, random: Random) -> Episode:
        """Noisy actions, some of them the look-ahead's, and what the look-ahead thinks of each state."""
        stages, block = self._drawn(random)
        encoded = EncodedBlock(GpgNetwork(self.model.exported()), stages.graph, stages.costs)
        printed = self.settings.reward is Reward.PAPER
        masks, actions, worth = [], [], []
        state = (1 << stages.graph.size) - 1
        while state:
            space = ranked(stages, state)
            action = float(encoded.actions([state])[0]) + random.gauss(0.0, self.settings.noise)
            action = min(max(action, 0.0), 1.0 - 1e-6)
            if not printed:
                best, score = best_ending(encoded, stages, _QUICK, state, random)
                worth.append(score)
                if random.random() < self.settings.look_ahead_share and space.holds(best):
                    action = (space.rank(best) + 0.5) / space.count
            masks.append(state)
            actions.append(action)
            state ^= space.unrank(int(action * space.count))
        return self._as_episode(stages, block, tuple(masks), actions, worth)

    def _as_episode(
        self,
        stages: Stages,
        block: BlockRows,
        masks: tuple[int, ...],
        actions: list[float],
        worth: list[float],
    ) -> Episode:
        taken_s = [stages[now ^ then] for now, then in zip(masks, (*masks[1:], 0), strict=True)]
        shares = np.array(taken_s, np.float64) / block.found.total_s
        if self.settings.reward is Reward.PAPER:
            reward = np.exp(-1e3 * np.array(taken_s))
        else:
            reward = -shares
        to_go = np.cumsum(shares[::-1])[::-1]
        return Episode(
            block,
            masks,
            StateRows.of(block, masks),
            np.array(actions, np.float32),
            reward.astype(np.float32),
            (np.minimum(to_go, worth) if len(worth) else np.array([])).astype(np.float32),
        )

    def _update(self, random: Random) -> None:
        losses: dict[str, Tensor] = {}
        total = torch.zeros(())
        for optimiser in self._optimisers:
            optimiser.zero_grad()
            for group in optimiser.param_groups:
                group["lr"] = self.settings.learning_rate * (1.0 - 0.9 * self.step / self.settings.steps)
        count = self.settings.blocks_per_update
        if self._lessons:
            chosen = random.sample(list(self._lessons), min(count, len(self._lessons)))
            losses["value"], losses["imitation"], losses["judge"] = imitated(self.model, chosen)
            total = total + losses["value"] + _ACTOR_WEIGHT * losses["imitation"] + losses["judge"]
        if self._episodes:
            tried = random.sample([one for _, one in self._episodes], min(count, len(self._episodes)))
            bounded = self.settings.reward is Reward.LATENCY
            worth, actor, critic = reinforced(
                self.model, self.target, tried, gamma=self.settings.gamma, bounded=bounded
            )
            losses["value_tried"], losses["actor"], losses["critic"] = worth, actor, critic
            total = total + worth + critic + _ACTOR_WEIGHT * actor
        total.backward()  # type: ignore[no-untyped-call]
        for optimiser in self._optimisers:
            optimiser.step()
        rate = self.settings.target_rate
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(fast, rate)
        self._losses.append({name: float(value.detach()) for name, value in losses.items()})

    def validate(self) -> None:
        """The mean ratio to sequential on blocks that no step draws; the losses since the last time."""
        network = GpgNetwork(self.model.exported())
        ratios = []
        for number in range(self.settings.validation_blocks):
            random = Random(f"{self.settings.seed}:validation:{number}")
            graph, costs = self.drawing.draw(random)
            stages = Stages(graph, costs, TOP_LIMITS, GroupRule.CONNECTED, Strategy.PARALLEL)
            block = EncodedBlock(network, graph, costs)
            if self.settings.reward is Reward.PAPER:
                endings = acted(block, stages)
            else:
                endings = looked_ahead(block, stages, _QUICK, random)
            ratios.append(schedule_s(stages, endings) / block.total_s)
        ratio = fmean(ratios)
        names = sorted({name for row in self._losses for name in row})
        losses = {name: fmean([row[name] for row in self._losses if name in row]) for name in names}
        self._losses.clear()
        self.history.append(GpgValidation(step=self.step, phase=self.phase, ratio=ratio, losses=losses))
        self.since_best += 1
        if ratio < self.best_ratio:
            self.best_ratio, self.since_best, self.best = ratio, 0, network


@dataclass(frozen=True)
class GpgResult:
    """What a run leaves."""

    checkpoint: bytes
    history: tuple[GpgValidation, ...]
    train_s: float
    steps: int
    ended: str  # "done", "no better for a while", "time", "interrupted"


def train(
    drawing: Drawing,
    settings: GpgSettings,
    *,
    names: Mapping[Digest, str],
    costs: str,
    on_step: Callable[[Trainer], None] = lambda trainer: None,
    time_limit_s: float | None = None,
    state: Path | None = None,
) -> GpgResult:
    """Train until done, the time is up, or Ctrl-C, and keep the best policy of all validations.

    `names` are the models by digest and `costs` the cost model, both for the record. `state` is where the run
    is kept after every validation; one that is there goes on. Within the time limit a seed gives the same
    policy on the same machine, interrupted or not.

    Raises:
        InputError: `state` is of a run with other settings or models.
    """
    torch.set_num_threads(1)  # the matrices are small: a second thread costs more than it brings
    began_s = time.monotonic()
    trainer = Trainer(drawing, settings)
    about = {"settings": settings.plain(), "models": sorted(drawing.models), "costs": costs}
    if state is not None and state.exists():
        _restore(trainer, state, about)
    ended = "done"
    validated = len(trainer.history)
    try:
        while not trainer.done:
            trainer.advance()
            on_step(trainer)
            if state is not None and len(trainer.history) > validated:
                validated = len(trainer.history)
                _save(trainer, state, about)
            if time_limit_s is not None and time.monotonic() - began_s > time_limit_s:
                ended = "time"
                break
    except KeyboardInterrupt:
        ended = "interrupted"
    if not trainer.history:
        trainer.validate()
    if ended == "done" and trainer.step < settings.steps:
        ended = "no better for a while"
    train_s = time.monotonic() - began_s
    provenance = {
        **about,
        "models": dict(sorted(names.items())),
        "steps": trainer.step,
        "validation_ratio": trainer.best_ratio,
        "ended": ended,
        "versions": {"torch": torch.__version__.split("+")[0], "numpy": np.__version__},
    }
    raw = encode(GpgCheckpoint(trainer.best, provenance))
    return GpgResult(raw, tuple(trainer.history), train_s, trainer.step, ended)


def _save(trainer: Trainer, path: Path, about: Mapping[str, Any]) -> None:
    """Whole or not at all: a run that is killed while it writes goes on from the last validation."""
    part = path.with_name(path.name + ".part")
    torch.save({"about": dict(about), **trainer.saved()}, part)
    part.replace(path)


def _restore(trainer: Trainer, path: Path, about: Mapping[str, Any]) -> None:
    try:
        saved = torch.load(path, weights_only=True)
        if saved["about"] != about:
            raise InputError(f"{path} is a run with other settings or models", remedy="delete it")
        trainer.restore(saved)
    except InputError:
        raise
    except Exception as error:  # torch raises what its unpickler meets
        raise InputError(f"{path} is no training run: {str(error)[:120]}", remedy="delete it") from error
