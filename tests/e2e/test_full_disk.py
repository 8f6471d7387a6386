"""An artifact that does not fit on the device's disk."""

import contextlib
import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from stageloom import Client
from stageloom.edge_agent.store import RESERVE_BYTES
from tests.agent.conftest import eventually
from tests.e2e.fleet import PATIENCE_S, Device, Fleet
from tests.e2e.networks import rows, write_heavy
from tests.scratch import resize_disk, small_disk

pytestmark = pytest.mark.more

_DISK_BYTES = 4 << 20
_ENOUGH_BYTES = 64 << 20
_NUMBERS = count(1)


@pytest.fixture(scope="module")
def large(shared_fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan of `alpha` and a network of 16 MiB."""
    file = write_heavy(tmp_path_factory.mktemp("large") / "large.onnx", 5, width=2048)
    if not shared_fleet.runs:
        shared_fleet.start()
    shared_fleet.do("model", "add", str(file), "--name", "large")
    shared_fleet.make_plan("large", "--model", "alpha", "--model", "large")
    return "large"


@pytest.fixture
def cramped(fleet: Fleet) -> Iterator[Device]:
    """A device whose whole home lies on a disk of 4 MiB."""
    with small_disk(_DISK_BYTES) as disk, Device(fleet, f"cramped-{next(_NUMBERS)}", disk) as device:
        yield device.join()


def _serves(device: Device) -> bool:
    with Client(device.running.socket) as client:
        return "output" in client.run("alpha", {"input": rows(1)[0]}, timeout_s=60)


def _part_bytes(home: Path) -> int:
    return sum(path.stat().st_size for path in (home / "artifacts").glob("*.part"))


def _fill(file: Path) -> None:
    """Write until nothing more fits."""
    with file.open("wb", buffering=0) as out, contextlib.suppress(OSError):
        while out.write(bytes(1 << 20)):
            pass


@pytest.mark.promise("disk-artifact-fit-fills")
def test_an_artifact_that_does_not_fit_is_not_begun_and_comes_when_the_disk_has_grown(
    cramped: Device, large: str
) -> None:
    """The device's disk has 4 MiB.

    1. It runs `alpha`; a plan is pushed whose artifact has 16 MiB. The planner is told that it does not fit.
    2. Not a byte of it came; the device serves on.
    3. Another plan is committed.
    4. The large plan is pushed again, and the disk grows: now it is committed.
    """
    device = cramped
    agent = device.start()
    device.run("alpha")
    device.push(large)
    device.until_seen(lambda s: "cannot be stored" in s["report"]["reason"], "the planner is told why")
    assert not _part_bytes(device.home)
    assert _serves(device)
    device.run("whole")
    device.push(large)
    resize_disk(device.home.parent, _ENOUGH_BYTES)
    device.until_seen(lambda s: s["report"]["state"] == "committed", "the large plan to be committed")
    assert _serves(device)
    assert agent.process.poll() is None
    device.drain_telemetry()


@pytest.mark.promise("disk-artifact-fit-fills")
def test_a_disk_that_others_fill_in_mid_transfer_stops_neither_serving_nor_the_next_plan(
    cramped: Device, large: str
) -> None:
    """The device's disk has room for the artifact, until another program takes it.

    1. The device runs `alpha`; the large plan is pushed. When so much of the artifact has come that other
       plans would fit there, the agent is halted and the disk is filled.
    2. The planner is told why, and the part is gone. The device serves on.
    3. Another plan is committed.
    4. The room is given back: the large plan, pushed again, is committed.
    """
    device, filler = cramped, cramped.home.parent / "filler"
    agent = device.start()
    device.run("alpha")
    resize_disk(device.home.parent, _ENOUGH_BYTES)
    device.push(large)
    eventually(lambda: _part_bytes(device.home) > 2 * RESERVE_BYTES, "a part of it has come", PATIENCE_S)
    agent.process.send_signal(signal.SIGSTOP)  # lest the rest comes while the disk is being filled
    _fill(filler)
    agent.process.send_signal(signal.SIGCONT)
    device.until_seen(lambda s: "cannot be stored" in s["report"]["reason"], "the planner is told why")
    assert not _part_bytes(device.home)
    assert _serves(device)
    device.run("whole")
    assert _serves(device)
    filler.unlink()
    device.run(large)
    assert agent.process.poll() is None
    device.drain_telemetry()


@pytest.mark.promise("disk-artifact-fit-fills")
def test_a_disk_that_is_full_once_the_artifact_has_come_holds_the_plan_back_and_says_so(
    cramped: Device, large: str
) -> None:
    """The artifact is whole, but the state that says that its plan runs cannot be stored.

    1. The device runs `alpha`; the large plan is pushed while the engine is halted. When the artifact has
       come, the disk is filled and the engine goes on.
    2. The planner is told why nothing happens; the device serves on.
    3. The room is given back: the large plan is committed.
    """
    device, filler = cramped, cramped.home.parent / "filler"
    agent = device.start()
    device.run("alpha")
    resize_disk(device.home.parent, _ENOUGH_BYTES)
    engine = agent.now().engine.pid
    assert engine is not None
    os.kill(engine, signal.SIGSTOP)
    device.push(large)
    device.until_seen(lambda s: s["report"]["state"] == "verified", "the artifact to be whole")
    _fill(filler)
    os.kill(engine, signal.SIGCONT)
    device.until_seen(lambda s: "cannot be stored" in s["report"]["reason"], "the planner is told why")
    assert _serves(device)
    filler.unlink()
    device.until_seen(lambda s: s["report"]["state"] == "committed", "the large plan to be committed")
    assert _serves(device)
    assert agent.process.poll() is None
    device.drain_telemetry()
