"""Plans: the list, one as its timeline, and why it is as it is."""

from stageloom.planner.api import routes
from stageloom.planner.api.page.timeline import draw
from stageloom.planner.api.page.visit import Rendered, Visit
from stageloom.planner.schema.explanation import PlanExplainRequest
from stageloom.planner.schema.plan import ExportFormat, PlanExportRequest, PlanListRequest, PlanShowRequest
from stageloom.planner.store.generations import device_of_plan


def plans(visit: Visit) -> Rendered:
    """Plans by name."""
    page = visit.ask(routes.PLAN_LIST, PlanListRequest, after=visit.query.get("after", ""), limit=50)
    return Rendered("plans.html", {"plans": page.items, "next": page.next})


def show(visit: Visit) -> Rendered:
    """A plan's facts; timeline and explanation come once they are made, both under one device's costs."""
    info = visit.ask(routes.PLAN_SHOW, PlanShowRequest, plan=visit.path["plan"])
    device = visit.query.get("device") or visit.api.reader.read(device_of_plan, info.digest)
    return Rendered("plan.html", {"plan": info, "device_name": device or ""})


def timeline(visit: Visit) -> Rendered:
    """The predicted timeline under a device's costs, or under estimates."""
    export = visit.ask(
        routes.PLAN_EXPORT,
        PlanExportRequest,
        plan=visit.path["plan"],
        format=ExportFormat.PERFETTO.value,
        device=visit.query.get("device") or None,
    )
    return Rendered("timeline.html", {"drawing": draw(export.files[0].text), "plan": export.plan})


def explanation(visit: Visit) -> Rendered:
    """Blocks and their costs, who decided for the plan, what else there was."""
    found = visit.ask(
        routes.PLAN_EXPLAIN,
        PlanExplainRequest,
        plan=visit.path["plan"],
        device=visit.query.get("device") or None,
    )
    return Rendered("explanation.html", {"said": found})
