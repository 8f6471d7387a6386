"""An agent that leads a session has it come after those of its clients."""

import os
from pathlib import Path

import pytest

from stageloom.edge_agent.config import ModelFile
from tests.agent.models import write_tiny
from tests.agent.process import AgentProcess

OWN = Path("/proc/self/autogroup")

pytestmark = pytest.mark.skipif(not os.access(OWN, os.W_OK), reason="this kernel groups no sessions")


def niceness_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])


def served(folder: Path) -> tuple[ModelFile, ...]:
    return (ModelFile(path=str(write_tiny(folder / "net.onnx")), name="net"),)


@pytest.mark.parametrize(("settings", "expected"), [({}, 0), ({"niceness": 9}, 9)])
def test_an_agent_that_leads_a_session_has_it_come_after_others(
    tmp_path: Path, settings: dict[str, int], expected: int
) -> None:
    with AgentProcess(tmp_path / "agent", leads=True, models=served(tmp_path), **settings) as agent:
        agent.until(lambda status: True, "the agent answers")
        assert niceness_of(agent.process.pid) == expected


def test_an_agent_that_a_shell_started_leaves_the_shells_session_alone(tmp_path: Path) -> None:
    before = OWN.read_text()
    with AgentProcess(tmp_path / "agent", models=served(tmp_path)) as agent:
        agent.until(lambda status: True, "the agent answers")
        assert OWN.read_text() == before
