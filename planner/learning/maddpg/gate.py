"""The gate that a policy passes before it has a say: three criteria over what it did on a twin. Pure.

1. Its answers depend on the state. Spread is the standard deviation of an action over the states, mean over
   the actions. A combination of blocks counts where at least a hundredth of the states gets it.
2. It beats the best seed: over loads that training never saw, the lower end of the 95 % interval of the ratio
   of value is above 1. A ratio is paired over arrivals; logarithms are averaged over loads, and Student's
   interval is over arrivals.
3. It is nowhere behind the best seed by more than a margin: under each load the lower end of that load's
   interval is above 1 less the margin. All have to hold, so no correction for their number is due.

Value is throughput, or p99 where mean throughput differs by less than `LEAST_SPREAD` under that load (as
`stageloom.planner.tournament.score.better` has it). Ratios are above 1 where the policy is better.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from typing import Final

import numpy as np

from stageloom.planner.learning.maddpg.replay import Floats
from stageloom.planner.schema.policy import PolicyCriterion, PolicyLoadCheck, PolicyVerdict
from stageloom.planner.tournament.score import LEAST_SPREAD, Score
from stageloom.shared.engine.windows import PairedLogs
from stageloom.shared.ids import Digest
from stageloom.shared.policy.maddpg.actions import combine_blocks
from stageloom.shared.policy.maddpg.space import Space

THROUGHPUT: Final = "throughput"
P99: Final = "p99"
_SIDE: Final = 0.975
"""Of each end of a 95 % interval."""

_LEAST_PER_S: Final = 1e-3
_LEAST_S: Final = 1e-6
"""Stand for nothing served: a ratio stays finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateBounds:
    """What a policy has to exceed."""

    spread: float = 0.01  # mean standard deviation of an action over the states
    combinations: int = 2  # distinct ones, at least
    share: float = 0.01  # of the states that a combination answers, to count
    level: float = LEAST_SPREAD  # a mean throughput that differs by less is equal
    behind_throughput: float = 0.01  # share of the best seed's that may be lacking under a load
    behind_p99: float = 0.1  # the same where p99 decides, which varies more


@dataclass(frozen=True, kw_only=True)
class LoadOutcome:
    """A policy and the best seed under one load, on the same arrivals.

    `policy`, `best_seed`: a score per arrivals, in the same order. `actions`: what the policy answers to the
    states that either met. [states, action_width]
    """

    load: str
    seed: str
    policy: tuple[Score, ...]
    best_seed: tuple[Score, ...]
    actions: Floats


def judge(
    policy: Digest,
    space: Space,
    outcomes: Sequence[LoadOutcome],
    bounds: GateBounds | None = None,
    *,
    twin: str = "",
    arrivals: str = "",
) -> PolicyVerdict:
    """The verdict on a policy of this space; `twin` and `arrivals` say where the outcomes are from.

    Raises:
        ValueError: no load, or another number of arrivals under one than under another.
    """
    limits = bounds or GateBounds()
    if not outcomes or len({len(outcome.policy) for outcome in outcomes}) != 1:
        raise ValueError(f"{len(outcomes)} loads with unequal arrivals give no verdict")
    figures = [_value_logs(outcome, limits.level) for outcome in outcomes]
    loads = [_load(outcome, figure, logs) for outcome, (figure, logs) in zip(outcomes, figures, strict=True)]
    criteria = (
        _depends_on_state(space, np.concatenate([outcome.actions for outcome in outcomes]), limits),
        _beats_best_seed([logs for _, logs in figures]),
        _nowhere_behind(loads, limits),
    )
    failed = [criterion.reason for criterion in criteria if not criterion.passed]
    return PolicyVerdict(
        policy=policy,
        passed=not failed,
        reason="; ".join(failed)[:512],
        criteria=criteria,
        loads=tuple(loads),
        twin=twin[:512],
        arrivals=arrivals[:512],
    )


def _depends_on_state(space: Space, actions: Floats, bounds: GateBounds) -> PolicyCriterion:
    states = len(actions)
    spread = float(np.std(actions.astype(np.float64), axis=0).mean())
    rows = (combine_blocks(space, row[space.num_models :]).combined for row in actions.tolist())
    answers = Counter(tuple(sorted(combined)) for combined in rows)  # the same in another order says nothing
    combinations = sum(count >= bounds.share * states for count in answers.values())
    return PolicyCriterion(
        name="answers depend on the state",
        passed=spread > bounds.spread and combinations >= bounds.combinations,
        reason=(
            f"over {states} states its actions spread by {spread:.3f} and give {combinations} combination"
            f"{'' if combinations == 1 else 's'} of blocks; above {bounds.spread:g} and at least "
            f"{bounds.combinations} are asked for"
        ),
        figures={"states": states, "spread": spread, "combinations": combinations},
    )


def _beats_best_seed(logs: Sequence[Sequence[float]]) -> PolicyCriterion:
    """`logs`: per load and arrivals, of the figure that decides under that load."""
    over_loads = [fsum(column) / len(column) for column in zip(*logs, strict=True)]
    ratio, low, high = _interval(over_loads)
    return PolicyCriterion(
        name="beats the best seed",
        passed=low > 1.0,
        reason=(
            f"under {len(logs)} loads that training never saw it is worth {ratio:.3f} of the best seed "
            f"({low:.3f} to {high:.3f}, {len(over_loads)} arrivals each); the lower end is to be above 1"
        ),
        figures={"ratio": ratio, "low": low, "high": high},
    )


def _nowhere_behind(loads: Sequence[PolicyLoadCheck], bounds: GateBounds) -> PolicyCriterion:
    least = {THROUGHPUT: 1.0 - bounds.behind_throughput, P99: 1.0 - bounds.behind_p99}
    worst = min(loads, key=lambda load: load.low - least[load.figure])
    return PolicyCriterion(
        name="nowhere behind the best seed",
        passed=worst.low > least[worst.figure],
        reason=(
            f"it stands worst under {worst.load}: by {worst.figure} it is worth {worst.ratio:.3f} of the "
            f"best seed ({worst.low:.3f} to {worst.high:.3f}); the lower end is to be above "
            f"{least[worst.figure]:.3g}"
        ),
        figures={"ratio": worst.ratio, "low": worst.low, "least": least[worst.figure]},
    )


def _load(outcome: LoadOutcome, figure: str, logs: Sequence[float]) -> PolicyLoadCheck:
    ratio, low, high = _interval(logs)
    return PolicyLoadCheck(
        load=outcome.load,
        seed=outcome.seed,
        figure=figure,
        ratio=ratio,
        low=low,
        high=high,
        policy_per_s=_mean(outcome.policy, "throughput_per_s"),
        seed_per_s=_mean(outcome.best_seed, "throughput_per_s"),
        policy_p99_s=_mean(outcome.policy, "p99_s"),
        seed_p99_s=_mean(outcome.best_seed, "p99_s"),
    )


def _value_logs(outcome: LoadOutcome, level: float) -> tuple[str, list[float]]:
    """The figure that decides, and per arrivals the logarithm of its ratio."""
    pairs = list(zip(outcome.policy, outcome.best_seed, strict=True))
    ours, theirs = _mean(outcome.policy, "throughput_per_s"), _mean(outcome.best_seed, "throughput_per_s")
    if abs(ours - theirs) > level * theirs:
        return THROUGHPUT, [
            log(max(one.throughput_per_s, _LEAST_PER_S) / max(other.throughput_per_s, _LEAST_PER_S))
            for one, other in pairs
        ]
    return P99, [log(max(other.p99_s, _LEAST_S) / max(one.p99_s, _LEAST_S)) for one, other in pairs]


def _interval(logs: Sequence[float]) -> tuple[float, float, float]:
    """Mean ratio and the ends of its 95 % interval, of two or more logarithms."""
    paired = PairedLogs()
    for one in logs:
        paired.add(one)
    low, high = paired.bounds(_SIDE)
    return exp(paired.mean), exp(max(low, -_FAR)), exp(min(high, _FAR))


_FAR: Final = 50.0
"""A logarithm whose exponential every JSON number holds."""


def _mean(scores: Sequence[Score], figure: str) -> float:
    return fsum(getattr(score, figure) for score in scores) / len(scores)
