"""An endpoint on a thread of this process, with a backend that the test plays."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from stageloom.edge_agent.ingest.connection import ConnectionLimits
from stageloom.edge_agent.ingest.endpoint import Endpoint
from stageloom.edge_agent.ingest.ledger import TaskLedger
from stageloom.edge_agent.ingest.messages import ModelSignature, TensorInfo
from stageloom.edge_agent.loop import Loop
from stageloom.edge_agent.worker.messages import (
    AddArena,
    AddLayout,
    CancelTask,
    Command,
    DropArena,
    DropLayout,
    RunTask,
    StartRecording,
    TaskDone,
)
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.ids import TaskId

ECHO = ModelSignature(
    "echo", (TensorInfo("input", "float32", (1, 4)),), (TensorInfo("output", "float32", (1, 4)),)
)
TWIN = ModelSignature(
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
    """Agent and engine: tasks wait until the test answers them; with `echo` outputs are the first input."""

    life = 1
    busy = False

    def __init__(self) -> None:
        self.infos: dict[str, ModelSignature] = {"echo": ECHO, "twin": TWIN}
        self.why_not_ready = ""
        self.echo = False
        self.accepted: list[RunTask] = []
        self.layouts: dict[int, AddLayout] = {}
        self.cancelled: list[TaskId] = []
        self.arenas: dict[int, mmap.mmap] = {}
        self.added_arenas: list[int] = []
        self.dropped_layouts: list[int] = []
        self.endpoint: Endpoint | None = None

    def models(self) -> Mapping[str, ModelSignature]:
        return self.infos

    def not_ready(self) -> str:
        return self.why_not_ready

    def send(self, command: Command, fds: Sequence[int] = ()) -> bool:
        match command:
            case RunTask():
                self.accepted.append(command)
                if self.echo:
                    self.complete(command)
            case CancelTask(task):
                self.cancel(task)
            case AddArena(arena, size_bytes):
                self.added_arenas.append(arena)
                self.arenas[arena] = mmap.mmap(fds[0], size_bytes)
            case DropArena(arena):
                self.arenas.pop(arena).close()
            case AddLayout():
                self.layouts[command.layout] = command
            case DropLayout(layout):
                self.dropped_layouts.append(layout)
            case StartRecording(number, seconds):
                os.write(fds[0], f"{seconds:g}".encode())
                assert self.endpoint is not None
                self.endpoint.recording_ended(number, self.why_not_ready)
        return True

    def take_ends(self) -> None: ...

    def complete(self, task: RunTask) -> None:
        assert self.endpoint is not None
        layout = self.layouts[task.layout]
        _, arena, offset = layout.inputs[0]
        data = self.arenas[arena][offset : offset + 16]
        for _, arena, offset in layout.outputs:
            self.arenas[arena][offset : offset + 16] = data
        now = time.monotonic()
        self.endpoint.task_done(TaskDone(task.task, Outcome.COMPLETED, "", "", now, now, now))

    def cancel(self, task: TaskId) -> None:
        self.cancelled.append(task)
        assert self.endpoint is not None
        self.endpoint.task_ended(task, Outcome.CANCELLED, "cancelled", "cancelled by its owner")

    def metrics(self, start: int) -> tuple[bytes, bool]:
        return b"{}", False

    def status(self) -> bytes:
        return b"{}"


class Hosted:
    """The endpoint's thread; `call` runs something on it."""

    def __init__(self, directory: Path, limits: ConnectionLimits) -> None:
        self.loop = Loop()
        self.backend = PlayedBackend()
        self.ledger = TaskLedger()
        self.endpoint = Endpoint(self.loop, self.backend, self.backend, self.ledger, limits)
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
