"""The service manager's notify protocol (sd_notify(3)): datagrams of `NAME=value` lines.

Our own, since it is a socket and one line of text: the usual packages either need libsystemd or have had no
release in years.
"""

import logging
import os
import socket
from collections.abc import Mapping
from typing import Final

_log = logging.getLogger(__name__)

SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
_USEC_VARIABLE: Final = "WATCHDOG_USEC"
_PID_VARIABLE: Final = "WATCHDOG_PID"


class Notifier:
    """Sends to the service manager; where there is none, every call does nothing."""

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        """`address`: a path, or a name in the abstract namespace after `@`; empty: nobody listens."""
        self.watchdog_s = watchdog_s
        """Silence after which the manager takes this process for dead; None where it does not watch."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address.startswith(("/", "@")):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    @property
    def listens(self) -> bool:
        """Whether there is a manager."""
        return self._socket is not None

    def send(self, **fields: str) -> None:
        """One datagram, such as `READY="1", STATUS="..."`. Never waits, never raises: serving goes on."""
        if self._socket is None:
            return
        lines = "\n".join(f"{name}={' '.join(value.split())}" for name, value in fields.items())
        try:
            self._socket.sendto(lines.encode(), self._address)
        except OSError as error:
            _log.debug("the service manager was not told %s: %s", ", ".join(fields), error)

    def close(self) -> None:
        """Tell nothing more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def manager_of(environment: Mapping[str, str], pid: int | None = None) -> Notifier:
    """The manager that started this process (`pid`), as the environment tells."""
    return Notifier(environment.get(SOCKET_VARIABLE, ""), _watchdog_s(environment, pid or os.getpid()))


def _watchdog_s(environment: Mapping[str, str], pid: int) -> float | None:
    """None too where it is meant for another process."""
    length, whose = environment.get(_USEC_VARIABLE, ""), environment.get(_PID_VARIABLE, str(pid))
    if not length.isdecimal() or whose != str(pid) or not int(length):
        return None
    return int(length) / 1e6
