"""What answers each verb of the API. A command without a planner imports only what answers its own verb."""

from importlib import import_module
from typing import Any, Final

from stageloom.planner.api.context import HANDLERS, Handler
from stageloom.planner.api.route import Route

_MODULES: Final = {
    "access": ("service",),
    "device": ("devices",),
    "explanation": ("plans",),
    "job": ("service",),
    "model": ("models",),
    "plan": ("plans",),
    "policy": ("policies",),
    "prediction": ("predictions",),
    "replan": ("devices", "service"),
    "rollout": ("rollouts",),
    "scheduler": ("schedulers",),
    "service": ("service",),
    "telemetry": ("telemetry",),
    "training": ("trainings",),
    "trial": ("plans",),
    "webhook": ("webhooks",),
}
"""By the module of `stageloom.planner.schema` that holds a request, who may answer it."""


def handler_of(route: Route[Any, Any]) -> Handler:
    """What answers a verb."""
    if route not in HANDLERS:
        for module in _MODULES[route.request.__module__.rpartition(".")[2]]:
            import_module(f"{__name__}.{module}")
    return HANDLERS[route]
