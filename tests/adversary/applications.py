"""An application that keeps to no rule, over the agent's real socket."""

import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType

from stageloom.edge_agent.ingest import channel
from stageloom.edge_agent.ingest.messages import (
    PROTOCOL_VERSION,
    AttachArena,
    ClientHello,
    DeclareLayout,
    InputRef,
    OutputRef,
    SubmitRequest,
    TaskEnded,
    TraceRequest,
    TraceWritten,
    decode_to_application,
    encode,
)

ARENA_BYTES = 1 << 16
OUTPUTS_AT = ARENA_BYTES // 2
TIMEOUT_S = 60.0


class RawApplication:
    """Packets by hand; one arena, in which it may write whenever it likes."""

    def __init__(self, socket: Path) -> None:
        self._sock = channel.connect(socket, TIMEOUT_S)
        self._sock.send(encode(ClientHello(PROTOCOL_VERSION)))
        self._task = 0
        file = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
        os.ftruncate(file, ARENA_BYTES)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.memory = mmap.mmap(file, ARENA_BYTES)
        channel.send_with_descriptor(self._sock, encode(AttachArena(0, ARENA_BYTES)), file)
        os.close(file)

    def __enter__(self) -> "RawApplication":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()

    def declare(self, model: str, source: InputRef, output: str, nbytes: int) -> None:
        """Layout 0: one input, one output."""
        target = OutputRef(0, output, 0, OUTPUTS_AT, nbytes)
        self._sock.send(encode(DeclareLayout(0, (model,), (source,), (target,))))

    def run(self) -> TaskEnded:
        """One task in layout 0, and how it ended."""
        self._task += 1
        self._sock.send(encode(SubmitRequest(self._task, 0, 0.0)))
        while True:
            answer = self._receive()
            if isinstance(answer, TaskEnded) and answer.task == self._task:
                return answer

    def ask_for_trace(self, seconds: float, file: int) -> None:
        """Have the engine record into whatever `file` is."""
        channel.send_with_descriptor(
            self._sock,
            encode(
                TraceRequest(0, seconds),
            ),
            file,
        )

    def traced(self) -> str:
        """Why there is no recording; empty where there is one."""
        while True:
            answer = self._receive()
            if isinstance(answer, TraceWritten):
                return answer.reason

    def _receive(self) -> object:
        packet, _ = channel.receive(self._sock)
        assert packet, "the agent hung up"
        return decode_to_application(packet)
