"""One message to one address, over HTTP, within a bounded time."""

import socket
import ssl
import threading
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_address
from typing import Final

from stageloom.planner.webhooks.address import address_problem, checked_url, port_of
from stageloom.shared.errors import InputError
from stageloom.shared.version import __version__

LIMIT_S: Final = 5.0
"""From the first packet to the answer's first line."""


class NotDelivered(Exception):
    """Why a message did not arrive; `gone`: the receiver wants no more."""

    def __init__(self, problem: str, *, gone: bool = False) -> None:
        super().__init__(problem)
        self.gone = gone


def send(url: str, headers: dict[str, str], body: bytes, *, private: bool, limit_s: float = LIMIT_S) -> None:
    """POST a body of JSON. Redirections are not followed.

    Raises:
        NotDelivered: no 2xx came, or nothing may be sent there.
    """
    try:
        parts = checked_url(url, private=private)
        host, port = parts.hostname or "", port_of(parts)
        raw = _connected(host, port, private=private, limit_s=limit_s)
    except InputError as error:
        raise NotDelivered(error.cause) from error
    except (OSError, UnicodeError) as error:
        raise NotDelivered(f"no connection: {error}") from error
    expired = threading.Timer(limit_s, _end, (raw,))  # a timeout of the socket would begin anew at each byte
    expired.daemon = True
    expired.start()
    try:
        link = raw
        if parts.scheme == "https":
            link = ssl.create_default_context().wrap_socket(raw, server_hostname=host)
        connection = HTTPConnection(host, port)
        connection.sock = link
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        common = {"Content-Type": "application/json", "User-Agent": f"stageloom/{__version__}"}
        named = host if parts.port is None else f"{host}:{port}"
        connection.request("POST", target, body, {"Host": named, **common, **headers})
        status = connection.getresponse().status
    except (OSError, HTTPException, ValueError) as error:
        raise NotDelivered(f"no answer: {type(error).__name__}: {error}") from error
    finally:
        expired.cancel()
        with suppress(OSError):
            raw.close()
        with suppress(OSError, UnboundLocalError):
            link.close()
    if not 200 <= status < 300:
        raise NotDelivered(f"the receiver answered {status}", gone=status == 410)


def _connected(host: str, port: int, *, private: bool, limit_s: float) -> socket.socket:
    """A connection to what the name resolves to now.

    Raises:
        NotDelivered: one of its addresses is none to send to.
        OSError: it has none, or does not listen.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, where in found:
        problem = address_problem(ip_address(str(where[0]).partition("%")[0]), private=private)
        if problem:
            raise NotDelivered(f"{host} resolves to {where[0]}, {problem}")
    family, kind, protocol, _, where = found[0]
    raw = socket.socket(family, kind, protocol)
    try:
        raw.settimeout(limit_s)
        raw.connect(where)
    except BaseException:
        raw.close()
        raise
    return raw


def _end(link: socket.socket) -> None:
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
