"""Devices and plans whose times can be worked out by hand."""

from collections.abc import Mapping

from stageloom.planner.twin.device_file import DeviceFile, Kind
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import BoundPlan
from stageloom.shared.ids import OpId
from stageloom.shared.search.costs import CostTable


def device(**fields: object) -> DeviceFile:
    """A device that costs nothing beside what operators take."""
    known: dict[str, object] = {
        "name": "toy",
        "title": "Toy",
        "kind": Kind.DERIVED,
        "fp32_flop_per_s": 1e9,
        "fp16_flop_per_s": 2e9,
        "bytes_per_s": 1e9,
        "launch_s": 0.0,
        "barrier_s": 0.0,
        "step_s": 0.0,
        "groups_interference": 1.0,
        "lanes_interference": 0.0,
    }
    return DeviceFile(**{**known, **fields})  # type: ignore[arg-type]


def measured(bound: BoundPlan, seconds: Mapping[str, float], toy: DeviceFile | None = None) -> StepTimes:
    """Every operator of a model takes so many seconds."""
    toy = toy or device()
    table = {
        (model.plan.artifact, OpId(op)): seconds[model.plan.name]
        for model in bound.models
        for op in range(len(model.graph.operators))
    }
    return StepTimes(toy, CostTable(measured_s=table, rates=toy.rates()))
