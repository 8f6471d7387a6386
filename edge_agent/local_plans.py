"""What the agent makes of a trigger that fired: the alarm for the planner, and plans of its own. Pure.

Whether a plan made here may run is the link core's to say, which knows the autonomy that the planner
granted and whether it answers; see `edge_agent.link.local`.
"""

import logging
from functools import lru_cache

from edge_agent.alarms import Fired
from edge_agent.link.events import AlarmRaised, PlanRef, RunnablePlan
from edge_agent.telemetry import row_name
from shared.errors import PlanError
from shared.messages.control import AlarmSample, ModelLoad, Origin
from shared.plan import Plan, decode_plan
from shared.policy.plain import plain_replan

_log = logging.getLogger(__name__)

_decoded = lru_cache(maxsize=2)(decode_plan)
"""The planner waits for the alarm; what runs is seldom another plan than at the alarm before."""
_MODELS = 64  # what an alarm holds
_BLOCKS = 62  # what a mask holds


def alarm_raised(fired: Fired, running: RunnablePlan | None, at_us: int) -> AlarmRaised:
    """Everything the link core needs; `at_us` is the wall clock."""
    return AlarmRaised(
        at_us=at_us,
        cause=fired.firing.cause.value,
        value=fired.firing.value,
        threshold=fired.firing.threshold,
        plan=running.ref.digest if running else None,
        loads=tuple(
            ModelLoad(
                row_name(load.model),
                load.arrivals_per_s,
                load.service_s * 1e6,
                load.queued,
                round(load.oldest_age_s * 1e6),
            )
            for load in fired.loads[:_MODELS]
        ),
        samples=tuple(
            AlarmSample(
                tuple(_mask(blocks) for blocks in sample.progress[:_MODELS]),
                tuple(sample.deviation[:_MODELS]),
            )
            for sample in fired.firing.samples
        ),
    )


def decoded(running: RunnablePlan) -> Plan | None:
    """The running plan; None where it cannot be read."""
    try:
        return _decoded(running.wire, running.ref.digest)
    except PlanError as error:
        _log.error("the running plan cannot be read: %s", error)
        return None


def runnable(plan: Plan, running: RunnablePlan) -> RunnablePlan:
    """A plan made from the one that runs, of the same artifacts."""
    return RunnablePlan(PlanRef(plan.digest, Origin.LOCAL), plan.wire, running.artifacts)


def plain_plan(fired: Fired, running: RunnablePlan | None) -> RunnablePlan | None:
    """The running plan with launch intervals for these loads; None where none would change."""
    before = None if running is None else decoded(running)
    if running is None or before is None:
        return None
    plan = plain_replan(before, fired.loads)
    return None if plan is before else runnable(plan, running)


def _mask(blocks: tuple[int, ...]) -> int:
    return sum(bit << at for at, bit in enumerate(blocks[:_BLOCKS]))
