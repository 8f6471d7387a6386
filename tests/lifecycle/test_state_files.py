"""State files that earlier versions wrote are read, decided about and written as they were."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stageloom.edge_agent.lifecycle import attempts
from stageloom.edge_agent.lifecycle.statefile import (
    FallbackFile,
    decode_state,
    encode_state,
    load_state,
    save_state,
)
from stageloom.edge_agent.lifecycle.states import LinkState, PlanRef, RunnablePlan
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import DecodeError
from stageloom.shared.messages import control
from stageloom.shared.messages.control import ArtifactNeed, DeviceState, Origin
from tests.lifecycle.driver import GOOD, NEED, desired

WRITTEN = Path(__file__).parents[1] / "data" / "agent_states"
VERSIONS = sorted(folder.name for folder in WRITTEN.iterdir())
STARTS = {
    "received": (DeviceState.RECEIVED, []),
    "trial": (DeviceState.REJECTED, ["reject"]),
    "probation": (DeviceState.ROLLED_BACK, ["reject"]),
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


def test_the_state_file_round_trips_and_a_damaged_one_is_set_aside(tmp_path: Any) -> None:
    path = tmp_path / "link.state"
    assert load_state(path) == (LinkState(), None)
    state = LinkState(desired=desired(3, artifacts=(NEED,)), state=DeviceState.WAITING, last_good=GOOD)
    save_state(path, state)
    assert load_state(path) == (state, None)
    path.write_bytes(path.read_bytes()[:-7])
    loaded, problem = load_state(path)
    assert loaded == LinkState() and problem is not None and "set aside" in problem
    assert load_state(path) == (LinkState(), None), "no boot loop"


@pytest.mark.parametrize(
    ("damaged", "revision", "said"),
    [("link.state", 1, "; the copy before it is used"), ("link.state.previous", 2, "")],
)
def test_the_copy_before_is_said_to_be_used_only_where_it_is(
    tmp_path: Path, damaged: str, revision: int, said: str
) -> None:
    path = tmp_path / "link.state"
    for number in (1, 2):
        save_state(path, LinkState(revision=number))
    (tmp_path / damaged).write_bytes(b"rubbish")
    problem = f"{damaged} is corrupt (not a state file) and set aside{said}"
    assert load_state(path) == (LinkState(revision=revision), problem)


def test_the_largest_state_fits_its_file() -> None:
    blob = bytes(at * 7919 % 251 for at in range(96 << 10))
    needs = tuple(ArtifactNeed(f"m{at:063d}", digest_bytes([b"%d" % at]), 2**44) for at in range(64))
    wanted = desired(
        1, blob, artifacts=needs, profiles=tuple(control.ProfileRequest(at, needs[at]) for at in range(64))
    )
    plan = RunnablePlan(PlanRef(digest_bytes([b"x"]), Origin.LOCAL), blob, needs)
    state = LinkState(desired=wanted, last_good=plan, reason="r" * 512)
    assert decode_state(encode_state(state)) == state
    with pytest.raises(DecodeError):
        decode_state(b"\x00" + msgspec.msgpack.encode({"revision": -1}))
