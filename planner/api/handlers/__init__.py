"""What answers each verb of the API. Importing this package registers all of it."""

from stageloom.planner.api.handlers import (
    devices,
    explanations,
    models,
    plans,
    policies,
    predictions,
    schedulers,
    simulations,
    telemetry,
    trainings,
)
from stageloom.planner.api.handlers.service import hold_tokens

__all__ = [
    "devices",
    "explanations",
    "hold_tokens",
    "models",
    "plans",
    "policies",
    "predictions",
    "schedulers",
    "simulations",
    "telemetry",
    "trainings",
]
