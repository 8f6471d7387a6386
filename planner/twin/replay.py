"""Telemetry as arrivals and windows, a device over the wire, predictions and their errors.

Telemetry counts arrivals per interval and does not keep their times; inside an interval they are taken to lie
evenly spread at random, as Poisson arrivals would. Bursts longer than an interval stay bursts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.telemetry import telemetry_rows
from stageloom.planner.telemetry import together
from stageloom.planner.twin.arrivals import Counted, CountedSpan
from stageloom.planner.twin.window import (
    ModelWindow,
    StepsWindow,
    Window,
    add_counts,
)
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.stats import ModelQueue, QueueSnapshot
from stageloom.shared.errors import InputError, UnavailableError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.telemetry import (
    PLAN_CHARS,
    LatencyHistogram,
    PlanActivated,
    QueueSample,
    Row,
    RowKind,
    StepTimings,
    TaskCounters,
)
from stageloom.shared.plan import Plan


def counted_arrivals(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Counted]:
    """Arrivals by model, of the time that the counters of all these models cover.

    Raises:
        InputError: no counter of these models is among the rows.
    """
    counted = [(row.at_us, row.data) for row in rows if isinstance(row.data, TaskCounters)]
    mine = [(at_us, data) for at_us, data in counted if data.model in names]
    if not mine:
        raise InputError(
            "the device counted no task of this plan's models", remedy="give --rate or --recording"
        )
    begin_us = min(at_us - data.interval_us for at_us, data in mine)
    end_us = max(at_us for at_us, _ in mine)
    spans: dict[str, list[CountedSpan]] = {name: [] for name in names}
    for at_us, data in mine:
        first_us, last_us = at_us - data.interval_us - begin_us, at_us - begin_us
        spans[data.model].append((first_us * 1e-6, last_us * 1e-6, data.submitted))
    length_s = (end_us - begin_us) * 1e-6
    return {name: Counted(spans=tuple(found), length_s=length_s) for name, found in spans.items()}


def active_spans(rows: Sequence[Row], plan: Digest) -> list[tuple[int, int]]:
    """From when to when this plan was active, by the device's clock in microseconds, oldest first.

    `rows`: `PlanActivated` and others, oldest first; the newest row ends the last span.
    """
    spans: list[tuple[int, int]] = []
    since_us: int | None = None
    for row in rows:
        if not isinstance(row.data, PlanActivated):
            continue
        if since_us is None and row.data.plan == plan:
            since_us = row.at_us
        elif since_us is not None and row.data.plan != plan:
            spans.append((since_us, row.at_us))
            since_us = None
    if since_us is not None and rows[-1].at_us > since_us:
        spans.append((since_us, rows[-1].at_us))
    return spans


def measured_window(rows: Sequence[Row], plan: Plan, begin_us: int, end_us: int) -> Window | None:
    """What a device measured of a plan between two moments of its clock; None if no interval lies there.

    Whole intervals only: rows whose interval began before `begin_us` are left out. It lasts from the first
    interval of any model to the last, as a model without a task sends none. Glances have the queues and no
    progress, which telemetry lacks; `used_s` is not known.
    """
    cut_us = max(_cut(rows, begin_us, end_us), default=begin_us)
    inside = [row for row in rows if cut_us < row.at_us <= end_us]
    counters: dict[str, list[TaskCounters]] = {}
    histograms: dict[str, list[LatencyHistogram]] = {}
    first_us, last_us = end_us, begin_us
    for row in inside:
        if isinstance(row.data, TaskCounters):
            counters.setdefault(row.data.model, []).append(row.data)
            first_us = min(first_us, row.at_us - row.data.interval_us)
            last_us = max(last_us, row.at_us)
        elif isinstance(row.data, LatencyHistogram):
            histograms.setdefault(row.data.model, []).append(row.data)
    if first_us >= last_us:
        return None
    steps = [row.data for row in inside if isinstance(row.data, StepTimings)]
    mine = [step for step in steps if step.plan == plan.digest[:PLAN_CHARS]]
    busy_s = _busy_s(mine, plan)
    glances = _glances(inside)
    last = {queue.name: queue.queued for queue in glances[-1].queues} if glances else {}
    models = tuple(
        ModelWindow(
            name=name,
            submitted=sum(one.submitted for one in found),
            ended=add_counts(found),
            queued=last.get(name, 0),
            busy_s=busy_s.get(name, 0.0),
            histogram=together(histograms[name]) if name in histograms else None,
        )
        for name, found in counters.items()
    )
    return Window(
        plan=plan.digest,
        began_s=begin_us * 1e-6,
        seconds=(last_us - first_us) * 1e-6,
        busy_s=sum(step.sum_us for step in mine) * 1e-6,
        used_s=None,
        models=models,
        steps=_steps(mine),
        glances=glances,
        open_before=0,
        open_after=sum(last.values()),
    )


def _cut(rows: Sequence[Row], begin_us: int, end_us: int) -> Iterator[int]:
    """When the intervals ended that began before `begin_us`; what was sent with them is of these, too."""
    for row in rows:
        began_us = row.at_us - row.data.interval_us if isinstance(row.data, TaskCounters) else row.at_us
        if began_us < begin_us <= row.at_us <= end_us:
            yield row.at_us


def _busy_s(steps: Sequence[StepTimings], plan: Plan) -> dict[str, float]:
    """Per model its part of the steps: a step's time is shared equally by the members that ran in it."""
    found: dict[str, float] = {}
    for step in steps:
        if step.combined_block >= len(plan.combined):
            continue
        members = plan.combined[step.combined_block].members
        names = [plan.models[m.model].name for at, m in enumerate(members) if step.mask >> at & 1]
        for name in names:
            found[name] = found.get(name, 0.0) + step.sum_us * 1e-6 / len(names)
    return found


def _steps(steps: Sequence[StepTimings]) -> tuple[StepsWindow, ...]:
    by_program: dict[tuple[int, int], list[StepTimings]] = {}
    for step in steps:
        by_program.setdefault((step.combined_block, step.mask), []).append(step)
    sums = {program: together(rows) for program, rows in sorted(by_program.items())}
    return tuple(
        StepsWindow(
            combined=combined, mask=mask, count=one.count, sum_s=one.sum_us * 1e-6, max_s=one.max_us * 1e-6
        )
        for (combined, mask), one in sums.items()
    )


def _glances(rows: Sequence[Row]) -> tuple[QueueSnapshot, ...]:
    by_moment: dict[int, dict[str, QueueSample]] = {}
    for row in rows:
        if isinstance(row.data, QueueSample):
            by_moment.setdefault(row.at_us, {})[row.data.model] = row.data
    return tuple(
        QueueSnapshot(at_us * 1e-6, None, None, tuple(map(_queue, samples.values())))
        for at_us, samples in sorted(by_moment.items())
    )


def _queue(sample: QueueSample) -> ModelQueue:
    return ModelQueue(sample.model, 0, sample.tasks, sample.oldest_age_us * 1e-6, 0, 0)


def figures(window: Window) -> dict[str, float]:
    """What of a window is predicted, kept and compared: `MODEL.NAME` of each model, and `NAME` of all.

    `steps_running` is the mean number of steps that run at a time, which every device can tell.
    """
    found = {
        "throughput_per_s": window.throughput_per_s,
        "p50_ms": 1e3 * window.latency_s(0.5),
        "p99_ms": 1e3 * window.p99_s,
        "mean_latency_ms": 1e3 * window.mean_latency_s,
        "steps_running": sum(step.sum_s for step in window.steps) / window.seconds,
        "queue_variance_s2": window.queue_variance(),
    }
    if window.used_s is not None:
        found["utilisation"] = window.utilisation
    for model in window.models:
        lost = model.ended.refused + model.ended.expired + model.ended.failed
        queued = [q.queued for glance in window.glances for q in glance.queues if q.name == model.name]
        found |= {
            f"{model.name}.arrivals_per_s": model.submitted / window.seconds,
            f"{model.name}.throughput_per_s": model.ended.completed / window.seconds,
            f"{model.name}.p50_ms": 1e3 * model.latency_s(0.5),
            f"{model.name}.p99_ms": 1e3 * model.latency_s(0.99),
            f"{model.name}.queued_mean": sum(queued) / len(queued) if queued else 0.0,
            f"{model.name}.queued_max": float(max(queued, default=0)),
            f"{model.name}.lost": float(lost),
            f"{model.name}.lost_per_s": lost / window.seconds,
        }
    return found


def relative_errors(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Predicted over measured, less 1, of every figure that both have and that was not measured as 0.

    A latency that is predicted as 0 is of no task, and compares with none. Nor do counts of tasks: what was
    measured is seldom as long as what was simulated.
    """
    return {
        name: predicted[name] / value - 1.0
        for name, value in measured.items()
        if name in predicted
        and value > 0.0
        and (predicted[name] > 0.0 or not name.endswith("_ms"))
        and not name.endswith(".lost")
    }


POLL_S: Final = 0.5
_KINDS: Final = (
    RowKind.PLAN_ACTIVATED,
    RowKind.TASK_COUNTERS,
    RowKind.LATENCY_HISTOGRAM,
    RowKind.QUEUE_SAMPLE,
    RowKind.STEP_TIMINGS,
)
_MOST_ROWS: Final = 200_000


class AgentDevice:
    """One enrolled device. Its tasks come from its own applications.

    `push` makes a plan the device's desired one; `sleep` waits so many seconds. Moments are of the device's
    clock, as its rows tell them.
    """

    def __init__(
        self,
        store: ReadStore,
        device: DeviceId,
        push: Callable[[BoundPlan], None],
        sleep: Callable[[float], None],
        *,
        timeout_s: float = 120.0,
    ) -> None:
        self._store = store
        self._device = device
        self._push = push
        self._sleep = sleep
        self._timeout_s = timeout_s
        self._bound: BoundPlan | None = None
        self._reached_us = 0  # the newest row that a window or a deployment has taken account of

    def deploy(self, bound: BoundPlan) -> None:
        """Push the plan and wait until the device runs it: it may have to win a trial first.

        Raises:
            UnavailableError: it does not run it in time; what ran before goes on.
        """
        rows = self._rows()
        self._reached_us = max((row.at_us for row in rows), default=0)
        runs = active_spans(rows, bound.plan.digest)
        self._push(bound)
        self._bound = bound
        if runs and runs[-1][1] == self._reached_us:  # it runs already, and sends no new row of it
            return
        self._bound, waited_s = None, 0.0
        while not (spans := self._active(bound)):
            if waited_s >= self._timeout_s:
                raise UnavailableError(
                    f"{self._device} does not run plan {bound.plan.digest[:12]} after {waited_s:.0f} s",
                    remedy=f"see `stageloom device show {self._device}`",
                )
            self._sleep(POLL_S)
            waited_s += POLL_S
        self._reached_us = max(self._reached_us, spans[-1][0])
        self._bound = bound

    def run(self, seconds: float, *, sample_at_s: Sequence[float] | None = None) -> Window:
        """Wait so long, then return the window of what the device sent; it chooses when it samples its
        queues.

        Raises:
            UnavailableError: no plan was deployed, or the device sent nothing of it in time.
        """
        if self._bound is None:
            raise UnavailableError(f"nothing was deployed on {self._device}", remedy="deploy a plan first")
        since_us = self._reached_us
        until_us = since_us + round(seconds * 1e6)
        self._sleep(seconds)
        waited_s = 0.0
        while True:
            rows = self._rows(since_us)
            newest_us = max((row.at_us for row in rows), default=since_us)
            window = measured_window(rows, self._bound.plan, since_us, until_us)
            if window is not None and newest_us >= until_us:
                self._reached_us = until_us
                return window
            if waited_s >= self._timeout_s:
                raise UnavailableError(f"{self._device} has sent nothing for {waited_s:.0f} s")
            self._sleep(POLL_S)
            waited_s += POLL_S

    def _rows(self, since_us: int = 0) -> list[Row]:
        return self._store.read(telemetry_rows, self._device, _KINDS, since_us=since_us, limit=_MOST_ROWS)

    def _active(self, bound: BoundPlan) -> list[tuple[int, int]]:
        """When the plan ran since it was pushed."""
        return active_spans(self._rows(self._reached_us + 1), bound.plan.digest)
