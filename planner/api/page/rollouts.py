"""Rollouts: which versions go where, how far they are, and the buttons that hold, resume and end them."""

from typing import Any, Final

from stageloom.planner.api import routes
from stageloom.planner.api.page.fleet import Badge
from stageloom.planner.api.page.visit import Rendered, Visit
from stageloom.planner.schema.rollout import (
    AskState,
    RolloutDevicesRequest,
    RolloutInfo,
    RolloutListRequest,
    RolloutShowRequest,
    RolloutState,
)
from stageloom.planner.store.rollout_needs import REVERSIBLE

_TONES: Final = {
    RolloutState.RUNNING.value: "busy",
    RolloutState.PAUSED.value: "plain",
    RolloutState.STOPPED.value: "bad",
    RolloutState.COMPLETED.value: "good",
    AskState.ASKED.value: "busy",
    AskState.DONE.value: "good",
    AskState.FAILED.value: "bad",
}


def rollout_badge(state: RolloutState | AskState) -> Badge:
    """A state as the pages colour it."""
    return Badge(state.value, _TONES.get(state.value, "off"))


def rollouts(visit: Visit) -> Rendered:
    """Newest first."""
    page = visit.ask(routes.ROLLOUT_LIST, RolloutListRequest, after=visit.query.get("after", ""), limit=50)
    rows = [(info, rollout_badge(info.state)) for info in page.items]
    return Rendered("rollouts.html", {"rows": rows, "next": page.next})


def show(visit: Visit) -> Rendered:
    """One rollout with its devices."""
    page = visit.ask(
        routes.ROLLOUT_DEVICES,
        RolloutDevicesRequest,
        rollout=visit.path["rollout"],
        after=visit.query.get("after", ""),
        limit=50,
    )
    devices = [(one, rollout_badge(one.state)) for one in page.items]
    return Rendered("rollout.html", {**_figures(visit), "devices": devices, "next": page.next})


def live(visit: Visit) -> Rendered:
    """How far it is; the buttons only where others are right now."""
    figures = _figures(visit)
    return Rendered("rollout_live.html", {**figures, "buttons": visit.query.get("buttons") != figures["key"]})


def _figures(visit: Visit) -> dict[str, Any]:
    info: RolloutInfo = visit.ask(routes.ROLLOUT_SHOW, RolloutShowRequest, rollout=visit.path["rollout"])
    return {
        "rollout": info,
        "state": rollout_badge(info.state),
        "numbers": [(state.value, getattr(info, state.value)) for state in AskState],
        "key": info.state.value,
        "reversible": info.state.value in REVERSIBLE,
        "buttons": False,
    }


def confirm_abort(visit: Visit) -> Rendered:
    """The question before a rollout ends."""
    visit.require(routes.ROLLOUT_ABORT.role)
    return Rendered("rollout_abort.html", _figures(visit))
