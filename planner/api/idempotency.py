"""Idempotency keys: a request that is sent again with the same key is carried out once.

The answer is kept in the store for a day, so that a client that lost its connection, or whose planner was
restarted, gets it by asking again. A request that failed is not kept, and neither is an answer that holds a
secret: its repeat is refused.
"""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from stageloom.planner.api.route import Route
from stageloom.planner.store.access import KeptAnswer, keep_answer, kept_answer
from stageloom.planner.store.store import Store
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import InputError, RefusedError
from stageloom.shared.ids import Digest

logger = logging.getLogger(__name__)


class KeyUse(NamedTuple):
    """A key that a client sent with a request of this digest."""

    who: str
    key: str
    request_digest: Digest


def request_digest(route: Route[Any, Any], request: Any) -> Digest:
    """What tells one request from another."""
    return digest_bytes([route.name.encode(), msgspec.json.encode(request)])


class Remembered:
    """The keys in use, and those whose answers the store has. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._in_use: set[tuple[str, str]] = set()

    @contextmanager
    def in_use(self, use: KeyUse) -> Iterator[None]:
        """While a request with this key is carried out, no other one is.

        Raises:
            RefusedError: one is.
        """
        with self._lock:
            if use[:2] in self._in_use:
                raise RefusedError("the request with this key is being carried out", remedy="ask again")
            self._in_use.add(use[:2])
        try:
            yield
        finally:
            with self._lock:
                self._in_use.discard(use[:2])

    def earlier(self, use: KeyUse) -> KeptAnswer | None:
        """The answer that the request got under this key; None if it is new.

        Raises:
            InputError: the key was used for another request, or for an answer that is told once.
            StorageError: the database cannot be read.
        """
        kept = self._store.read(kept_answer, use.who, use.key)
        if kept is None:
            return None
        if kept.request_digest != use.request_digest:
            raise InputError("the idempotency key was used for another request", remedy="make a new one")
        if not kept.body:
            raise InputError(
                "the request was carried out, and its secret is told once",
                remedy="make another, with a new key",
            )
        return kept

    def keep(self, use: KeyUse, status: int, body: bytes) -> "Future[None]":
        """Keep an answer, unless it says that nothing was done.

        The future is done once it is kept, or cannot be: what was asked has been done all the same.
        """
        done: Future[None] = Future()
        if status >= HTTPStatus.BAD_REQUEST:
            done.set_result(None)
            return done

        def tell(kept: "Future[None]") -> None:
            if error := kept.exception():
                logger.warning("an answer cannot be kept for its repeat: %s", error)
            done.set_result(None)

        self._store.submit(keep_answer, *use, status, body).add_done_callback(tell)
        return done
