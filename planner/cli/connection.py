"""The planner that a command talks to."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, Union

from stageloom.planner.api.client import PlannerClient, is_running, socket_path
from stageloom.planner.api.route import AnswerForm, Route
from stageloom.planner.cli.settings import settings
from stageloom.planner.schema.base import Page, Request
from stageloom.shared.errors import InputError, StorageError

if TYPE_CHECKING:
    from stageloom.planner.api.offline import StoreClient

Q = TypeVar("Q", bound=Request)
R = TypeVar("R")
T = TypeVar("T")
Caller = Union[PlannerClient, "StoreClient"]

LONG_S: Final = 600.0
"""For answers that are computed beside the planner, one after the other: a plan of many large blocks has many
optima to look for. A page waits for a minute and names these commands."""


@contextmanager
def connected(*, live: bool = True, or_older: bool = False) -> Iterator[Caller]:
    """The planner that the options name. Without `live` its store will do, where no planner runs; with
    `or_older` that of an older version, too.

    Raises:
        InputError: there is no token for the planner elsewhere.
        StorageError: the token's file cannot be read.
        StageloomError: as `PlannerClient` and `StoreClient`.
    """
    caller: Caller
    if settings.planner:
        caller = PlannerClient(url=settings.planner, token=_token())
    elif live or is_running(socket_path(settings.folder)):
        caller = PlannerClient(data_dir=settings.folder)
    else:
        from stageloom.planner.api.offline import StoreClient

        caller = StoreClient(settings.folder, or_older=or_older)
    gc.enable()  # `main` has held it off while modules were imported
    with caller:
        yield caller


def _token() -> str:
    if not settings.token:
        settings.token = _read_token(settings.token_file)
    return settings.token


def _read_token(file: str) -> str:
    if not file:
        raise InputError(
            "--planner needs an access token", remedy="name its file with --token-file, or - for stdin"
        )
    try:
        return sys.stdin.readline() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "") or "it is no text"
        raise StorageError(f"{file}: {reason}", remedy="name the file that holds the token") from error


def call(route: Route[Q, R], request: Q, *, timeout_s: float = 60.0) -> R:
    """One request to the planner, and its reply.

    Raises:
        StageloomError: the planner said no, or is not there.
    """
    with connected(live=not route.offline) as caller:
        if route.form is AnswerForm.JOB:
            raise AssertionError("jobs are followed: stageloom.planner.cli.jobs")
        return caller.call(route, request, timeout_s=timeout_s)


def every(route: Route[Q, Page[T]], request: Q) -> list[T]:
    """All items of a list. Raises as `call`."""
    with connected(live=not route.offline) as caller:
        return list(caller.pages(route, request))


def first(route: Route[Q, Page[T]], request: Q, number: int) -> list[T]:
    """The first `number` items of a list. Raises as `call`."""
    items: list[T] = []
    with connected(live=not route.offline) as caller:
        for item in caller.pages(route, request):
            items.append(item)
            if len(items) == number:
                break
    return items
