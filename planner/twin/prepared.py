"""What a prediction's request asks for, from the planner's store: the plan, its step times, what arrives."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from stageloom.planner.schema import prediction as schema
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.telemetry import newest_telemetry
from stageloom.planner.twin.arrivals import Periodic, Poisson, Process, Recorded, require_known
from stageloom.planner.twin.device_file import named_device
from stageloom.planner.twin.replay import counted_arrivals
from stageloom.planner.twin.simulation import Simulation
from stageloom.planner.twin.stored import stored_times
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.errors import InputError
from stageloom.shared.messages.telemetry import RowKind
from stageloom.shared.plan import decode_plan
from stageloom.shared.text import bounded

TASKS_MAX: Final = 5_000_000
"""Tasks of one simulation: what happens to them is kept until its end."""

_DEFAULT_S: Final = 60.0
_AFTER_S: Final = 0.001  # what is simulated ends before its end: so much later the last arrival is part of it


class PreparedPrediction(NamedTuple):
    """A prediction without its figures, and the simulation that gives them."""

    prediction: schema.PredictionInfo
    simulation: Simulation


class _Load(NamedTuple):
    """Arrivals, for how long, and in words."""

    processes: Mapping[str, Process]
    seconds: float
    text: str


def prepared(store: ReadStore, request: schema.PredictionCreateRequest, now_us: int) -> PreparedPrediction:
    """The prediction that a request asks for, made at `now_us`.

    Raises:
        InputError: no such plan, device or device file; nothing arrived, it is of another model, or too much.
    """
    info = store.read(plan_info, request.plan)
    plan = decode_plan(info.wire)
    bound = bind(plan, {model.artifact: store.graph(model.artifact) for model in plan.models})
    times, source = _times(store, request, bound)
    load = _load(store, request, [model.name for model in plan.models])
    made = schema.PredictionInfo(
        number=0,
        made_at_us=now_us,
        device=request.device,
        plan=info.plan,
        digest=info.digest,
        twin=bounded(source),
        arrivals=bounded(load.text),
        seconds=load.seconds,
        predicted={},
    )
    return PreparedPrediction(made, Simulation(bound, times, load.processes, load.seconds, request.seed))


def _times(
    store: ReadStore, request: schema.PredictionCreateRequest, bound: BoundPlan
) -> tuple[StepTimes, str]:
    base = named_device(request.twin) if request.twin else None
    if request.device is not None:
        return stored_times(store, request.device, bound, base)
    assert base is not None
    return StepTimes.derived(base, bound.plan.executor.precision), f"{base.kind.value} from {base.name}"


def _load(store: ReadStore, request: schema.PredictionCreateRequest, names: Sequence[str]) -> _Load:
    if request.recording is not None:
        return _recorded(request.recording, names, request.seconds)
    load = _counted(store, request, names)
    tasks = sum(process.mean_per_s for process in load.processes.values()) * load.seconds
    if tasks > TASKS_MAX:
        raise InputError(
            f"about {tasks:.0f} tasks would arrive, and {TASKS_MAX} are the most that are simulated",
            remedy="simulate fewer seconds",
        )
    return load


def _counted(store: ReadStore, request: schema.PredictionCreateRequest, names: Sequence[str]) -> _Load:
    """At the rates that were given, or as the device counted."""
    if request.rates:
        how = request.arrivals or schema.ArrivalKind.POISSON
        processes = {rate.model: _process(how, rate.per_s) for rate in request.rates}
        require_known(processes, names)
        text = ", ".join(f"{rate.model} {rate.per_s:g}/s" for rate in request.rates)
        return _Load(processes, request.seconds or _DEFAULT_S, f"{how.value}: {text}")
    assert request.device is not None
    last_us = round(request.last_s * 1e6)
    rows = store.read(newest_telemetry, request.device, [RowKind.TASK_COUNTERS], last_us)[0]
    found = counted_arrivals(rows, names)
    covered_s = min(found[names[0]].length_s, schema.SIMULATED_MAX_S)
    text = f"the last {found[names[0]].length_s:.0f} s of {request.device}"
    return _Load(found, request.seconds or covered_s, text)


def _process(how: schema.ArrivalKind, per_s: float) -> Process:
    return Periodic(rate_per_s=per_s) if how is schema.ArrivalKind.PERIODIC else Poisson(rate_per_s=per_s)


def _recorded(recording: Mapping[str, Sequence[float]], names: Sequence[str], seconds: float | None) -> _Load:
    processes = {name: Recorded(times_s=tuple(times)) for name, times in recording.items()}
    require_known(processes, names)
    arrived = [process.times_s for process in processes.values() if process.times_s]
    if not arrived:
        raise InputError("the recording holds no arrival", remedy='write it like {"resnet50": [0.0, 0.5]}')
    earliest_s = min(times[0] for times in arrived)
    begin_s = earliest_s if earliest_s > schema.SIMULATED_MAX_S else 0.0
    length_s = max(times[-1] for times in arrived) - begin_s
    if seconds is None and length_s >= schema.SIMULATED_MAX_S:
        raise InputError(
            f"this is a recording of {length_s:.0f} s, and a day is the most that is simulated",
            remedy="cut it, see that its times are seconds, or simulate its beginning with --seconds",
        )
    shifted = {
        name: Recorded(times_s=tuple(at_s - begin_s for at_s in process.times_s))
        for name, process in processes.items()
    }
    return _Load(shifted, seconds or max(length_s + _AFTER_S, 1.0), "recorded")
