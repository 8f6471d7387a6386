"""Step times of a device that the planner knows: from the costs of its class and what it served.

The costs are those that plans are searched with. Where the device served plans that the store knows, one lane
at a time, the twin is fitted to their steps (`stageloom.planner.twin.calibrate`), so that what a session or a
launch costs beyond its operators is in it. Steps that took much longer than the same models alone were served
beside somebody else's load: the twin is not fitted to those, and says so.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from stageloom.planner.costs.measured import device_costs
from stageloom.planner.costs.measured_parts import costs_there
from stageloom.planner.store.costs import calibration_of
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.machines import whole_times
from stageloom.planner.store.plans import plan_infos
from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.telemetry import telemetry_rows
from stageloom.planner.twin.calibrate import Calibrated, DeviceMeasurements, StepSample, calibrate
from stageloom.planner.twin.device_file import DeviceFile, cpu_device, load_device
from stageloom.planner.twin.doubts import DISTURBED, WholeTimes, over_alone
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.telemetry import PLAN_CHARS, RowKind, StepTimings
from stageloom.shared.plan import CombinedBlock, ExecutorOptions, Plan, decode_plan
from stageloom.shared.schedule import names_resources
from stageloom.shared.search.arrangements import ON_GPU
from stageloom.shared.search.costs import CostTable

_LEAST_STEPS: Final = 20
_MOST_ROWS: Final = 20_000
_CORES: Final = re.compile(r" x(\d+)\b")
_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "nano": ("Jetson Nano",),
    "tx2": ("Jetson TX2", "quill"),
    "xavier_nx": ("Xavier NX",),
    "orin_nx": ("Orin NX",),
    "a100": ("A100",),
    "h100": ("H100",),
}


def base_device(device_class: str, executor: str) -> DeviceFile:
    """The device file to begin with for a device class: by its GPU's name, or a CPU of its cores.

    A class that is named after a GPU does not tell its cores: an executor on its CPU is taken to have one.

    Raises:
        InputError: the class names a GPU that no device file is for.
    """
    hardware = device_class.partition(";")[0]
    if executor not in ON_GPU:
        cores = _CORES.search(hardware)
        return cpu_device(int(cores.group(1)) if cores else 1)
    for name, words in _WORDS.items():
        # TX2i and A100X are variants of what they begin like; an RTX A1000 is another GPU
        if any(re.search(rf"\b{re.escape(word)}(?!\d)", hardware, re.IGNORECASE) for word in words):
            return load_device(name)
    raise InputError(f"no device file is for {hardware!r}", remedy="name one with --twin")


def stored_times(
    store: ReadStore, device: DeviceId, bound: BoundPlan, base: DeviceFile | None = None
) -> tuple[StepTimes, str]:
    """Step times of a device for a plan, and in a few words where they are from.

    Raises:
        InputError: there is no such device, or no device file for its class.
    """
    device_class = store.read(device_info, device).device_class
    known = base or base_device(device_class, bound.plan.executor.name)
    held = store.read(calibration_of, device)

    graphs = {model.plan.artifact: model.source for model in bound.models}
    costs = costs_there(store, device, bound.plan, graphs)
    if not any(table.measured_s for table in (costs, *costs.beside.values())):
        return StepTimes.derived(
            known, bound.plan.executor.precision
        ), f"{known.kind.value} from {known.name}"
    at_one = costs
    if any(batch != 1 for batch in costs.measured_at.values()):  # steps are fitted at one task
        at_one = device_costs(
            store,
            held.costs_key,
            bound.plan.executor,
            [(model.artifact, 1) for model in bound.plan.models],
            graph_of=store.graph,
            taught_by=held.taught_by,
        )
    samples = served_steps(store, device, bound, held.steps_since_us)
    disturbed = None if held.own else over_alone(samples, _whole(store, device, samples))
    left_out = ""
    if disturbed is not None and disturbed >= DISTURBED:
        left_out = f"; what it served took {disturbed:.2f} times as long as alone, and is left out"
    elif (fitted := _fitted(device, known, at_one, samples, bound.plan.executor.precision)) is not None:
        beside = _rated_beside(costs, fitted.device, fitted=True)
        known_there = replace(fitted.costs, stages=costs.stages, parts=costs.parts, beside=beside)
        times = StepTimes(fitted.device, known_there)
        return times, f"measured on {device}, fitted to {len(fitted.errors)} programs that it served"
    table = replace(_rated(costs, known, bound.plan.executor), beside=_rated_beside(costs, known))
    where = device if held.own else device_class.partition(";")[0]
    return StepTimes(known, table), f"operators measured on {where}{left_out}"


def _rated(
    costs: CostTable, device: DeviceFile, executor: ExecutorOptions, *, fitted: bool = False
) -> CostTable:
    """What is known on an executor, with the device's rates where stages taught no others."""
    if _learned(costs):
        return costs
    return replace(costs, rates=device.rates_beside(fitted or bool(costs.measured_s), executor.precision))


def _rated_beside(
    costs: CostTable, device: DeviceFile, *, fitted: bool = False
) -> dict[ExecutorOptions, CostTable]:
    """The same of a plan's further executors, each in its own precision."""
    return {
        executor: _rated(other, device, executor, fitted=fitted) for executor, other in costs.beside.items()
    }


def _learned(costs: CostTable) -> bool:
    return costs.interference is not None and costs.interference.samples > 0


def _whole(store: ReadStore, device: DeviceId, samples: Sequence[StepSample]) -> WholeTimes:
    """What the device measured of the samples' models alone, in moments in which nothing was served."""
    artifacts = {model.artifact for sample in samples for model in sample.bound.plan.models}
    return store.read(whole_times, device, artifacts) if artifacts else {}


def _fitted(
    device: DeviceId, base: DeviceFile, costs: CostTable, samples: Sequence[StepSample], precision: str
) -> Calibrated | None:
    complete = [sample for sample in samples if _measured(costs, sample)]
    if not complete:
        return None
    measured = DeviceMeasurements(
        operators=costs.measured_s,
        steps=complete,
        precision=precision,
        source=f"steps that {device} served",
    )
    try:
        return calibrate(base, measured)
    except InputError:  # nothing but parallel groups was served: the costs as they are must do
        return None


def _measured(costs: CostTable, sample: StepSample) -> bool:
    """Every operator of the step has a time."""
    combined = sample.bound.combined[sample.combined]
    return all(
        (sample.bound.plan.models[member.model].artifact, op) in costs.measured_s
        for at, member in enumerate(combined.members)
        if sample.mask >> at & 1
        for op in sample.bound.models[member.model].blocks[member.block].operators
    )


def served_steps(store: ReadStore, device: DeviceId, like: BoundPlan, since_us: int = 0) -> list[StepSample]:
    """Mean seconds of the programs that a device served, of plans with one lane and batch 1.

    Only what was served after `since_us`, by the device's clock: before, its costs were others. Plans of
    other executor options than those of `like` are left out, as are programs of a few steps, and blocks that
    ran on another executor than the first one, or in part on resources that their schedule names.
    """
    rows = store.read(telemetry_rows, device, [RowKind.STEP_TIMINGS], limit=_MOST_ROWS)
    plans = {
        plan.digest[:PLAN_CHARS]: decode_plan(plan.wire) for plan in store.read(plan_infos, limit=1_000_000)
    }
    sums: dict[tuple[str, int, int], tuple[int, int]] = {}
    for row in rows:
        if row.at_us > since_us and isinstance(row.data, StepTimings):
            key = (row.data.plan, row.data.combined_block, row.data.mask)
            count, total_us = sums.get(key, (0, 0))
            sums[key] = count + row.data.count, total_us + row.data.sum_us
    bounds: dict[str, BoundPlan | None] = {}
    found = []
    for (name, combined, mask), (count, total_us) in sums.items():
        if name not in bounds:
            bounds[name] = _usable(store, plans.get(name), like)
        bound = bounds[name]
        if bound is None or count < _LEAST_STEPS or combined >= len(bound.combined):
            continue
        if _elsewhere(bound.combined[combined].plan):
            continue
        buckets = (1,) * mask.bit_count()
        found.append(StepSample(bound, combined, mask, buckets, total_us / count * 1e-6))
    return found


def _elsewhere(block: CombinedBlock) -> bool:
    """Whether some of its steps do not run on the plan's first executor alone."""
    return bool(block.executor or block.further_places) or names_resources(block.schedule)


def _usable(store: ReadStore, plan: Plan | None, like: BoundPlan) -> BoundPlan | None:
    if plan is None or plan.lanes != 1 or plan.executor != like.plan.executor:
        return None
    if any(model.batch != 1 or model.splits for model in plan.models):
        return None
    try:
        graphs: dict[Digest, Graph] = {model.artifact: store.graph(model.artifact) for model in plan.models}
    except InputError:  # an artifact whose file is gone
        return None
    return bind(plan, graphs)
