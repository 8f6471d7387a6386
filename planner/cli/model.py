"""`stageloom model ...`: look at ONNX files, import them, forget them."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from stageloom.planner.admin.client import ask, require_running
from stageloom.planner.cli.options import DatabaseUrl, DataDir, Json, Shapes, checked, data_dir_of, reading
from stageloom.planner.cli.output import emit, emit_json, emit_table, progress, when
from stageloom.shared.importer.model_argument import MODEL_METAVAR, named, parse_model, parse_shape
from stageloom.shared.messages import admin

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at ONNX files, import them, list and remove models.",
)

File = Annotated[str, typer.Argument(metavar=MODEL_METAVAR, help="An ONNX file, open inputs pinned.")]


@app.command()
def inspect(file: File, shape: Shapes = None, json: Json = False) -> None:
    """Import a model without keeping it. Prints what was found: operators, cuts, memory, what is opaque.

    \b
    stageloom model inspect yolo.onnx:images=1x3x640x640
    """
    from stageloom.shared.importer.api import inspect_model
    from stageloom.shared.importer.report import report_rows

    model = parse_model(file).with_shapes(map(parse_shape, shape or ()))
    report = inspect_model(Path(model.path), dict(model.shapes), progress=_progress())
    if json:
        emit_json(report.to_json())
        return
    rows = report_rows(report)
    width = max(len(label) for label, _ in rows)
    emit("\n".join(f"{label:<{width}}  {text}" for label, text in rows))


@app.command()
def add(
    file: File,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="What applications will call it.",
            show_default="NAME=, else the file's",
        ),
    ] = None,
    shape: Shapes = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Import a model and give it to the planner. The same file again changes nothing.

    \b
    stageloom model add resnet50.onnx --shape data=1x3x224x224
    stageloom model add detector=yolo.onnx:images=1x3x640x640
    stageloom model add bert.onnx:input_ids=1x128,attention_mask=1x128
    """
    from stageloom.shared.importer.api import artifact_path, import_model

    folder = data_dir_of(data_dir)
    model = named(parse_model(file).with_shapes(map(parse_shape, shape or ())), name)
    checked(admin.ModelRemoveRequest(model=model.called))
    require_running(folder)  # known before minutes go into an import
    # Where the planner looks too: as a service it may have a /tmp of its own.
    with tempfile.TemporaryDirectory(prefix=".add-", dir=folder.absolute()) as scratch:
        report = import_model(
            Path(model.path), shapes=dict(model.shapes), out_dir=Path(scratch), progress=_progress()
        )
        request = checked(
            admin.ModelAddRequest(
                model=model.called,
                path=str(artifact_path(Path(scratch), report.digest)),
                digest=report.digest,
            )
        )
        info = ask(folder, request, admin.ModelReply, timeout_s=600.0).model
    if json:
        emit_json({**report.to_json(), "model": info.model})
        return
    emit(info.model)
    progress(
        f"model {info.model}: {info.operators} operators, {info.base_cuts} base cuts, {info.opaque} opaque, "
        f"{info.size_bytes / (1 << 20):.1f} MiB, artifact {info.digest[:12]}"
    )


@app.command("list")
def list_models(data_dir: DataDir = None, database_url: DatabaseUrl = "", json: Json = False) -> None:
    """List the models.

    \b
    stageloom model list
    """
    from stageloom.planner.store.models import model_infos

    with reading(data_dir, database_url) as store:
        infos = store.read(model_infos, limit=1_000_000)
    if json:
        emit_json(infos)
        return
    emit_table(
        ["model", "operators", "base cuts", "opaque", "MiB", "artifact", "added (UTC)"],
        [
            (
                m.model,
                m.operators,
                m.base_cuts,
                m.opaque,
                m.size_bytes / (1 << 20),
                m.digest[:12],
                when(m.added_at_us),
            )
            for m in infos
        ],
        empty="there is no model; add one with `stageloom model add`",
    )


@app.command()
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME")], data_dir: DataDir = None, json: Json = False
) -> None:
    """Forget a model that no device should run. Plans that name it stay, and can no longer be pushed.

    \b
    stageloom model remove resnet50
    """
    ask(data_dir_of(data_dir), checked(admin.ModelRemoveRequest(model=name)), admin.Done)
    if json:
        emit_json({"model": name, "removed": True})
    progress(f"model {name} is gone")


def _progress() -> Callable[[str], None] | None:
    """Phases of an import, for whoever watches; a pipe or a log is spared them."""
    return progress if sys.stderr.isatty() else None
