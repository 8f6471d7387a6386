"""Where what a device served does not fit to what else is known: steps that others disturbed, and predictions
whose utilisation and queues contradict what was measured. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from stageloom.planner.twin.calibrate import StepSample
from stageloom.shared.ids import Digest
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.arrangements import with_borders

DISTURBED: Final = 1.25
"""Steps that took so many times what whole models take alone are no measure of the plan: as for a drift."""

_ALWAYS: Final = 0.98
_BUSY: Final = 0.95
_RATHER: Final = 0.8  # of what was predicted
_IDLE: Final = 0.5
_MORE: Final = 10.0  # than random arrivals explain

WholeTimes = Mapping[Digest, Mapping[tuple[ExecutorOptions, int], float]]
"""Seconds of one run of a whole model alone, by artifact, executor and batch."""


def over_alone(samples: Sequence[StepSample], whole: WholeTimes) -> float | None:
    """What models took in steps of their own over what they take alone; None where nothing can be compared.

    Only models all of whose blocks were sampled, each in steps that ran nothing else, on one executor.
    """
    took: dict[tuple[str, int], dict[int, StepSample]] = {}
    for sample in samples:
        members = sample.bound.combined[sample.combined].plan.members
        active = [member for at, member in enumerate(members) if sample.mask >> at & 1]
        if len(active) == 1:
            took.setdefault((sample.bound.plan.digest, active[0].model), {})[active[0].block] = sample
    took_s, alone_s = 0.0, 0.0
    for (_, model), by_block in took.items():
        bound = next(iter(by_block.values())).bound
        options = {bound.executor_of(sample.combined) for sample in by_block.values()}
        blocks = bound.plan.models[model].num_blocks
        if len(by_block) < blocks or len(options) > 1:
            continue
        (one,) = options
        known_s = whole.get(bound.plan.models[model].artifact, {}).get((one, 1), math.inf)
        if known_s < math.inf:
            took_s += math.fsum(sample.seconds for sample in by_block.values())
            alone_s += with_borders(one, known_s, blocks)
    return took_s / alone_s if alone_s > 0.0 else None


def doubt_of(predicted: Mapping[str, float], measured: Mapping[str, float] | None, lanes: int) -> str:
    """What contradicts itself in a prediction and what was measured of its plan since; empty: nothing does.

    Both are figures as `stageloom.planner.twin.replay.figures` makes them.
    """
    busy, waiting = _busy(predicted, lanes), _waiting(predicted)
    then = None if measured is None else _busy(measured, lanes)
    if busy >= _BUSY and then is not None and then <= _RATHER * busy:
        return (
            f"lanes were predicted to be busy {_percent(busy)} of the time and were {_percent(then)}: "
            "the twin's steps take longer than the device's, its queues are not to be believed"
        )
    if measured is not None and then is not None and then <= _IDLE:
        waited = _waiting(measured)
        if waited > 1.0 + _MORE * _explained(then):
            return (
                f"{waited:.1f} tasks waited while lanes were busy {_percent(then)} of the time: they come in "
                "bursts, or something that the twin does not know holds them up"
            )
    if measured is None and busy >= _ALWAYS and waiting > 1.0:
        return (
            "more tasks arrive than the plan is predicted to carry: its queues grow, and latencies say how "
            "long was simulated"
        )
    return ""


def _busy(figures: Mapping[str, float], lanes: int) -> float:
    return figures.get("steps_running", 0.0) / max(lanes, 1)


def _waiting(figures: Mapping[str, float]) -> float:
    """Tasks in all queues, the mean over time."""
    return math.fsum(value for name, value in figures.items() if name.endswith(".queued_mean"))


def _explained(busy: float) -> float:
    """Waiting tasks of one lane under random arrivals (Pollaczek and Khinchine); more lanes have fewer."""
    return busy * busy / (2.0 * (1.0 - busy))


def _percent(share: float) -> str:
    return f"{100.0 * share:.0f} %"
