"""One learner for all agents: critics by equation 3, actors by equation 4 (TOP, V-B; Lowe et al. 2017).

    y_i = r_i + gamma Q'_i(s', rho'(s')),    critic i: the square of y_i - Q_i(s, a) falls,
    actor i: Q_i(s, a with its own part replaced by rho_i(s)) rises.

Ours: equation 3 as printed multiplies the gradient of Q by y, not by y - Q, and so drives Q away without end
(`MaddpgSettings.printed_critic`); rewards are computed when a transition is drawn, from raw figures; the
critics' last bias starts at the mean reward's return, so that they learn differences and not the level; the
end of an episode is a truncation, so every transition is bootstrapped through.

All agents' networks of a kind are one batch of matrices, so an update of W + 1 agents is a few large
products. TOP, section VI-B: critics of 1024, 512 and 300 hidden units, actors of 500 and 128, ReLU. A critic
reads the state and the actions of all agents, an actor the state; actors' outputs are padded to the widest
agent's.

No clock, no thread, no global randomness: a learner and its copy go on alike, bit by bit.
"""

import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stageloom.planner.learning.maddpg.replay import Floats, Normaliser, Replay, Transitions
from stageloom.planner.learning.maddpg.settings import MaddpgSettings, Start
from stageloom.shared.errors import DecodeError
from stageloom.shared.policy.maddpg.actions import centre
from stageloom.shared.policy.maddpg.space import Space

LAST_SCALE = 0.01
"""Of the actors' last weights: untrained, their actions hardly depend on the state."""


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
        return [*self.weights, *self.biases]

    def require_grad(self) -> "Stack":
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
            torch._foreach_lerp_(self.tensors, [tensor.detach() for tensor in other.tensors], rate)

    def __call__(self, rows: Tensor) -> Tensor:
        """[agents, rows, inputs] -> [agents, rows, outputs]"""
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            rows = torch.baddbmm(bias, rows, weight)
            if layer < last:
                rows = torch.relu(rows)
        return rows

    def saved(self) -> dict[str, list[Tensor]]:
        return {key: [one.detach().clone() for one in getattr(self, key)] for key in ("weights", "biases")}

    def restore(self, saved: Mapping[str, Sequence[Tensor]]) -> None:
        """Restore in place, so that an optimiser keeps its references."""
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
        return cls(agents, Stack.drawn(len(agents), (state_width, *hidden, max(agents)), random))

    def start_at(self, actions: Sequence[float]) -> None:
        """Give these actions, almost whatever the state is. `actions`: an action row, within (0, 1)"""
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


STATE_FORMAT = 1


class Learner:
    """Stores transitions (`add`), learns from them (`update`), exports the actors (`policy_weights`)."""

    def __init__(self, space: Space, settings: MaddpgSettings, seed: int) -> None:
        self.space, self.settings, self.seed = space, settings, seed
        self.random = np.random.default_rng([seed, 0x4D414444])
        self.replay = Replay(settings.replay)
        self.normaliser: Normaliser | None = None  # frozen once there are transitions to learn from
        self.updates = 0
        self.actors = Actors.drawn(space.agents, space.state_width, settings.actors, self.random)
        width = space.state_width + space.action_width
        self.critics = Stack.drawn(len(space.agents), (width, *settings.critics, 1), self.random)
        self._own = torch.zeros(len(space.agents), space.action_width, dtype=torch.bool)
        self._own[self.actors.places[0], torch.arange(space.action_width)] = True
        self._aim = torch.full((space.action_width,), 0.5)
        if settings.start is not Start.PAPER:
            self.start_at(alone_actions(space))
        self._make_targets()
        self.actors.stack.require_grad()
        self.critics.require_grad()
        rates = (settings.actor_learning_rate, settings.learning_rate)
        self._optimisers = [
            torch.optim.Adam(stack.tensors, lr=rate, fused=True)
            for stack, rate in zip((self.actors.stack, self.critics), rates, strict=True)
        ]

    def start_at(self, actions: tuple[float, ...]) -> None:
        """Initialise the actors to this action row; before the first update only."""
        assert self.updates == 0, "actors that have learned do not start again"
        self.actors.start_at(actions)
        self.aim(actions)
        self._make_targets()

    def aim(self, actions: tuple[float, ...]) -> None:
        """Pull the actors towards this action row from now on; see `MaddpgSettings.pull`."""
        self._aim = torch.tensor(actions, dtype=torch.float32).clamp(0.01, 0.99)

    def add(self, new: Transitions) -> None:
        """Store transitions; once there are enough to learn from, freeze the z-scores on them."""
        self.replay.add(new)
        if self.normaliser is None and self.replay.added >= self.settings.learn_from:
            self._freeze()

    @property
    def ready(self) -> bool:
        """Whether there is enough to learn from."""
        return self.normaliser is not None

    def update(self, count: int = 1) -> dict[str, float]:
        """So many updates; mean losses of those that had them, none before there is enough to learn from."""
        if not self.ready:
            return {}
        losses = defaultdict[str, list[float]](list)
        for _ in range(count):
            for name, value in self._update().items():
                losses[name].append(value)
        return {name: fmean(values) for name, values in losses.items()}

    def policy_weights(self) -> dict[str, Floats]:
        """The actors as plain arrays; see `stageloom.shared.policy.maddpg.network`."""
        return self.actors.exported()

    def rewards(self, kept: Transitions) -> Floats:
        """Equation 2 for all agents; 0 for what never ran. [transitions, W + 1]"""
        assert self.normaliser is not None
        found = self.normaliser.rewards(kept.figures, kept.excess, self.settings)
        return np.where(kept.ran[:, None], found, np.float32(0.0))

    def targets(self, rewards: Tensor, following: Tensor) -> Tensor:
        """y of equation 3, by the target networks. [W + 1, transitions, 1]"""
        with torch.no_grad():
            rows = torch.cat([following, self.target_actors.rows(following)], dim=1)
            worth = self.target_critics(rows.expand(len(self.space.agents), *rows.shape))
            return rewards.T[:, :, None] + self.settings.gamma * worth

    def _update(self) -> dict[str, float]:
        settings = self.settings
        places = self.random.integers(0, len(self.replay), settings.batch)
        drawn = self.replay.take(places)
        states, actions = torch.from_numpy(drawn.states), torch.from_numpy(drawn.actions)
        y = self.targets(torch.from_numpy(self.rewards(drawn)), torch.from_numpy(drawn.following))
        found = {"critic": self._improve_critics(states, actions, y)}
        self.updates += 1
        late = self.updates - settings.actor_after
        if late > 0 and late % settings.actor_every == 0:
            found["actor"] = self._improve_actors(states, actions)
            self.target_actors.stack.follow(self.actors.stack, settings.target_rate)
        self.target_critics.follow(self.critics, settings.target_rate)
        return found

    def _improve_critics(self, states: Tensor, actions: Tensor, y: Tensor) -> float:
        rows = torch.cat([states, actions], dim=1)
        worth = self.critics(rows.expand(len(self.space.agents), *rows.shape))
        error = y - worth
        # The sum over agents: each has its own parameters and so its own gradient.
        loss = (y * worth if self.settings.printed_critic else error * error).mean(dim=(1, 2)).sum()
        self._step(1, loss)
        return float(error.detach().square().mean())

    def _improve_actors(self, states: Tensor, actions: Tensor) -> float:
        logits = self.actors.logits(states)
        mixed = torch.where(
            self._own[:, None], torch.sigmoid(logits), actions
        )  # [W + 1, batch, action_width]
        rows = torch.cat([states.expand(len(mixed), *states.shape), mixed], dim=2)
        worth = self.critics.frozen()(rows)
        size = worth.detach().abs().mean(dim=(1, 2), keepdim=True) + 1e-6
        off = (torch.sigmoid(logits) - self._aim) * self.space.bins  # in intervals
        loss = -(worth / size).mean(dim=(1, 2)).sum() + self.settings.pull * off.square().mean()
        self._step(0, loss)
        return float(-worth.detach().mean())

    def _step(self, which: int, loss: Tensor) -> None:
        self._optimisers[which].zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimisers[which].step()

    def _freeze(self) -> None:
        kept = self.replay.everything()
        ran = kept.figures[kept.ran]
        if not len(ran):
            return  # the paper's superblocks only: nothing was measured yet
        self.normaliser = Normaliser.of(ran, self.settings)
        if self.settings.gamma < 1.0:
            level = torch.from_numpy(self.rewards(kept).mean(axis=0)) / (1.0 - self.settings.gamma)
            with torch.no_grad():
                self.critics.biases[-1].copy_(level[:, None, None])
            self._make_targets()

    def _make_targets(self) -> None:
        self.target_actors = Actors(self.space.agents, self.actors.stack.copy())
        self.target_critics = self.critics.copy()

    def state(self) -> bytes:
        """All that is needed to resume bit by bit."""
        replay = self.replay.saved()
        arrays = {name: torch.from_numpy(values) for name, values in replay["arrays"].items()}
        normaliser = None if self.normaliser is None else self.normaliser.saved()
        plain = {
            "format": STATE_FORMAT,
            "seed": self.seed,
            "settings": self.settings.plain(),
            "agents": list(self.space.agents),
            "updates": self.updates,
            "added": replay["added"],
            "normaliser": normaliser,
            "random": self.random.bit_generator.state,
        }
        buffer = io.BytesIO()
        torch.save(
            {
                "plain": json.dumps(plain),
                "aim": self._aim,
                "stacks": {name: stack.saved() for name, stack in self._stacks().items()},
                "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
                "replay": arrays,
            },
            buffer,
        )
        return buffer.getvalue()

    @classmethod
    def restored(cls, space: Space, raw: bytes) -> "Learner":
        """The learner that gave `state`.

        Raises:
            DecodeError: the bytes are none, or of another space.
        """
        try:
            saved: dict[str, Any] = torch.load(io.BytesIO(raw), weights_only=True)
            plain = json.loads(saved["plain"])
            if plain["format"] != STATE_FORMAT or plain["agents"] != list(space.agents):
                raise ValueError(f"format {plain['format']}, agents {plain['agents']}")
            learner = cls(space, MaddpgSettings.of(plain["settings"]), plain["seed"])
            learner._restore(saved, plain)
        except Exception as error:  # torch raises whatever its unpickler meets
            raise DecodeError(
                f"not the state of a learner of maddpg: {str(error)[:200]}", remedy="begin a new training"
            ) from error
        return learner

    def _restore(self, saved: dict[str, Any], plain: dict[str, Any]) -> None:
        for name, stack in self._stacks().items():
            stack.restore(saved["stacks"][name])
        for one, state in zip(self._optimisers, saved["optimisers"], strict=True):
            one.load_state_dict(state)
        self._aim = saved["aim"]
        self.updates = plain["updates"]
        self.normaliser = None if plain["normaliser"] is None else Normaliser.restored(plain["normaliser"])
        self.random.bit_generator.state = plain["random"]
        arrays = {name: values.numpy() for name, values in saved["replay"].items()}
        self.replay.restore({"added": plain["added"], "arrays": arrays})

    def _stacks(self) -> dict[str, Stack]:
        return {
            "actors": self.actors.stack,
            "critics": self.critics,
            "target_actors": self.target_actors.stack,
            "target_critics": self.target_critics,
        }


def alone_actions(space: Space) -> tuple[float, ...]:
    """The action row that starts every block alone, launched as fast as can be: interval centres."""
    return (0.0,) * space.num_models + tuple(centre(number, space.bins) for number in space.bin_of_start)
