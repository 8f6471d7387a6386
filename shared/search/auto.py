"""The plan of a device on which nothing was searched yet: good without a choice, known without a search.

Every model runs whole, in one session of one thread, on whichever executor is known to run it fastest. There
is a lane per core and each lane keeps to its core: threads that stay where their weights are cached, and that
never wait for each other inside an operator, do more work than pools that share the cores. The task whose
deadline comes first goes first, whatever its model.

A step is never interrupted. Where the steps of a long model would hold up another model's tasks beyond what
these can wait, the long model leaves the last core free for the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

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


@dataclass(frozen=True)
class KnownModel:
    """What was measured of a model: which executor runs it, and the seconds it takes there on one thread."""

    executor: str
    seconds: float


def auto_plan(
    models: Sequence[ModelChoice], known: Mapping[Digest, KnownModel], default: str, cores: Sequence[int]
) -> Plan:
    """A lane per core. `known`: by artifact; `default` runs the models that are not there.

    Raises:
        PlanError: the plan would not be legal.
    """
    lanes = min(len(cores), MAX_LANES)
    whole = [
        replace(one, partition="whole", replicas=lanes, queue=QueuePlan(rule=QueueRule.DEADLINE))
        for one in models
    ]
    run_by = [known[one.artifact].executor if one.artifact in known else default for one in models]
    long = long_models([known[m.artifact].seconds if m.artifact in known else None for m in models], lanes)
    shared = tuple(range(lanes - 1))  # the resources that long models may use
    names = list(dict.fromkeys(run_by))
    plan = compose(
        whole,
        scheduler="sequential",
        lanes=lanes,
        executor=ExecutorOptions(name=names[0]),
        rules=Rules(step_choice=StepChoice.DEADLINE),
    )
    return replace(
        plan,
        combined=tuple(
            replace(
                block,
                executor=names.index(run_by[block.members[0].model]),
                resources=shared if block.members[0].model in long else (),
            )
            for block in plan.combined
        ),
        further_executors=tuple(ExecutorOptions(name=name) for name in names[1:]),
        resources=tuple(Resource(cores=(core,)) for core in cores[:lanes]),
        lane_resources=tuple(range(lanes)),
    )


def long_models(seconds: Sequence[float | None], lanes: int) -> frozenset[int]:
    """The models whose steps would hold up another model's tasks, by number; `seconds` per model, if known.

    A task that arrives while each of n lanes is in a step of t seconds waits longer than s with probability
    (1 - s / t)^n, as the times left are uniform; s is what the task can wait beyond its own time.
    """
    if lanes < 2:
        return frozenset()
    times_s = [one for one in seconds if one is not None]
    slack_s = min((max(URGENCY * one, LEAST_PATIENCE_S) - one for one in times_s), default=0.0)
    return frozenset(
        index
        for index, one in enumerate(seconds)
        if one is not None and one > slack_s and (1.0 - slack_s / one) ** lanes > HELD_UP
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
