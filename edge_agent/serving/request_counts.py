"""Requests that the serving process answered: how many, how they ended and how long they took."""

import os
import threading
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from stageloom.shared.metrics import CountedSeconds

COUNTS_EVERY_S: Final = 1.0
"""So often the serving process tells the agent, where anything came since."""


class RequestSeconds(Struct):
    """Requests of one method of the protocol: how many by status, and how long all took.

    Over HTTP a request begins with its head, over gRPC when its whole message was received.
    """

    protocol: str  # "http" or "grpc"
    method: str
    statuses: dict[str, int]
    seconds: CountedSeconds


class RequestCounters:
    """All since the process began; from any thread.

    Methods and statuses are the protocol's own, so that there are few.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._methods: dict[tuple[str, str], RequestSeconds] = {}
        self._told = True

    def add(self, protocol: str, method: str, status: str, seconds: float) -> None:
        """One more request was answered."""
        with self._lock:
            counted = self._methods.get((protocol, method))
            if counted is None:
                counted = RequestSeconds(protocol, method, {}, CountedSeconds.empty())
                self._methods[protocol, method] = counted
            counted.statuses[status] = counted.statuses.get(status, 0) + 1
            counted.seconds.add(seconds)
            self._told = False

    def tell(self, report: int) -> None:
        """Write them to this socket of packets, unless nothing came since.

        An agent that is late with reading gets the next ones.
        """
        with self._lock:
            if self._told:
                return
            body = msgspec.json.encode(list(self._methods.values()))
            self._told = True
        try:
            os.write(report, body)
        except OSError:
            self._told = False


def decode_requests(body: bytes) -> Sequence[RequestSeconds]:
    """What `tell` wrote; nothing of an empty body, or of one that is cut off."""
    try:
        return msgspec.json.decode(body, type=list[RequestSeconds]) if body else ()
    except msgspec.DecodeError:
        return ()
