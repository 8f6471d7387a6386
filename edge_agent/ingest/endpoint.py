"""The local endpoint: where applications of this machine submit tasks.

It runs on the main loop and never waits for anyone: packets are read a few at a time per connection, replies
that a slow application does not take are kept up to a bound, and above it nothing more is read from that
application. Tensors stay in the application's arenas; only their places pass through here.
"""

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stageloom.edge_agent.ingest.channel import SOCKET_NAME, receive, socket_address
from stageloom.edge_agent.ingest.connection import Arena, Connection, ConnectionLimits, Layout
from stageloom.edge_agent.ingest.ledger import UNKNOWN_MODEL, TaskLedger
from stageloom.edge_agent.ingest.memory_file import close_received, seals_of
from stageloom.edge_agent.ingest.messages import (
    MAX_PACKET_BYTES,
    PROTOCOL_VERSION,
    AskStatus,
    AttachArena,
    Cancel,
    Declare,
    DetachArena,
    Ended,
    Goodbye,
    Hello,
    ListModels,
    ModelInfo,
    Models,
    Retract,
    Status,
    Submit,
    ToAgent,
    Trace,
    Traced,
    Welcome,
    decode_to_agent,
    encode,
)
from stageloom.edge_agent.loop import READ, WRITE, Loop
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.errors import DecodeError, StorageError, TaskRefused
from stageloom.shared.ids import TaskId

_log = logging.getLogger(__name__)

_PACKETS_PER_TURN = 32  # of one connection, before the others have their turn
_MAX_CONNECTIONS = 256
_BACKLOG = 128
_REASON_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Accepted:
    """A checked task on its way to the engine."""

    id: TaskId
    layout: Layout
    priority: int
    deadline_s: float | None  # on CLOCK_MONOTONIC


class Backend(Protocol):
    """What the endpoint needs from the agent behind it."""

    def models(self) -> Mapping[str, ModelInfo]:
        """What can be run now; empty while no plan is active."""

    def not_ready(self) -> str:
        """Why no task can be taken now; empty when one can."""

    def submit(self, task: Accepted) -> None:
        """Hand the task to the engine; its end comes back through `Endpoint.task_ended`."""

    def cancel(self, task: TaskId) -> None:
        """The owner does not want it any more."""

    def add_arena(self, arena: Arena) -> None:
        """The engine process maps it."""

    def drop_arena(self, arena: Arena) -> None:
        """No open task uses it."""

    def drop_layout(self, layout: Layout) -> None:
        """No task to come uses it."""

    def status(self) -> bytes:
        """The status as JSON."""

    def trace(self, seconds: float, file: int, ended: Callable[[str], None]) -> None:
        """Record into a memory file, whose descriptor stays the caller's; `ended` hears why not, if so."""


class Endpoint:
    """All connections. Methods are called on the loop's thread."""

    def __init__(
        self, loop: Loop, backend: Backend, ledger: TaskLedger, limits: ConnectionLimits | None = None
    ) -> None:
        self._loop = loop
        self._backend = backend
        self._ledger = ledger
        self._limits = limits or ConnectionLimits()
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        self._connections: dict[int, Connection] = {}
        self._next_connection = 1
        self._next_arena = 1
        self._next_layout = 1
        self._arenas_of: dict[TaskId, tuple[Arena, ...]] = {}

    def listen(self, directory: Path) -> Path:
        """Open the socket `agent.sock` in a directory that only the owner may enter.

        The caller holds the state directory's lock, so a socket file that is there is stale.

        Raises:
            StorageError: the directory or the socket cannot be made.
        """
        path = directory / SOCKET_NAME
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.chmod(0o700)
            path.unlink(missing_ok=True)
            old_mask = os.umask(0o177)
            try:
                with socket_address(path) as address:
                    listener.bind(address)
            finally:
                os.umask(old_mask)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise StorageError(
                f"cannot listen at {path}: {error.strerror}", remedy="check the directory's owner and space"
            ) from error
        self._listener, self._path = listener, path
        self._loop.watch(listener, READ, self._accept)
        return path

    @property
    def num_connections(self) -> int:
        """Applications connected now."""
        return len(self._connections)

    def arenas(self) -> list[Arena]:
        """Every arena that is mapped or may still be used: what a new engine process is told first."""
        return [arena for c in self._connections.values() for arena in c.arenas.values()]

    def task_ended(
        self, task: TaskId, outcome: Outcome, code: str = "", reason: str = "", queued_at_s: float = 0.0
    ) -> None:
        """Count the end and tell the owner, if it is still there."""
        ended = self._ledger.end(task, outcome, self._loop.now())
        if ended is None:
            return
        self._release(task)
        connection = self._connections.get(ended.owner)
        if connection is None:
            return
        connection.tasks.pop(ended.owner_task, None)
        self._send(
            connection,
            Ended(
                ended.owner_task,
                outcome.value,
                code,
                reason[:_REASON_CHARS],
                ended.received_at_s,
                queued_at_s,
            ),
        )

    def end_all(self, outcome: Outcome, code: str, reason: str) -> None:
        """The engine is gone: every open task ends."""
        for task in self._ledger.open_tasks():
            self.task_ended(task.id, outcome, code, reason)

    def close(self, reason: str) -> None:
        """Say why, close every connection and remove the socket file."""
        if self._listener is not None:
            self._loop.watch(self._listener, 0, self._accept)
            self._listener.close()
            self._listener = None
        for connection in list(self._connections.values()):
            self._drop(connection, reason)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _accept(self, events: int) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # Out of descriptors or the peer left at once; level triggering asks again.
            _log.warning("an application could not connect: %s", error)
            return
        if len(self._connections) >= _MAX_CONNECTIONS:
            sock.send(encode(Goodbye(f"more than {_MAX_CONNECTIONS} applications are connected")))
            sock.close()
            return
        sock.setblocking(False)
        connection = Connection(self._next_connection, sock, self._limits)
        self._next_connection += 1
        self._connections[connection.id] = connection
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        events = (0 if connection.choked else READ) | (WRITE if connection.has_unsent else 0)
        if events != connection.watched:
            connection.watched = events
            self._loop.watch(connection.sock, events, lambda ready: self._ready(connection, ready))

    def _ready(self, connection: Connection, events: int) -> None:
        if events & WRITE:
            connection.flush()
        if events & READ:
            self._read(connection)
        if connection.id in self._connections:
            self._watch(connection)

    def _read(self, connection: Connection) -> None:
        for _ in range(_PACKETS_PER_TURN):
            if connection.id not in self._connections or connection.choked:
                return
            descriptors: list[int] = []
            try:
                packet, descriptors = receive(connection.sock)
                if not packet:
                    self._drop(connection, "")
                    return
                self._handle(connection, decode_to_agent(packet), descriptors)
            except BlockingIOError:
                return
            except (DecodeError, TaskRefused) as error:
                self._drop(connection, str(error))
                return
            except OSError:
                self._drop(connection, "")
                return
            finally:
                close_received(descriptors)

    def _handle(self, connection: Connection, message: ToAgent, descriptors: list[int]) -> None:
        if not connection.greeted and not isinstance(message, Hello):
            raise DecodeError("the first message is not a hello")
        match message:
            case Submit():
                self._submit(connection, message)
            case Cancel():
                if (task := connection.tasks.get(message.task)) is not None:
                    self._backend.cancel(task)
            case AttachArena():
                arena = connection.admit_arena(
                    message.arena, message.nbytes, descriptors, new_id=self._next_arena
                )
                self._next_arena += 1
                self._backend.add_arena(arena)
            case Declare():
                self._declare(connection, message)
            case Retract():
                if (layout := connection.layouts.pop(message.layout, None)) is not None:
                    self._backend.drop_layout(layout)
            case DetachArena():
                self._detach(connection, connection.arenas.pop(message.arena, None))
            case ListModels():
                self._send(connection, _page(message, list(self._backend.models().values())))
            case AskStatus():
                self._send(connection, Status(message.request, self._backend.status()))
            case Trace():
                self._trace(connection.id, message, descriptors)
            case Hello():
                if message.version != PROTOCOL_VERSION:
                    raise DecodeError(
                        f"the application speaks version {message.version} of the local protocol, "
                        f"the agent {PROTOCOL_VERSION}",
                        remedy="install the same stageloom on both sides",
                    )
                connection.greeted = True
                limits = self._limits
                self._send(
                    connection,
                    Welcome(PROTOCOL_VERSION, limits.max_tasks, limits.max_arena_bytes, limits.max_arenas),
                )

    def _trace(self, connection: int, asked: Trace, descriptors: list[int]) -> None:
        if len(descriptors) != 1:
            raise DecodeError("a recording was asked for without the file for it")

        def ended(reason: str) -> None:
            self._traced(connection, Traced(asked.request, reason[:_REASON_CHARS]))

        if seals_of(descriptors[0]) is None:
            ended("the descriptor is not a memory file; make one with memfd_create and copy it afterwards")
            return
        self._backend.trace(asked.seconds, descriptors[0], ended)

    def _traced(self, connection: int, traced: Traced) -> None:
        if (found := self._connections.get(connection)) is not None:
            self._send(found, traced)

    def _declare(self, connection: Connection, declared: Declare) -> None:
        old = connection.layouts.pop(declared.layout, None)
        if old is not None:
            self._backend.drop_layout(old)
        if len(connection.layouts) >= self._limits.max_layouts:
            raise TaskRefused("bad_reference", f"more than {self._limits.max_layouts} layouts are declared")
        connection.layouts[declared.layout] = Layout(self._next_layout, declared)
        self._next_layout += 1

    def _submit(self, connection: Connection, submit: Submit) -> None:
        if submit.task <= connection.last_task:
            raise DecodeError(f"task number {submit.task} does not rise")
        connection.last_task = submit.task
        now_s = self._loop.now()
        models = self._backend.models()
        layout = connection.layouts.get(submit.layout)
        model = layout.declared.models[0] if layout is not None else UNKNOWN_MODEL
        opened = self._ledger.open(
            owner=connection.id,
            owner_task=submit.task,
            model=model if model in models else UNKNOWN_MODEL,
            now_s=now_s,
        )
        try:
            layout = self._checked(connection, submit, layout, models)
        except TaskRefused as error:
            self.task_ended(opened.id, Outcome.REFUSED, error.code, str(error))
            return
        deadline_s = None
        if submit.deadline_s is not None:
            deadline_s = min(submit.sent_at_s, now_s) + submit.deadline_s
            if deadline_s <= now_s:
                reason = "the deadline passed before it was queued"
                self.task_ended(opened.id, Outcome.EXPIRED, "deadline", reason)
                return
        connection.tasks[submit.task] = opened.id
        for arena in layout.arenas:
            arena.open_tasks += 1
        self._arenas_of[opened.id] = layout.arenas
        self._backend.submit(Accepted(opened.id, layout, submit.priority, deadline_s))

    def _checked(
        self,
        connection: Connection,
        submit: Submit,
        layout: Layout | None,
        models: Mapping[str, ModelInfo],
    ) -> Layout:
        if why := self._backend.not_ready():
            raise TaskRefused("not_ready", why, remedy="see `stageloom-agent status`")
        if len(connection.tasks) >= self._limits.max_tasks:
            raise TaskRefused(
                "too_many_tasks",
                f"{len(connection.tasks)} tasks of this application are open",
                remedy="wait for some to end",
            )
        if layout is None:
            raise TaskRefused("bad_reference", f"layout {submit.layout} was not declared")
        if layout.checked_for is not models:
            layout.check(models, connection.arenas)
        return layout

    def _release(self, task: TaskId) -> None:
        for arena in self._arenas_of.pop(task, ()):
            arena.open_tasks -= 1
            if arena.detached and not arena.open_tasks:
                self._forget(arena)

    def _detach(self, connection: Connection, arena: Arena | None) -> None:
        if arena is None or arena.detached:
            return
        arena.detached = True
        for layout in connection.layouts.values():
            if arena in layout.arenas:
                layout.checked_for, layout.told = None, 0
                self._backend.drop_layout(layout)
        if not arena.open_tasks:
            self._forget(arena)

    def _forget(self, arena: Arena) -> None:
        self._backend.drop_arena(arena)
        os.close(arena.descriptor)

    def _drop(self, connection: Connection, reason: str) -> None:
        if self._connections.pop(connection.id, None) is None:
            return
        self._loop.watch(connection.sock, 0, self._accept)
        if reason:
            _log.warning("connection %d of an application ends: %s", connection.id, reason)
            connection.send(Goodbye(reason[:_REASON_CHARS]))
        connection.close()
        for layout in connection.layouts.values():
            self._backend.drop_layout(layout)
        connection.layouts.clear()
        for arena in list(connection.arenas.values()):
            self._detach(connection, arena)
        for task in list(connection.tasks.values()):
            self._backend.cancel(task)

    def _send(self, connection: Connection, message: Ended | Models | Status | Traced | Welcome) -> None:
        had_unsent = connection.has_unsent
        connection.send(message)
        if connection.has_unsent and not had_unsent:
            self._watch(connection)


def _page(request: ListModels, infos: Sequence[ModelInfo]) -> Models:
    """As many models from `start` on as one packet holds."""
    chosen: list[ModelInfo] = []
    size = 64
    for info in infos[request.start :]:
        size += len(encode(Models(0, (info,))))
        if chosen and (size > MAX_PACKET_BYTES or len(chosen) == 64):
            break
        chosen.append(info)
    return Models(request.request, tuple(chosen), request.start + len(chosen) < len(infos))
