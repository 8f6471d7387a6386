"""What the engine says of itself: frozen statistics for telemetry, triggers and trials."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec import Struct

from stageloom.shared.engine.queues import Launcher
from stageloom.shared.engine.slots import CombinedState, InFlight, PlanState
from stageloom.shared.engine.steps import Outcome, PlanKey


@dataclass(frozen=True, slots=True)
class Counts:
    """How many tasks ended in each way."""

    completed: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0

    @property
    def total(self) -> int:
        return self.completed + self.refused + self.failed + self.cancelled + self.expired


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStats:
    """One model's queue and progress. A shared task counts in each of its models."""

    name: str
    queued: int  # tasks not launched yet
    queued_bytes: int
    oldest_age_s: float  # of the oldest queued task, 0 where there is none
    launched: int  # tasks so far
    ended: Counts
    progress: tuple[int, ...]  # per replica of the active plan the mask of blocks with an instance in them


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedStats:
    """One combined block of the active plan since the plan was loaded."""

    index: int
    runs: int
    skips: int  # times passed over while it could run
    most_skips: int  # the most in a row
    input_ratio: float  # mean over the runs, 0 without one


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine at one instant."""

    now_s: float
    active: PlanKey | None
    loaded: tuple[PlanKey, ...]
    draining: bool
    submitted: int
    ended: Counts  # of tasks; submitted == ended.total + open_tasks
    open_tasks: int
    instances: int  # in flight with a block still to be issued
    lane_loads: tuple[int, ...]  # steps in flight per lane
    steps: int  # issued so far
    fallback_steps: int  # of them without a ready program
    models: tuple[ModelStats, ...]
    combined: tuple[CombinedStats, ...]


class ModelQueue(Struct, frozen=True, array_like=True, gc=False):
    """One model's queue and progress."""

    name: str
    arrived: int  # tasks so far, also those that found the queue full
    queued: int
    oldest_age_s: float  # 0 where it is empty
    blocks: int  # of the active plan; 0 where it lacks the model
    progress: int  # bit b: some replica has an instance in block b
    tightest_s: float | None = None  # from arrival to deadline, of its tasks since the last sample


class QueueSnapshot(Struct, frozen=True, array_like=True, tag=13):
    """The queues at one instant, as a trigger samples them ten times a second; also a report of the engine.

    It costs much less than `EngineStats`.
    """

    at_s: float
    key: PlanKey | None  # of the active plan
    tightest_s: float | None  # of any model's
    queues: tuple[ModelQueue, ...]
    oldest_age_s: float = 0.0  # of the oldest task that waits, for a guard, which a twin has none of


def counts(ended: Mapping[Outcome, int]) -> Counts:
    """Freeze the counters of one model or of all."""
    return Counts(**{outcome.value: count for outcome, count in ended.items()})


def model_stats(launcher: Launcher, progress: tuple[int, ...], now: float) -> ModelStats:
    oldest = launcher.queue.oldest_arrived_s
    return ModelStats(
        name=launcher.name,
        queued=len(launcher.queue),
        queued_bytes=launcher.queue.nbytes,
        oldest_age_s=0.0 if oldest is None else now - oldest,
        launched=launcher.launched,
        ended=counts(launcher.ended),
        progress=progress,
    )


def model_queue(launcher: Launcher, active: PlanState | None, in_flight: InFlight, now: float) -> ModelQueue:
    oldest = launcher.queue.oldest_arrived_s
    progress, blocks = 0, 0
    if active is not None and (index := active.bound.model_index.get(launcher.name)) is not None:
        blocks = active.bound.models[index].plan.num_blocks
        for mask in progress_of(active, launcher.name, in_flight):
            progress |= mask
    return ModelQueue(
        launcher.name,
        launcher.arrived,
        len(launcher.queue),
        0.0 if oldest is None else now - oldest,
        blocks,
        progress,
        None if launcher.tightest_s == math.inf else launcher.tightest_s,
    )


def combined_stats(combined: Iterable[CombinedState]) -> tuple[CombinedStats, ...]:
    """Freeze the combined blocks of a plan."""
    return tuple(
        CombinedStats(
            index=c.index,
            runs=c.runs,
            skips=c.total_skips + c.skips,
            most_skips=max(c.most_skips, c.skips),
            input_ratio=c.active_sum / (c.runs * c.size) if c.runs else 0.0,
        )
        for c in combined
    )


def progress_of(plan: PlanState, name: str, in_flight: InFlight) -> tuple[int, ...]:
    """Per replica the blocks in which an instance physically is, running there or waiting to. [replicas]"""
    index = plan.bound.model_index.get(name)
    if index is None:
        return ()
    tracks = plan.models[index].tracks
    masks = dict.fromkeys(tracks, 0)
    for track in tracks:
        for slot in track.slots:
            instance = slot.instance
            if instance is not None and not instance.over:
                masks[track] |= 1 << instance.passed
    for record in in_flight.values():
        for instance, slot in record.members:
            track = slot.track
            if track in masks and instance.track is track and not instance.over:
                masks[track] |= 1 << instance.passed
    return tuple(masks.values())
