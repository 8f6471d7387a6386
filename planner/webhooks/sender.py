"""One message to one address, over HTTP, within a bounded time."""

import socket
import ssl
import threading
import time
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_address
from typing import Final

from stageloom.planner.webhooks.address import address_problem, checked_url, port_of
from stageloom.shared.errors import InputError
from stageloom.shared.version import __version__

LIMIT_S: Final = 5.0
"""From before the name is looked up to the end of the answer's headers. The resolver alone is not cut short:
it ends by its own limits, and what is left of these is for the rest."""


class NotDelivered(Exception):
    """Why a message did not arrive; `gone`: the receiver wants no more."""

    def __init__(self, problem: str, *, gone: bool = False) -> None:
        super().__init__(problem)
        self.gone = gone


class _Deadline:
    """Cuts off, at a moment, the socket that is watched then.

    A socket's own timeout begins anew at each byte, so a receiver that drips would never meet it.
    """

    def __init__(self, limit_s: float) -> None:
        self._until_s = time.monotonic() + limit_s
        self._lock = threading.Lock()
        self._watched: socket.socket | None = None
        self._over = False
        self._timer = threading.Timer(limit_s, self._end)
        self._timer.daemon = True
        self._timer.start()

    def left_s(self) -> float:
        """Seconds until then.

        Raises:
            TimeoutError: none.
        """
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no time is left")
        return left_s

    def watch(self, link: socket.socket) -> None:
        """Cut off this one, not the one before: wrapping a socket in TLS takes its descriptor away."""
        with self._lock:
            self._watched = link
            if self._over:
                _cut(link)

    def close(self) -> None:
        """Cut off nothing any more; call it before the socket's descriptor may be another's."""
        self._timer.cancel()
        with self._lock:
            self._watched = None

    def _end(self) -> None:
        with self._lock:
            self._over = True
            if self._watched is not None:
                _cut(self._watched)


def send(url: str, headers: dict[str, str], body: bytes, *, private: bool, limit_s: float = LIMIT_S) -> None:
    """POST a body of JSON. Redirections are not followed.

    Raises:
        NotDelivered: no 2xx came, or nothing may be sent there.
    """
    with closing(_Deadline(limit_s)) as deadline:
        try:
            parts = checked_url(url, private=private)
            host, port = parts.hostname or "", port_of(parts)
            link = _connected(host, port, deadline, private=private)
        except InputError as error:
            raise NotDelivered(error.cause) from error
        except (OSError, UnicodeError) as error:
            raise NotDelivered(f"no connection: {error}") from error
        try:
            deadline.watch(link)
            if parts.scheme == "https":
                context = ssl.create_default_context()
                link = context.wrap_socket(link, server_hostname=host, do_handshake_on_connect=False)
                deadline.watch(link)
                link.do_handshake()
            connection = HTTPConnection(host, port)
            connection.sock = link
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            common = {"Content-Type": "application/json", "User-Agent": f"stageloom/{__version__}"}
            connection.request("POST", target, body, {"Host": parts.netloc, **common, **headers})
            status = connection.getresponse().status
            deadline.left_s()  # headers that were cut off look like ones that ended
        except (OSError, HTTPException, ValueError) as error:
            raise NotDelivered(f"no answer: {type(error).__name__}: {error}") from error
        finally:
            deadline.close()
            with suppress(OSError):
                link.close()
    if not 200 <= status < 300:
        raise NotDelivered(f"the receiver answered {status}", gone=status == 410)


def _connected(host: str, port: int, deadline: _Deadline, *, private: bool) -> socket.socket:
    """A connection to the first that listens of what the name resolves to now.

    Raises:
        NotDelivered: one of its addresses is none to send to.
        OSError: it has none, none listens, or no time is left.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, where in found:
        problem = address_problem(ip_address(str(where[0]).partition("%")[0]), private=private)
        if problem:
            raise NotDelivered(f"{host} resolves to {where[0]}, {problem}")
    refused = OSError("the name has no address")
    for tried, (family, kind, protocol, _, where) in enumerate(found):
        left_s = deadline.left_s()
        try:
            link = socket.socket(family, kind, protocol)  # fails where the machine has no IPv6
            try:
                link.settimeout(left_s / (len(found) - tried))  # a silent one leaves time for the rest
                link.connect(where)
                link.settimeout(deadline.left_s())
            except BaseException:
                link.close()
                raise
        except OSError as error:
            refused = error
        else:
            return link
    raise refused


def _cut(link: socket.socket) -> None:
    """Shut it down under whoever reads. The plain socket's way: TLS's own would drop, under a thread that is
    within it, what that thread needs."""
    with suppress(OSError):
        socket.socket.shutdown(link, socket.SHUT_RDWR)
