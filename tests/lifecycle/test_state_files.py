"""State files that earlier versions wrote are read, decided about and written as they were."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from stageloom.edge_agent.lifecycle import attempts
from stageloom.edge_agent.lifecycle.statefile import FallbackFile, load_state, save_state
from stageloom.shared.digest import digest_bytes
from stageloom.shared.messages.control import DeviceState, Origin

WRITTEN = Path(__file__).parents[1] / "data" / "agent_states"
VERSIONS = sorted(folder.name for folder in WRITTEN.iterdir())
STARTS = {
    "received": (DeviceState.RECEIVED, []),
    "trial": (DeviceState.REJECTED, ["reject"]),
    "probation": (DeviceState.ROLLED_BACK, []),
    "rejected": (DeviceState.REJECTED, []),
    "local_trial": (DeviceState.NO_GAIN, ["reject"]),
    "local_probation": (DeviceState.REJECTED, ["reject"]),
    "local_good": (DeviceState.COMMITTED, []),
}
"""By file: the state that a start goes on from, and the verdicts that it tells of what it found."""


@pytest.mark.promise("state-files-of-earlier-versions")
@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_state_of_an_earlier_version_is_read_and_written_alike(
    version: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "link.state"
    shutil.copy(WRITTEN / version / name, path)
    state, problem = load_state(path)
    assert problem is None
    read = json.loads((WRITTEN / version / "states.json").read_bytes())[name]
    assert json.loads(msgspec.json.encode(state)) == read
    save_state(path, state)
    assert path.read_bytes() == (WRITTEN / version / name).read_bytes()
    after, rows = attempts.at_boot(state, 1)
    assert (after.state, [row.verdict for row in rows]) == STARTS[name]
    assert after.local is None and after.trial is None


@pytest.mark.promise("state-files-of-earlier-versions")
@pytest.mark.parametrize("version", VERSIONS)
def test_fallback_of_an_earlier_version_is_read(version: str, tmp_path: Path) -> None:
    path = tmp_path / "fallback"
    shutil.copy(WRITTEN / version / "fallback", path)
    plan, problem = FallbackFile(path).load()
    assert plan is not None and not problem
    assert (plan.ref.digest, plan.ref.origin, plan.wire) == (
        digest_bytes([b"local"]),
        Origin.LOCAL,
        b"local",
    )
