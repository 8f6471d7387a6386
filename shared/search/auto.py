"""The plan of a device on which nothing was searched yet: good without a choice, known without a search.

Every model runs whole, in one session of one thread, on whichever executor is known to run it fastest. There
is a lane per core and each lane keeps to its core: threads that stay where their weights are cached, and that
never wait for each other inside an operator, do more work than pools that share the cores. The task whose
deadline comes first goes first, whatever its model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from stageloom.shared.ids import Digest
from stageloom.shared.plan import MAX_LANES, ExecutorOptions, Plan, QueuePlan, QueueRule, Resource, StepChoice
from stageloom.shared.search.compose import ModelChoice, Rules, compose

CLEARLY: Final = 0.97
"""An executor takes the place of another if it takes at most this part of its time: less may be noise."""


def auto_plan(
    models: Sequence[ModelChoice], executors: Mapping[Digest, str], default: str, cores: Sequence[int]
) -> Plan:
    """`executors`: by artifact, the one that runs it; `default` runs the others. A lane per core.

    Raises:
        PlanError: the plan would not be legal.
    """
    lanes = min(len(cores), MAX_LANES)
    whole = [
        replace(one, partition="whole", replicas=lanes, queue=QueuePlan(rule=QueueRule.DEADLINE))
        for one in models
    ]
    run_by = [executors.get(model.artifact, default) for model in models]
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
            replace(block, executor=names.index(run_by[block.members[0].model])) for block in plan.combined
        ),
        further_executors=tuple(ExecutorOptions(name=name) for name in names[1:]),
        resources=tuple(Resource(cores=(core,)) for core in cores[:lanes]),
        lane_resources=tuple(range(lanes)),
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
