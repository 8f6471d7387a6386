"""`stageloom prediction create`: what the twin predicts of a plan."""

import json as json_text
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import typer

from stageloom.planner.api import routes
from stageloom.planner.api.problem import ApiRefused
from stageloom.planner.cli.jobs import run_job
from stageloom.planner.cli.options import Rates, TwinFile, parse_rates
from stageloom.planner.cli.output import emit_table, progress, show
from stageloom.planner.cli.prediction import figure
from stageloom.planner.cli.request_file import From, request_from, twin_text
from stageloom.planner.schema import prediction as schema
from stageloom.planner.schema.plan import ArrivalRate
from stageloom.shared.errors import InputError

_ARRIVALS = ".arrivals_per_s"


def create(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="Its name, or 8 characters of its digest.")],
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="Take costs and arrivals from what it measured."),
    ] = None,
    twin: TwinFile = "",
    rate: Rates = None,
    arrivals: Annotated[
        schema.ArrivalKind | None,
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
    seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Simulate so long. Default: as recorded, else 60.")
    ] = None,
    scenario: From = None,
) -> None:
    """Predict queues, latency and utilisation of a plan. It runs on a simulated device.

    Without --rate and --recording the arrivals that --device counted are replayed. Works while the planner is
    down, too. `stageloom prediction list` shows what was predicted beside what was measured since.

    \b
    stageloom prediction create tuned --device shop-7
    stageloom prediction create tuned --twin nano --rate resnet50=60 --rate squeezenet=120 --arrivals periodic
    stageloom prediction create tuned --device shop-7 --from scenario.toml

    \b
    Fields for --from alone:
      last_s   of --device's telemetry the newest so many seconds count; 600
      seed     equal seeds give equal predictions; 0
      keep     keep the prediction, to compare it with what comes; true
    """
    given: dict[str, Any] = {
        "plan": plan,
        "device": device or None,
        "twin": twin_text(twin or None),
        "rates": _rates(rate),
        "arrivals": arrivals,
        "recording": None if recording is None else _recorded(recording),
        "seconds": seconds,
    }
    request = request_from(schema.PredictionCreateRequest, scenario, given)
    try:
        made = run_job(routes.PREDICTION_CREATE, request)
    except ApiRefused as error:
        if recording is None or error.status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            raise
        number = sum(map(len, (request.recording or {}).values()))
        raise InputError(
            f"{recording} has {number} arrivals of all models together: {error.cause}", remedy="cut it"
        ) from error
    show(made, lambda: _tell(made))


def _rates(texts: list[str] | None) -> tuple[ArrivalRate, ...] | None:
    rates = parse_rates(texts)
    return tuple(ArrivalRate(model=model, per_s=per_s) for model, per_s in rates.items()) or None


def _recorded(path: Path) -> dict[str, list[float]]:
    """Arrivals from a file, to the microsecond: more would only make the request longer.

    So would seconds since 1970, which are counted from the earliest arrival on.
    """
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
    odd = [at_s for times in found.values() for at_s in times if not 0.0 <= at_s <= schema.LATEST_S]
    if odd:
        raise InputError(f"{path} has an arrival at {odd[0]} s", remedy="write seconds, also since 1970")
    longest = max((len(times) for times in found.values()), default=0)
    if longest > schema.RECORDED_MAX:
        raise InputError(
            f"{path} has {longest} arrivals of a model, and {schema.RECORDED_MAX} are the most",
            remedy="cut it",
        )
    earliest_s = min((at_s for times in found.values() for at_s in times), default=0.0)
    begin_s = earliest_s if earliest_s > schema.SIMULATED_MAX_S else 0.0
    return {name: [round(at_s - begin_s, 6) for at_s in times] for name, times in found.items()}


def _is_times(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(at_s, float) for at_s in value)


def _tell(made: schema.PredictionInfo) -> None:
    found = made.predicted
    models = [name.removesuffix(_ARRIVALS) for name in found if name.endswith(_ARRIVALS)]
    emit_table(
        ("model", "arrivals/s", "done/s", "lost", "p50 ms", "p99 ms", "queued", "queued max"),
        [
            (
                model,
                figure(found[model + _ARRIVALS]),
                figure(found[f"{model}.throughput_per_s"]),
                int(found[f"{model}.lost"]),
                figure(found[f"{model}.p50_ms"] or None),
                figure(found[f"{model}.p99_ms"] or None),
                figure(found[f"{model}.queued_mean"]),
                int(found[f"{model}.queued_max"]),
            )
            for model in models
        ],
        empty="the plan has no models",
    )
    kept = f"; kept as prediction {made.number}" if made.number else ""
    progress(
        f"{made.seconds:.0f} s simulated, {made.twin}, {made.arrivals}: "
        f"utilisation {100 * found['utilisation']:.0f} %, {found['throughput_per_s']:.1f} tasks/s{kept}"
    )
    if made.doubt:
        progress(made.doubt)
