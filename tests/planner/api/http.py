"""HTTP to a planner's local socket without the client's manners: any head, any body, any pace."""

import http.client
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

PATIENCE_S = 20.0


class Answer(NamedTuple):
    """Status, head and body of an answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return msgspec.json.decode(self.body)


class LocalHttp(http.client.HTTPConnection):
    """One connection to the socket `path`."""

    def __init__(self, path: Path, timeout_s: float = PATIENCE_S) -> None:
        super().__init__("planner", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = connected(self._path)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """The whole answer to one request."""
        self.request(method, path, body, dict(headers or {}))
        answer = self.getresponse()
        return Answer(
            answer.status, {name.lower(): text for name, text in answer.getheaders()}, answer.read()
        )


def connected(path: Path) -> socket.socket:
    """A bare connection."""
    made = socket.socket(socket.AF_UNIX)
    made.connect(str(path))  # it blocks: with a timeout it would fail where many connect at once
    made.settimeout(PATIENCE_S)
    return made


def asked(
    path: Path, method: str, target: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """One request over a connection of its own."""
    with closing(LocalHttp(path)) as connection:
        return connection.ask(method, target, body, headers)


def read_to_end(connection: socket.socket) -> bytes:
    """What comes until the other side hangs up."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@contextmanager
def events(path: Path, target: str) -> Iterator[Iterator[tuple[str, Any]]]:
    """Server-sent events: (name, value), as they come."""
    with closing(LocalHttp(path)) as connection:
        connection.request("GET", target)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")

        def read() -> Iterator[tuple[str, Any]]:
            name = ""
            for line in answer:
                field, _, text = line.decode().rstrip("\n").partition(": ")
                if field == "event":
                    name = text
                elif field == "data":
                    yield name, msgspec.json.decode(text)

        yield read()
