"""Jobs: requests that take longer than an answer may."""

from enum import Enum
from typing import Annotated, Any

from msgspec import Meta, field

from stageloom.planner.schema.base import Reply, Request
from stageloom.shared.messages.base import Line, MicroSeconds, Real, Seconds, ShortText, SmallCount

JobId = Annotated[str, Meta(min_length=1, max_length=32, pattern=r"^[0-9a-z]+\Z")]


class JobState(str, Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ProblemDetails(Reply, frozen=True, kw_only=True):
    """Why a request was refused (RFC 9457). `detail` is the cause, `remedy` what to do about it; `exit_code`
    is what the command line ends with."""

    type: ShortText = "about:blank"
    title: ShortText
    status: Annotated[int, Meta(ge=400, le=599)]
    detail: Line
    remedy: Line = ""
    exit_code: Annotated[int, Meta(ge=1, le=255)] = 1


class JobProgress(Reply, frozen=True, kw_only=True):
    """How far a job is: `done` of `size` parts (0: not known), and a line for people."""

    text: Line = ""
    done: SmallCount = 0
    size: SmallCount = 0
    elapsed_s: Seconds = 0.0
    figures: dict[str, Real] = field(default_factory=dict)


class JobInfo(Reply, frozen=True, kw_only=True):
    """One job. `result`, once it is done, is what `operation` promises; `problem` why it failed."""

    job: JobId
    operation: ShortText
    state: JobState
    who: ShortText
    began_at_us: MicroSeconds
    ended_at_us: MicroSeconds = 0
    progress: JobProgress
    result: Any = None
    problem: ProblemDetails | None = None


class JobListRequest(Request, frozen=True, kw_only=True):
    """Jobs of this planner since it started, newest first; the last 256."""


class JobShowRequest(Request, frozen=True, kw_only=True):
    job: JobId


class JobCancelRequest(Request, frozen=True, kw_only=True):
    """End a job; a tournament ends with its best so far. One that has ended is left alone."""

    job: JobId


class JobEventsRequest(Request, frozen=True, kw_only=True):
    """Follow a job: a server-sent event `progress` at each change, and `end` with the whole job."""

    job: JobId
