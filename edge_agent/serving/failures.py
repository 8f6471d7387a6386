"""Errors as the protocol's clients expect them: Triton's codes, by HTTP's and gRPC's names.

| Triton | HTTP | gRPC |
| --- | --- | --- |
| INVALID_ARG | 400 | INVALID_ARGUMENT |
| ALREADY_EXISTS | 400 | ALREADY_EXISTS |
| CANCELLED | 400 | CANCELLED |
| NOT_FOUND | 404 | NOT_FOUND |
| INTERNAL | 500 | INTERNAL |
| UNSUPPORTED | 501 | UNIMPLEMENTED |
| UNAVAILABLE | 503 | UNAVAILABLE |
"""

import logging
from enum import Enum
from typing import Final

from stageloom.edge_agent.ingest.signature import LAYOUT_CODES
from stageloom.shared.errors import (
    AgentRestarted,
    InputError,
    NotFoundError,
    StageloomError,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskRefused,
    UnavailableError,
)

_log = logging.getLogger(__name__)


class FailureKind(Enum):
    """HTTP's status and gRPC's code."""

    INVALID = 400, "INVALID_ARGUMENT"
    EXISTS = 400, "ALREADY_EXISTS"
    CANCELLED = 400, "CANCELLED"
    STRANGER = 401, "UNAUTHENTICATED"
    FORBIDDEN = 403, "PERMISSION_DENIED"
    NOT_FOUND = 404, "NOT_FOUND"
    TOO_LARGE = 413, "RESOURCE_EXHAUSTED"
    INTERNAL = 500, "INTERNAL"
    UNSUPPORTED = 501, "UNIMPLEMENTED"
    UNAVAILABLE = 503, "UNAVAILABLE"

    @property
    def status(self) -> int:
        return self.value[0]

    @property
    def code(self) -> str:
        return self.value[1]


class InferenceFailure(StageloomError):
    """What a client is told instead of an answer."""

    def __init__(self, kind: FailureKind, cause: str, *, remedy: str = "") -> None:
        super().__init__(cause, remedy=remedy)
        self.kind = kind


_KINDS: Final[tuple[tuple[type[StageloomError], FailureKind], ...]] = (
    (NotFoundError, FailureKind.NOT_FOUND),
    (InputError, FailureKind.INVALID),
    (TaskCancelled, FailureKind.CANCELLED),
    (TaskFailed, FailureKind.INTERNAL),
    (AgentRestarted, FailureKind.UNAVAILABLE),
    (UnavailableError, FailureKind.UNAVAILABLE),
)


def failure_of(error: BaseException) -> InferenceFailure:
    """The failure that an error is; one that is not raised on purpose is logged and told by its type."""
    if isinstance(error, InferenceFailure):
        return error
    if isinstance(error, TaskExpired):  # in Triton's words, which clients look for
        return InferenceFailure(FailureKind.UNAVAILABLE, f"Request timeout expired: {error.cause}")
    if isinstance(error, TaskRefused):
        kind = FailureKind.UNAVAILABLE
        if error.code == "unknown_model":
            kind = FailureKind.NOT_FOUND
        elif error.code in LAYOUT_CODES:
            kind = FailureKind.INVALID
        return InferenceFailure(kind, error.cause, remedy=error.remedy)
    for known, kind in _KINDS:
        if isinstance(error, known):
            return InferenceFailure(kind, error.cause, remedy=error.remedy)
    _log.error("a request failed", exc_info=error)
    return InferenceFailure(FailureKind.INTERNAL, f"the server failed: {type(error).__name__}")


def unsupported(what: str, remedy: str = "") -> InferenceFailure:
    """The refusal of a part of the protocol that is not there."""
    return InferenceFailure(FailureKind.UNSUPPORTED, what, remedy=remedy)
