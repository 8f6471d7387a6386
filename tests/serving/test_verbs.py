"""What the verbs answer by themselves, over a service that a test plays."""

import asyncio
from typing import Any, cast

from stageloom.edge_agent.ingest.messages import ModelSignature, TensorInfo
from stageloom.edge_agent.serving.inference import InferenceService
from stageloom.edge_agent.serving.regions import RegionTable
from stageloom.edge_agent.serving.verbs import Verbs


class _PlayedService:
    """Serves the model `tiny`, where there is no `reason` not to."""

    def __init__(self) -> None:
        self.reason = ""

    async def refresh(self) -> dict[str, tuple[ModelSignature, ...]]:
        ends = (TensorInfo("x", "float32", (1, 1)),), (TensorInfo("y", "float32", (1, 1)),)
        return {"tiny": (ModelSignature("tiny", *ends, version=3),)}

    async def not_ready(self) -> str:
        return self.reason


def test_no_model_is_listed_as_ready_while_no_task_would_be_taken() -> None:
    """1. The engine runs. 2. It crashes, and its plan's models stay known."""
    service = _PlayedService()
    verbs = Verbs(cast(InferenceService, service), RegionTable())

    def index(ready: bool) -> list[dict[str, Any]]:
        return asyncio.run(verbs.index(ready=ready))

    listed = {"name": "tiny", "version": "3"}
    assert index(ready=False) == index(ready=True) == [{**listed, "state": "READY", "reason": ""}]
    service.reason = "the engine process is starting"
    assert index(ready=False) == [{**listed, "state": "UNAVAILABLE", "reason": service.reason}]
    assert index(ready=True) == []
