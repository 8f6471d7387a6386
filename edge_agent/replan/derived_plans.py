"""Plans made from the one that runs: of the same artifacts, as a trigger's answer. Pure.

The lifecycle core decides whether one may run: it knows the autonomy that the planner granted and whether
it answers; see `stageloom.edge_agent.lifecycle.local`.
"""

import logging
from functools import lru_cache

from stageloom.edge_agent.lifecycle.states import PlanRef, RunnablePlan
from stageloom.edge_agent.replan.alarms import Fired
from stageloom.shared.errors import PlanError
from stageloom.shared.messages.control import Origin
from stageloom.shared.plan import Plan, decode_plan
from stageloom.shared.policy.plain import plain_replan

_log = logging.getLogger(__name__)

_decoded = lru_cache(maxsize=2)(decode_plan)
"""The planner waits for the alarm; what runs is seldom another plan than at the alarm before."""


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
