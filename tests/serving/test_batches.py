"""A batch whose tasks find no room all at once, over a client of the agent that a test plays."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stageloom.edge_agent.ingest.messages import ModelSignature, TensorInfo
from stageloom.edge_agent.serving import inference
from stageloom.edge_agent.serving.inference import InferenceService
from stageloom.edge_agent.serving.request import GivenInput, InferenceAnswer, InferenceCall
from stageloom.shared.errors import TaskRefused
from tests.serving.played import PlayedTask

ROWS = 5


class _NarrowClient:
    """Has room for so many tasks; each doubles its row once the event loop goes on."""

    def __init__(self, room: int, code: str, rule: str) -> None:
        self.room, self.code, self.rule = room, code, rule
        self.open: list[PlayedTask] = []
        self.refused = 0

    def models(self) -> dict[str, ModelSignature]:
        ends = (TensorInfo("x", "float32", (1, 1)),), (TensorInfo("y", "float32", (1, 1)),)
        return {"double": ModelSignature("double", *ends, batchable=True)}

    def submit(self, model: str, inputs: Any, *, deliver: Callable[[Any], Any], **_: Any) -> PlayedTask:
        task = PlayedTask()
        self.open.append(task)
        if len(self.open) > self.room:
            self.refused += 1
            loser = self.open.pop(0 if self.rule == "oldest" else -1)
            loser.set_exception(TaskRefused(self.code, "there is no room"))
            if self.rule == "raised":
                loser.result()
        asyncio.get_running_loop().call_soon(self._end, task, deliver, 2 * inputs["x"])
        return task

    def _end(self, task: PlayedTask, deliver: Callable[[Any], Any], made: Any) -> None:
        if not task.done():
            self.open.remove(task)
            task.set_result(deliver({"y": made}))


def _infer(
    client: _NarrowClient, monkeypatch: pytest.MonkeyPatch
) -> tuple[InferenceAnswer, InferenceService]:
    monkeypatch.setattr(inference, "Client", lambda path: client)
    service = InferenceService(Path("none"), ROWS)
    rows = GivenInput("x", "FP32", (ROWS, 1), np.arange(ROWS, dtype=np.float32).reshape(ROWS, 1))
    call = InferenceCall("double", "", "", (rows,), None, True, None, 0)
    return asyncio.run(service.infer(call, 0.0)), service


@pytest.mark.parametrize(
    ("code", "rule", "refused"),
    [
        ("queue_full", "newest", ROWS - 2),
        ("queue_full", "oldest", ROWS - 2),
        ("too_many_tasks", "newest", ROWS - 2),
        ("arena_full", "raised", 1),
    ],
)
def test_rows_that_find_no_room_run_after_those_before_them(
    code: str, rule: str, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = _NarrowClient(2, code, rule)
    answer, service = _infer(client, monkeypatch)
    (made,) = answer.outputs
    assert made.shape == (ROWS, 1)
    assert made.elements == [np.float32(2 * row).tobytes() for row in range(ROWS)]
    assert client.refused == refused, "later rounds are no larger than what there is room for"
    assert service.statistics.of("double", 1)["execution_count"] == ROWS


@pytest.mark.parametrize(
    ("room", "code", "rule"),
    [(0, "queue_full", "newest"), (0, "arena_full", "raised"), (2, "not_ready", "newest")],
    ids=["a queue of others' tasks", "memory of others' tasks", "another refusal"],
)
def test_a_batch_is_refused_where_no_task_of_its_own_will_make_room(
    room: int, code: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = _NarrowClient(room, code, rule)
    with pytest.raises(TaskRefused, match="no room") as refusal:
        _infer(client, monkeypatch)
    assert refusal.value.code == code
