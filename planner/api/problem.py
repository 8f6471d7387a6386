"""Errors as problem details (RFC 9457), with the cause and remedy that the command line shows, and back."""

import errno
import logging
from http import HTTPStatus
from typing import Final

import msgspec

from stageloom.planner.schema.job import ProblemDetails
from stageloom.shared.errors import (
    DecodeError,
    ExitCode,
    InputError,
    NotFoundError,
    RefusedError,
    StageloomError,
    StorageError,
    TokenError,
    UnavailableError,
)
from stageloom.shared.text import bounded

logger = logging.getLogger(__name__)

MEDIA_TYPE: Final = "application/problem+json"

_STATUS: Final[tuple[tuple[type[StageloomError], HTTPStatus], ...]] = (
    (NotFoundError, HTTPStatus.NOT_FOUND),
    (TokenError, HTTPStatus.FORBIDDEN),
    (InputError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (DecodeError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (RefusedError, HTTPStatus.CONFLICT),
    (UnavailableError, HTTPStatus.SERVICE_UNAVAILABLE),
    (StorageError, HTTPStatus.INSUFFICIENT_STORAGE),
)
"""By the first class that fits; any other error raised on purpose is a conflict."""


_OF_STORAGE: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
)


class ApiRefused(StageloomError):
    """The planner did not do what was asked; `status` is HTTP's, `exit_code` what the command ends with."""

    def __init__(self, problem: ProblemDetails) -> None:
        super().__init__(problem.detail, remedy=problem.remedy)
        self.status = problem.status
        self.problem = problem
        try:
            self.exit_code = ExitCode(problem.exit_code)
        except ValueError:  # a later planner's
            self.exit_code = ExitCode.FAILED


def problem(
    status: HTTPStatus, detail: str, remedy: str = "", exit_code: ExitCode = ExitCode.FAILED
) -> ProblemDetails:
    """A problem of this status."""
    return ProblemDetails(
        title=status.phrase,
        status=int(status),
        detail=bounded(detail),
        remedy=bounded(remedy),
        exit_code=exit_code,
    )


def problem_of(error: BaseException, doing: str) -> ProblemDetails:
    """The problem that an error is; one not raised on purpose is logged, and told by its type alone."""
    if isinstance(error, ApiRefused):
        return error.problem
    if isinstance(error, StageloomError):
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), HTTPStatus.CONFLICT)
        return problem(status, error.cause, error.remedy, error.exit_code)
    if isinstance(error, ImportError):
        return problem(
            HTTPStatus.CONFLICT,
            f"{error.name or error} cannot be imported where the planner runs: {error}",
            "install the extra that has it there",
            ExitCode.BACKEND,
        )
    logger.error("%s failed", doing, exc_info=error)
    if isinstance(error, OSError) and error.errno in _OF_STORAGE:
        return problem(
            HTTPStatus.INSUFFICIENT_STORAGE,
            f"the planner cannot write or read a file of its own: {error.strerror}",
            "see its log for which, free space or give it back its permissions, and ask again",
            ExitCode.STORAGE,
        )
    return problem(
        HTTPStatus.INTERNAL_SERVER_ERROR, f"the planner failed: {type(error).__name__}", "see its log"
    )


def decode_problem(status: int, body: bytes) -> ProblemDetails:
    """The problem in an answer, whatever sent it."""
    try:
        return msgspec.json.decode(body, type=ProblemDetails)
    except msgspec.DecodeError:
        text = bounded(body[:200].decode("utf-8", "replace")) or "no reason was given"
        return ProblemDetails(
            title="refused", status=min(max(status, 400), 599), detail=f"HTTP {status}: {text}"
        )
