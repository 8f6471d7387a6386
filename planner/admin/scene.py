"""Where a contest takes place: the twin of a device, and what arrives there, each with where it is from."""

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Final, NamedTuple

from stageloom.planner.contest.task import Scene
from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.telemetry import newest_telemetry
from stageloom.planner.twin.arrivals import Poisson, Process, require_all
from stageloom.planner.twin.replay import counted_arrivals
from stageloom.planner.twin.stored import base_device, stored_times
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import BoundPlan
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.admin import ArrivalRate
from stageloom.shared.messages.telemetry import RowKind

RECORDED_S: Final = 60.0
"""So much of a device's telemetry says what arrives."""

ASSUMED_LOAD: Final = 0.8
"""Of what one plain instance after another can do, where nothing says what arrives."""


class Staged(NamedTuple):
    """A scene, and in a few words where its times and its arrivals are from."""

    scene: Scene
    twin: str
    arrivals: str


def stage(
    store: ReadStore,
    device: DeviceId | None,
    first: BoundPlan,
    graphs: Mapping[Digest, Graph],
    rates: Sequence[ArrivalRate],
) -> Staged:
    """The scene for plans of the models of `first`, a plan of single blocks with one task each.

    Raises:
        InputError: no twin of the device can be made, or only some models' arrivals are known.
    """
    if device is not None:
        times, twin = stored_times(store, device, first)
    else:
        base = base_device("", first.plan.executor.name)
        times = StepTimes.derived(base, first.plan.executor.precision)
        twin = f"assumed, since no device was named: {base.title}"
    service_s = _service_s(times, first)
    arrivals, text = _arrivals(store, device, first, rates, service_s)
    return Staged(Scene(times=times, arrivals=arrivals, graphs=graphs, service_s=service_s), twin, text)


def _service_s(times: StepTimes, first: BoundPlan) -> tuple[float, ...]:
    """Device seconds of one task alone, per model."""
    steps = times.of_plan(first)
    return tuple(
        fsum(
            steps.step(index, 1, (1,)).seconds
            for index, block in enumerate(first.combined)
            if block.members[0].model == model
        )
        for model in range(len(first.plan.models))
    )


def _arrivals(
    store: ReadStore,
    device: DeviceId | None,
    first: BoundPlan,
    rates: Sequence[ArrivalRate],
    service_s: Sequence[float],
) -> tuple[Mapping[str, Process], str]:
    """Processes by model, and in words."""
    names = [model.name for model in first.plan.models]
    if rates:
        given = _poisson({rate.model: rate.per_s for rate in rates})
        require_all(given, names)
        text = ", ".join(f"{name} {given[name].mean_per_s:g}/s" for name in names)
        return given, f"poisson: {text}"
    rows = (
        []
        if device is None
        else store.read(newest_telemetry, device, [RowKind.TASK_COUNTERS], _us(RECORDED_S))[0]
    )
    counted = any(getattr(row.data, "model", None) in names and row.data.submitted for row in rows)  # type: ignore[union-attr]
    if not counted:
        per_s = ASSUMED_LOAD / fsum(service_s)
        text = f"assumed, as none were given or counted: poisson, {per_s:.3g}/s of each model"
        return _poisson(dict.fromkeys(names, per_s)), text
    found = counted_arrivals(rows, names)
    require_all(found, names)
    return found, f"the last {found[names[0]].length_s:.0f} s of {device}"


def _poisson(rates: Mapping[str, float]) -> Mapping[str, Process]:
    return {name: Poisson(rate_per_s=per_s) for name, per_s in rates.items()}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
