"""Measurements of both processes as telemetry rows, and the journal that hands them to the link."""

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from stageloom.edge_agent.ingest.ledger import Interval
from stageloom.edge_agent.worker.messages import OperatorTimes, PartsTimed, StageTimes, Stats, StepTraced
from stageloom.shared.ids import Digest
from stageloom.shared.messages.telemetry import (
    PLAN_CHARS,
    Event,
    GroupSpan,
    OperatorTiming,
    PartProfileResult,
    PartTiming,
    ProfileResult,
    QueueSample,
    RowData,
    StageProfileResult,
    StageTiming,
    StepTimings,
    StepTrace,
    TaskCounters,
)
from stageloom.shared.partition import Axis
from stageloom.shared.text import bounded

_log = logging.getLogger(__name__)

_PROBLEMS: Final = 16
_CODE_CHARS: Final = 128
_TEXT_CHARS: Final = 512


class Journal:
    """Every note goes to the log, to `status` while it is among the newest, and to the planner."""

    def __init__(self, keep: Callable[[Sequence[RowData]], None]) -> None:
        """`keep`: the link's part for telemetry."""
        self.problems: deque[str] = deque(maxlen=_PROBLEMS)
        self._keep = keep

    def found(self, problem: str) -> None:
        """Something was wrong with the state that the agent found at its start."""
        _log.warning("%s", problem)
        self.problems.append(problem)
        self.record([Event("state", problem[:_TEXT_CHARS])])

    def note(self, code: str, text: str) -> None:
        _log.warning("%s: %s", code, text)
        self.problems.append(f"{time.strftime('%H:%M:%S')} {code}: {text}")
        self.record([Event(code[:_CODE_CHARS], text[:_TEXT_CHARS])])

    def record(self, rows: Sequence[RowData]) -> None:
        if rows:
            self._keep(rows)


_TIMINGS_PER_ROW = 64
_LONGEST_NAME = 64


def row_name(model: str) -> str:
    """A model's name as rows spell it: other characters than letters, digits, `.`, `_` and `-` become `_`."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", model)[:_LONGEST_NAME]
    return name if name[:1].isalnum() else f"x{name}"[:_LONGEST_NAME]


def task_rows(intervals: Mapping[str, Interval], length_us: int) -> list[RowData]:
    """Counters and latencies of the models that saw a task."""
    rows: list[RowData] = []
    for model, interval in intervals.items():
        c, name = interval.counts, row_name(model)
        rows.append(
            TaskCounters(
                name, length_us, c.submitted, c.completed, c.refused, c.cancelled, c.expired, c.failed
            )
        )
        if c.completed:
            rows.append(interval.histogram(name))
    return rows


def engine_rows(stats: Stats, plans: Mapping[int, Digest], service_us: Mapping[str, float]) -> list[RowData]:
    """Queues, and steps of the plans known by key: in a trial two plans take turns within one report.

    `service_us` is the mean device time of one task of a model.
    """
    rows: list[RowData] = [
        QueueSample(
            row_name(model.name),
            model.queue_length,
            round(model.queue_length * service_us.get(model.name, 0.0)),
            round(model.oldest_age_s * 1e6),
        )
        for model in stats.models
    ]
    rows += [
        StepTimings(
            plans[one.key][:PLAN_CHARS],
            one.combined,
            one.mask,
            one.steps,
            round(one.busy_s * 1e6),
            round(one.longest_s * 1e6),
        )
        for one in stats.combined
        if one.steps and one.key in plans
    ]
    return rows


class ServiceTimes:
    """Device time per completed task of each model, since the first report after the plan was activated.

    A step's time is shared equally by the members that ran in it.
    """

    def __init__(self, members: Sequence[Sequence[str]]) -> None:
        self._members = members
        self._busy_s: dict[str, float] = {}
        self._completed: dict[str, int] = {}
        self._before: dict[str, int] | None = None

    def add(self, stats: Stats) -> None:
        """One report of the engine; the first one tells where to count from."""
        completed = {model.name: model.outcomes.get("completed", 0) for model in stats.models}
        before, self._before = self._before, completed
        if before is None:
            return  # which tasks are of its steps cannot be told
        for name, count in completed.items():
            self._completed[name] = self._completed.get(name, 0) + count - before.get(name, 0)
        for one in stats.combined:
            if one.key != stats.key or one.combined >= len(self._members):
                continue
            names = [name for at, name in enumerate(self._members[one.combined]) if one.mask >> at & 1]
            for name in names:
                self._busy_s[name] = self._busy_s.get(name, 0.0) + one.busy_s / len(names)

    def per_task_us(self) -> dict[str, float]:
        """Per model; models without a completed task are left out."""
        return {
            name: self._busy_s.get(name, 0.0) / count * 1e6
            for name, count in self._completed.items()
            if count
        }


def trace_row(traced: StepTraced, plan: Digest) -> StepTrace:
    """One step as a timeline."""

    def since_us(at_s: float) -> int:
        return max(round((at_s - traced.started_s) * 1e6), 0)

    return StepTrace(
        plan[:PLAN_CHARS],
        traced.combined,
        traced.mask,
        traced.lane,
        since_us(traced.ended_s),
        tuple(
            GroupSpan(item, stream, since_us(begin_s), since_us(end_s))
            for item, stream, begin_s, end_s in traced.groups
        ),
        round(traced.started_s * 1e6),
        traced.whole,
    )


def profile_rows(times: OperatorTimes, environment: str) -> list[RowData]:
    """The answer to a profile request, in parts; operators that the time limit cut off are left out.

    The last row of the engine's last report says that the answer is whole.
    """
    whole = times.first + len(times.times) >= times.operators
    timings = [
        OperatorTiming(op, median_us, spread_us, runs)
        for op, (median_us, spread_us, runs) in enumerate(times.times, times.first)
        if runs
    ]
    parts = [timings[i : i + _TIMINGS_PER_ROW] for i in range(0, len(timings), _TIMINGS_PER_ROW)] or [[]]
    return [
        ProfileResult(
            times.request,
            Digest(times.artifact),
            times.batch,
            bounded(environment, 128),
            tuple(part),
            whole and index == len(parts) - 1,
            bounded(times.reason),
        )
        for index, part in enumerate(parts)
    ]


def part_rows(parts: PartsTimed, artifact: Digest, environment: str) -> list[RowData]:
    """Parts of operators, in rows; the first one has what it takes to hand over and to copy."""
    timings = [
        PartTiming(op, Axis(axis), extent, median_us, spread_us, runs)
        for op, axis, extent, median_us, spread_us, runs in parts.times
    ]
    chunks = [timings[i : i + _TIMINGS_PER_ROW] for i in range(0, len(timings), _TIMINGS_PER_ROW)] or [[]]
    return [
        PartProfileResult(
            parts.request,
            artifact,
            bounded(environment, 128),
            tuple(chunk),
            None if at else parts.handover_us,
            None if at else parts.copy_bytes_per_s,
            bounded(parts.reason),
        )
        for at, chunk in enumerate(chunks)
    ]


def stage_rows(times: StageTimes, plan: Digest, environment: str) -> list[RowData]:
    """One part of the answer to a stage profile request, in rows."""
    timings = [StageTiming(*one) for one in times.times]
    parts = [timings[i : i + _TIMINGS_PER_ROW] for i in range(0, len(timings), _TIMINGS_PER_ROW)] or [[]]
    return [
        StageProfileResult(
            times.request,
            plan,
            times.combined,
            bounded(environment, 128),
            tuple(part),
            times.step_us,
            times.last and index == len(parts) - 1,
            bounded(times.reason),
        )
        for index, part in enumerate(parts)
    ]
