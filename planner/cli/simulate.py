"""`stageloom simulate`, and `prediction list`: what the twin predicts of a plan, and what was measured."""

import json as json_text
import sys
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from stageloom.planner.cli.options import (
    LAST_S,
    MOST_ROWS,
    DatabaseUrl,
    DataDir,
    Json,
    Last,
    Rates,
    TwinFile,
    parse_rates,
    reading,
)
from stageloom.planner.cli.output import emit_json, emit_table, progress, when
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId

if TYPE_CHECKING:
    from stageloom.planner.store.predictions import KeptPrediction
    from stageloom.planner.store.store import ReadStore
    from stageloom.planner.twin.arrivals import Process
    from stageloom.planner.twin.times import StepTimes
    from stageloom.planner.twin.window import Window
    from stageloom.shared.bound import BoundPlan
    from stageloom.shared.ids import DeviceId
    from stageloom.shared.messages.admin import PlanInfo
    from stageloom.shared.plan import Plan

predictions = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Look at predictions beside what was measured since."
)


@predictions.callback()
def group() -> None:
    """Look at predictions beside what was measured since."""


_BAR = 30
_SLICES = 50  # of a simulation, one per redrawing of the bar
_DEFAULT_S = 60.0
_DAY_S = 86_400.0  # what --seconds is bounded by, too
_AFTER_S = 0.001  # what is simulated ends before its end: so much later the last arrival is part of it


class ArrivalKind(str, Enum):
    """How tasks of `--rate` arrive."""

    PERIODIC = "periodic"
    POISSON = "poisson"


class _Load(NamedTuple):
    """Arrivals, for how long, and in words."""

    processes: "Mapping[str, Process]"
    seconds: float
    text: str


def simulate(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="Its name, or 8 characters of its digest.")],
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="Take costs and arrivals from what it measured.")
    ] = "",
    twin: TwinFile = "",
    rate: Rates = None,
    arrivals: Annotated[
        ArrivalKind | None,
        typer.Option("--arrivals", help="How the tasks of --rate arrive. Default: poisson."),
    ] = None,
    recording: Annotated[
        Path | None,
        typer.Option(
            "--recording",
            metavar="FILE",
            help="Arrivals as JSON: model to a list of seconds, ascending; from the earliest on if that lies "
            "behind a day, such as seconds since 1970, else from 0.",
        ),
    ] = None,
    last: Last = LAST_S,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1, max=_DAY_S, metavar="S", help="Simulate so long. Default: as recorded, else 60."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Equal seeds give equal predictions.")] = 0,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Keep the prediction, to compare it with what comes.")
    ] = True,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Predict queues, latency and utilisation of a plan. It runs on a simulated device.

    Without --rate and --recording the arrivals that --device counted are replayed. Works while the planner is
    down, too. `stageloom prediction list` shows what was predicted beside what was measured since.

    \b
    stageloom simulate tuned --device shop-7
    stageloom simulate tuned --twin nano --rate resnet50=60 --rate squeezenet=120 --arrivals periodic
    """
    from stageloom.planner.store.predictions import KeptPrediction, keep_prediction
    from stageloom.planner.twin.replay import figures

    with reading(data_dir, database_url) as store:
        info, decoded, bound = _bound(store, plan)
        times, source = _times(store, bound, device, twin)
        load = _load(store, decoded, device, parse_rates(rate), arrivals, recording, last, seconds)
        window = _run(times, bound, load, seed)
        made = KeptPrediction(
            device=_device_id(device),
            plan=info.plan,
            digest=info.digest,
            twin=source,
            arrivals=load.text,
            seconds=load.seconds,
            figures=figures(window),
            made_at_us=time.time_ns() // 1000,
        )
        number = store.database.change(keep_prediction, made) if keep else 0
    _print(made, number, window, json=json)


def _bound(store: "ReadStore", name: str) -> "tuple[PlanInfo, Plan, BoundPlan]":
    from stageloom.planner.store.plans import plan_info
    from stageloom.shared.bound import bind
    from stageloom.shared.plan import decode_plan

    info = store.read(plan_info, name)
    plan = decode_plan(info.wire)
    return info, plan, bind(plan, {model.artifact: store.graph(model.artifact) for model in plan.models})


def _times(store: "ReadStore", bound: "BoundPlan", device: str, twin: str) -> "tuple[StepTimes, str]":
    from stageloom.planner.twin.device_file import load_device
    from stageloom.planner.twin.stored import stored_times
    from stageloom.planner.twin.times import StepTimes

    base = load_device(twin) if twin else None
    name = _device_id(device)
    if name is not None:
        return stored_times(store, name, bound, base)
    if base is None:
        raise InputError("nothing says what device to simulate", remedy="give --device or --twin")
    return StepTimes.derived(base, bound.plan.executor.precision), f"{base.kind.value} from {base.name}"


def _load(
    store: "ReadStore",
    plan: "Plan",
    device: str,
    rates: Mapping[str, float],
    arrivals: ArrivalKind | None,
    recording: Path | None,
    last_s: float,
    seconds: float | None,
) -> _Load:
    from stageloom.planner.store.telemetry import newest_telemetry
    from stageloom.planner.twin.arrivals import require_known
    from stageloom.planner.twin.replay import counted_arrivals
    from stageloom.shared.messages.telemetry import RowKind

    names = [model.name for model in plan.models]
    if rates and recording is not None:
        raise InputError("both --rate and --recording say what arrives", remedy="give one of them")
    if arrivals is not None and not rates:
        raise InputError(
            f"--arrivals {arrivals.value} says how the tasks of --rate arrive, and there is no --rate",
            remedy="give --rate MODEL=PER_S, or leave --arrivals out",
        )
    if recording is not None:
        return _from_file(recording, names, seconds)
    if rates:
        text = ", ".join(f"{name} {per_s:g}/s" for name, per_s in rates.items())
        how = arrivals or ArrivalKind.POISSON
        processes = {name: _process(how, per_s) for name, per_s in rates.items()}
        require_known(processes, names)
        return _Load(processes, seconds or _DEFAULT_S, f"{how.value}: {text}")
    name = _device_id(device)
    if name is None:
        raise InputError("nothing says what arrives", remedy="give --rate, --recording or --device")
    rows = store.read(newest_telemetry, name, [RowKind.TASK_COUNTERS], round(last_s * 1e6))[0]
    found = counted_arrivals(rows, names)
    covered_s = found[names[0]].length_s
    return _Load(found, seconds or covered_s, f"the last {covered_s:.0f} s of {device}")


def _process(arrivals: ArrivalKind, per_s: float) -> "Process":
    from stageloom.planner.twin.arrivals import Periodic, Poisson

    return Periodic(rate_per_s=per_s) if arrivals is ArrivalKind.PERIODIC else Poisson(rate_per_s=per_s)


def _from_file(path: Path, names: list[str], seconds: float | None) -> _Load:
    from stageloom.planner.twin.arrivals import Recorded, require_known

    try:
        found = json_text.loads(path.read_text(encoding="utf-8"), parse_int=float)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", remedy="name a readable file") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} cannot be read as JSON: {str(error)[:200]}",
            remedy='write it like {"resnet50": [0.0, 0.5]}',
        ) from error
    if not isinstance(found, dict) or not all(_is_times(times) for times in found.values()):
        raise InputError(f"{path} is no table of lists of seconds", remedy='such as {"resnet50": [0.0, 0.5]}')
    processes = {name: Recorded(times_s=tuple(times)) for name, times in found.items()}
    require_known(processes, names)
    arrived = [one.times_s for one in processes.values() if one.times_s]
    if not arrived:
        raise InputError(f"{path} holds no arrival", remedy='write it like {"resnet50": [0.0, 0.5]}')
    earliest_s = min(times[0] for times in arrived)
    begin_s = earliest_s if earliest_s > _DAY_S else 0.0
    length_s = max(times[-1] for times in arrived) - begin_s
    if seconds is None and length_s >= _DAY_S:
        raise InputError(
            f"{path} is a recording of {length_s:.0f} s, and a day is the most that is simulated",
            remedy="cut it, see that its times are seconds, or simulate its beginning with --seconds",
        )
    shifted = {
        name: Recorded(times_s=tuple(at_s - begin_s for at_s in one.times_s))
        for name, one in processes.items()
    }
    return _Load(shifted, seconds or max(length_s + _AFTER_S, 1.0), f"recorded in {path.name}")


def _is_times(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, float) for one in value)


def _run(times: "StepTimes", bound: "BoundPlan", load: _Load, seed: int) -> "Window":
    from stageloom.planner.twin.reference import Twin
    from stageloom.planner.twin.window import join

    twin = Twin(times, load.processes, seed=seed)
    twin.deploy(bound)
    windows = []
    for done in range(_SLICES):
        windows.append(twin.run(load.seconds * (done + 1) / _SLICES - twin.now_s))
        _bar(done + 1)
    return join(windows)


def _bar(done: int) -> None:
    if not sys.stderr.isatty():
        return
    filled = _BAR * done // _SLICES
    end = "\n" if done == _SLICES else ""
    sys.stderr.write(f"\r[{'#' * filled}{'.' * (_BAR - filled)}] {100 * done // _SLICES} % {end}")
    sys.stderr.flush()


def _print(made: "KeptPrediction", number: int, window: "Window", *, json: bool) -> None:
    if json:
        emit_json({**flat(made, None), "number": number})
        return
    found = made.figures
    emit_table(
        ("model", "arrivals/s", "done/s", "lost", "p50 ms", "p99 ms", "queued", "queued max"),
        [
            (
                model.name,
                shown(found[f"{model.name}.arrivals_per_s"]),
                shown(found[f"{model.name}.throughput_per_s"]),
                int(found[f"{model.name}.lost"]),
                shown(found[f"{model.name}.p50_ms"]),
                shown(found[f"{model.name}.p99_ms"]),
                shown(found[f"{model.name}.queued_mean"]),
                int(found[f"{model.name}.queued_max"]),
            )
            for model in window.models
        ],
        empty="the plan has no models",
    )
    kept = f"; kept as prediction {number}" if number else ""
    progress(
        f"{made.seconds:.0f} s simulated, {made.twin}, {made.arrivals}: "
        f"utilisation {100 * found['utilisation']:.0f} %, {found['throughput_per_s']:.1f} tasks/s{kept}"
    )


def _device_id(name: str) -> "DeviceId | None":
    from stageloom.shared.ids import DeviceId

    return DeviceId(name) if name else None


_SHOWN = ("throughput_per_s", "p50_ms", "p99_ms", "steps_running")


@predictions.command("list")
def list_predictions(
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="Of this device alone. Default: of all.")
    ] = "",
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=MOST_ROWS, help="The newest N.")] = 20,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Show the twin's predictions beside what was measured. Of a plan on a device, each.

    Measured is the last time that the plan ran since the prediction was made.

    \b
    stageloom prediction list --device shop-7
    stageloom prediction list --limit 5 --json
    """
    from stageloom.planner.store.devices import device_info
    from stageloom.planner.store.predictions import newest_predictions

    with reading(data_dir, database_url) as store:
        name = DeviceId(device) if device else None
        if name is not None:
            store.read(device_info, name)
        found = [(one, _measured(store, one)) for one in store.read(newest_predictions, name, limit=limit)]
    if json:
        emit_json([flat(one, measured) for one, measured in found])
        return
    emit_table(
        ("number", "made (UTC)", "device", "plan", "figure", "predicted", "measured", "error %"),
        [row for one, measured in found for row in _rows(one, measured)],
        empty="nothing was predicted yet; see `stageloom simulate`",
    )


def _rows(one: "KeptPrediction", measured: Mapping[str, float] | None) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for name in _SHOWN:
        predicted = one.figures.get(name)
        known = None if measured is None else measured.get(name)
        error = 100.0 * (predicted / known - 1.0) if predicted is not None and known else None
        about = (one.number, when(one.made_at_us), one.device or "-", one.plan)
        rows.append((*about, name, shown(predicted), shown(known), shown(error)))
    return rows


def flat(one: "KeptPrediction", measured: Mapping[str, float] | None) -> dict[str, object]:
    """A prediction for JSON, with relative errors where it was measured."""
    from stageloom.planner.twin.replay import relative_errors

    return {
        "number": one.number,
        "made_at_us": one.made_at_us,
        "device": one.device,
        "plan": one.plan,
        "digest": one.digest,
        "twin": one.twin,
        "arrivals": one.arrivals,
        "seconds": one.seconds,
        "predicted": dict(one.figures),
        "measured": None if measured is None else dict(measured),
        "relative_errors": None if measured is None else relative_errors(one.figures, measured),
    }


def _measured(store: "ReadStore", one: "KeptPrediction") -> dict[str, float] | None:
    """The figures of the plan's last run on the device since the prediction; None while there is none."""
    from stageloom.planner.store.plans import plan_info
    from stageloom.planner.store.telemetry import telemetry_rows
    from stageloom.planner.twin.replay import active_spans, figures, measured_window
    from stageloom.shared.messages.telemetry import RowKind
    from stageloom.shared.plan import decode_plan

    if one.device is None:
        return None
    kinds = [
        RowKind.PLAN_ACTIVATED,
        RowKind.TASK_COUNTERS,
        RowKind.LATENCY_HISTOGRAM,
        RowKind.QUEUE_SAMPLE,
        RowKind.STEP_TIMINGS,
    ]
    activated = store.read(telemetry_rows, one.device, kinds[:1], limit=1000)
    newer = store.read(telemetry_rows, one.device, kinds[1:], since_us=one.made_at_us, limit=200_000)
    spans = active_spans(sorted([*activated, *newer], key=lambda row: row.at_us), one.digest)
    plan = decode_plan(store.read(plan_info, one.plan).wire)
    windows = (
        measured_window(newer, plan, max(begin_us, one.made_at_us), end_us)
        for begin_us, end_us in reversed(spans)
    )
    found = next((window for window in windows if window is not None), None)
    return None if found is None else figures(found)


def shown(value: float | None) -> str:
    """A figure as tables have it; nothing where there is none."""
    return "" if value is None else f"{value:.4g}"
