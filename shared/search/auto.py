"""The plan of a device on which nothing was searched yet: good without a choice, known without a search.

Every model runs whole if it can, in sessions of one thread, on whichever executor is known to run it fastest.
There is a lane per core and each lane keeps to its core: its thread stays where its weights are cached and
waits for no other inside an operator. The task whose deadline comes first goes first, whatever its model.

A step is never interrupted. Where the steps of a long model would hold up another model's tasks beyond what
these can wait, the long model is cut into blocks: a task that is due sooner goes between them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import MAX_LANES, ExecutorOptions, Plan, QueuePlan, QueueRule, Resource, StepChoice
from stageloom.shared.search.compose import ModelChoice, Rules, compose

CLEARLY: Final = 0.97
"""An executor takes the place of another if it takes at most this part of its time: less may be noise."""

URGENCY: Final = 5.0
"""A task is taken to be wanted within this multiple of its own time,"""
LEAST_PATIENCE_S: Final = 0.020
"""and never sooner than this: what sits around a model, cameras and networks, has its own delays."""
HELD_UP: Final = 0.1
"""How often urgent tasks may be held up too long while long steps are in every lane."""
BLOCK_SHARE: Final = 0.5
"""Of the shortest patience of any model, what a block may take."""
_OVERDUE_AFTER: Final = 1 << 10
"""Choices in which a block may be passed over: those of a cut model often are, for tasks that are due sooner;
tasks without a deadline must come to run all the same."""


@dataclass(frozen=True)
class KnownModel:
    """What was measured of a model: which executor runs it, and the seconds it takes there on one thread."""

    executor: str
    seconds: float


def auto_plan(
    models: Sequence[ModelChoice],
    known: Mapping[Digest, KnownModel],
    default: str,
    cores: Sequence[int],
    *,
    whole: bool = False,
) -> Plan:
    """A lane per core. `known`: by artifact; `default` runs the models that are not there.

    `whole`: no model is cut, whatever it holds up.

    Raises:
        PlanError: the plan would not be legal.
    """
    lanes = min(len(cores), MAX_LANES)
    times_s = [known[one.artifact].seconds if one.artifact in known else None for one in models]
    blocks = [1] * len(models) if whole else block_counts(times_s, lanes)
    cut = [
        replace(
            one,
            partition=even_cuts(one.graph, number),
            replicas=lanes,
            queue=QueuePlan(rule=QueueRule.DEADLINE),
        )
        for one, number in zip(models, blocks, strict=True)
    ]
    run_by = [known[one.artifact].executor if one.artifact in known else default for one in models]
    names = list(dict.fromkeys(run_by))
    plan = compose(
        cut,
        scheduler="sequential",
        lanes=lanes,
        executor=ExecutorOptions(name=names[0]),
        rules=Rules(step_choice=StepChoice.DEADLINE, max_skips=_OVERDUE_AFTER),
    )
    return replace(
        plan,
        combined=tuple(
            replace(block, executor=names.index(run_by[block.members[0].model])) for block in plan.combined
        ),
        further_executors=tuple(ExecutorOptions(name=name) for name in names[1:]),
        resources=tuple(Resource(cores=(core,)) for core in cores[:lanes]),
        lane_resources=tuple(range(lanes)),
    )


def block_counts(seconds: Sequence[float | None], lanes: int) -> list[int]:
    """Into how many blocks each model is to be cut; `seconds` per model, if known. [num_models]

    A task that arrives while each of n lanes is in a step of t seconds waits longer than s with probability
    (1 - s / t)^n, as the times left are uniform; s is what the task can wait beyond its own time. A model of
    which that is more than `HELD_UP` for some other one gets blocks of at most `BLOCK_SHARE` of the shortest
    patience: the block that runs and the own one of the urgent task fit into it.
    """
    patience_s = [max(URGENCY * one, LEAST_PATIENCE_S) for one in seconds if one is not None]
    times_s = [one for one in seconds if one is not None]
    slack_s = min((most - one for most, one in zip(patience_s, times_s, strict=True)), default=0.0)
    longest_s = BLOCK_SHARE * min(patience_s, default=0.0)
    return [
        math.ceil(one / longest_s)
        if one is not None and one > slack_s and (1.0 - slack_s / one) ** lanes > HELD_UP
        else 1
        for one in seconds
    ]


def even_cuts(graph: Graph, blocks: int) -> tuple[int, ...]:
    """Base cuts for so many blocks of about equal shares of the arithmetic, as far as there are such cuts."""
    if blocks < 2 or not graph.base_cuts:
        return ()
    done = list(accumulate(operator.flop for operator in graph.operators))
    return tuple(
        sorted(
            {
                min(graph.base_cuts, key=lambda cut: abs(done[cut - 1] - done[-1] * part / blocks))
                for part in range(1, blocks)
            }
        )
    )


def fastest(times_s: Mapping[str, float], default: str) -> str:
    """The executor with the shortest time, `default` unless another one is clearly faster.

    `times_s`: by executor, infinity where it cannot run the model.
    """
    if not times_s:
        return default
    best = min(times_s, key=lambda name: (times_s[name], name))
    known_s = times_s.get(default)
    return best if known_s is None or times_s[best] <= CLEARLY * known_s else default
