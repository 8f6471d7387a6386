"""The local endpoint: where applications of this machine submit tasks.

It runs on the main loop and never waits for anyone: packets are read a few at a time per connection, replies
that a slow application does not take are kept up to a bound, and above it nothing more is read from that
application. Tensors stay in the application's arenas; only their places pass through here.
"""

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Protocol

from stageloom.edge_agent.ingest.channel import SOCKET_NAME, close_received, receive, seals_of, socket_address
from stageloom.edge_agent.ingest.connection import (
    ApplicationConnection,
    Arena,
    ConnectionLimits,
    DeclaredLayout,
)
from stageloom.edge_agent.ingest.ledger import UNKNOWN_MODEL, OpenTask, TaskLedger
from stageloom.edge_agent.ingest.messages import (
    MAX_PACKET_BYTES,
    MAX_REASON_CHARS,
    PROTOCOL_VERSION,
    AgentWelcome,
    AskMetrics,
    AskStatus,
    AttachArena,
    CancelRequest,
    ClientHello,
    DeclareLayout,
    DetachArena,
    Goodbye,
    ListModels,
    MetricsPage,
    Models,
    ModelSignature,
    RetractLayout,
    Status,
    SubmitRequest,
    TaskEnded,
    ToAgent,
    TraceRequest,
    TraceWritten,
    decode_to_agent,
    encode,
)
from stageloom.edge_agent.loop import READ, WRITE, Loop
from stageloom.edge_agent.worker.messages import (
    AddApplication,
    AddArena,
    CancelTask,
    Command,
    DropApplication,
    DropArena,
    DropLayout,
    RunTask,
    StartRecording,
    TaskDone,
)
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.errors import DecodeError, StorageError, TaskRefused
from stageloom.shared.ids import TaskId

_log = logging.getLogger(__name__)

_PACKETS_PER_TURN = 32  # of one connection, before the others have their turn
_MAX_CONNECTIONS = 256
_BACKLOG = 128
_ENDS_AT_ONCE = 32
"""So many tasks are handed to the engine process before ends are read: a wake-up for each costs more."""


class Engine(Protocol):
    """The part of `EngineClient` that the endpoint uses."""

    life: int

    @property
    def busy(self) -> bool:
        """The engine process takes nothing now."""

    def send(self, command: Command, fds: Sequence[int] = ()) -> bool:
        """Send a command; False if no process takes it."""

    def take_ends(self) -> None:
        """Hand on the ends that applications have been told of."""


class Backend(Protocol):
    """What the endpoint asks the agent."""

    def models(self) -> Mapping[str, ModelSignature]:
        """What can be run now; empty while no plan is active."""

    def not_ready(self) -> str:
        """Why no task can be taken now; empty when one can."""

    def status(self) -> bytes:
        """The status as JSON."""

    def metrics(self, start: int) -> tuple[bytes, bool]:
        """(what was counted as JSON, with models from position `start` on; whether there are more)."""


class Endpoint:
    """All connections. Methods are called on the loop's thread; ends of tasks come in by `task_ended`."""

    def __init__(
        self,
        loop: Loop,
        backend: Backend,
        engine: Engine,
        ledger: TaskLedger,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._loop = loop
        self._backend = backend
        self._engine = engine
        self._ledger = ledger
        self._limits = limits or ConnectionLimits()
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        self._connections: dict[int, ApplicationConnection] = {}
        self._numbers = count(1)  # of connections, arenas, layouts and recordings; none is used again
        self._recordings: dict[int, tuple[int, int]] = {}  # the connection and request of each
        self._last: tuple[OpenTask, TaskDone] | None = None  # whose end the engine process told last
        self._unread = 0  # tasks handed to the engine process since ends were read

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
        return len(self._connections)

    def engine_ready(self) -> None:
        """A new engine process maps every arena; it is told a layout with the first task in it."""
        for connection in self._connections.values():
            if connection.greeted:
                self._add_application(connection)
            for arena in connection.arenas.values():
                self._add_arena(arena)

    def task_done(self, done: TaskDone) -> None:
        """The engine process reports an end: count it, and tell the owner if that does not do so."""
        ended = self._ledger.end(done.task, done.outcome, done.ended_s, done.started_s)
        if ended is None:
            return
        self._forget_task(ended)
        if done.told:
            self._last = ended, done
        else:
            self._tell(ended, done.outcome, done.code, done.reason, done.queued_s, done.shapes)

    def pass_on(self, application: int, packet: bytes) -> None:
        """Send what an application did not take from the engine process."""
        connection = self._connections.get(application)
        if connection is not None:
            had_unsent = connection.has_unsent
            connection.send_packet(packet)
            if connection.has_unsent and not had_unsent:
                self._watch(connection)

    def task_ended(self, task: TaskId, outcome: Outcome, code: str = "", reason: str = "") -> None:
        """Count an end that the engine process does not report, and tell the owner, if it is still there."""
        ended = self._ledger.end(task, outcome, self._loop.now())
        if ended is not None:
            self._forget_task(ended)
            self._tell(ended, outcome, code, reason)

    def _forget_task(self, ended: OpenTask) -> None:
        self._release(ended)
        connection = self._connections.get(ended.owner)
        if connection is not None:
            connection.tasks.pop(ended.owner_task, None)

    def _tell(
        self,
        ended: OpenTask,
        outcome: Outcome,
        code: str,
        reason: str,
        queued_at_s: float = 0.0,
        shapes: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        connection = self._connections.get(ended.owner)
        if connection is None:
            return
        self._send(
            connection,
            TaskEnded(
                ended.owner_task,
                outcome.value,
                code,
                reason[:MAX_REASON_CHARS],
                ended.received_at_s,
                queued_at_s,
                shapes=shapes,
            ),
        )

    def recording_ended(self, number: int, reason: str) -> None:
        """Tell the application that a recording is in its file; with a reason there is none."""
        connection, request = self._recordings.pop(number, (0, 0))
        if connection in self._connections:
            self._send(self._connections[connection], TraceWritten(request, reason[:MAX_REASON_CHARS]))

    def end_all(self, outcome: Outcome, code: str, reason: str) -> None:
        """The engine is gone: every open task and every recording ends.

        The last end that it reported may not have been told any more. An application takes the first of two.
        """
        if self._last is not None:
            ended, done = self._last
            self._last = None
            self._tell(ended, done.outcome, done.code, done.reason, done.queued_s, done.shapes)
        for task in self._ledger.open_tasks():
            self.task_ended(task.id, outcome, code, reason)
        for number in list(self._recordings):
            self.recording_ended(
                number, "the engine process ended while it was recording; try again in a moment"
            )

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
        connection = ApplicationConnection(next(self._numbers), sock, self._limits)
        self._connections[connection.id] = connection
        self._watch(connection)

    def _watch(self, connection: ApplicationConnection) -> None:
        events = (0 if connection.choked else READ) | (WRITE if connection.has_unsent else 0)
        if events != connection.watched:
            connection.watched = events
            self._loop.watch(connection.sock, events, lambda ready: self._ready(connection, ready))

    def _ready(self, connection: ApplicationConnection, events: int) -> None:
        if events & WRITE:
            connection.flush()
        if events & READ:
            self._read(connection)
        if connection.id in self._connections:
            self._watch(connection)

    def _read(self, connection: ApplicationConnection) -> None:
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

    def _handle(self, connection: ApplicationConnection, message: ToAgent, descriptors: list[int]) -> None:
        if not connection.greeted and not isinstance(message, ClientHello):
            raise DecodeError("the first message is not a hello")
        match message:
            case SubmitRequest():
                self._submit(connection, message)
            case CancelRequest():
                if (task := connection.tasks.get(message.task)) is not None:
                    self._engine.send(CancelTask(task))
            case AttachArena():
                self._add_arena(
                    connection.admit_arena(
                        message.arena, message.nbytes, descriptors, new_id=next(self._numbers)
                    )
                )
            case DeclareLayout():
                self._declare(connection, message)
            case RetractLayout():
                if (layout := connection.layouts.pop(message.layout, None)) is not None:
                    self._drop_layout(layout)
            case DetachArena():
                self._detach(connection, connection.arenas.pop(message.arena, None))
            case ListModels():
                models = list(self._backend.models().values())
                why_none = "" if models else self._backend.not_ready()
                self._send(connection, _page(message, models, why_none))
            case AskStatus():
                self._send(connection, Status(message.request, self._backend.status()))
            case AskMetrics():
                body, more = self._backend.metrics(message.start)
                self._send(connection, MetricsPage(message.request, body, more))
            case TraceRequest():
                self._record(connection.id, message, descriptors)
            case ClientHello():
                if message.version != PROTOCOL_VERSION:
                    raise DecodeError(
                        f"the application speaks version {message.version} of the local protocol, "
                        f"the agent {PROTOCOL_VERSION}",
                        remedy="install the same stageloom on both sides",
                    )
                connection.greeted = True
                self._add_application(connection)
                limits = self._limits
                self._send(
                    connection,
                    AgentWelcome(
                        PROTOCOL_VERSION, limits.max_tasks, limits.max_arena_bytes, limits.max_arenas
                    ),
                )

    def _record(self, connection: int, trace: TraceRequest, descriptors: list[int]) -> None:
        if len(descriptors) != 1:
            raise DecodeError("a recording was asked for without the file for it")
        number = next(self._numbers)
        self._recordings[number] = connection, trace.request
        if seals_of(descriptors[0]) is None:
            reason = "the descriptor is not a memory file; make one with memfd_create and copy it afterwards"
            self.recording_ended(number, reason)
        elif not self._engine.send(StartRecording(number, trace.seconds), descriptors):
            self.recording_ended(number, "the engine process is not running; try again in a moment")

    def _add_application(self, connection: ApplicationConnection) -> None:
        self._engine.send(AddApplication(connection.id), [connection.sock.fileno()])

    def _add_arena(self, arena: Arena) -> None:
        """Tell the engine process an arena once: commands reach one that is not ready yet, too."""
        life = self._engine.life
        if arena.sent_to != life and self._engine.send(AddArena(arena.id, arena.nbytes), [arena.descriptor]):
            arena.sent_to = life

    def _drop_layout(self, layout: DeclaredLayout) -> None:
        if layout.sent_to == self._engine.life:
            self._engine.send(DropLayout(layout.id))

    def _declare(self, connection: ApplicationConnection, declared: DeclareLayout) -> None:
        old = connection.layouts.pop(declared.layout, None)
        if old is not None:
            self._drop_layout(old)
        if len(connection.layouts) >= self._limits.max_layouts:
            raise TaskRefused("bad_reference", f"more than {self._limits.max_layouts} layouts are declared")
        connection.layouts[declared.layout] = DeclaredLayout(next(self._numbers), connection.id, declared)

    def _submit(self, connection: ApplicationConnection, submit: SubmitRequest) -> None:
        if submit.task <= connection.last_task:
            raise DecodeError(f"task number {submit.task} does not rise")
        connection.last_task = submit.task
        now_s = self._loop.now()
        models = self._backend.models()
        layout = connection.layouts.get(submit.layout)
        model = layout.declared.models[0] if layout is not None else UNKNOWN_MODEL
        task = self._ledger.open(
            owner=connection.id,
            owner_task=submit.task,
            model=model if model in models else UNKNOWN_MODEL,
            now_s=now_s,
        )
        try:
            layout = self._checked(connection, submit, layout, models)
            deadline_s = None
            if submit.deadline_s is not None:
                deadline_s = min(submit.sent_at_s, now_s) + submit.deadline_s
                if deadline_s <= now_s:
                    reason = "the deadline passed before it was queued"
                    self.task_ended(task.id, Outcome.EXPIRED, "deadline", reason)
                    return
            self._prepare(connection, layout)
        except TaskRefused as error:
            self.task_ended(task.id, Outcome.REFUSED, error.code, str(error))
            return
        connection.tasks[submit.task] = task.id
        task.arenas = layout.arenas
        for arena in layout.arenas:
            arena.open_tasks += 1
        # If the process has just ended the task is answered with all others.
        self._engine.send(RunTask(task.id, layout.id, submit.priority, deadline_s, submit.task, now_s))
        self._unread += 1
        if self._unread >= _ENDS_AT_ONCE:
            self._take_ends()

    def _take_ends(self) -> None:
        self._unread = 0
        self._engine.take_ends()

    def _prepare(self, connection: ApplicationConnection, layout: DeclaredLayout) -> None:
        """Tell the engine process a layout that it does not have.

        Raises:
            TaskRefused: the process takes nothing now (`engine_busy`), or the layout fits no message.
        """
        if self._engine.busy:
            raise TaskRefused(
                "engine_busy", "the engine process does not read its messages", remedy="submit more slowly"
            )
        if layout.sent_to == self._engine.life:
            return
        try:
            if self._engine.send(layout.command(connection.arenas)):
                layout.sent_to = self._engine.life
        except ValueError as error:
            raise TaskRefused("too_many_tensors", str(error)) from error

    def _checked(
        self,
        connection: ApplicationConnection,
        submit: SubmitRequest,
        layout: DeclaredLayout | None,
        models: Mapping[str, ModelSignature],
    ) -> DeclaredLayout:
        if why := self._backend.not_ready():
            raise TaskRefused("not_ready", why, remedy="see `stageloom-agent status`")
        if len(connection.tasks) >= self._limits.max_tasks:
            self._take_ends()
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

    def _release(self, task: OpenTask) -> None:
        for arena in task.arenas:
            arena.open_tasks -= 1
            if arena.detached and not arena.open_tasks:
                self._forget(arena)

    def _detach(self, connection: ApplicationConnection, arena: Arena | None) -> None:
        if arena is None or arena.detached:
            return
        arena.detached = True
        for layout in connection.layouts.values():
            if arena in layout.arenas:
                self._drop_layout(layout)
                layout.checked_for, layout.sent_to = None, 0
        if not arena.open_tasks:
            self._forget(arena)

    def _forget(self, arena: Arena) -> None:
        self._engine.send(DropArena(arena.id))
        os.close(arena.descriptor)

    def _drop(self, connection: ApplicationConnection, reason: str) -> None:
        if self._connections.pop(connection.id, None) is None:
            return
        self._loop.watch(connection.sock, 0, self._accept)
        if reason:
            _log.warning("connection %d of an application ends: %s", connection.id, reason)
            connection.send(Goodbye(reason[:MAX_REASON_CHARS]))
        connection.close()
        if connection.greeted:
            self._engine.send(DropApplication(connection.id))
        for layout in connection.layouts.values():
            self._drop_layout(layout)
        connection.layouts.clear()
        for arena in list(connection.arenas.values()):
            self._detach(connection, arena)
        for task in list(connection.tasks.values()):
            self._engine.send(CancelTask(task))

    def _send(
        self,
        connection: ApplicationConnection,
        message: TaskEnded | Models | Status | MetricsPage | TraceWritten | AgentWelcome,
    ) -> None:
        had_unsent = connection.has_unsent
        connection.send(message)
        if connection.has_unsent and not had_unsent:
            self._watch(connection)


def _page(request: ListModels, infos: Sequence[ModelSignature], why_none: str) -> Models:
    """As many models from `start` on as one packet holds."""
    chosen: list[ModelSignature] = []
    size = 64
    for info in infos[request.start :]:
        size += len(encode(Models(0, (info,))))
        if chosen and (size > MAX_PACKET_BYTES or len(chosen) == 64):
            break
        chosen.append(info)
    more = request.start + len(chosen) < len(infos)
    return Models(request.request, tuple(chosen), more, why_none[:MAX_REASON_CHARS])
