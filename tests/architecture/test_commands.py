"""Every console script and every benchmark answers --help, and says nothing on stderr."""

import json
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


SHOW = """
import contextlib, io, json, runpy, sys

def said(module):
    out, err, code = io.StringIO(), io.StringIO(), None
    sys.argv = ["", "--help"]
    sys.modules.pop(module, None)  # another benchmark has imported it
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(module.removesuffix(".__main__"), run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code
    return [code or 0, err.getvalue(), out.getvalue()]

print(json.dumps({module: said(module) for module in json.loads(sys.argv[1])}))
"""


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_console_script_explains_itself(script: str) -> None:
    module, function = SCRIPTS[script].split(":")
    call = f"import sys; from {module} import {function}; sys.argv[0] = {script!r}; sys.exit({function}())"
    assert f"Usage: {script}" in run("-c", call, "--help")


def test_there_are_two_console_scripts() -> None:
    assert set(SCRIPTS) == {"stageloom", "stageloom-agent"}


@pytest.fixture(scope="module")
def explained() -> dict[str, tuple[int, str, str]]:
    """What every benchmark's --help gives: exit code, stderr, stdout. In one process: imports take time."""
    found: dict[str, tuple[int, str, str]] = json.loads(run("-c", SHOW, json.dumps(BENCHMARKS)))
    return found


@pytest.mark.parametrize("module", BENCHMARKS)
def test_a_benchmark_explains_itself(module: str, explained: dict[str, tuple[int, str, str]]) -> None:
    code, err, text = explained[module]
    assert (code, err) == (0, "")
    assert text.startswith("usage:")
    assert module.removesuffix(".__main__").split(".")[-1] in text.splitlines()[0]


def test_there_are_benchmarks() -> None:
    assert "benchmarks.zoo.__main__" in BENCHMARKS
