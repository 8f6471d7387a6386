"""Ways to learn when to run which plan: policies that choose among known plans anew for every window. Pure.

The plans, *arms*, are the best that a local search meets with half of the evaluations. The rest are episodes,
from which a policy is learned that sees what arrived of each model in the window before, and what waits. A
window's *reward* is less the mean over the models of the logarithm of their latency, as in TOP's equation 2
with alpha = gamma = 0; a queue that is not served counts as Little's law has it.

| way | source |
| --- | --- |
| `bandit` | linear Thompson sampling, a ridge regression per arm (Agrawal and Goyal 2013) |
| `fitted_q` | fitted Q iteration (Ernst et al. 2005), a ridge regression per arm |
| `policy_gradient` | REINFORCE with a baseline (Williams 1992), a softmax over the arms |
| `evolved` | the cross-entropy method over such a softmax's weights (Szita and Lorincz 2006) |
| `distilled` | the regime library: loads fall into two clusters, each with the arm that did best there |
| `best_pair` | no learning: every pair of arms, one for each of two clusters of loads, the best pair of all |
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from benchmarks.learning.unlearned import ActionRow, Best, local_search
from stageloom.planner.learning.maddpg.problem import Problem, ScheduleTable
from stageloom.planner.learning.maddpg.replay import FIGURES_BEFORE_LATENCY, Doubles
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.learning.maddpg.work import Environment, EnvironmentStep
from stageloom.planner.tournament.score import Score, figures_of, improves, score_of

Choose: TypeAlias = Callable[[Doubles], int]
"""From a context [context_width] to the place of an arm."""

Integers: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Ask: TypeAlias = Callable[[Choose], "Log"]
"""For an episode, with what chooses in it."""

ARMS: Final = 5
CLUSTERS: Final = 2
_QUEUED_SCALE_S: Final = 0.05  # as the policy's state has it
_SHORTEST_S: Final = 1e-4  # a latency below it counts as that
_DISCOUNT: Final = 0.8  # per window: what waits now is served within some
_RIDGE: Final = 1.0
_EXPLORE: Final = 0.2  # of the windows of `fitted_q`
_STEP: Final = 0.3
_POPULATION: Final = 6
_ELITE: Final = 2


class Log(NamedTuple):
    """What an episode of T windows was like."""

    contexts: Doubles  # before each window, and after the last [T + 1, context_width]
    arms: Integers  # [T]
    rewards: Doubles  # [T]


@dataclass(frozen=True)
class Arms:
    """Plans of one problem to choose among; the best first."""

    problem: Problem
    table: ScheduleTable
    settings: MaddpgSettings
    rows: tuple[ActionRow, ...]

    @property
    def context_width(self) -> int:
        """Arrivals and queued work per model, and 1."""
        return 2 * self.problem.space.num_models + 1

    def windows(
        self, choose: Choose, seed: int, count: int
    ) -> Iterator[tuple[Doubles, int, EnvironmentStep]]:
        """Context, arm and outcome of window after window, from empty queues."""
        environment = Environment(self.problem, self.table, self.settings, seed, thorough=True)
        context = self._context(None)
        for _ in range(count):
            arm = choose(context)
            step = environment.step(self.rows[arm])
            yield context, arm, step
            context = self._context(step)

    def episode(self, choose: Choose, seed: int, count: int) -> Log:
        """What can be learned from so many windows."""
        contexts, arms, rewards = [], [], []
        for context, arm, step in self.windows(choose, seed, count):
            contexts.append(context)
            arms.append(arm)
            latency = np.maximum(step.figures[FIGURES_BEFORE_LATENCY:], _SHORTEST_S)
            rewards.append(-float(np.log(latency).mean()))
        contexts.append(self._context(step))
        return Log(np.array(contexts), np.array(arms), np.array(rewards))

    def score(self, choose: Choose, seeds: Sequence[int], count: int) -> Score:
        """The worth of a policy, as of a plan: over all seeds, the first window of each does not count."""
        found = []
        for seed in seeds:
            steps = [step for *_, step in self.windows(choose, seed, count + 1)]
            windows = [step.window for step in steps[1:] if step.window is not None]
            found.append(figures_of(windows, self.problem.service_s))
        return score_of(found)

    def _context(self, step: EnvironmentStep | None) -> Doubles:
        problem, window = self.problem, None if step is None else step.window
        if window is None:
            return np.array([1.0] * problem.space.num_models + [0.0] * problem.space.num_models + [1.0])
        rates = [
            one.submitted / window.seconds / mean
            for one, mean in zip(window.models, problem.arrivals_per_s, strict=True)
        ]
        queued = [
            np.arcsinh(one.queued * one_s / _QUEUED_SCALE_S)
            for one, one_s in zip(window.models, problem.service_s, strict=True)
        ]
        return np.array([*rates, *queued, 1.0])


def arms_of(
    problem: Problem,
    table: ScheduleTable,
    settings: MaddpgSettings,
    judge: Callable[[ActionRow], Score],
    evaluations: int,
    rng: np.random.Generator,
) -> tuple[Arms, Score]:
    """The best plans of a local search, and the score of the best; plans of equal scores are one."""
    met: dict[tuple[float, float], ActionRow] = {}

    def noted(row: ActionRow) -> Score:
        score = judge(row)
        met.setdefault((-score.throughput_per_s, score.p99_s), row)
        return score

    best = Best(noted)
    local_search(problem.space, best, evaluations, rng)
    assert best.held is not None
    others = [row for _, row in sorted(met.items()) if row != best.row]
    return Arms(problem, table, settings, (best.row, *others)[:ARMS]), best.held[1]


Way: TypeAlias = Callable[[Arms, Ask, int, np.random.Generator], Choose]
"""Learns from so many episodes."""


def bandit(arms: Arms, episode: Ask, episodes: int, rng: np.random.Generator) -> Choose:
    """Rewards are what the window itself brings; queues that an arm leaves behind are not foreseen."""
    ridge = _Ridge(len(arms.rows), arms.context_width)
    for _ in range(episodes):
        log = episode(lambda context: int(np.argmax(ridge.drawn(context, rng))))
        ridge.learn(log.contexts[:-1], log.arms, log.rewards)
    return ridge.best


def fitted_q(arms: Arms, episode: Ask, episodes: int, rng: np.random.Generator) -> Choose:
    """As the bandit, with the discounted worth of what comes after."""
    logs: list[Log] = []
    count, ridge = len(arms.rows), _Ridge(len(arms.rows), arms.context_width)
    for _ in range(episodes):
        logs.append(episode(_curious(ridge, count, _EXPLORE if logs else 1.0, rng)))
        for _ in range(round(2 / (1 - _DISCOUNT))):
            older, ridge = ridge, _Ridge(count, arms.context_width)
            for log in logs:
                after = older.worths(log.contexts[1:]).max(axis=1)
                ridge.learn(log.contexts[:-1], log.arms, log.rewards + _DISCOUNT * after)
    return ridge.best


def policy_gradient(arms: Arms, episode: Ask, episodes: int, rng: np.random.Generator) -> Choose:
    """Returns are discounted; the baseline is their mean over the episode."""
    weights = np.zeros((len(arms.rows), arms.context_width))
    for _ in range(episodes):
        log = episode(_drawn(weights, rng))
        returns = _returns(log.rewards)
        gains = (returns - returns.mean()) / max(float(returns.std()), 1e-6)
        for context, arm, gain in zip(log.contexts, log.arms, gains, strict=False):
            slope = -_softmax(weights @ context)
            slope[arm] += 1.0
            weights += _STEP / len(gains) * gain * np.outer(slope, context)
    return _greedy(weights)


def evolved(arms: Arms, episode: Ask, episodes: int, rng: np.random.Generator) -> Choose:
    """Weights of a generation are drawn from independent normal distributions around the best ones."""
    mean = np.zeros((len(arms.rows), arms.context_width))
    spread, left = np.ones_like(mean), episodes
    best: tuple[float, Doubles] = (-np.inf, mean)
    while left > 0:
        drawn = [rng.normal(mean, spread) for _ in range(min(_POPULATION, left))]
        left -= len(drawn)
        ranked = sorted(((float(episode(_greedy(one)).rewards.mean()), one) for one in drawn), key=_first)
        best = max(best, ranked[-1], key=_first)
        elite = np.array([one for _, one in ranked[-_ELITE:]])
        mean, spread = elite.mean(axis=0), np.asarray(elite.std(axis=0) + 0.1)
    return _greedy(best[1])


def distilled(arms: Arms, episode: Ask, episodes: int, rng: np.random.Generator) -> Choose:
    """Every arm is held for as many episodes."""
    logs = [episode(held(at % len(arms.rows))) for at in range(episodes)]
    contexts = np.concatenate([log.contexts[:-1] for log in logs])
    near = clusters_of(contexts, arms.problem.space.num_models)
    sums = np.zeros((2, CLUSTERS, len(arms.rows)))
    for log in logs:
        for context, arm, reward in zip(log.contexts, log.arms, log.rewards, strict=False):
            sums[:, near(context), arm] += (reward, 1.0)
    worth = np.where(sums[1] > 0, sums[0] / np.maximum(sums[1], 1.0), -np.inf)
    chosen = worth.argmax(axis=1)
    return _by_kind(chosen.tolist(), near)


WAYS: Final[dict[str, Way]] = {
    "bandit over plans": bandit,
    "fitted Q over plans": fitted_q,
    "policy gradient over plans": policy_gradient,
    "evolved choice of plans": evolved,
    "distilled library": distilled,
}


def best_pair(arms: Arms, seeds: Sequence[int], count: int) -> tuple[tuple[int, int], Score]:
    """The most that a policy could gain that tells two kinds of load apart by the window before.

    Every pair of arms is scored on the arrivals that judge, so its answer is better than any policy's that
    has to learn: a bound, up to the arms and to queues that one could look at besides.
    """
    logs = [arms.episode(held(0), seed, count) for seed in seeds]
    near = clusters_of(np.concatenate([log.contexts for log in logs]), arms.problem.space.num_models)
    places = range(len(arms.rows))
    scores = {
        (one, other): arms.score(_by_kind((one, other), near), seeds, count)
        for one, other in product(places, places)
    }
    top = max(scores.values(), key=lambda score: score.throughput_per_s)
    best = next(pair for pair, score in scores.items() if score is top)
    for pair, score in scores.items():
        if improves(score, scores[best], top):
            best = pair
    return best, scores[best]


def clusters_of(contexts: Doubles, models: int) -> Callable[[Doubles], int]:
    """Which of two kinds of load a context is of: 2-means of arrivals (Lloyd 1982), from the two farthest."""
    arrivals = contexts[:, :models]
    first = arrivals[np.argmax(np.linalg.norm(arrivals - arrivals.mean(axis=0), axis=1))]
    second = arrivals[np.argmax(np.linalg.norm(arrivals - first, axis=1))]
    centres = np.stack([first, second])
    for _ in range(20):
        nearest = np.linalg.norm(arrivals[:, None] - centres, axis=2).argmin(axis=1)
        centres = np.stack(
            [
                arrivals[nearest == one].mean(axis=0) if (nearest == one).any() else centres[one]
                for one in range(CLUSTERS)
            ]
        )
    return lambda context: int(np.linalg.norm(context[:models] - centres, axis=1).argmin())


class _Ridge:
    """A ridge regression per arm of how far the reward is from the mean of all, on the context."""

    def __init__(self, arms: int, width: int) -> None:
        self._gram = np.stack([_RIDGE * np.eye(width)] * arms)
        self._moment = np.zeros((arms, width))
        self._contexts = np.zeros((arms, width))  # their sums
        self._rewards: list[float] = []
        self._mean = 0.0  # of the rewards
        self._weights: Doubles | None = None  # [arms, width], between two lessons

    def learn(self, contexts: Doubles, arms: Integers, rewards: Doubles) -> None:
        """Take in windows."""
        for arm in range(len(self._gram)):
            of, gained = contexts[arms == arm], rewards[arms == arm]
            self._gram[arm] += of.T @ of
            self._moment[arm] += gained @ of
            self._contexts[arm] += of.sum(axis=0)
        self._rewards += rewards.tolist()
        self._weights = None

    def worths(self, context: Doubles) -> Doubles:
        """What each arm is expected to bring, in one context or many. [..., arms]"""
        if self._weights is None:
            self._mean = float(np.mean(self._rewards)) if self._rewards else 0.0
            self._weights = self._solved(self._moment - self._mean * self._contexts)
        found: Doubles = self._mean + context @ self._weights.T
        return found

    def best(self, context: Doubles) -> int:
        """The arm that is expected to bring most."""
        return int(np.argmax(self.worths(context)))

    def drawn(self, context: Doubles, rng: np.random.Generator) -> Doubles:
        """What each arm may bring: drawn from what is known of it. [arms]"""
        scale = float(np.std(self._rewards)) if self._rewards else 1.0
        doubt = np.sqrt(self._solved(np.tile(context, (len(self._gram), 1))) @ context)
        found: Doubles = self.worths(context) + scale * doubt * rng.normal(size=len(doubt))
        return found

    def _solved(self, rows: Doubles) -> Doubles:
        found: Doubles = np.linalg.solve(self._gram, rows[:, :, None])[:, :, 0].astype(np.float64)
        return found


def _softmax(logits: Doubles) -> Doubles:
    raised = np.exp(logits - logits.max())
    found: Doubles = raised / raised.sum()
    return found


def _returns(rewards: Doubles) -> Doubles:
    found, after = np.zeros_like(rewards), 0.0
    for at in reversed(range(len(rewards))):
        after = rewards[at] + _DISCOUNT * after
        found[at] = after
    return found


def held(arm: int) -> Choose:
    """One plan that stays."""
    return lambda _: arm


def _by_kind(chosen: Sequence[int], near: Choose) -> Choose:
    return lambda context: chosen[near(context)]


def _curious(ridge: _Ridge, count: int, explores: float, rng: np.random.Generator) -> Choose:
    return lambda context: int(rng.integers(count)) if rng.random() < explores else ridge.best(context)


def _drawn(weights: Doubles, rng: np.random.Generator) -> Choose:
    return lambda context: int(rng.choice(len(weights), p=_softmax(weights @ context)))


def _greedy(weights: Doubles) -> Choose:
    return lambda context: int(np.argmax(weights @ context))


def _first(ranked: tuple[float, Doubles]) -> float:
    return ranked[0]
