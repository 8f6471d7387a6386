"""The extra `planner-lite`: a planner without Ray, numba and torch imports, searches and judges plans."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.planner.processes import ROOT, PlannerProcess, environment, plan_file

pytestmark = pytest.mark.more

LEFT_OUT = ("ray", "numba", "llvmlite", "torch")
"""Packages of the extras `planner` and `learn` alone."""

_STAGELOOM = [sys.executable, "-c", "from stageloom.planner.cli import main; main()"]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that, first on Python's path, hides `LEFT_OUT` in every process."""
    folder = tmp_path_factory.mktemp("without")
    hide = f"import sys\nsys.modules.update(dict.fromkeys({LEFT_OUT!r}))\n"
    (folder / "sitecustomize.py").write_text(hide)
    return str(folder)


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory, without: str) -> Iterator[PlannerProcess]:
    """A planner with the default setting of `search`, which is Ray."""
    home = tmp_path_factory.mktemp("lite") / "home"
    process = PlannerProcess(home, search="ray", first_path=without)
    yield process
    process.stop()


def _stageloom(planner: PlannerProcess, without: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*_STAGELOOM, *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        env=environment(planner.home, first_path=without),
        check=False,
    )


def test_models_are_imported_and_plans_searched_on_the_local_pool(
    planner: PlannerProcess, without: str, model_file: Path
) -> None:
    add = ("model", "add", str(model_file), "--name", "branches", "--shape", "x=1x8")
    create = ("plan", "create", "--model", "branches", "--scheduler", "ios", "--json")
    assert _stageloom(planner, without, *add).returncode == 0
    made = _stageloom(planner, without, *create)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["scheduler"] == "ios"
    said = [line for line in planner.log().splitlines() if "Ray is not installed" in line]
    assert len(said) == 1, "one line says where searches run"
    assert "pip install 'stageloom[planner]'" in said[0]


def test_a_contest_is_judged_by_the_reference_twin(
    planner: PlannerProcess, without: str, model_file: Path, tmp_path: Path
) -> None:
    add = ("model", "add", str(model_file), "--name", "judged", "--shape", "x=1x8")
    rates = plan_file(tmp_path / "rates.toml", rates=[{"model": "judged", "per_s": 2.0}])
    create = ("plan", "create", "--model", "judged", "--from", rates, "--budget", "5s", "--json")
    assert _stageloom(planner, without, *add).returncode == 0
    made = _stageloom(planner, without, *create)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["contest"]["judged"]


def test_the_packages_are_hidden_from_every_process(without: str) -> None:
    environ = {**os.environ, "PYTHONPATH": f"{without}{os.pathsep}{ROOT}"}
    for package in LEFT_OUT:
        tried = subprocess.run(
            [sys.executable, "-c", f"import {package}"], env=environ, capture_output=True, check=False
        )
        assert tried.returncode == 1, package
