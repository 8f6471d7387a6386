"""What splitting operators over two resources of a device takes: parts, hand-overs, and copies.

Parts are timed alone, as operators are. A hand-over is what a step takes beyond that: a few short operators
are split in a plan of their own, which runs as plans run, so that waking a helper, waiting for it and sharing
the interpreter are in it.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

from stageloom.edge_agent.executor.base import OperatorTime, TimingRequest
from stageloom.shared.artifact import Artifact
from stageloom.shared.errors import ExecutorError
from stageloom.shared.partition import Axis, Split
from stageloom.shared.plan import ExecutorOptions, Plan
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.measured_splits import PartSample, alike, operators_to_time
from stageloom.shared.search.patterns import fitted_pattern
from stageloom.shared.search.split_plan import ResourcePair, split_plan
from stageloom.shared.search.split_problem import Halves, SplitChoice, SplitState, Whole

if TYPE_CHECKING:
    from stageloom.edge_agent.executor.onnx.split_timing import PartTime, PartTimingRequest
    from stageloom.edge_agent.worker.profiling import StageSamples

HANDOVERS: Final = 6
"""Splits of the plan by which hand-overs are measured."""

LEAST_HANDOVER_S: Final = 1e-6
"""A hand-over is not free, whatever the noise of two differences says."""

_COPY_BYTES: Final = 1 << 20
_COPIES: Final = 25


@runtime_checkable
class PartTimer(Protocol):
    """An executor that times parts of operators."""

    def time_parts(
        self, artifact: Artifact, request: "PartTimingRequest", idle: Callable[[], bool]
    ) -> "tuple[PartTime, ...]":
        """See `stageloom.edge_agent.executor.onnx.split_timing`."""


def timed_parts(
    executor: object,
    artifact: Artifact,
    alone: Sequence[OperatorTime],
    request: TimingRequest,
    points: int,
    idle: Callable[[], bool],
) -> "tuple[PartTime, ...]":
    """Parts of `points` extents per axis, of the operators that take longest first; of equal ones once.

    `alone`: the operators' times. [num_operators]

    Raises:
        ExecutorError: the executor times no parts, or a part cannot be loaded.
    """
    if not isinstance(executor, PartTimer):
        raise ExecutorError(
            "the executor times no parts of operators", remedy="measure splits on onnx or openvino"
        )
    from stageloom.edge_agent.executor.onnx.split_timing import PartTimingRequest
    from stageloom.shared.importer.splittable import SplitReader

    graph, reader = artifact.graph, SplitReader(artifact)
    axes = [reader.axes(op) for op in range(len(graph.operators))]
    ops = operators_to_time(axes, alike(graph, reader), [one.median_us for one in alone])
    if not ops:
        return ()
    asked = PartTimingRequest(
        ops=tuple(ops),
        points=points,
        repeats=request.repeats,
        limit_s=request.limit_s,
        wall_s=request.wall_s,
        intra_op_threads=request.intra_op_threads,
    )
    return executor.time_parts(artifact, asked, idle)


def core_pair(threads: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The first cores of this process for two resources of so many threads; None where it has too few."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 * threads:
        return None
    return tuple(cores[:threads]), tuple(cores[threads : 2 * threads])


class HandoverPlan(NamedTuple):
    """A plan in which some operators are split, and what the longer half of each takes alone."""

    plan: Plan
    halves_s: float  # of all splits together
    splits: int


def handover_plan(
    artifact: Artifact,
    parts: Sequence[PartSample],
    options: ExecutorOptions,
    cores: tuple[tuple[int, ...], tuple[int, ...]],
) -> HandoverPlan | None:
    """The shortest operators of those timed, each split near its middle; None where none can be.

    Raises:
        PlanError: the plan would not be legal.
    """
    found = sorted(_middles(parts), key=lambda one: one[1])
    states: list[SplitState] = [Whole(0)] * len(artifact.graph.operators)
    halves_s = 0.0
    splits: list[Split] = []
    for split, seconds in found:
        if states[split.first] == Whole(0) and len(splits) < HANDOVERS:
            states[split.first] = Halves(split.axis, split.boundary)
            halves_s += seconds
            splits.append(split)
    if not splits:
        return None
    choice = SplitChoice(states=tuple(states), splits=tuple(sorted(splits)), seconds=halves_s)
    plan = split_plan(
        "model", artifact.digest, artifact.graph, choice, ResourcePair((options, options), cores)
    )
    return HandoverPlan(plan, halves_s, len(splits))


def _middles(parts: Sequence[PartSample]) -> Iterator[tuple[Split, float]]:
    """Per operator and axis the split at the sampled extent nearest to its middle, and its longer half."""
    axes: dict[tuple[int, Axis], dict[int, float]] = {}
    for one in parts:
        axes.setdefault((one.op, one.axis), {})[one.extent] = one.seconds
    for (op, axis), samples in axes.items():
        whole = max(samples)
        inside = [extent for extent in samples if extent < whole]
        if not inside:
            continue
        end = min(inside, key=lambda extent: (abs(2 * extent - whole), extent))
        pattern = fitted_pattern(samples)
        yield Split(op, op, axis, end), max(pattern(end), pattern(whole - end))


def handover_s(schedule: StageSchedule, samples: "StageSamples", asked: HandoverPlan) -> float | None:
    """Seconds of one hand-over: what steps took beyond their whole groups and the halves alone.

    None where no step was measured.
    """
    if not samples.step_s:
        return None
    away = {number for number, stage in enumerate(schedule.stages) if stage.resources}
    whole_s = sum(median(taken) for stage, taken in samples.stage_s.items() if stage not in away)
    left_s = median(samples.step_s) - whole_s - asked.halves_s
    return max(left_s / asked.splits, LEAST_HANDOVER_S)


def copy_rate(nbytes: int = _COPY_BYTES, repeats: int = _COPIES) -> float:
    """Bytes per second of putting two arrays together that do not lie one behind the other."""
    import numpy as np  # the engine process starts without it

    halves = [np.ones((2, nbytes // 16), np.float32) for _ in range(2)]
    taken = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        np.concatenate(halves, axis=1)
        taken.append(time.perf_counter() - began_s)
    return nbytes / median(taken)


def as_samples(times: "Sequence[PartTime]") -> list[PartSample]:
    """Their medians in seconds."""
    return [PartSample(one.op, one.axis, one.extent, one.time.median_us / 1e6) for one in times]


def told(times: "Sequence[PartTime]") -> tuple[tuple[int, str, int, float, float, int], ...]:
    """As the report has them."""
    return tuple(
        (one.op, one.axis.value, one.extent, one.time.median_us, one.time.spread_us, one.time.runs)
        for one in times
    )
