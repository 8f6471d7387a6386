"""Plans that move what searches leave alone: lanes, threads, replicas, executors, cuts, batches, order. Pure.

Proposed are all ways to share the device's cores (`stageloom.shared.search.arrangements`), of which `auto`
takes its plan, too: lanes times threads within the cores, a replica for each lane, each model on the
executor that is fastest there, whole or cut, the earliest deadline first; the plan that runs with that step
choice; and each of them with larger batches, where the device measured that those take less per task. Models
that run abreast are whole ones on several lanes, pipelines are cut ones. Whether a plan is better is judged
elsewhere.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from stageloom.planner.replan.judge import ModelDemand
from stageloom.planner.replan.scene import WayTimes
from stageloom.shared.plan import ExecutorOptions, Plan, QueueRule, StepChoice, Wait
from stageloom.shared.search.arrangements import (
    BY_DEADLINE,
    Times,
    arranged_plan,
    arrangements,
    patience_of,
)
from stageloom.shared.search.compose import ModelChoice

MOST_BLOCKS: Final = 8
"""Of a cut model: each has a border."""

BATCH_GAIN: Final = 0.9
"""A batch is worth it where a task of it takes at most this part of a task alone."""


def levers(
    incumbent: Plan,
    models: Sequence[ModelChoice],
    times: Sequence[WayTimes],
    demand: Sequence[ModelDemand],
    cores: Sequence[int],
) -> list[Plan]:
    """Plans to judge, each structure once and the running one's never. All but the plan are by model.

    `times`: what is known of whole models; what is not there is not proposed.
    """
    known = [_of_one(ways) for ways in times]
    patience_s = [
        usual if load.deadline_s == math.inf else load.deadline_s
        for usual, load in zip((patience_of(one) for one in known), demand, strict=True)
    ]
    most = [min(len(one.graph.base_cuts) + 1, MOST_BLOCKS) for one in models]
    found = [
        arranged_plan([replace(one, batch=1) for one in models], arrangement, cores)
        for arrangement in arrangements(known, most, incumbent.executor, len(cores), patience_s)
        if all(options in one for options, one in zip(arrangement.run_by, known, strict=True))
    ]
    found += [by_deadline(incumbent)] if may_go_by_deadline(incumbent) else []
    found += [plan for one in [*found, incumbent] for plan in _batched(one, models, times)]
    return [
        one
        for one in {plan.structure: plan for plan in found}.values()
        if one.structure != incumbent.structure
    ]


def _of_one(ways: WayTimes) -> Times:
    return {options: taken for (options, batch), taken in ways.items() if batch == 1 and taken < math.inf}


def by_deadline(plan: Plan) -> Plan:
    """The plan with the earliest deadline first over all models, and what can no longer end in time given up.

    Launch intervals go: no strict ones serve more in time (docs/learning.md, "The launcher").
    """
    models = tuple(
        replace(one, launch_interval_us=0, queue=replace(one.queue, rule=QueueRule.DEADLINE))
        for one in plan.models
    )
    return replace(
        plan,
        models=models,
        step_choice=BY_DEADLINE.step_choice,
        max_skips=BY_DEADLINE.max_skips,
        run_ahead=BY_DEADLINE.run_ahead,
    )


def may_go_by_deadline(plan: Plan) -> bool:
    """Whether `by_deadline` is another order than the plan's: combined blocks that wait keep their own."""
    return plan.step_choice is not StepChoice.DEADLINE and plan.wait is Wait.NONE


def _batched(plan: Plan, models: Sequence[ModelChoice], times: Sequence[WayTimes]) -> list[Plan]:
    """The plan with the batches that take least per task; none where no larger one is known to take less."""
    by_model: Mapping[int, ExecutorOptions] = {
        member.model: plan.executors[block.executor] for block in plan.combined for member in block.members
    }
    best = [
        _best_batch(ways, by_model[index], model.batch)
        for index, (model, ways) in enumerate(zip(plan.models, times, strict=True))
    ]
    if best == [model.batch for model in plan.models]:
        return []
    changed = [replace(model, batch=batch) for model, batch in zip(plan.models, best, strict=True)]
    return [replace(plan, models=tuple(changed))]


def _best_batch(ways: WayTimes, options: ExecutorOptions, batch: int) -> int:
    each = {size: taken / size for (one, size), taken in ways.items() if one == options and taken < math.inf}
    if not each or batch not in each:
        return batch
    best = min(each, key=lambda size: (each[size], size))
    return best if each[best] <= BATCH_GAIN * each[batch] else batch
