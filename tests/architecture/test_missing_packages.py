"""Each side's extra installs what it needs; a command that lacks a package names it and the remedy."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("missing", "program", "arguments", "remedy"),
    [
        (
            "sqlalchemy",
            "stageloom.planner.cli.app",
            ["model", "list"],
            "pip install 'stageloom[planner,onnx]'",
        ),
        *(
            (
                missing,
                "stageloom.planner.cli.app",
                ["up", "--data-dir", "{folder}/home", "--listen", "127.0.0.1:0"],
                "pip install 'stageloom[planner,onnx]'",
            )
            for missing in ("starlette", "uvicorn")
        ),
        (
            "matplotlib",
            "stageloom.planner.cli.app",
            ["scheduler", "compare", "--model", "a", "--plot", "a.svg"],
            "pip install 'stageloom[plot]'",
        ),
        (
            "onnx",
            "stageloom.edge_agent.cli.app",
            ["verify", "a.onnx", "--schedule", "greedy"],
            "stageloom[edge,onnx]",
        ),
    ],
)
def test_missing_package_is_one_line_with_its_remedy(
    missing: str, program: str, arguments: list[str], remedy: str, tmp_path: Path
) -> None:
    words = [word.format(folder=tmp_path) for word in arguments]
    run = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        f"from {program} import execute\nsys.exit(execute({words!r}))"
    )
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=90)
    assert done.returncode == 6
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: {missing}")
    assert remedy in done.stderr
