"""Calibration finds again what a device was made of, and says how well it fits."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from stageloom.planner.twin.calibrate import (
    DeviceMeasurements,
    OverlapSample,
    StepSample,
    calibrate,
    least_squares,
    noise_quantiles,
)
from stageloom.planner.twin.device_file import DeviceFile, Kind, cpu_device, device_toml, parse_device
from stageloom.planner.twin.lanes import noise_factors, slowdown
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.plan import CombinedBlock, Member, ModelPlan, Plan
from stageloom.shared.schedule import StageSchedule, stage_schedule
from stageloom.shared.search.costs import CostTable
from tests.search.graphs import model

FORKS = [[], [0], [0], [1, 2], [3], [3], [4, 5], [6]]
"""Two diamonds in a row, and one more operator."""


def library() -> dict[str, tuple[Digest, Graph]]:
    return {name: model(name, FORKS, cuts=(1, 3, 4, 6, 7)) for name in ("a", "b")}


def cut_plan(cuts: tuple[int, ...], forked: bool) -> BoundPlan:
    """Both models cut there, every block alone; `forked`: what is independent runs side by side."""
    found = library()
    models = tuple(
        ModelPlan(name=name, artifact=artifact, cuts=cuts) for name, (artifact, _) in found.items()
    )
    combined = []
    for index in range(len(models)):
        for block, (start, stop) in enumerate(pairwise((0, *cuts, len(FORKS)))):
            schedule = _schedule(start, stop, forked)
            combined.append(CombinedBlock((Member(index, 0, block),), schedule))
    return bind(Plan(models=models, combined=tuple(combined)), dict(found.values()))


def _schedule(start: int, stop: int, forked: bool) -> StageSchedule:
    stages: list[list[list[int]]] = []
    for op in range(start, stop):
        if forked and stages and op in (2, 5) and op - 1 >= start:
            stages[-1].append([op - start])
        else:
            stages.append([[op - start]])
    return stage_schedule(stages)


ALONE = [0.0010, 0.0030, 0.0020, 0.0008, 0.0025, 0.0012, 0.0040, 0.0005]
INSIDE = {"a": 0.7, "b": 0.9}
"""What an operator inside an item takes of what it takes alone."""


def truth() -> tuple[DeviceFile, CostTable]:
    base = replace(
        cpu_device(2),
        item_s=0.0004,
        border_s_per_byte=2e-6,
        groups_interference=0.3,
        barrier_s=0.0002,
        step_s=0.0001,
    )
    inside = {
        (artifact, OpId(op)): ALONE[op] * INSIDE[name]
        for name, (artifact, _) in library().items()
        for op in range(len(FORKS))
    }
    return base, CostTable(measured_s=inside, rates=base.rates())


def samples(plans: list[BoundPlan], noise: float = 0.0, seed: int = 0) -> list[StepSample]:
    device, costs = truth()
    rng, found = np.random.default_rng(seed), []
    for bound in plans:
        times = StepTimes(device, costs).of_plan(bound)
        for index in range(len(bound.combined)):
            seconds = times.step(index, 1, (1,)).seconds - device.step_s
            found.append(StepSample(bound, index, 1, (1,), seconds * (1 + noise * rng.standard_normal())))
    return found


def operators() -> dict[tuple[Digest, OpId], float]:
    return {(artifact, OpId(op)): ALONE[op] for artifact, _ in library().values() for op in range(len(FORKS))}


CALIBRATED_ON = [
    cut_plan((), False),
    cut_plan((1, 3, 4, 6, 7), False),
    cut_plan((4,), False),
    cut_plan((), True),
    cut_plan((4,), True),
]


@pytest.mark.promise("calibration-finds-synthetic-device")
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_steps_of_plans_that_were_not_measured_are_predicted(noise: float) -> None:
    measured = DeviceMeasurements(
        operators=operators(), steps=samples(CALIBRATED_ON, noise), step_s=0.0001, source="a test"
    )
    found = calibrate(cpu_device(2), measured)
    assert max(map(abs, found.errors)) < 0.02 + 3 * noise
    for cuts, forked in (((3,), False), ((1, 6), False), ((3, 4), True), ((7,), True)):
        bound = cut_plan(cuts, forked)
        predicted = found.times.of_plan(bound)
        expected = StepTimes(*truth()).of_plan(bound)
        for index in range(len(bound.combined)):
            ratio = predicted.step(index, 1, (1,)).seconds / expected.step(index, 1, (1,)).seconds
            assert ratio == pytest.approx(1.0, abs=0.05 + 2 * noise)


def test_what_groups_cost_is_found_once_items_are() -> None:
    measured = DeviceMeasurements(operators=operators(), steps=samples(CALIBRATED_ON), source="a test")
    device = calibrate(cpu_device(2), measured).device
    assert device.groups_interference == pytest.approx(0.3, abs=0.15)
    assert device.barrier_s == pytest.approx(0.0002, abs=0.0002)
    sequential = DeviceMeasurements(operators=operators(), steps=samples(CALIBRATED_ON[:3]), source="a test")
    base = replace(cpu_device(2), groups_interference=0.77)
    assert calibrate(base, sequential).device.groups_interference == 0.77


@pytest.mark.parametrize("interference", [0.0, 0.4, 1.3])
def test_the_lanes_interference_is_what_explains_steps_beside_others(interference: float) -> None:
    beside = [
        OverlapSample(t * slowdown([share, share], interference), t, share)
        for t, share in ((0.01, 0.5), (0.02, 0.3), (0.005, 0.8))
    ]
    measured = DeviceMeasurements(
        operators=operators(), steps=samples(CALIBRATED_ON), beside=beside, source="a test"
    )
    assert calibrate(cpu_device(2), measured).device.lanes_interference == pytest.approx(interference)


@pytest.mark.parametrize("interference", [0.0, 0.4])
def test_what_short_and_long_steps_lose_tells_fixed_seconds_from_interference(interference: float) -> None:
    beside = [
        OverlapSample((t + 0.0003) * slowdown([0.5, 0.5], interference), t, 0.5)
        for t in (0.0002, 0.0005, 0.002, 0.01)
    ]
    measured = DeviceMeasurements(
        operators=operators(), steps=samples(CALIBRATED_ON), beside=beside, source="a test"
    )
    device = calibrate(cpu_device(2), measured).device
    assert device.lanes_interference == pytest.approx(interference, abs=0.03)
    assert device.beside_s == pytest.approx(0.0003, rel=0.05)


@pytest.mark.parametrize("interference", [0.0, 0.4])
def test_what_groups_lose_beside_another_lane_tells_what_an_item_costs_there(interference: float) -> None:
    device, costs = truth()
    bound = cut_plan((4,), True)
    times = StepTimes(device, costs).of_plan(bound)
    crowded = []
    for index in range(len(bound.combined)):
        alone = times.step(index, 1, (1,))
        slow = slowdown([alone.crowded_share] * 2, interference)
        seconds = (alone.crowded_s - device.step_s + 0.0003 + (alone.items - 1) * 0.0005) * slow
        crowded.append(StepSample(bound, index, 1, (1,), seconds))
    beside = [
        OverlapSample((t + 0.0003) * slowdown([0.5, 0.5], interference), t, 0.5)
        for t in (0.0002, 0.0005, 0.002, 0.01)
    ]
    measured = DeviceMeasurements(
        operators=operators(),
        steps=samples(CALIBRATED_ON),
        beside=beside,
        crowded=crowded,
        step_s=device.step_s,
        source="a test",
    )
    found = calibrate(cpu_device(2), measured).device
    assert found.item_beside_s == pytest.approx(0.0005, rel=0.1)
    assert found.sources["item_beside_s"] == "a test"
    alone_item = StepSample(cut_plan((), False), 0, 1, (1,), 0.02)
    with pytest.raises(InputError, match="one item"):
        calibrate(cpu_device(2), replace(measured, crowded=[alone_item]))


def test_noise_is_kept_as_quantiles_with_a_mean_of_one() -> None:
    rng = np.random.default_rng(3)
    spreads = np.exp(rng.normal(0.0, 0.2, 5000))
    found = noise_quantiles(list(spreads))
    assert list(found) == sorted(found)
    assert (found[0][0], found[-1][0]) == (0.0, 1.0)
    drawn = np.array(noise_factors(found, 1))
    assert drawn.mean() == pytest.approx(1.0, abs=0.02)
    assert np.quantile(drawn, 0.9) == pytest.approx(np.quantile(spreads, 0.9) / spreads.mean(), rel=0.05)
    assert noise_quantiles([1.0] * 10) == ()


@pytest.mark.promise("stalls-drawn-seldom-they")
def test_a_stall_of_one_step_in_a_thousand_is_drawn_as_seldom() -> None:
    spreads = [1.0] * 9990 + [40.0] * 10
    drawn = np.array(noise_factors(noise_quantiles(spreads), 1))
    assert 0 < np.count_nonzero(drawn > 2.0) <= 12  # of 4,096


def test_a_fitted_device_is_measured_and_its_file_says_where() -> None:
    measured = DeviceMeasurements(
        operators=operators(),
        steps=samples(CALIBRATED_ON),
        spreads=[0.9 + 0.01 * one for one in range(60)],
        step_s=0.0003,
        task_s=0.0002,
        source="steps that shop-7 served on 2026-11-21",
    )
    device = calibrate(cpu_device(2), measured).device
    assert device.kind is Kind.MEASURED
    assert (device.step_s, device.task_s) == (0.0003, 0.0002)
    assert device.sources["item_s"] == device.sources["noise"] == measured.source
    assert device.sources["launch_s"] == cpu_device(2).sources["launch_s"]
    assert parse_device(device_toml(device), "again") == device


def test_what_was_not_measured_stays_the_device_files() -> None:
    """As from a planner's telemetry, which has neither gaps between steps nor single ones."""
    base = replace(
        cpu_device(2),
        step_s=0.0004,
        task_s=0.0005,
        noise=((0.0, 0.9), (1.0, 1.1)),
        sources={**cpu_device(2).sources, "task_s": "a guess", "noise": "a guess"},
    )
    measured = DeviceMeasurements(operators=operators(), steps=samples(CALIBRATED_ON), source="a test")
    device = calibrate(base, measured).device
    assert (device.step_s, device.task_s, device.noise) == (base.step_s, base.task_s, base.noise)
    for name in ("step_s", "task_s", "noise", "lanes_interference"):
        assert device.sources[name] == base.sources[name]
    assert device.sources["item_s"] == "a test"
    assert parse_device(device_toml(device), "again") == device


@pytest.mark.parametrize(("precision", "rated"), [("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "fp32")])
def test_batches_scale_as_the_precision_of_the_steps_does(precision: str, rated: str) -> None:
    """By the published rates, for fp32 where there are none."""
    base = replace(cpu_device(2), fp16_flop_per_s=8 * cpu_device(2).fp32_flop_per_s)
    measured = DeviceMeasurements(
        operators=operators(), steps=samples(CALIBRATED_ON), precision=precision, source="a test"
    )
    artifact, graph = library()["a"]
    fitted, published = calibrate(base, measured).costs, CostTable(rates=base.rates(rated))
    one_s, eight_s = (fitted.operator_s(artifact, graph, OpId(1), batch) for batch in (1, 8))
    expected = published.estimate_s(graph, OpId(1), 8) / published.estimate_s(graph, OpId(1), 1)
    assert eight_s / one_s == pytest.approx(expected)


def test_nothing_to_fit_is_refused() -> None:
    with pytest.raises(InputError, match="no step was measured"):
        calibrate(cpu_device(2), DeviceMeasurements(operators=operators(), steps=[], source="a test"))
    unknown = DeviceMeasurements(operators={}, steps=samples(CALIBRATED_ON[:1]), source="a test")
    with pytest.raises(InputError, match="was not measured"):
        calibrate(cpu_device(2), unknown)


def test_least_squares_keeps_unknowns_from_falling_below_zero() -> None:
    """x - y = 1 and y = -1 in the plane: held at y = 0, the rest is x = 1."""
    found = least_squares(np.array([[1.0, -1.0], [0.0, 1.0]]), np.array([1.0, -1.0]))
    assert found.tolist() == pytest.approx([1.0, 0.0])
    exact = least_squares(np.array([[2.0, 0.0], [0.0, 1e-6]]), np.array([4.0, 3e-6]))
    assert exact.tolist() == pytest.approx([2.0, 3.0])
