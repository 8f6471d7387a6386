"""A stranger's distribution: built as a wheel, installed, listed, checked, compared and used by name."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stageloom.planner.cli.app import execute
from stageloom.planner.config import PlannerConfig
from stageloom.planner.service import Planner
from stageloom.planner.store.plans import plan_info
from stageloom.shared.errors import ExitCode
from stageloom.shared.plan import Plan, decode_plan
from tests.planner.processes import ROOT, ok
from tests.planner.world import World
from tests.shared.strangers import install
from tests.store.migrated import begin_migrated

pytestmark = pytest.mark.more

SOURCE = ROOT / "examples" / "extension"


def _pip(*arguments: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        *arguments,
        "--no-deps",
        "--no-index",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the installed wheel, and a distribution that does not load."""
    folder = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__*__*"))
    _pip("wheel", str(source), "--no-build-isolation", "--wheel-dir", str(folder))
    (wheel,) = folder.glob("*.whl")
    _pip("install", str(wheel), "--target", str(folder / "site"))
    broken = {"broken": "broken_one:broken", "ios": "broken_one:broken"}
    install(folder / "site", "broken-one", "stageloom.schedulers", broken, "import no_such_module")
    return folder / "site"


@pytest.fixture
def world(tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A running planner's data."""
    monkeypatch.syspath_prepend(str(installed))
    config = PlannerConfig(data_dir=tmp_path / "home", listen="127.0.0.1:0", search="local", search_workers=1)
    begin_migrated(config.data_dir)
    with closing(Planner(config)) as planner:
        yield World(config.data_dir, planner.store)


@pytest.mark.promise("stranger-s-scheduler-by-name")
def test_a_strangers_scheduler_is_used_by_name_and_a_broken_one_stops_nothing(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = {info["name"]: info for info in json.loads(ok(world.home, "scheduler", "list", "--json"))}
    mine = listed["critical_path"]
    assert mine["distribution"] == "stageloom-critical-path 1.0" and mine["kind"] == "scheduler"
    assert mine["help"] == "Two operators at a time, those with the longest way to the end first"
    assert listed["pairs"]["kind"] == "policy" and listed["pairs"]["problem"] == ""
    assert "broken of broken-one 1.0 does not load" in listed["broken"]["problem"]

    check = json.loads(ok(world.home, "scheduler", "check", "critical_path", "--graphs", "5", "--json"))
    assert check["tried"] == check["cases"] and not any(rule["broken"] for rule in check["rules"])

    chosen = ("--scheduler", "critical_path", "--scheduler", "greedy", "--scheduler", "broken")
    compare = ["scheduler", "compare", "--model", "diamond", *chosen, "--json"]
    assert execute([*compare, "--data-dir", str(world.home)]) == 0
    said = capsys.readouterr()
    rows = {row["scheduler"]: row for row in json.loads(said.out)}
    assert rows["critical_path"]["plan"] == rows["greedy"]["plan"], "a diamond's branches side by side"
    assert "broken" not in rows and "left out: broken of broken-one 1.0 does not load" in said.err

    create = ["plan", "create", "--model", "diamond", "--json", "--data-dir", str(world.home)]
    assert execute([*create, "--scheduler", "critical_path"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["digest"] == rows["critical_path"]["plan"] and made["scheduler"] == "critical_path"
    assert execute([*create, "--scheduler", "broken"]) == ExitCode.USAGE
    assert "broken of broken-one 1.0 does not load" in capsys.readouterr().err
    assert not {"stageloom_critical_path", "broken_one"} & set(sys.modules), "workers alone imported them"

    assert execute([*create, "--policy", "pairs", "--name", "pairs"]) == 0
    assert plan_of_pairs(world).lanes == 2
    assert "the policy pairs decides lanes" in refused(create, capsys)


def plan_of_pairs(world: World) -> Plan:
    return decode_plan(world.store.read(plan_info, "pairs").wire)


def refused(create: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert execute([*create, "--policy", "pairs", "--lanes", "3"]) == ExitCode.USAGE
    return capsys.readouterr().err


@pytest.mark.promise("stranger-s-scheduler-by-name")
def test_neither_command_line_imports_what_others_add(installed: Path) -> None:
    program = (
        "import sys; from stageloom.edge_agent.cli.app import app; from stageloom.planner.cli.app import app;"
        "from stageloom.shared.search.registry import added_schedulers;"
        "assert 'critical_path' in added_schedulers().usable;"
        "assert not {'stageloom_critical_path', 'broken_one'} & set(sys.modules)"
    )
    path = os.pathsep.join([str(installed), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
