"""Fits a twin to what a device measured: operators, items, stages of groups, lanes, noise. Pure.

What a device reports is turned into `StepSample`s (steps of a known plan with their mean seconds, one lane at
a time) and operator times. Three fits follow, each on what the ones before left open.

1. Items. A step whose stages hold one item each takes

       y = sum over items (sum over operators x_op + item_s) + border_s_per_byte * border bytes.

   Unknown are all x_op, item_s, border_s_per_byte, and per model how much an operator inside an item takes of
   what it takes alone, k (fusing saves what borders cost): least squares of relative errors, with x_op near
   k times the operator's own time (within about OPERATOR_SPREAD), and nothing below 0.
2. Groups. With x known, a step with stages of several groups leaves `contention` and `barrier_s` open: the
   formula of `stageloom.shared.search.costs` is linear in both.
3. Lanes. Steps that ran with another lane's beside them all the time took

       y = slowdown(interference) (alone + beside_s)

   (`stageloom.planner.twin.lanes`): short and long steps together separate what is in proportion from
   what is not. Steps of several items, their groups one after another for want of a core, then tell what an
   item beyond the first costs there:

       y = slowdown(interference) (crowded + beside_s + (items - 1) item_beside_s).

Noise is the spread of single steps around their means, as quantiles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stageloom.planner.twin.device_file import DeviceFile, Kind
from stageloom.planner.twin.lanes import slowdown
from stageloom.planner.twin.times import BlockTimes, StepTimes, border_bytes
from stageloom.shared.bound import BoundPlan
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.matmul import matmul
from stageloom.shared.search.costs import CostTable

Operators: TypeAlias = Mapping[tuple[Digest, OpId], float]
"""Seconds of operators run alone."""

OPERATOR_SPREAD: Final = 0.3
"""How far an operator inside an item is taken to be off its model's mean share, relatively."""

SAMPLE_SPREAD: Final = 0.02
"""How far a step's mean seconds are taken to be off, relatively."""

NOISE_QUANTILES: Final = 32
"""Evenly spaced; above the last, as many as the sample bears, each at half of what the one before leaves.

One step in a thousand may take thirty times as long; spread over a thirty-second of all steps, such stalls
would make most of every p99.
"""

_LEAST_S: Final = 1e-7  # an operator that takes less is taken to take this, where times are compared
_TURNS: Final = 200  # of the active set that keeps unknowns from falling below 0
_BESIDE_STEPS: Final = 200  # between no fixed seconds beside another step and all that there is
_LEAST_PULL: Final = 1e-9  # of the gradient, relatively, at which it ends


class StepSample(NamedTuple):
    """Steps of one program: their mean seconds from begin to end."""

    bound: BoundPlan
    combined: int
    mask: int
    buckets: tuple[int, ...]
    seconds: float


class OverlapSample(NamedTuple):
    """Steps that ran while another lane was busy all the time."""

    seconds: float  # mean
    alone_s: float  # the same steps alone
    share: float  # of the device that such a step uses alone
    running: int = 2  # steps at a time


@dataclass(frozen=True, kw_only=True)
class DeviceMeasurements:
    """What a device measured. `source` says where and when, for the device file.

    None: it was not measured, and stays the device file's.
    """

    operators: Operators
    steps: Sequence[StepSample]
    beside: Sequence[OverlapSample] = ()
    crowded: Sequence[
        StepSample
    ] = ()  # of several items, with another lane busy all the time and no core left
    spreads: Sequence[float] | None = None  # seconds of single steps over their means
    step_s: float | None = None  # between two steps of a lane that has work
    task_s: float | None = None
    precision: str = "fp32"  # of the steps and operators
    source: str


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The device fitted, and how well: relative errors of the steps that it was fitted to."""

    device: DeviceFile
    costs: CostTable
    errors: tuple[float, ...]

    @property
    def times(self) -> StepTimes:
        """The steps' times that follow."""
        return StepTimes(self.device, self.costs)


def calibrate(base: DeviceFile, measured: DeviceMeasurements) -> Calibrated:
    """Fit `base`, which gives everything that was not measured.

    Raises:
        InputError: no step of single items was measured.
    """
    single = [sample for sample in measured.steps if _single(base, sample)]
    if not single:
        raise InputError("no step was measured that runs one item after another", remedy="profile a plan")
    operators, item_s, border = _fit_items(base, measured.operators, single)
    device = replace(
        base,
        kind=Kind.MEASURED,
        item_s=item_s,
        border_s_per_byte=border,
        step_s=base.step_s if measured.step_s is None else measured.step_s,
        task_s=base.task_s if measured.task_s is None else measured.task_s,
        noise=base.noise if measured.spreads is None else noise_quantiles(measured.spreads),
    )
    rates = device.rates_beside(True, measured.precision)
    at_one = dict.fromkeys((artifact for artifact, _ in operators), 1)  # as the steps that were fitted
    costs = CostTable(measured_s=operators, measured_at=at_one, rates=rates)
    contention, barrier_s = _fit_groups(StepTimes(device, costs), measured.steps)
    lanes, beside_s = _fit_lanes(measured.beside) or (base.lanes_interference, base.beside_s)
    device = replace(
        device,
        groups_interference=contention,
        barrier_s=barrier_s,
        lanes_interference=lanes,
        beside_s=beside_s,
        sources={**base.sources, **dict.fromkeys(_told_by(measured), measured.source)},
    )
    if not device.noise:
        device = replace(device, sources={k: v for k, v in device.sources.items() if k != "noise"})
    costs = replace(costs, rates=replace(rates, contention=contention, barrier_s=barrier_s))
    if measured.crowded:
        item_beside_s = _fit_crowded(StepTimes(device, costs), measured.crowded)
        device = replace(device, item_beside_s=item_beside_s)
    return Calibrated(device, costs, _errors(StepTimes(device, costs), measured.steps))


def _told_by(measured: DeviceMeasurements) -> list[str]:
    """The figures of a device file that were measured."""
    apart = {
        "step_s": measured.step_s is not None,
        "task_s": measured.task_s is not None,
        "noise": measured.spreads is not None,
        "lanes_interference": bool(measured.beside),
        "beside_s": bool(measured.beside),
        "item_beside_s": bool(measured.crowded),
    }
    fitted = ("item_s", "border_s_per_byte", "groups_interference", "barrier_s")
    return [*fitted, *(name for name, known in apart.items() if known)]


def noise_quantiles(spreads: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Levels and quantiles of seconds over mean seconds, scaled to a mean of 1; () for fewer than 50."""
    if len(spreads) < 50:
        return ()
    levels = [index / NOISE_QUANTILES for index in range(NOISE_QUANTILES)]
    while (1.0 - levels[-1]) * len(spreads) >= 2.0:
        levels.append((1.0 + levels[-1]) / 2.0)
    levels.append(1.0)
    found = np.quantile(np.asarray(spreads), levels)
    mean = float(np.trapezoid(found, levels))  # of what `noise_factors` draws
    return tuple((level, float(one) / mean) for level, one in zip(levels, found, strict=True))


def _block(times: StepTimes, sample: StepSample) -> BlockTimes:
    return times.of_plan(sample.bound).blocks[sample.combined]


def _single(base: DeviceFile, sample: StepSample) -> bool:
    """Whether the step runs one item after another, each at the batch its operators were measured at."""
    block = _block(StepTimes.derived(base), sample)
    items = block.items(sample.mask)
    alone = len({item.stage for item in items}) == len(items) and not any(item.merge for item in items)
    return block.staged and alone and set(sample.buckets) == {1}


def _fit_items(
    base: DeviceFile, operators: Operators, samples: Sequence[StepSample]
) -> tuple[dict[tuple[Digest, OpId], float], float, float]:
    """Seconds of operators inside items, `item_s`, `border_s_per_byte`."""
    problem = _Items(operators)
    times = StepTimes.derived(base)
    for sample in samples:
        block = _block(times, sample)
        problem.add([block.model_ops(item) for item in block.items(sample.mask)], sample.seconds)
    return problem.solve()


class _Items:
    """The first fit as rows of a linear system. Unknowns: operators, a share per model, item, border."""

    def __init__(self, operators: Operators) -> None:
        self._operators = list(operators)
        self._alone = [max(operators[operator], _LEAST_S) for operator in self._operators]
        self._at = {one: index for index, one in enumerate(self._operators)}
        models = list(dict.fromkeys(artifact for artifact, _ in self._operators))
        count = len(self._operators)
        self._share = {artifact: count + index for index, artifact in enumerate(models)}
        self._item = count + len(models)
        self._border = self._item + 1
        self._rows: list[tuple[dict[int, float], float]] = []
        for index, (artifact, _) in enumerate(self._operators):
            weight = 1.0 / (OPERATOR_SPREAD * self._alone[index])
            self._rows.append(({index: weight, self._share[artifact]: -1.0 / OPERATOR_SPREAD}, 0.0))
        for column in self._share.values():
            self._rows.append(({column: 1.0}, 1.0))

    def add(self, items: Sequence[tuple[Digest, Graph, tuple[OpId, ...]]], seconds: float) -> None:
        weight = 1.0 / (SAMPLE_SPREAD * seconds)
        row: dict[int, float] = {self._item: weight * len(items)}
        for artifact, graph, ops in items:
            for op in ops:
                column = self._at.get((artifact, op))
                if column is None:
                    raise InputError(f"operator {op} of artifact {artifact[:12]} was not measured")
                row[column] = row.get(column, 0.0) + weight
            row[self._border] = row.get(self._border, 0.0) + weight * border_bytes(graph, ops)
        self._rows.append((row, weight * seconds))

    def solve(self) -> tuple[dict[tuple[Digest, OpId], float], float, float]:
        """The unknowns, none below 0."""
        columns = self._border + 1
        matrix = np.zeros((len(self._rows), columns))
        wanted = np.zeros(len(self._rows))
        for index, (row, value) in enumerate(self._rows):
            for column, weight in row.items():
                matrix[index, column] = weight
            wanted[index] = value
        found = least_squares(matrix, wanted)
        operators = {one: float(found[index]) for index, one in enumerate(self._operators)}
        return operators, float(found[self._item]), float(found[self._border])


def least_squares(
    matrix: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The x >= 0 with matrix x near wanted (an active set, after Lawson and Hanson 1974).

    Unknowns that come out below 0 are held at 0, and let go again where that would bring x nearer.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0.0] = 1.0
    scaled = matrix / scale
    free = np.ones(matrix.shape[1], dtype=bool)
    found = np.zeros(matrix.shape[1])
    for _ in range(_TURNS):
        found[:] = 0.0
        found[free] = np.linalg.lstsq(scaled[:, free], wanted, rcond=None)[0]
        below = free & (found < 0.0)
        if below.any():
            free &= ~below
            continue
        pull = np.where(free, 0.0, matmul(scaled.T, wanted - matmul(scaled, found)))
        strongest = int(np.argmax(pull))
        if pull[strongest] <= _LEAST_PULL * np.linalg.norm(wanted):
            break
        free[strongest] = True
    held: npt.NDArray[np.float64] = np.maximum(found, 0.0) / scale
    return held


def _fit_groups(times: StepTimes, samples: Sequence[StepSample]) -> tuple[float, float]:
    """`contention` and `barrier_s` from the steps with stages of several groups; as they were without any."""
    rows, wanted = [], []
    for sample in samples:
        block = _block(times, sample)
        if not block.staged:
            continue
        stages = block.stages(sample.mask, sample.buckets)
        several = [stage for stage in stages if len(stage.items_s) > 1]
        if not several:
            continue
        known_s = sum(s.least_s if len(s.items_s) > 1 else s.items_s[0] for s in stages)
        beside_s = sum(stage.total_s - stage.least_s for stage in several)
        rows.append([beside_s / sample.seconds, len(several) / sample.seconds])
        wanted.append((sample.seconds - known_s) / sample.seconds)
    if not rows:
        return times.device.groups_interference, times.device.barrier_s
    contention, barrier_s = least_squares(np.asarray(rows), np.asarray(wanted))
    return float(contention), float(barrier_s)


def _fit_lanes(beside: Sequence[OverlapSample]) -> tuple[float, float] | None:
    """`lanes_interference` and `beside_s` under which steps beside others take what they took.

    Of the fixed seconds that are tried the one that leaves the smallest relative errors, with the median of
    the interferences that then explain each step; None where no sample depends on either.
    """
    told = [sample for sample in beside if sample.running > max(sample.running * sample.share, 1.0)]
    if not told:
        return None
    most_s = max(max(sample.seconds - sample.alone_s, 0.0) / (sample.running - 1) for sample in told)
    tried = [most_s * index / _BESIDE_STEPS for index in range(_BESIDE_STEPS + 1)]
    return min(
        ((_interference(told, trial_s), trial_s) for trial_s in tried),
        key=lambda fit: _lanes_error(told, *fit),
    )


def _interference(beside: Sequence[OverlapSample], beside_s: float) -> float:
    found = []
    for sample in beside:
        least = max(sample.running * sample.share, 1.0)
        alone_s = sample.alone_s + beside_s * (sample.running - 1)
        found.append((sample.seconds / alone_s - least) / (sample.running - least))
    return max(median(found), 0.0)


def _lanes_error(beside: Sequence[OverlapSample], interference: float, beside_s: float) -> float:
    """Sum of squares, relative to what was measured; what is as good as exact counts as that."""
    total = 0.0
    for sample in beside:
        slow = slowdown([sample.share] * sample.running, interference)
        predicted_s = (sample.alone_s + beside_s * (sample.running - 1)) * slow
        total += (predicted_s / sample.seconds - 1.0) ** 2
    return round(total, 12)


def _fit_crowded(times: StepTimes, crowded: Sequence[StepSample]) -> float:
    """`item_beside_s`, all else known: the median of what explains each step, not below 0.

    Raises:
        InputError: a step has one item alone, which does not depend on it.
    """
    device, found = times.device, []
    for step in crowded:
        alone = times.of_plan(step.bound).step(step.combined, step.mask, step.buckets)
        if alone.items < 2:
            raise InputError("a step of one item tells nothing of what the items after its first cost")
        slow = slowdown([alone.crowded_share] * 2, device.lanes_interference)
        rest_s = step.seconds / slow - (alone.crowded_s - device.step_s) - device.beside_s
        found.append(rest_s / (alone.items - 1))
    return max(median(found), 0.0)


def _errors(times: StepTimes, samples: Sequence[StepSample]) -> tuple[float, ...]:
    """Predicted over measured seconds, less 1; a sample has no overhead between steps in it."""
    found = []
    for sample in samples:
        predicted = times.of_plan(sample.bound).step(sample.combined, sample.mask, sample.buckets)
        found.append((predicted.seconds - times.device.step_s) / sample.seconds - 1.0)
    return tuple(found)
