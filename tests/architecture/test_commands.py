"""Every console script and every benchmark answers --help, and says nothing on stderr."""

import ast
import subprocess
import sys

import pytest
import tomllib

from tests.architecture.sources import ROOT, modules, source_of

SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "scripts"
]
BENCHMARKS = [
    m for m in modules("benchmarks") if 'if __name__ == "__main__"' in source_of(m).read_text("utf-8")
]


def defines(module: str, name: str) -> bool:
    """Whether a module's own source defines or imports a name at its top."""
    source = source_of(module)
    tree = ast.parse(source.read_text(encoding="utf-8") if source.exists() else "")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Import | ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
            return True
    return False


def help_of(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            name,
            marks=pytest.mark.xfail(not defines(*target.split(":")), reason=f"{target} is not built yet"),
        )
        for name, target in SCRIPTS.items()
    ],
)
def test_a_console_script_explains_itself(script: str) -> None:
    module, function = SCRIPTS[script].split(":")
    run = f"import sys; from {module} import {function}; sys.argv[0] = {script!r}; sys.exit({function}())"
    assert f"Usage: {script}" in help_of("-c", run)


def test_there_are_two_console_scripts() -> None:
    assert set(SCRIPTS) == {"stageloom", "stageloom-agent"}


@pytest.mark.parametrize("module", BENCHMARKS)
def test_a_benchmark_explains_itself(module: str) -> None:
    assert f"usage: python -m {module}".casefold() in help_of("-m", module).casefold()


def test_there_are_benchmarks() -> None:
    assert "benchmarks.zoo" in BENCHMARKS
