"""The plan of a device on which nothing was searched yet: good without a choice, known without a search.

Of all ways to share the cores (`stageloom.shared.search.arrangements`) it is the one that carries most. That
is worked out from the times that were measured (`deadline_load`), for tasks that are wanted within a few
times their own time. What really arrives, re-plans go by.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from stageloom.shared.plan import ExecutorOptions, Plan
from stageloom.shared.search.arrangements import (
    HANDOVER_S,
    STEP_S,
    Arrangement,
    Times,
    arranged_plan,
    arrangements,
    likely_blocks_s,
    patience_of,
    unpinned,
    usable_times,
)
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.search.deadline_load import load_within_deadlines, most_load
from stageloom.shared.search.lane_load import BESIDE, ServedModel

AUTO: Final = "auto"
"""The name of this plan where a scheduler is asked for."""

BETTER: Final = 1.02
"""An arrangement must carry so many times the load of each simpler one: what is worked out is no truth."""


def auto_plan(
    models: Sequence[ModelChoice],
    known: Sequence[Times],
    default: ExecutorOptions,
    cores: Sequence[int],
    *,
    whole: bool = False,
    pinned: bool = True,
) -> Plan:
    """The plan that carries most of those that are tried. `known`: by model, as far as times are known.

    `default` runs what was not measured. `whole`: no model is cut, whatever it holds up. Unless
    `pinned`, lanes keep to no core: there are so many, and which they are is not known.

    Raises:
        PlanError: the plan would not be legal.
    """
    most = [1 if whole else len(one.graph.base_cuts) + 1 for one in models]
    plan = arranged_plan(models, best_arrangement(known, most, default, len(cores)), cores)
    return plan if pinned else unpinned(plan)


def best_arrangement(
    known: Sequence[Times],
    most_blocks: Sequence[int],
    default: ExecutorOptions,
    cores: int,
) -> Arrangement:
    """Of all arrangements the one that carries most. `known` and `most_blocks`: by model.

    A lane per core and whole models unless another is clearly better, or while some model is unknown.
    """
    known = usable_times(known)  # a task is not due by a time that no plan can give it
    patience_s = [patience_of(one) for one in known]
    simple, *others = arrangements(known, most_blocks, default, cores, patience_s)
    if not others or any(one is None for one in patience_s):
        return simple
    best, most = simple, BETTER * _carried(simple, known, patience_s)
    for other in others:
        if (carried := _carried(other, known, patience_s, at_least=most)) > most:
            best, most = other, BETTER * carried
    return best


def split_carries_more(
    known: Times, most_blocks: int, default: ExecutorOptions, cores: int, split_s: float
) -> bool:
    """Whether a model whose task takes `split_s`, split over two cores, carries clearly more than in its best
    arrangement. Such a plan has one lane, whatever other cores there are."""
    (times,) = usable_times([known])
    patience_s = patience_of(times)
    if patience_s is None:
        return False
    best = best_arrangement([times], [most_blocks], default, cores)
    both = replace(default, intra_op_threads=2)
    split = Arrangement(lanes=1, width=2, blocks=(1,), run_by=(both,))
    most = BETTER * _carried(best, [times], [patience_s])
    return _carried(split, [{**times, both: split_s}], [patience_s], at_least=most) > most


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
    for at, (times, options, blocks, most_s) in enumerate(
        zip(known, one.run_by, one.blocks, patience_s, strict=True)
    ):
        assert most_s is not None
        blocks_s = tuple(taken + STEP_S for taken in likely_blocks_s(options, times[options], blocks))
        left_s = most_s - HANDOVER_S
        served.append(ServedModel(blocks_s=blocks_s, deadline_s=left_s, express=at in one.express))
    alone_s = [min(times.values()) for times in known]
    by_work = [
        replace(model, weight=1.0 / (taken + STEP_S)) for model, taken in zip(served, alone_s, strict=True)
    ]
    least = at_least**2 / most_load(by_work, lanes)
    carried = load_within_deadlines(served, lanes, at_least=least, beside=BESIDE)
    if carried <= 0.0:
        return 0.0
    least = at_least**2 / carried
    return math.sqrt(carried * load_within_deadlines(by_work, lanes, at_least=least, beside=BESIDE))
