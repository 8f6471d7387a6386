"""Every page and part of a page, once."""

from typing import Final

from stageloom.planner.api.page import audit, device, fleet, model, plan, replans, rollouts
from stageloom.planner.api.page.visit import View

VIEWS: Final[tuple[tuple[str, View], ...]] = (
    ("/ui/fleet", fleet.fleet),
    ("/ui/fleet/live", fleet.live),
    ("/ui/devices/{device}", device.show),
    ("/ui/devices/{device}/live", device.live),
    ("/ui/devices/{device}/curves", device.curves),
    ("/ui/devices/{device}/revoke", device.confirm_revoke),
    ("/ui/devices/{device}/jobs/{job}", device.job),
    ("/ui/devices/{device}/jobs/{job}/progress", device.progress),
    ("/ui/plans", plan.plans),
    ("/ui/plans/{plan}", plan.show),
    ("/ui/plans/{plan}/timeline", plan.timeline),
    ("/ui/plans/{plan}/explanation", plan.explanation),
    ("/ui/models", model.models),
    ("/ui/models/compare", model.compare),
    ("/ui/replans", replans.replans),
    ("/ui/rollouts", rollouts.rollouts),
    ("/ui/rollouts/{rollout}", rollouts.show),
    ("/ui/rollouts/{rollout}/live", rollouts.live),
    ("/ui/rollouts/{rollout}/abort", rollouts.confirm_abort),
    ("/ui/audit", audit.audit),
)

SLOW_VIEWS: Final[frozenset[View]] = frozenset({device.curves, plan.timeline, plan.explanation})
"""Parts of a page that wait for what is computed beside the planner, which may take minutes."""
