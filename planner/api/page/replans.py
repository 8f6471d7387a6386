"""Re-plans of the whole fleet: which alarm began each, and how it ended."""

from stageloom.planner.api import routes
from stageloom.planner.api.page.fleet import plan_state
from stageloom.planner.api.page.visit import Rendered, Visit
from stageloom.planner.schema.replan import ReplanListRequest


def replans(visit: Visit) -> Rendered:
    """Newest first."""
    page = visit.ask(
        routes.REPLAN_LIST,
        ReplanListRequest,
        device=visit.query.get("device") or None,
        after=visit.query.get("after", ""),
        limit=50,
    )
    rows = [(info, plan_state(info.outcome)) for info in page.items]
    return Rendered(
        "replans.html", {"rows": rows, "next": page.next, "device_name": visit.query.get("device", "")}
    )
