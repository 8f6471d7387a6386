"""The audit log."""

from typing import Final
from urllib.parse import urlencode

from stageloom.planner.api import routes
from stageloom.planner.api.handlers.plans import position
from stageloom.planner.api.page.visit import Rendered, Visit
from stageloom.planner.store.access import audit_entries

_OUTCOMES: Final = {"": None, "done": False, "refused": True}
_PAGE: Final = 64


def audit(visit: Visit) -> Rendered:
    """What was changed, or tried; newest first, filtered by who, what and how it went."""
    visit.require(routes.AUDIT_LIST.role)
    chosen = {name: visit.query.get(name, "")[:128].strip() for name in ("who", "about", "outcome")}
    entries, following = visit.api.reader.read(
        audit_entries,
        before=position(visit.query.get("after", "")),
        limit=_PAGE,
        who=chosen["who"],
        about=chosen["about"],
        refused=_OUTCOMES.get(chosen["outcome"]),
    )
    more = urlencode({**chosen, "after": following}) if following else ""
    return Rendered("audit.html", {"entries": entries, "chosen": chosen, "next": more})
