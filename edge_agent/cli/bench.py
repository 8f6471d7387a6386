"""`stageloom-agent bench`: a user's own models, and what serves them best on this machine."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from stageloom.edge_agent.bench import MOST_SECONDS
from stageloom.shared.errors import InputError
from stageloom.shared.importer.model_argument import MODEL_METAVAR, parse_models

if TYPE_CHECKING:
    from stageloom.edge_agent.config import Precision


def bench(
    model: Annotated[
        list[str], typer.Argument(metavar=f"{MODEL_METAVAR}...", help="ONNX files, with open inputs pinned.")
    ],
    rate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PER_S",
            help="Tasks a second, of one model or of each; their proportion is what counts.",
            show_default="as many of each model",
        ),
    ] = None,
    deadline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]MS",
            help="When a result is worthless, of one model or of each.",
            show_default="five times the model's own time, at least 20",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=5.0, max=MOST_SECONDS, help="How long to measure, about.")
    ] = 200.0,
    precision: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="fp32, or what the agent may use beside it: bf16, which OpenVINO is compared in as well, or "
            "on a GPU tf32 or fp16, and onnxruntime is compared in tf32 as well.",
        ),
    ] = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Find what serves your own models best on this machine.

    A default session per model, tuned settings of onnxruntime and OpenVINO, and the agent with its own plan
    take turns on the same random arrivals, and each one's load within the deadlines is found. With a GPU,
    onnxruntime's sessions there are among them, where it is installed for that. It ends with a sentence that
    says what to use.

    \b
    stageloom-agent bench detector.onnx classifier.onnx
    stageloom-agent bench det=yolo.onnx:images=1x3x640x640 cls.onnx --rate det=15 --rate cls=60 --deadline 50
    """
    from stageloom.edge_agent.bench.own_models import StatedLoad, result_text
    from stageloom.edge_agent.bench.own_models import bench as compare
    from stageloom.edge_agent.bench.termination import ended_politely

    arguments = parse_models(model, option="")
    names = [one.called for one in arguments]
    load = StatedLoad(
        rates_per_s=by_model("--rate", rate or (), names),
        deadlines_ms=by_model("--deadline", deadline or (), names),
        seconds=seconds,
        precision=known_precision(precision),
    )
    with ended_politely():
        result = compare(arguments, load, lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(result.document(), indent=2) if as_json else result_text(result))


def known_precision(name: str) -> "Precision":
    """Raises:
    InputError: nothing is compared in it.
    """
    from stageloom.edge_agent.config import PRECISIONS

    found = next((one for one in PRECISIONS if one == name), None)
    if found is None:
        raise InputError(
            f"nothing is compared in the precision {name!r}", remedy=f"use one of {', '.join(PRECISIONS)}"
        )
    return found


def by_model(option: str, given: Sequence[str], names: Sequence[str]) -> Mapping[str, float]:
    """Numbers by model; one without a name is for all models that no other names.

    Raises:
        InputError: one is no number, or there are two for a model.
    """
    found: dict[str, float] = {}
    for text in given:
        name, named, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            raise InputError(
                f"{option} {text!r} is no number", remedy=f"write {option} 30 or {option} {names[0]}=30"
            ) from None
        if name in found:
            raise InputError(f"{option} is given twice for {name or 'all models'!r}", remedy="give it once")
        found[name if named else ""] = value
    if "" in found:
        rest = found.pop("")
        found = {**dict.fromkeys(names, rest), **found}
    return found
