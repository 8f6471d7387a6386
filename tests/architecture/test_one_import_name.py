"""One import name: what we install is `stageloom`, so that an application's own folders never meet ours."""

import ast
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, repository_files

FOLDERS = ("shared", "planner", "edge_agent", "migrations")
_MAY_IMPORT = re.compile(rf"^\s*(?:import|from)\s(?:.*[\s,])?(?:{'|'.join(FOLDERS)})\b", re.MULTILINE)
NOT_BELOW = ("benchmarks/adversary/older/",)  # the bridge to 0.1.0, which had the bare names


def bare_imports(source: str) -> list[str]:
    """The modules that a source imports by a name of ours without `stageloom`."""
    if not _MAY_IMPORT.search(source):
        return []  # parsing takes most of the time
    imported = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.append(node.module)
    return [name for name in imported if name.split(".")[0] in FOLDERS]


def test_no_source_imports_a_bare_name() -> None:
    sources = [path for path in repository_files() if path.suffix == ".py"]
    assert len(sources) > 500
    guilty = {
        str(path.relative_to(ROOT)): names
        for path in sources
        if not str(path.relative_to(ROOT)).startswith(NOT_BELOW)
        and (names := bare_imports(path.read_text(encoding="utf-8")))
    }
    assert guilty == {}


@pytest.mark.parametrize(
    "line", ["import shared.engine", "from planner import cli", "import edge_agent as e"]
)
def test_the_check_sees_bare_names(line: str) -> None:
    assert bare_imports(line)


def test_an_application_with_folders_of_the_same_names_uses_the_client(tmp_path: Path) -> None:
    for name in FOLDERS:
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text("MINE = True\n")
    application = tmp_path / "application.py"
    application.write_text(
        "from stageloom import Client\n"
        f"import {', '.join(FOLDERS)}\n"
        f"print(all(p.MINE for p in ({', '.join(FOLDERS)})), Client.__module__)\n"
    )
    done = subprocess.run([sys.executable, str(application)], capture_output=True, text=True, check=False)
    assert done.stdout == "True stageloom.edge_agent.ingest.client\n", done.stderr


def test_the_distribution_installs_one_package() -> None:
    assert (distribution("stageloom").read_text("top_level.txt") or "").split() == ["stageloom"]
