"""What a device does: `TargetDevice`, which runs plans, and `Window`, what happened between two instants.

A window is the same value of a twin, an engine and an agent. Its parts are the engine's own (`Counts`,
`QueueSnapshot`) where those exist; `rows` gives the telemetry that an agent would have sent of it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from stageloom.planner.telemetry import together
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.stats import Counts, QueueSnapshot
from stageloom.shared.ids import Digest
from stageloom.shared.messages.telemetry import (
    PLAN_CHARS,
    LatencyHistogram,
    QueueSample,
    RowData,
    StepTimings,
    TaskCounters,
    Utilisation,
    histogram_of,
    quantile_us,
)
from stageloom.shared.policy.queues import QueueMeasure, variance

ENDINGS: Final = ("completed", "refused", "cancelled", "expired", "failed")
"""Ways in which a task ends, in the order of `TaskCounters`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWindow:
    """One model's tasks; a shared task counts in each of its models."""

    name: str
    submitted: int
    ended: Counts
    queued: int  # at the end
    busy_s: float  # its part of the steps it ran in: a step's time is shared equally by its members
    latencies_s: tuple[float, ...] = ()  # of completed tasks, arrival to answer, in order of their answers
    histogram: LatencyHistogram | None = None  # where the latencies themselves are not known

    @property
    def service_s(self) -> float:
        """Device seconds of one task; 0 where none completed."""
        return self.busy_s / self.ended.completed if self.ended.completed else 0.0

    @property
    def mean_latency_s(self) -> float:
        """Mean over the completed tasks; 0 without one."""
        if self.latencies_s:
            return math.fsum(self.latencies_s) / len(self.latencies_s)
        if self.histogram is not None and self.histogram.count:
            return self.histogram.sum_us / self.histogram.count * 1e-6
        return 0.0

    def latency_s(self, fraction: float) -> float:
        """The smallest latency that at most 1 - `fraction` of the tasks exceed; 0 without one.

        From a histogram it is off by up to a bucket's width (19 %).
        """
        if not self.latencies_s:
            return 0.0 if self.histogram is None else quantile_us([self.histogram], fraction) * 1e-6
        return _quantile(self.latencies_s, fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsWindow:
    """Steps of one combined block under one mask that ended."""

    combined: int
    mask: int
    count: int
    sum_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One device between two instants.

    `busy_s`: at least one step was in flight. `used_s`: the integral of the share of the device that running
    steps used, at most `seconds`; None where the device cannot tell. `glances`: the queues now and then.
    """

    plan: Digest
    began_s: float
    seconds: float
    busy_s: float
    used_s: float | None
    models: tuple[ModelWindow, ...]
    steps: tuple[StepsWindow, ...]
    glances: tuple[QueueSnapshot, ...]
    open_before: int  # tasks that had come and not ended, at the beginning
    open_after: int  # and at the end

    @property
    def completed(self) -> int:
        """Tasks, over all models."""
        return sum(model.ended.completed for model in self.models)

    @property
    def throughput_per_s(self) -> float:
        return self.completed / self.seconds

    @property
    def utilisation(self) -> float:
        """Used over all seconds, in [0, 1]; busy over all where the device cannot tell."""
        return (self.busy_s if self.used_s is None else self.used_s) / self.seconds

    @property
    def busy_s_per_task(self) -> float:
        """Device seconds per completed task, a trial's figure at open load; infinity without one."""
        return self.busy_s / self.completed if self.completed else math.inf

    @property
    def mean_latency_s(self) -> float:
        """Over the completed tasks of all models; 0 without one."""
        total_s = math.fsum(model.mean_latency_s * model.ended.completed for model in self.models)
        return total_s / self.completed if self.completed else 0.0

    def latency_s(self, fraction: float) -> float:
        """As `ModelWindow.latency_s`, over all models."""
        histograms = [model.histogram for model in self.models if model.histogram is not None]
        if histograms:
            return quantile_us(histograms, fraction) * 1e-6
        return _quantile([latency_s for model in self.models for latency_s in model.latencies_s], fraction)

    @property
    def p99_s(self) -> float:
        """The latency that one task in a hundred exceeds; 0 without a completed task."""
        return self.latency_s(0.99)

    def queue_variance(self, measure: QueueMeasure = QueueMeasure.WORK) -> float:
        """Variance over the queues (`stageloom.shared.policy.queues`), mean over the glances; 0 without any.

        Queued work counts with each model's `service_s` in this window, or the others' mean without one.
        """
        if not self.glances:
            return 0.0
        found = [variance(self._counted(glance, measure)) for glance in self.glances]
        return math.fsum(found) / len(found)

    def _counted(self, glance: QueueSnapshot, measure: QueueMeasure) -> list[float]:
        if measure is QueueMeasure.TASKS:
            return [float(queue.queued) for queue in glance.queues]
        service_s = self._services_s()
        return [queue.queued * service_s.get(queue.name, 0.0) for queue in glance.queues]

    def _services_s(self) -> dict[str, float]:
        """Device seconds of one task; a model of which none completed, which may be starved, has the mean."""
        known = [model.service_s for model in self.models if model.service_s > 0.0]
        mean_s = math.fsum(known) / len(known) if known else 0.0
        return {model.name: model.service_s or mean_s for model in self.models}

    def rows(self) -> list[RowData]:
        """The telemetry rows that an agent would send of it; queues as at the last glance."""
        rows: list[RowData] = []
        for model in self.models:
            ended = model.ended
            rows.append(
                TaskCounters(
                    model.name,
                    round(self.seconds * 1e6),
                    model.submitted,
                    *(getattr(ended, name) for name in ENDINGS),
                )
            )
            if model.histogram is not None:
                rows.append(model.histogram)
            elif model.latencies_s:
                rows.append(
                    histogram_of(model.name, [round(latency_s * 1e6) for latency_s in model.latencies_s])
                )
        service_s = self._services_s()
        for queue in self.glances[-1].queues if self.glances else ():
            work_us = round(queue.queued * service_s.get(queue.name, 0.0) * 1e6)
            rows.append(QueueSample(queue.name, queue.queued, work_us, round(queue.oldest_age_s * 1e6)))
        rows += [
            StepTimings(
                self.plan[:PLAN_CHARS],
                step.combined,
                step.mask,
                step.count,
                round(step.sum_s * 1e6),
                round(step.max_s * 1e6),
            )
            for step in self.steps
        ]
        used = None if self.used_s is None else 100.0 * self.used_s / self.seconds
        rows.append(Utilisation("gpu_load", used, "percent"))
        return rows


def _quantile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[max(math.ceil(fraction * len(ordered)) - 1, 0)] if ordered else 0.0


def join(windows: Sequence[Window]) -> Window:
    """Windows of one device that follow each other, as one; of the last one's plan.

    Raises:
        ValueError: there is none.
    """
    if not windows:
        raise ValueError("no window to join")
    names = dict.fromkeys(model.name for window in windows for model in window.models)
    used = [window.used_s for window in windows if window.used_s is not None]
    return Window(
        plan=windows[-1].plan,
        began_s=windows[0].began_s,
        seconds=sum(window.seconds for window in windows),
        busy_s=sum(window.busy_s for window in windows),
        used_s=sum(used) if len(used) == len(windows) else None,
        models=tuple(
            _join_models([m for window in windows for m in window.models if m.name == n]) for n in names
        ),
        steps=_join_steps([step for window in windows for step in window.steps]),
        glances=tuple(glance for window in windows for glance in window.glances),
        open_before=windows[0].open_before,
        open_after=windows[-1].open_after,
    )


def _join_models(parts: Sequence[ModelWindow]) -> ModelWindow:
    histograms = [part.histogram for part in parts if part.histogram is not None]
    return ModelWindow(
        name=parts[0].name,
        submitted=sum(part.submitted for part in parts),
        ended=add_counts([part.ended for part in parts]),
        queued=parts[-1].queued,
        busy_s=sum(part.busy_s for part in parts),
        latencies_s=tuple(latency_s for part in parts for latency_s in part.latencies_s),
        histogram=together(histograms) if histograms else None,
    )


def _join_steps(steps: Sequence[StepsWindow]) -> tuple[StepsWindow, ...]:
    by_program: dict[tuple[int, int], list[StepsWindow]] = {}
    for step in steps:
        by_program.setdefault((step.combined, step.mask), []).append(step)
    return tuple(
        StepsWindow(
            combined=combined,
            mask=mask,
            count=sum(one.count for one in found),
            sum_s=sum(one.sum_s for one in found),
            max_s=max(one.max_s for one in found),
        )
        for (combined, mask), found in sorted(by_program.items())
    )


def counts_between(before: Counts, after: Counts) -> Counts:
    """What was counted between two instants."""
    return Counts(**{name: getattr(after, name) - getattr(before, name) for name in ENDINGS})


def add_counts(counts: Sequence[Counts | TaskCounters]) -> Counts:
    """The sum of engine counts, or of telemetry's rows."""
    return Counts(**{name: sum(getattr(part, name) for part in counts) for name in ENDINGS})


SAMPLE_EVERY_S: Final = 0.1
"""As often as an agent samples its queues."""


def usual_samples(seconds: float, *, begin_s: float = 0.0, every_s: float = SAMPLE_EVERY_S) -> list[float]:
    """When a device samples its queues in a window of so many seconds, unless told otherwise.

    They are multiples of `every_s`, of which the window begins at `begin_s`; counted from its begin.
    """
    before, upto = (int(at_s / every_s + 1e-6) for at_s in (begin_s, begin_s + seconds))
    return [every_s * one - begin_s for one in range(before + 1, upto + 1)]


class TargetDevice(Protocol):
    """Something that runs plans. What is queued and in flight is carried over between calls."""

    def deploy(self, bound: BoundPlan) -> None:
        """Send new launches to this plan; what is in flight moves over or ends on the old one.

        Raises:
            StageloomError: the device cannot run it; what ran before goes on.
        """
        ...

    def run(self, seconds: float, *, sample_at_s: Sequence[float] | None = None) -> Window:
        """Run for a while; returns what happened.

        `sample_at_s`: when to look at the queues, ascending, counted from now; None: every 0.1 s. A device
        that cannot choose looks when it does.
        """
        ...


MakeDevice: TypeAlias = Callable[[int], TargetDevice]
"""A fresh device, with empty queues and the arrivals of a seed. Picklable, as workers make their own."""
