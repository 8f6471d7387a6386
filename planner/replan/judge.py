"""How well a plan serves an alarm's load: every candidate and the plan that runs on the same random arrivals.

What a trial compares at a load below what the device can carry is worth two figures: the mean over tasks of
the log of their latency, models weighted by their work, a task that missed its deadline counting as twice the
deadline; and the log of the share of tasks in time, in which the shortest task counts as much as any. Where
tasks wait all the time under both plans it is tasks in time per second. So a gain is

    gain = exp(mean over streams of (log latency of the base - log latency of the plan
                                     + log share in time of the plan - log share in time of the base)),

or of the logs of the rates, and the chance that it is at least `GAIN` is
Phi((log gain - log(1 + GAIN)) / sigma). There sigma joins the standard error of the mean over streams with
what the figure moves by if the times are off by their error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from statistics import NormalDist, fmean, stdev
from typing import Final

from stageloom.shared.search.lane_load import ServedModel, serve

GAIN: Final = 0.02
"""The least gain that is worth a change."""

LIKELY: Final = 0.8
"""The least chance of such a gain at which a plan is tried."""

SHARE_LOST: Final = 0.01
"""Of all tasks: a plan that has so many fewer in time is no gain, however fast the others are."""

TAIL: Final = 1.2
"""Nor is one whose p99 is so many times as long: a trial's guard refuses it."""

STREAMS: Final = 6
TASKS: Final = 1000  # of a stream
ALWAYS: Final = 0.98
"""Of arrivals that find a task waiting: then tasks wait all the time."""

_SEED: Final = 20261

Arrivals = Sequence[tuple[float, int]]
"""Instants in seconds, ascending, each with the index of its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDemand:
    """What is asked of one model. `work_s`: of one task, the weight of its latency beside other models'."""

    name: str
    rate_per_s: float
    work_s: float
    deadline_s: float = math.inf
    queued: int = 0
    oldest_age_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ServedPlan:
    """A plan as `stageloom.shared.search.lane_load` serves it; models in the demand's order."""

    models: tuple[ServedModel, ...]
    lanes: int
    by_deadline: bool
    beside: float  # of a step's time, for each other busy lane

    def slower(self, times: float, beside: float) -> "ServedPlan":
        """With every step longer by a share, and by more beside others."""
        models = tuple(
            replace(
                one,
                blocks_s=tuple(taken * (1.0 + times) for taken in one.blocks_s),
                each_more_s=one.each_more_s * (1.0 + times),
            )
            for one in self.models
        )
        return replace(self, models=models, beside=self.beside + beside)


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """Of one stream of arrivals. `per_s`: tasks in time per second while tasks arrived.

    `share_in_time` is as if one task more had been in time, so that it is never 0.
    """

    log_latency: float
    share_in_time: float
    per_s: float
    waiting_share: float


@dataclass(frozen=True, slots=True)
class JudgedModel:
    """Of one model over all streams. Latencies are of tasks that ended in time; 0 where none did."""

    name: str
    p50_s: float
    p99_s: float
    share_in_time: float


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A plan under a demand. `variance_s2`: of queued work over the models, the mean over time."""

    p50_s: float
    p99_s: float
    share_in_time: float
    oldest_age_s: float
    variance_s2: float
    models: tuple[JudgedModel, ...]
    streams: tuple[StreamFigures, ...]

    @property
    def saturated(self) -> bool:
        """Whether tasks wait all the time."""
        return fmean(one.waiting_share for one in self.streams) >= ALWAYS


def arrivals_of(demand: Sequence[ModelDemand], streams: int = STREAMS, tasks: int = TASKS) -> list[Arrivals]:
    """Streams of Poisson arrivals, each behind the tasks that are queued, which came before instant 0.

    Equal demands have equal arrivals, and other rates the same draws at another pace.
    """
    rate_per_s = math.fsum(one.rate_per_s for one in demand)
    if rate_per_s <= 0.0:
        return []
    waiting = sorted(
        (-one.oldest_age_s * (1.0 - at / one.queued), index)
        for index, one in enumerate(demand)
        for at in range(min(one.queued, tasks))
    )
    shares = tuple(one.rate_per_s / rate_per_s for one in demand)
    return [
        [*waiting, *((at / rate_per_s, model) for at, model in _drawn(shares, tasks, number))]
        for number in range(streams)
    ]


@lru_cache(maxsize=32)
def _drawn(shares: tuple[float, ...], tasks: int, number: int) -> tuple[tuple[float, int], ...]:
    """At one task a second."""
    random = Random(_SEED + number)
    models = random.choices(range(len(shares)), shares, k=tasks)
    at, found = 0.0, []
    for model in models:
        at += random.expovariate(1.0)
        found.append((at, model))
    return tuple(found)


def judge(plan: ServedPlan, demand: Sequence[ModelDemand], streams: Sequence[Arrivals]) -> Judged:
    """Serve every stream from its queue on."""
    figures, latencies, came = [], [[] for _ in demand], [0] * len(demand)  # type: ignore[var-annotated]
    oldest_s, variances = 0.0, []
    for arrivals in streams:
        served = serve(
            plan.models,
            plan.lanes,
            arrivals,
            by_deadline=plan.by_deadline,
            beside=plan.beside,
            begin_s=0.0,
        )
        logs, counts = [0.0] * len(demand), [0] * len(demand)
        last_s, in_time, soon = arrivals[-1][0], 0, 0
        for (at, model), end in zip(arrivals, served.ends_s, strict=True):
            counts[model] += 1
            latency = end - at
            deadline = plan.models[model].deadline_s
            if latency < deadline:
                latencies[model].append(latency)
                in_time += 1
                soon += end <= last_s
            else:  # also what was refused, which has no deadline to miss
                latency = 2.0 * deadline if deadline < math.inf else last_s
            logs[model] += math.log(max(latency, 1e-6))
        weights = [one.work_s * count for one, count in zip(demand, counts, strict=True)]
        if not any(weights):  # only of models that never completed a task, whose work is not known
            weights = [float(count) for count in counts]
        means = [total / count if count else 0.0 for total, count in zip(logs, counts, strict=True)]
        figure = math.fsum(w * mean for w, mean in zip(weights, means, strict=True)) / math.fsum(weights)
        share = (in_time + 1) / (len(arrivals) + 1)
        figures.append(StreamFigures(figure, share, soon / last_s, served.waiting_share))
        came = [a + b for a, b in zip(came, counts, strict=True)]
        oldest_s = max(oldest_s, served.oldest_age_s)
        variances.append(served.variance_s2)
    every = sorted(one for of_model in latencies for one in of_model)
    return Judged(
        p50_s=_quantile(every, 0.5),
        p99_s=_quantile(every, 0.99),
        share_in_time=len(every) / max(sum(came), 1),
        oldest_age_s=oldest_s,
        variance_s2=fmean(variances),
        models=tuple(
            JudgedModel(
                one.name,
                _quantile(sorted(found), 0.5),
                _quantile(sorted(found), 0.99),
                len(found) / count if count else 1.0,
            )
            for one, found, count in zip(demand, latencies, came, strict=True)
        ),
        streams=tuple(figures),
    )


def log_gain(base: Judged, other: Judged) -> tuple[float, float]:
    """Of `other` over `base` on the same streams: the log of the gain, above 0 the better, and its error."""
    if base.saturated and other.saturated:
        found = [
            math.log(max(b.per_s, 1e-9) / max(a.per_s, 1e-9))
            for a, b in zip(base.streams, other.streams, strict=True)
        ]
    else:
        found = [
            a.log_latency - b.log_latency + math.log(b.share_in_time / a.share_in_time)
            for a, b in zip(base.streams, other.streams, strict=True)
        ]
    error = stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0
    return fmean(found), error


def harms(base: Judged, other: Judged) -> bool:
    """Whether a plan loses what a trial guards: tasks in time, or the tail of latencies."""
    return other.share_in_time < base.share_in_time - SHARE_LOST or (
        other.p99_s > TAIL * base.p99_s > 0.0 and not other.share_in_time > base.share_in_time + SHARE_LOST
    )


def chance_of_gain(log_gained: float, error: float) -> float:
    """That the gain is at least `GAIN`, where its log is known to a standard error."""
    ahead = log_gained - math.log1p(GAIN)
    if error <= 0.0:
        return float(ahead >= 0.0)
    return NormalDist().cdf(ahead / error)


def _quantile(ascending: Sequence[float], level: float) -> float:
    """The least value that so large a share does not exceed; 0 of none."""
    if not ascending:
        return 0.0
    return ascending[min(math.ceil(level * len(ascending)), len(ascending)) - 1]
