"""`stageloom model ...`: look at ONNX files, import them, show where they run, forget them."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from stageloom.planner.api import routes
from stageloom.planner.cli.connection import call, connected, every
from stageloom.planner.cli.options import Shapes, checked
from stageloom.planner.cli.output import emit, emit_table, progress, show, when
from stageloom.planner.schema import model as schema
from stageloom.planner.schema.service import StatusRequest
from stageloom.shared.errors import InputError
from stageloom.shared.importer.model_argument import (
    MODEL_METAVAR,
    ModelArgument,
    format_model,
    named,
    parse_model,
    parse_shape,
)
from stageloom.shared.text import counted

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at ONNX files, import them, list, show and remove models.",
)

NameOrVersion = Annotated[str, typer.Argument(metavar="NAME[@VERSION]")]
File = Annotated[str, typer.Argument(metavar=MODEL_METAVAR, help="An ONNX file, open inputs pinned.")]


@app.command()
def inspect(file: File, shape: Shapes = None) -> None:
    """Import a model without keeping it. Prints what was found: operators, cuts, memory, what is opaque.

    \b
    stageloom model inspect yolo.onnx:images=1x3x640x640
    """
    from stageloom.shared.importer.api import inspect_model
    from stageloom.shared.importer.report import report_rows

    model = _single(parse_model(file).with_shapes(map(parse_shape, shape or ())))
    report = inspect_model(Path(model.path), model.largest, smallest=model.smallest, progress=_progress())
    rows = report_rows(report)
    width = max(len(label) for label, _ in rows)
    told = "\n".join(f"{label:<{width}}  {text}" for label, text in rows)
    show(report.to_json(), lambda: emit(told))


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
) -> None:
    """Import a model and give it to the planner. The same file again changes nothing; another one under
    the same name becomes the model's next version, which plans made from now on take.

    \b
    stageloom model add resnet50.onnx --shape data=1x3x224x224
    stageloom model add detector=yolo.onnx:images=1x3x640x640
    stageloom model add bert.onnx:input_ids=1x128,attention_mask=1x128
    stageloom model add yolo_retrained.onnx --name detector
    """
    from stageloom.shared.importer.api import artifact_path, import_model

    model = _single(named(parse_model(file).with_shapes(map(parse_shape, shape or ())), name))
    if model.version is not None:
        raise InputError(
            f"the version of {str(model.name)!r} is not yours to choose: the planner counts them",
            remedy=f"add it as {model.called}",
        )
    checked(schema.ModelRemoveRequest(model=model.called))
    call(routes.STATUS, StatusRequest())  # known before minutes go into an import
    with tempfile.TemporaryDirectory(prefix="stageloom-add-") as scratch:
        report = import_model(
            Path(model.path),
            shapes=model.largest,
            out_dir=Path(scratch),
            smallest=model.smallest,
            progress=_progress(),
        )
        request = checked(schema.ModelAddRequest(model=model.called, digest=report.digest))
        with connected() as caller:
            info = caller.upload(routes.MODEL_ADD, request, artifact_path(Path(scratch), report.digest))
    told = {"model": info.model, "version": info.version, "added": info.added}
    show({**report.to_json(), **told}, lambda: emit(info.model))
    if report.never_ran:
        progress(f"notice: {report.never_ran}")
    again = "" if info.added else " (the same artifact, which was there already)"
    progress(
        f"model {info.model}@{info.version}{again}: {counted(info.operators, 'operator')}, "
        f"{counted(info.base_cuts, 'base cut')}, "
        f"{info.opaque} opaque, {info.size_bytes / (1 << 20):.1f} MiB, artifact {info.digest[:12]}"
    )


@app.command("list")
def list_models() -> None:
    """List models and versions.

    \b
    stageloom model list
    """
    infos = every(routes.MODEL_LIST, schema.ModelListRequest())
    columns = ["model", "version", "operators", "base cuts", "opaque", "MiB", "artifact", "added (UTC)"]
    rows = [
        (
            info.model,
            info.version,
            info.operators,
            info.base_cuts,
            info.opaque,
            info.size_bytes / (1 << 20),
            info.digest[:12],
            when(info.added_at_us),
        )
        for info in infos
    ]
    show(
        infos,
        lambda: emit_table(columns, rows, empty="there is no model; add one with `stageloom model add`"),
    )


@app.command("show")
def show_model(name: NameOrVersion) -> None:
    """Show a version of a model, its plans and devices. The newest one where none is named.

    \b
    stageloom model show detector@1
    """
    detail = call(routes.MODEL_SHOW, checked(schema.ModelShowRequest(model=name)))
    info = detail.info
    rows = (
        ("model", f"{info.model}@{info.version}" + (", the newest" if info.newest else "")),
        ("artifact", info.digest),
        ("size", f"{info.size_bytes / (1 << 20):.1f} MiB, {info.operators} operators"),
        ("added (UTC)", when(info.added_at_us)),
        ("in plans", ", ".join(detail.plans) or "none"),
        ("desired on", ", ".join(detail.desired_on) or "no device"),
        ("runs on", ", ".join(detail.running_on) or "no device"),
    )
    show(detail, lambda: emit("\n".join(f"{label:<12}{text}" for label, text in rows)))


@app.command("export")
def export_model(
    name: NameOrVersion,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="To be written; it must not exist.")],
) -> None:
    """Write a version's normalised ONNX file. Plans of it, and their exports, are of its nodes.

    \b
    stageloom model export resnet50 resnet50.onnx
    stageloom model export detector@1 detector_before.onnx
    """
    request = checked(schema.ModelExportRequest(model=name))
    with connected(live=False) as caller:
        size = caller.download(routes.MODEL_EXPORT, request, file)
    show({"file": str(file), "size_bytes": size}, lambda: progress(f"{size} bytes in {file}"))


@app.command()
def remove(
    name: NameOrVersion,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Though devices, measurements that were asked for or kept plans use it."
        ),
    ] = False,
) -> None:
    """Forget a model or a version that nothing uses. What uses it is named.

    Plans of a version that is forgotten with --force stay, and cannot be pushed until it is added again.

    \b
    stageloom model remove resnet50
    stageloom model remove detector@1
    stageloom model remove detector@1 --force
    """
    call(routes.MODEL_REMOVE, checked(schema.ModelRemoveRequest(model=name, force=force)))
    show({"model": name, "removed": True}, lambda: None)
    progress(f"model {name} is gone")


def _single(model: ModelArgument) -> ModelArgument:
    """The argument where it stands for one model.

    Raises:
        InputError: it has a set of sizes.
    """
    each = model.each()
    if len(each) > 1:
        raise InputError(
            f"{format_model(model)!r} stands for {len(each)} models, and this command takes one",
            remedy=f"give them one by one; the first is {format_model(each[0])!r}",
        )
    return each[0]


def _progress() -> Callable[[str], None] | None:
    """Phases of an import, for whoever watches; a pipe or a log is spared them."""
    return progress if sys.stderr.isatty() else None
