"""The plan of a device on which nothing was searched yet: good without a choice, known without a search.

Of all ways to share the cores (`stageloom.shared.search.arrangements`) it is the one that carries most. That
is worked out from the times that were measured (`deadline_load`), for tasks that are wanted within a few
times their own time. What really arrives, re-plans go by.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from stageloom.shared.ids import Digest
from stageloom.shared.plan import ExecutorOptions, Plan
from stageloom.shared.search.arrangements import (
    STEP_S,
    Arrangement,
    Times,
    arranged_plan,
    arrangements,
    patience_of,
    with_borders,
)
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.search.deadline_load import load_within_deadlines
from stageloom.shared.search.lane_load import ServedModel

AUTO: Final = "auto"
"""The name of this plan where a scheduler is asked for."""

BETTER: Final = 1.02
"""Wider lanes, and cuts, must carry so many times the load of whole models on a lane per core."""


def auto_plan(
    models: Sequence[ModelChoice],
    times: Mapping[Digest, Times],
    default: ExecutorOptions,
    cores: Sequence[int],
    *,
    whole: bool = False,
) -> Plan:
    """The plan that carries most of those that are tried. `times`: by artifact, as far as they are known.

    `default` runs what was not measured. `whole`: no model is cut, whatever it holds up.

    Raises:
        PlanError: the plan would not be legal.
    """
    known = [times.get(one.artifact, {}) for one in models]
    most = [1 if whole else len(one.graph.base_cuts) + 1 for one in models]
    return arranged_plan(models, best_arrangement(known, most, default, len(cores)), cores)


def best_arrangement(
    known: Sequence[Times],
    most_blocks: Sequence[int],
    default: ExecutorOptions,
    cores: int,
) -> Arrangement:
    """Of all arrangements the one that carries most. `known` and `most_blocks`: by model.

    A lane per core and whole models unless another is clearly better, or while some model is unknown.
    """
    patience_s = [patience_of(one) for one in known]
    simple, *others = arrangements(known, most_blocks, default, cores, patience_s)
    if not others or any(one is None for one in patience_s):
        return simple
    best, most = simple, BETTER * _carried(simple, known, patience_s)
    for other in others:
        if (carried := _carried(other, known, patience_s, at_least=most)) > most:
            best, most = other, carried
    return best


def _carried(
    one: Arrangement, known: Sequence[Times], patience_s: Sequence[float | None], *, at_least: float = 0.0
) -> float:
    """The load that an arrangement carries: the geometric mean over two mixes of models.

    One has equally many tasks of each model, the other equal shares of the processor. 0 where it is less than
    `at_least`, or a model cannot run.
    """
    if any(
        times.get(options, math.inf) == math.inf for times, options in zip(known, one.run_by, strict=True)
    ):
        return 0.0
    served = []
    lanes = one.lanes if one.width else 1  # what several lanes add on a GPU differs from one to the next
    for times, options, blocks, most_s in zip(known, one.run_by, one.blocks, patience_s, strict=True):
        assert most_s is not None
        block_s = with_borders(options, times[options], blocks) / blocks + STEP_S
        served.append(ServedModel(blocks_s=(block_s,) * blocks, deadline_s=most_s))
    alone_s = [min(times.values()) for times in known]
    by_work = [replace(model, weight=1.0 / taken) for model, taken in zip(served, alone_s, strict=True)]
    carried = load_within_deadlines(served, lanes)
    if carried <= 0.0:
        return 0.0
    return math.sqrt(carried * load_within_deadlines(by_work, lanes, at_least=at_least**2 / carried))
