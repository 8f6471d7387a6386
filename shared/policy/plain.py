"""The plain re-plan: other launch intervals, from measured arrivals and costs. Pure; both sides use it.

Blocks, replicas and schedules stay as they are, so the new plan needs no trial, only the guard of launch
intervals. It stands where no learned policy does, and is what a learned one is compared with.

Rates: every model is launched at least as fast as its tasks arrive, of late or usually, with some headroom
where the device has it. What is left is shared by queued work, which empties all queues at the same instant:
with surplus u (in device seconds per second), arrivals a, queue length q and service time s of a task

    rate_m = a_m + u q_m / sum_k q_k s_k,    interval_m = 1 / rate_m.

The device has one device second per second and lane: service times are measured beside other lanes' steps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stageloom.shared.plan import ModelPlan, Plan, StepChoice

HEADROOM: Final = 0.25
"""Launches above arrivals where no queue asks for more: at exactly the arrivals a queue can only grow."""

LEAST_SURPLUS: Final = 0.1
"""Of the device: on an overloaded one, queues with more work still go before those with less."""

TOLERANCE: Final = 0.1
"""A shorter or longer interval by less is no change worth a swap."""

_LONGEST_US: Final = 3_600_000_000  # what a plan's launch interval may be


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One model's load at one instant. Unmeasured rates and times are 0."""

    model: str
    arrivals_per_s: float  # of late: what a burst shows in, and chance
    service_s: float  # measured device time of one task
    queued: int
    oldest_age_s: float = 0.0
    usual_per_s: float = 0.0  # arrivals over a minute, or since the load changed; 0: not known
    deadline_s: float = 0.0  # the usual one of its tasks of late, from arrival; 0: none had one

    def __post_init__(self) -> None:
        numbers = (
            self.arrivals_per_s,
            self.service_s,
            self.oldest_age_s,
            self.usual_per_s,
            self.deadline_s,
        )
        if self.queued < 0 or not all(0.0 <= number < math.inf for number in numbers):
            raise ValueError(f"no load of a model: {self}")

    @property
    def expected_per_s(self) -> float:
        """Arrivals to be ready for: a lull of some seconds does not mean that fewer tasks come."""
        return max(self.arrivals_per_s, self.usual_per_s)

    @property
    def queued_work_s(self) -> float:
        """Seconds of device time that wait."""
        return self.queued * self.service_s


def plain_replan(plan: Plan, loads: Sequence[Load]) -> Plan:
    """The plan with launch intervals for these loads; the same value where none of them would change.

    A model's rate never lies below its arrivals, neither those of late nor the usual ones. A model without a
    load, or without arrivals and queue, keeps its interval, as does one that was never measured or, where
    nothing is queued at all, any that keeps up. A plan that needs no intervals gets none.
    """
    if needs_no_intervals(plan):
        return plan
    by_model = {load.model: load for load in loads}
    rates = _rates_per_s(plan, by_model)
    models = tuple(_with_rate(model, by_model.get(model.name), rates) for model in plan.models)
    return plan if models == plan.models else replace(plan, models=models)


def needs_no_intervals(plan: Plan) -> bool:
    """Whether it goes by deadlines and has no launch intervals: in that order they would move nothing."""
    return plan.step_choice is StepChoice.DEADLINE and not any(one.launch_interval_us for one in plan.models)


def _rates_per_s(plan: Plan, loads: Mapping[str, Load]) -> dict[str, float]:
    """Launches a second of every model whose load asks for a change; empty where nothing is queued."""
    known = [loads[model.name] for model in plan.models if model.name in loads]
    measured = [load for load in known if load.service_s > 0.0]
    waiting_s = math.fsum(load.queued_work_s for load in measured)
    if waiting_s <= 0.0:
        return {}
    arriving = math.fsum(load.expected_per_s * load.service_s for load in measured)
    surplus = max(plan.lanes - arriving, LEAST_SURPLUS * plan.lanes)
    headroom = HEADROOM if arriving * (1.0 + HEADROOM) <= plan.lanes else 0.0
    rates = {}
    for load in measured:
        share = load.queued_work_s / waiting_s  # exactly 1 where nothing else waits, however long the queue
        rate_per_s = load.expected_per_s + surplus * share / load.service_s
        rates[load.model] = max(rate_per_s, load.expected_per_s * (1.0 + headroom))
    return rates


def _with_rate(model: ModelPlan, load: Load | None, rates: Mapping[str, float]) -> ModelPlan:
    if load is None:
        return model
    longest_us = _interval_us(load.expected_per_s)
    rate_per_s = rates.get(model.name, 0.0)
    if rate_per_s <= 0.0:  # nothing asks for another rate, other than that it keeps up
        wanted_us = min(model.launch_interval_us, longest_us)
    else:
        wanted_us = _interval_us(rate_per_s)
        now_us = model.launch_interval_us
        if abs(wanted_us - now_us) <= TOLERANCE * now_us and now_us <= longest_us:
            wanted_us = now_us
    return model if wanted_us == model.launch_interval_us else replace(model, launch_interval_us=wanted_us)


def _interval_us(rate_per_s: float) -> int:
    """Whole microseconds per task, rounded towards the faster; the longest that a plan may have for 0."""
    if rate_per_s * _LONGEST_US <= 1e6:
        return _LONGEST_US
    return math.floor(1e6 / rate_per_s)
