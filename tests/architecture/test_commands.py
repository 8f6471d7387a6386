"""Every console script and every benchmark answers --help, and says nothing on stderr."""

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


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_console_script_explains_itself(script: str) -> None:
    module, function = SCRIPTS[script].split(":")
    run = f"import sys; from {module} import {function}; sys.argv[0] = {script!r}; sys.exit({function}())"
    assert f"Usage: {script}" in help_of("-c", run)


def test_there_are_two_console_scripts() -> None:
    assert set(SCRIPTS) == {"stageloom", "stageloom-agent"}


@pytest.mark.parametrize("module", BENCHMARKS)
def test_a_benchmark_explains_itself(module: str) -> None:
    text = help_of("-m", module)
    assert text.startswith("usage:")
    assert module.removesuffix(".__main__").split(".")[-1] in text.splitlines()[0]


def test_there_are_benchmarks() -> None:
    assert "benchmarks.zoo.__main__" in BENCHMARKS
