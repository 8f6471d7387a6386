"""A service manager as far as its services see it: the socket that they notify."""

import socket
import time
from pathlib import Path
from select import select


class Manager:
    """Listens on a socket, in the file system or in the abstract namespace; closed after the `with` block."""

    def __init__(self, folder: Path, *, abstract: bool = False) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.address = f"@stageloom-test-{folder.name}" if abstract else str(folder / "notify")
        self._socket.bind("\0" + self.address[1:] if abstract else self.address)
        self.said: list[dict[str, str]] = []

    def __enter__(self) -> "Manager":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def take(self) -> list[dict[str, str]]:
        """What arrived since the last call, one dictionary a datagram."""
        new = []
        while select([self._socket], [], [], 0.0)[0]:
            new.append(_parsed(self._socket.recv(4096)))
        self.said += new
        return new

    def until(self, name: str, value: str | None = None, within_s: float = 60.0) -> dict[str, str]:
        """The next datagram in which `name` is said (to be `value`)."""
        deadline_s = time.monotonic() + within_s
        while True:
            self._socket.settimeout(max(deadline_s - time.monotonic(), 0.001))
            try:
                fields = _parsed(self._socket.recv(4096))
            except TimeoutError:
                raise AssertionError(f"no {name}={value} within {within_s} s, but {self.said}") from None
            self.said.append(fields)
            if name in fields and value in (None, fields[name]):
                return fields


def _parsed(datagram: bytes) -> dict[str, str]:
    return dict(line.split("=", 1) for line in datagram.decode().splitlines())
