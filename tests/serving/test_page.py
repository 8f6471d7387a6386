"""The commands of docs/serving.md, against an agent that serves the page's model."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.agent.process import AgentProcess

_PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
_BLOCKS = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def ports(agent: AgentProcess) -> tuple[str, str]:
    serving = agent.now().serving
    assert serving is not None
    return serving.http.rpartition(":")[2], serving.grpc.rpartition(":")[2]


def test_curl_examples_answer(ports: tuple[str, str], tmp_path: Path) -> None:
    blocks = [body for kind, body in _BLOCKS.findall(_PAGE.read_text("utf-8")) if kind == "bash"]
    lines = "".join(blocks).replace("localhost:8000", f"localhost:{ports[0]}").splitlines()
    answers = []
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line.replace("curl -s", "curl -s --fail-with-body")],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        if line.startswith("curl") and not line.endswith("/ready"):
            answers.append(json.loads(done.stdout))
    assert len(answers) == 5
    assert answers[0]["name"] == "tiny"
    assert answers[-1]["outputs"][0]["shape"] == [1, 3, 8, 8]


def test_python_example_runs(ports: tuple[str, str]) -> None:
    [body] = [body for kind, body in _BLOCKS.findall(_PAGE.read_text("utf-8")) if kind == "python"]
    names: dict[str, object] = {}
    exec(body.replace("127.0.0.1:8000", f"127.0.0.1:{ports[0]}"), names)
    result = names["result"]
    assert result.as_numpy("output").shape == (1, 3, 8, 8)  # type: ignore[attr-defined]
