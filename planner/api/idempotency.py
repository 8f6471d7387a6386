"""Idempotency keys: a request that is sent again with the same key is carried out once.

The store has the key before the request is carried out, and its answer after that, for a day: a client that
lost its connection, or whose planner was restarted, gets it by asking again. A request that was refused gives
its key back. Where nobody can tell the answer any more the repeat is refused with the reason: the planner or
its store failed amid the request, or the job that it began ended with the planner, or the answer held a
secret.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect

from stageloom.planner.api.bounds import Refusal
from stageloom.planner.api.jobs import Jobs
from stageloom.planner.api.route import AnswerForm, Route
from stageloom.planner.schema.job import JobInfo
from stageloom.planner.store.access import KeptAnswer, give_key_back, keep_answer, take_key
from stageloom.planner.store.store import Store
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import (
    InputError,
    NotFoundError,
    RefusedError,
    StageloomError,
    StorageError,
    UnavailableError,
)
from stageloom.shared.ids import Digest

logger = logging.getLogger(__name__)


class KeyUse(NamedTuple):
    """A key that a client sent with a request of this digest."""

    who: str
    key: str
    request_digest: Digest


def did_nothing(error: Exception) -> bool:
    """Whether a request that failed so is known to have changed nothing.

    Not where the store gave no answer in time, or its answer was lost: the change may be committed.
    """
    in_doubt = isinstance(error, StorageError | UnavailableError)
    return isinstance(error, StageloomError | Refusal | ClientDisconnect) and not in_doubt


def request_digest(route: Route[Any, Any], request: Any) -> Digest:
    """What tells one request from another."""
    return digest_bytes([route.name.encode(), msgspec.json.encode(request)])


class Remembered:
    """The keys in use, and those that the store has; for one event loop."""

    def __init__(self, store: Store, jobs: Jobs) -> None:
        self._store = store
        self._jobs = jobs
        self._in_use: set[tuple[str, str]] = set()

    @contextmanager
    def in_use(self, use: KeyUse) -> Iterator[None]:
        """While a request with this key is carried out, no other one is.

        Raises:
            RefusedError: one is.
        """
        if use[:2] in self._in_use:
            raise RefusedError("the request with this key is being carried out", remedy="ask again")
        self._in_use.add(use[:2])
        try:
            yield
        finally:
            self._in_use.discard(use[:2])

    async def take(self, use: KeyUse) -> KeptAnswer | None:
        """What the store has under this key; None if it is new, and taken by this request from now on.

        Raises:
            StorageError: the database cannot be written.
        """
        return await asyncio.wrap_future(self._store.submit(take_key, *use))

    def again(self, route: Route[Any, Any], use: KeyUse, kept: KeptAnswer) -> bytes:
        """The answer that the request got under this key.

        Raises:
            InputError: the key was used for another request, or for an answer that is told once.
            RefusedError: nobody knows how the request ended.
        """
        if kept.request_digest != use.request_digest:
            raise InputError("the idempotency key was used for another request", remedy="make a new one")
        if not kept.status:
            raise RefusedError(
                "the planner or its store failed while it carried this request out, and may have done so",
                remedy="look whether it took effect; if not, ask with a new key",
            )
        if not kept.body:
            raise InputError(
                "the request was carried out, and its secret is told once",
                remedy="make another, with a new key",
            )
        if route.form is AnswerForm.JOB:
            job = msgspec.json.decode(kept.body, type=JobInfo).job
            try:
                self._jobs.get(job)
            except NotFoundError as error:
                raise RefusedError(
                    f"the request began the job {job}, which the planner no longer knows",
                    remedy="look whether it took effect; if not, ask with a new key",
                ) from error
        return kept.body

    async def keep(self, use: KeyUse, status: int, body: bytes) -> None:
        """Keep an answer; an empty one is told once."""
        await self._note(keep_answer, use.who, use.key, status, body)

    async def give_back(self, use: KeyUse) -> None:
        """Nothing was done: the request may come again."""
        await self._note(give_key_back, use.who, use.key)

    async def _note(self, change: Callable[..., None], *arguments: Any) -> None:
        try:
            await asyncio.wrap_future(self._store.submit(change, *arguments))
        except StageloomError as error:  # the request ended as it did all the same
            logger.warning("what became of an idempotency key cannot be kept: %s", error)
