"""Imports that several tests look at, made once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import onnx
import pytest

from benchmarks import zoo
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.importer.api import artifact_path, import_model
from stageloom.shared.importer.report import ImportReport

Imported = Callable[[str], tuple[ImportReport, Artifact]]
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


@pytest.fixture(scope="session")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """Import a quarter-width zoo model, or a `light_*` model of the onnx package, by name."""
    folder = tmp_path_factory.mktemp("imported")

    @cache
    def get(name: str) -> tuple[ImportReport, Artifact]:
        path = LIGHT / f"{name}.onnx"
        if not name.startswith("light_"):
            path = folder / f"{name}.onnx"
            zoo.write(name, path, width=0.25)
        report = import_model(path, shapes={}, out_dir=folder)
        return report, open_artifact(artifact_path(folder, report.digest), report.digest)

    return get
