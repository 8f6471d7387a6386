"""A TCP relay that can be told to misbehave: between a real agent and a real planner.

with FaultProxy(planner_port) as proxy:  # the agent connects to proxy.port
    proxy.hang()      # nothing passes, nothing is closed
    proxy.heal()
"""

import contextlib
import selectors
import socket
import threading
import time
from types import TracebackType

_BUFFER_BYTES = 1 << 16
_TICK_S = 0.01


class _Pipe:
    """One direction of one connection: bytes that were read and may be written once their time has come."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target = source, target
        self.held: list[tuple[float, bytes]] = []  # due, data


class FaultProxy:
    """One listening port before one target port; every connection through it suffers alike."""

    def __init__(self, target_port: int) -> None:
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        self.passed_bytes = 0
        self._lock = threading.Lock()
        self._pipes: list[_Pipe] = []
        self._delay_s = 0.0
        self._bytes_per_s = float("inf")
        self._left_bytes: int | None = None  # pass so much more, then cut
        self._hangs = self._refuses = self._stopping = False
        self._budget_bytes = 0.0
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()

    # -- what may go wrong ----------------------------------------------------------------------------------

    def cut(self) -> None:
        """Close every connection now, with a reset."""
        with self._lock:
            self._close_all()

    def hang(self) -> None:
        """Pass nothing on and close nothing, as a router that lost power does."""
        with self._lock:
            self._hangs = True

    def delay(self, seconds: float) -> None:
        """Pass everything on so much later."""
        with self._lock:
            self._delay_s = seconds

    def throttle(self, bytes_per_s: float) -> None:
        """Pass on no more than this, over all connections."""
        with self._lock:
            self._bytes_per_s, self._budget_bytes = bytes_per_s, 0.0

    def truncate_after(self, nbytes: int) -> None:
        """Pass on so many bytes more, then cut, in the middle of whatever is being sent."""
        with self._lock:
            self._left_bytes = nbytes

    def refuse(self) -> None:
        """Cut everything, and let no one in."""
        with self._lock:
            self._refuses = True
            self._close_all()

    def heal(self) -> None:
        """Behave from now on."""
        with self._lock:
            self._hangs = self._refuses = False
            self._delay_s, self._bytes_per_s, self._left_bytes = 0.0, float("inf"), None

    @property
    def connections(self) -> int:
        """Connections that stand."""
        with self._lock:
            return len(self._pipes) // 2

    # -- the relay ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            with selectors.DefaultSelector() as selector, self._lock:
                selector.register(self._listener, selectors.EVENT_READ)
                for pipe in self._pipes if not self._hangs else []:
                    if len(pipe.held) < 64:
                        selector.register(pipe.source, selectors.EVENT_READ, pipe)
                ready = selector.select(0)
                self._budget_bytes = min(self._budget_bytes + self._bytes_per_s * _TICK_S, 1e9)
                for key, _ in ready:
                    if key.data is None:
                        self._accept()
                    else:
                        self._read(key.data)
                if not self._hangs:
                    for pipe in list(self._pipes):
                        self._write(pipe)
            if not ready:
                time.sleep(_TICK_S)

    def _accept(self) -> None:
        ours, _ = self._listener.accept()
        if self._refuses:
            ours.close()
            return
        try:
            theirs = socket.create_connection(self._target, timeout=1.0)
        except OSError:
            ours.close()
            return
        self.accepted += 1
        for one in (ours, theirs):
            one.setblocking(False)
        self._pipes += [_Pipe(ours, theirs), _Pipe(theirs, ours)]

    def _read(self, pipe: _Pipe) -> None:
        try:
            data = pipe.source.recv(_BUFFER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            pipe.held.append((time.monotonic() + self._delay_s, data))
        else:
            self._close(pipe)

    def _write(self, pipe: _Pipe) -> None:
        while pipe.held and pipe.held[0][0] <= time.monotonic() and self._budget_bytes >= 1:
            due_s, data = pipe.held.pop(0)
            part = data[: int(min(len(data), self._budget_bytes))]
            if self._left_bytes is not None:
                part = part[: self._left_bytes]
            try:
                sent = pipe.target.send(part) if part else 0
            except BlockingIOError:
                sent = 0
            except OSError:
                self._close(pipe)
                return
            self.passed_bytes += sent
            self._budget_bytes -= sent
            if sent < len(data):
                pipe.held.insert(0, (due_s, data[sent:]))
            if self._left_bytes is not None:
                self._left_bytes -= sent
                if self._left_bytes <= 0:
                    self._left_bytes = None
                    self._close_all()
                    return
            if sent < len(part):
                return

    def _close(self, pipe: _Pipe) -> None:
        """Both directions, with a reset: nothing that is still held arrives."""
        ends = {pipe.source, pipe.target}
        self._pipes = [one for one in self._pipes if one.source not in ends]
        for end in ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            end.close()

    def _close_all(self) -> None:
        while self._pipes:
            self._close(self._pipes[0])

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._thread.join()
        self._close_all()
        self._listener.close()
