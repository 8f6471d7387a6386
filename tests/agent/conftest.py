"""An endpoint on a thread of this process, with a backend that the test plays."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from stageloom.edge_agent.ingest.connection import Arena, ConnectionLimits, Layout
from stageloom.edge_agent.ingest.endpoint import Accepted, Endpoint
from stageloom.edge_agent.ingest.ledger import TaskLedger
from stageloom.edge_agent.ingest.messages import ModelInfo, TensorInfo
from stageloom.edge_agent.loop import Loop
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.ids import TaskId

ECHO = ModelInfo(
    "echo", (TensorInfo("input", "float32", (1, 4)),), (TensorInfo("output", "float32", (1, 4)),)
)
TWIN = ModelInfo(
    "twin", (TensorInfo("input", "float32", (1, 4)),), (TensorInfo("result", "float32", (1, 4)),)
)


def eventually(
    condition: Callable[[], object], what: str, within_s: float = 20.0, pause_s: float = 0.002
) -> None:
    """Poll until `condition` holds."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {within_s} s: {what}")
        time.sleep(pause_s)


class PlayedBackend:
    """Keeps accepted tasks until the test answers them; with `echo` outputs are the first input's bytes."""

    def __init__(self) -> None:
        self.infos: dict[str, ModelInfo] = {"echo": ECHO, "twin": TWIN}
        self.why_not_ready = ""
        self.echo = False
        self.accepted: list[Accepted] = []
        self.cancelled: list[TaskId] = []
        self.arenas: dict[int, mmap.mmap] = {}
        self.dropped_layouts: list[int] = []
        self.endpoint: Endpoint | None = None

    def models(self) -> Mapping[str, ModelInfo]:
        return self.infos

    def not_ready(self) -> str:
        return self.why_not_ready

    def submit(self, task: Accepted) -> None:
        self.accepted.append(task)
        if self.echo:
            self.complete(task)

    def complete(self, task: Accepted) -> None:
        assert self.endpoint is not None
        source = task.layout.inputs[0]
        data = self.arenas[source.arena][source.offset_bytes : source.offset_bytes + 16]
        for place in task.layout.outputs:
            self.arenas[place.arena][place.offset_bytes : place.offset_bytes + 16] = data
        self.endpoint.task_ended(task.id, Outcome.COMPLETED, queued_at_s=time.monotonic())

    def cancel(self, task: TaskId) -> None:
        self.cancelled.append(task)
        assert self.endpoint is not None
        self.endpoint.task_ended(task, Outcome.CANCELLED, "cancelled", "cancelled by its owner")

    def add_arena(self, arena: Arena) -> None:
        self.arenas[arena.id] = mmap.mmap(arena.descriptor, arena.nbytes)

    def drop_arena(self, arena: Arena) -> None:
        self.arenas.pop(arena.id).close()

    def drop_layout(self, layout: Layout) -> None:
        self.dropped_layouts.append(layout.id)

    def status(self) -> bytes:
        return b"{}"

    def trace(self, seconds: float, file: int, ended: Callable[[str], None]) -> None:
        os.write(file, f"{seconds:g}".encode())
        ended(self.why_not_ready)


class Hosted:
    """The endpoint's thread; `call` runs something on it."""

    def __init__(self, directory: Path, limits: ConnectionLimits) -> None:
        self.loop = Loop()
        self.backend = PlayedBackend()
        self.ledger = TaskLedger()
        self.endpoint = Endpoint(self.loop, self.backend, self.ledger, limits)
        self.backend.endpoint = self.endpoint
        self.path = self.endpoint.listen(directory)
        self._wake_read, self._wake_write = os.pipe()
        self._calls: list[Callable[[], None]] = []
        self.loop.watch(self._wake_read, 1, self._run_calls)
        self._thread = threading.Thread(target=self.loop.run)
        self._thread.start()

    def _run_calls(self, events: int) -> None:
        os.read(self._wake_read, 4096)
        while self._calls:
            self._calls.pop(0)()

    def call(self, function: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            try:
                function()
            finally:
                done.set()

        self._calls.append(run)
        os.write(self._wake_write, b"x")
        assert done.wait(20.0)

    def close(self) -> None:
        self.call(lambda: self.endpoint.close("the test is over"))
        self.call(self.loop.stop)
        self._thread.join(20.0)
        assert not self._thread.is_alive()
        self.loop.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


@pytest.fixture
def limits() -> ConnectionLimits:
    return ConnectionLimits()


@pytest.fixture
def hosted(tmp_path: Path, limits: ConnectionLimits) -> Iterator[Hosted]:
    host = Hosted(tmp_path / "run", limits)
    yield host
    host.close()
    totals = host.ledger.totals.values()
    assert len(host.ledger) == 0, "a task never ended"
    assert sum(c.submitted for c in totals) == sum(c.ended for c in totals)
    assert not host.backend.arenas, "an arena outlived its application"
