"""Schedulers: which there are, and how they compare on models of the store."""

from enum import Enum
from typing import Annotated

from msgspec import Meta

from stageloom.planner.schema.base import Budget, Reply, Request
from stageloom.planner.schema.plan import ModelOptions
from stageloom.planner.schema.replan import TrialInfo
from stageloom.shared.messages.base import DeviceName, DigestText, Line, Name, Real, SmallCount
from stageloom.shared.plan import MAX_MEMBERS


class SchedulerKind(str, Enum):
    """Which field of a request takes the name."""

    SCHEDULER = "scheduler"
    POLICY = "policy"  # a rival, which decides more than the schedules


class SchedulerListRequest(Request, frozen=True, kw_only=True):
    """What `scheduler` and `policy` of a plan's request take."""


class SchedulerInfo(Reply, frozen=True, kw_only=True):
    """One scheduler or policy, and what it does.

    `distribution`: name and version of what adds it; empty for Stageloom's own. `problem`: why it cannot be
    used, and what to do about it.
    """

    kind: SchedulerKind
    name: Line
    help: Line
    distribution: Line = ""
    problem: Line = ""


class SchedulerCompareRequest(Request, frozen=True, kw_only=True):
    """Search with each scheduler on the same models, cut and combined alike.

    `schedulers` empty: all. `device` names whose measured costs to use, none means estimates; with
    `measure_s` that device measures every plan found, so many seconds a plan at most, and the plans are kept.
    The rest is as in a plan's request.
    """

    models: Annotated[tuple[ModelOptions, ...], Meta(min_length=1, max_length=64)]
    schedulers: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    device: DeviceName | None = None
    combination: Name = "alone"
    members_max: Annotated[int, Meta(ge=1, le=MAX_MEMBERS)] = 2
    executor: Name = "onnx"
    r: Annotated[int, Meta(ge=1, le=1024)] | None = None
    s: Annotated[int, Meta(ge=1, le=1024)] | None = None
    measure_s: Budget | None = None


class ComparedScheduler(Reply, frozen=True, kw_only=True):
    """One scheduler's plan for the models.

    Milliseconds of one task of each model (replicas take turns, and a batch shares a run): as predicted, as
    no schedule can beat (`bound_ms`), with the cheapest stages within r and s (`optimum_ms`, where that is
    known), as the device measured. `over_bound` and `over_optimum` are shares. `stages`
    and `groups_max` are of stages, `streams_max` of streams. `trial` is the newest on the device in which the
    plan was the candidate.
    """

    models: Line
    scheduler: Name
    plan: DigestText
    predicted_ms: Real
    bound_ms: Real
    optimum_ms: Real | None
    over_bound: Real
    over_optimum: Real | None
    search_ms: Real
    stages: SmallCount | None
    groups_max: SmallCount | None
    streams_max: SmallCount | None
    measured_ms: Real | None
    trial: TrialInfo | None


class SchedulerCompareReply(Reply, frozen=True, kw_only=True):
    """All that were compared, the cheapest first; `reasons` why some were not measured, `failed` why some
    of other distributions are missing."""

    compared: Annotated[tuple[ComparedScheduler, ...], Meta(max_length=64)]
    reasons: Annotated[tuple[Line, ...], Meta(max_length=64)] = ()
    failed: Annotated[tuple[Line, ...], Meta(max_length=64)] = ()
