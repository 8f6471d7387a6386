"""One application's connection: its arenas, its open tasks, and replies that its socket did not take yet."""

import contextlib
import fcntl
import mmap
import os
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from stageloom.edge_agent.ingest.channel import seals_of
from stageloom.edge_agent.ingest.messages import DeclareLayout, ModelSignature, ToApplication, encode
from stageloom.edge_agent.ingest.signature import check_layout
from stageloom.edge_agent.worker.messages import AddLayout
from stageloom.shared.errors import TaskRefused
from stageloom.shared.ids import TaskId

_SEND_FLAGS = int(socket.MSG_DONTWAIT) | int(socket.MSG_NOSIGNAL)  # enums are slow to combine
# Of <linux/fcntl.h>; Python's fcntl module names them from 3.9 on, typeshed only for Linux.
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one application may use; more is refused, so that it cannot starve the others."""

    max_tasks: int = 1024  # open at once
    max_arenas: int = 16
    max_arena_bytes: int = 1 << 30  # in sum
    max_layouts: int = 4096
    max_unsent: int = 256  # replies waiting for its socket, above which nothing more is read from it


@dataclass(slots=True)
class Arena:
    """Shared memory of an application. The descriptor is kept to hand it to a new engine process."""

    id: int  # unique in this agent
    descriptor: int
    nbytes: int
    detached: bool = False
    open_tasks: int = 0  # that lie in it
    sent_to: int = 0  # `EngineClient.life` of the engine process that has it


@dataclass(slots=True, eq=False)
class DeclaredLayout:
    """Where the tensors of an application's tasks lie. `check` is the only check of it, once per plan."""

    id: int  # unique in this agent
    application: int  # the connection's
    declared: DeclareLayout
    arenas: tuple[Arena, ...] = ()
    checked_for: Mapping[str, ModelSignature] | None = None  # the models of that plan, by identity
    sent_to: int = 0  # `EngineClient.life` of the engine process that has the layout

    def check(self, models: Mapping[str, ModelSignature], arenas: Mapping[int, Arena]) -> None:
        """Compare the layout with the models of the plan; `arenas` are the connection's, by their numbers.

        Raises:
            TaskRefused: tasks in this layout cannot run; see `signature.check_layout`.
        """
        declared = self.declared
        check_layout(declared, models, {number: arena.nbytes for number, arena in arenas.items()})
        used = {ref.arena for ref in declared.inputs} | {ref.arena for ref in declared.outputs}
        self.arenas = tuple(arenas[number] for number in sorted(used))
        self.checked_for = models

    def command(self, arenas: Mapping[int, Arena]) -> AddLayout:
        """The layout as the engine process is told it, with the agent's numbers of `arenas`."""
        models = self.declared.models
        prefix = [f"{model}/" if len(models) > 1 else "" for model in models]
        return AddLayout(
            self.id,
            models,
            tuple((ref.tensor, arenas[ref.arena].id, ref.offset_bytes) for ref in self.declared.inputs),
            tuple(
                (prefix[ref.model] + ref.tensor, arenas[ref.arena].id, ref.offset_bytes)
                for ref in self.declared.outputs
            ),
            self.application,
            tuple(ref.shape for ref in self.declared.inputs),
        )


@dataclass
class ApplicationConnection:
    """State of one connection; `id` is never used again."""

    id: int
    sock: socket.socket
    limits: ConnectionLimits
    greeted: bool = False
    watched: int = 0  # readiness that the loop was last asked for
    last_task: int = -1
    arenas: dict[int, Arena] = field(default_factory=dict)  # by the application's own number
    layouts: dict[int, DeclaredLayout] = field(default_factory=dict)  # by the application's own number
    tasks: dict[int, TaskId] = field(default_factory=dict)  # open ones, by the application's own number
    _unsent: deque[bytes] = field(default_factory=deque)

    def admit_arena(self, number: int, nbytes: int, descriptors: list[int], new_id: int) -> Arena:
        """Check a descriptor and keep it.

        Raises:
            TaskRefused: no descriptor, not a memory file of that size with both size seals (without them the
                application could shrink it and crash whoever reads it), in huge pages (where a page that was
                given back and is wanted again may be out), or over a limit.
        """
        if len(descriptors) != 1:
            raise TaskRefused("bad_arena", f"{len(descriptors)} descriptors came with an arena, not one")
        if number in self.arenas:
            raise TaskRefused("bad_arena", f"arena {number} is attached already")
        if len(self.arenas) >= self.limits.max_arenas:
            raise TaskRefused("bad_arena", f"more than {self.limits.max_arenas} arenas on one connection")
        if nbytes + sum(arena.nbytes for arena in self.arenas.values()) > self.limits.max_arena_bytes:
            raise TaskRefused("bad_arena", f"more than {self.limits.max_arena_bytes} bytes of arenas")
        seals = seals_of(descriptors[0])
        if seals is None:
            raise TaskRefused("bad_arena", "the arena's descriptor is not a memory file")
        if seals & _SIZE_SEALS != _SIZE_SEALS or os.fstat(descriptors[0]).st_size != nbytes:
            raise TaskRefused("bad_arena", "the arena is not sealed against shrinking and growing")
        if os.fstatvfs(descriptors[0]).f_bsize != mmap.PAGESIZE:
            raise TaskRefused("bad_arena", "the arena lies in huge pages, which may run out while it is read")
        arena = Arena(new_id, descriptors.pop(), nbytes)
        self.arenas[number] = arena
        return arena

    @property
    def choked(self) -> bool:
        """Its replies pile up: read nothing more from it until they leave."""
        return len(self._unsent) >= self.limits.max_unsent

    @property
    def has_unsent(self) -> bool:
        """Some reply waits for the socket."""
        return bool(self._unsent)

    def send(self, message: ToApplication) -> None:
        """Send, or keep for `flush`; never waits."""
        self.send_packet(encode(message))

    def send_packet(self, packet: bytes) -> None:
        """The same with an encoded message."""
        if self._unsent or not self._try_send(packet):
            self._unsent.append(packet)

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        while self._unsent and self._try_send(self._unsent[0]):
            self._unsent.popleft()

    def _try_send(self, packet: bytes) -> bool:
        try:
            self.sock.send(packet, _SEND_FLAGS)
        except BlockingIOError:
            return False
        except OSError:
            return True  # the other end is gone; reading notices and closes
        return True

    def close(self) -> None:
        """Close the socket, which the engine process has, too; arenas are closed once no task uses them."""
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
