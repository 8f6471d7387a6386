"""The power goes: what a disk may then hold is rebuilt from a real process's own calls, and started on.

A planner and an agent run under `strace` while the test notes what they acknowledge, and when. The power is
cut between any two of their calls; `tests.adversary.disk` says what may be lost. On each disk the store, or
the agent's state, must open and hold all that was acknowledged before.
"""

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from stageloom.edge_agent.config import AgentConfig, encode_config
from stageloom.edge_agent.lifecycle.statefile import load_state
from stageloom.edge_agent.lifecycle.states import LinkState
from stageloom.edge_agent.link.connection import load_membership
from stageloom.edge_agent.link.factory import KEY_NAME, MEMBERSHIP_NAME, STATE_NAME
from stageloom.edge_agent.link.spool import Spool
from stageloom.planner.service import KEY_FILE
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.models import named_models
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.store import Store
from stageloom.planner.store.telemetry import telemetry_rows
from stageloom.planner.store.used_database import DATABASE_FILE
from stageloom.shared.artifact import file_digest
from stageloom.shared.errors import StageloomError
from stageloom.shared.ids import DeviceId
from stageloom.shared.keyfile import read_keys
from stageloom.shared.messages import control, telemetry
from tests.adversary.disk import Event, Link, Loss, Sync, SyncDirectory, Write, disk_after
from tests.adversary.strace import Recorded, recorded, traced, why_not
from tests.agent.process import AgentProcess
from tests.e2e.conftest import MODELS, stocked
from tests.e2e.fleet import Fleet
from tests.e2e.networks import write_chain
from tests.planner.fake_device import FakeDevice
from tests.planner.processes import PlannerProcess, environment, ok, until

pytestmark = pytest.mark.more

_WHY_NOT = why_not()
on_a_traced_process = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)
_FIRST_CALLS = 12
"""The power is cut before each of so many, in which keys are made, and then at random."""

few_or_many = pytest.mark.parametrize("cuts", [24, pytest.param(400, marks=pytest.mark.full)])


# -- the model -------------------------------------------------------------------------------------------

_WRITES = st.lists(st.tuples(st.integers(0, 40), st.binary(min_size=1, max_size=20)), max_size=6)


@pytest.mark.promise("after-power-cut-between")
@given(durable=_WRITES, after=_WRITES, seed=st.integers(0, 999))
def test_what_was_synced_is_there_and_what_was_not_comes_from_its_writes(
    durable: list[tuple[int, bytes]], after: list[tuple[int, bytes]], seed: int
) -> None:
    def written(writes: list[tuple[int, bytes]]) -> list[Write]:
        return [Write(0, offset, data) for offset, data in writes]

    begun: list[Event] = [Link("/d/a", 0), *written(durable), Sync(0), SyncDirectory("/d")]
    events: list[Event] = [*begun, *written(after)]
    safe = disk_after(begun, Loss.ALL, Random(0))["/d/a"]
    assert disk_after(events, Loss.ALL, Random(0)) == {"/d/a": safe}
    touched = {offset + at for offset, data in after for at in range(len(data))}
    found = disk_after(events, Loss.SOME, Random(seed))["/d/a"]
    assert len(found) >= len(safe)
    assert all(found[at] == byte for at, byte in enumerate(safe) if at not in touched)
    whole = disk_after(events, Loss.NOTHING, Random(0))["/d/a"]
    assert whole == disk_after([*events, Sync(0)], Loss.ALL, Random(0))["/d/a"]


def test_a_name_is_lost_with_all_that_came_after_it_in_its_directory() -> None:
    events: list[Event] = [
        Link("/d/a", 0),
        SyncDirectory("/d"),
        Link("/d/b", 1),
        Link("/d/c", 2),
        Link("/e/x", 3),
    ]
    found = {tuple(disk_after(events, Loss.SOME, Random(seed))) for seed in range(40)}
    names = {tuple(name for name in one if name.startswith("/d")) for one in found}
    assert names == {("/d/a",), ("/d/a", "/d/b"), ("/d/a", "/d/b", "/d/c")}
    assert tuple(disk_after(events, Loss.ALL, Random(0))) == ("/d/a",)


# -- what both sides have in common ----------------------------------------------------------------------


@dataclass
class Notes:
    """What was acknowledged, when (seconds since 1970), and how a disk shows it."""

    facts: list[tuple[float, str, Callable[[Any], object]]] = field(default_factory=list)

    def note(self, what: str, holds: Callable[[Any], object]) -> None:
        """From now on `holds` must be true of every disk."""
        self.facts.append((time.time(), what, holds))

    def missing(self, at_s: float, found: Any) -> list[str]:
        """What was acknowledged before the cut and does not hold."""
        return [what for noted_s, what, holds in self.facts if noted_s < at_s and not _held(holds, found)]


def _held(holds: Callable[[Any], object], found: Any) -> bool:
    try:
        return bool(holds(found))
    except (StageloomError, OSError):
        return False


def disks(
    calls: Sequence[Recorded], root: Path, scratch: Path, cuts: int
) -> Iterator[tuple[float, str, Path]]:
    """(time of the cut, its description, the folder as the disk has it)."""
    rng = Random(17)
    for number in range(cuts):
        at, loss = number + 1, Loss.SOME
        if number >= _FIRST_CALLS:
            at = rng.randrange(1, len(calls))
            loss = rng.choice((Loss.ALL, Loss.SOME, Loss.SOME, Loss.NOTHING))
        held = disk_after([call.event for call in calls[:at]], loss, rng)
        folder = laid_out(held, root, scratch / f"disk-{number}")
        yield calls[at].at_s, f"cut {number} before call {at} of {len(calls)}, {loss.name} lost", folder
        shutil.rmtree(folder)


def laid_out(held: Mapping[str, bytes], root: Path, folder: Path) -> Path:
    """Make a folder hold what `root` would."""
    folder.mkdir(mode=0o700)
    for path, content in held.items():
        target = folder / Path(path).relative_to(root)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(0o600)
    return folder


def without_syncs(calls: Sequence[Recorded], root: Path, scratch: Path) -> Path:
    """A disk at the end of the calls of a process that never waits for the disk; names are kept."""
    events = [call.event for call in calls if not isinstance(call.event, Sync)]
    directories = {str(Path(event.path).parent) for event in events if isinstance(event, Link)}
    named = [*events, *(SyncDirectory(path) for path in directories)]
    return laid_out(disk_after(named, Loss.ALL, Random(0)), root, scratch / "careless")


def whole_or_absent(keys: Path) -> bool:
    """A torn key file would stop every start, and a new one is made only where there is none."""
    return not keys.exists() or bool(read_keys(keys))


# -- the planner -----------------------------------------------------------------------------------------


@contextmanager
def traced_planner(home: Path, calls: Path) -> Iterator[None]:
    """A planner from its first start on, killed at the end."""
    command = (sys.executable, "-c", "from stageloom.planner.cli import main; main()")
    process = subprocess.Popen(
        [*traced(calls), *command, "up", "--json", "--listen", "127.0.0.1:0", "--data-dir", str(home)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(home),
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline(), "the planner did not start"
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # strace and what it traces
        process.wait(30)
        process.stdout.close()


def row(number: int) -> telemetry.Utilisation:
    return telemetry.Utilisation("cpu", number / 10, "%")


def played_planner(home: Path, calls: Path, model: Path) -> Notes:
    """A device enrols, is pushed a plan, reports and sends rows; every answer is noted."""
    notes = Notes()
    with traced_planner(home, calls):
        ok(home, "model", "add", str(model), "--name", "chain")
        notes.note("the model and its artifact", lambda store: holds_model(store, "chain"))
        ok(home, "plan", "create", "--model", "chain", "--name", "whole")
        notes.note("the plan", lambda store: store.read(plan_info, "whole").plan == "whole")
        token = ok(home, "device", "token", "nano").strip().splitlines()[-1]
        with FakeDevice(token) as device:
            key = device.token.planner_key
            notes.note("the planner's key", lambda store: key_of(store) == key)
            device.enrol()
            notes.note("the device", lambda store: store.read(device_info, DeviceId("nano")).device == "nano")
            device.hello()
            for number in range(6):
                play_round(home, device, notes, number)
    return notes


def play_round(home: Path, device: FakeDevice, notes: Notes, number: int) -> None:
    """One push, report and batch; each noted once it was answered."""
    name = DeviceId("nano")
    ok(home, "plan", "push", name, "whole", "--now")
    notes.note(
        f"generation {number + 1}",
        lambda store: store.read(device_info, name).desired_generation >= number + 1,
    )
    device.report(control.Report(revision=number + 1, reason=f"report {number + 1}"))
    notes.note(
        f"report {number + 1}", lambda store: store.read(device_info, name).report.revision >= number + 1
    )
    rows = [row(one) for one in range(20 * number, 20 * number + 20)]
    device.rows(20 * number, rows)
    notes.note(f"batch {number}", lambda store: set(rows) <= stored_rows(store))


def holds_model(store: Store, name: str) -> bool:
    (info,) = store.read(named_models, [name])
    return bool(store.load_artifact(info.digest).graph.operators)


def key_of(store: Store) -> bytes:
    return bytes(z85.decode(read_keys(store.data_dir / KEY_FILE).public))


def stored_rows(store: Store) -> set[Any]:
    found = store.read(telemetry_rows, DeviceId("nano"), [telemetry.RowKind.UTILISATION])
    return {one.data for one in found}


@pytest.mark.promise("after-power-cut-between")
@on_a_traced_process
@few_or_many
def test_a_planner_holds_all_that_it_acknowledged_before_the_power_went(tmp_path: Path, cuts: int) -> None:
    home = tmp_path / "planner"
    notes = played_planner(home, tmp_path / "calls", write_chain(tmp_path / "chain.onnx", 1))
    calls = recorded(tmp_path / "calls", home)
    assert notes.missing(calls[-1].at_s, Store(without_syncs(calls, home, tmp_path))), "nothing was looked at"
    for number, (at_s, how, disk) in enumerate(disks(calls, home, tmp_path, cuts)):
        assert whole_or_absent(disk / KEY_FILE), how
        if number % 12 == 0:
            starts(disk, how)
        store = Store(disk)
        try:
            assert not notes.missing(at_s, store), how
        finally:
            store.close()


def starts(home: Path, how: str) -> None:
    """A real planner serves on what the disk holds."""
    try:
        planner = PlannerProcess(home)
    except AssertionError as error:
        error.add_note(how)
        raise
    assert planner.stop() == 0, how


# -- the agent -------------------------------------------------------------------------------------------


@dataclass
class AgentDisk:
    """An agent's home, and what its spool makes of it."""

    home: Path

    @property
    def state(self) -> LinkState:
        return load_state(self.home / STATE_NAME)[0]

    def generation(self) -> int:
        """Of the newest plan that was desired of it."""
        desired = self.state.desired
        return desired.generation if desired else 0

    def good(self) -> bool:
        """There is a last-known-good plan, and its artifacts are whole."""
        good, folder = self.state.last_good, self.home / "artifacts"
        return good is not None and all(
            file_digest(folder / need.digest) == need.digest for need in good.artifacts
        )

    def keeps(self, boot: int, stored: int) -> bool:
        """None of the first `stored` rows of this boot, which the planner has, counts as dropped."""
        _, dropped, _ = Spool(self.home / "spool", boot=1).masks().get(boot, (0, 0, 0))
        return not dropped & ((1 << stored) - 1)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A planner with two small networks and the plans `whole` and `cut`."""
    folder = tmp_path_factory.mktemp("fleet")
    found = stocked(
        folder, {name: write_chain(folder / f"{name}.onnx", at) for at, name in enumerate(MODELS)}
    )
    yield found
    found.close()


@contextmanager
def traced_agent(home: Path, calls: Path) -> Iterator[None]:
    """An agent, killed with its engine at the end; what it says goes to its log."""
    config = AgentConfig(home=str(home), stats_interval_s=0.1, probation_s=0.3)
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(
            [*traced(calls), sys.executable, "-m", "stageloom.edge_agent.run", encode_config(config)],
            stdout=log,
            stderr=log,
            env=environment(home),
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def played_agent(fleet: Fleet, home: Path, calls: Path) -> Notes:
    """It joins, is pushed two plans in turn, and its rows are stored; all that the planner saw is noted."""
    notes = Notes()
    token = fleet.ask("device", "token", home.name)["token"]
    join = (sys.executable, "-m", "stageloom.edge_agent", "join", token, "--home", str(home))
    home.mkdir(mode=0o700)
    subprocess.run([*traced(calls), *join], env=environment(home), check=True)
    public = read_keys(home / KEY_NAME).public
    notes.note("its key", lambda disk: read_keys(disk.home / KEY_NAME).public == public)
    notes.note("its planner", lambda disk: load_membership(disk.home / MEMBERSHIP_NAME) is not None)
    with traced_agent(home, calls):
        for plan in ("whole", "cut", "whole"):
            generation = int(fleet.ask("plan", "push", home.name, plan, "--now")["generation"])
            until(partial(committed, fleet, home.name, generation, notes), timeout_s=60.0)
    return notes


def committed(fleet: Fleet, device: str, generation: int, notes: Notes) -> bool:
    """Notes what the planner has of this device."""
    note_rows(fleet, device, notes)
    report = fleet.ask("device", "show", device)["report"]
    if report["generation"] != generation or report["state"] != "committed":
        return False
    revision = int(report["revision"])
    notes.note(f"revision {revision}", lambda disk: disk.state.revision >= revision)
    notes.note(f"generation {generation}", lambda disk: disk.generation() >= generation)
    notes.note(f"a plan to start on, {generation}", lambda disk: disk.good())
    return True


def note_rows(fleet: Fleet, device: str, notes: Notes) -> None:
    """Rows that the planner has are not dropped."""
    query = "SELECT boot, max(sequence) + 1 FROM telemetry WHERE device = ? GROUP BY boot"
    with contextlib.closing(sqlite3.connect(fleet.home / DATABASE_FILE)) as database:
        for boot, stored in database.execute(query, (device,)):
            notes.note(f"{stored} rows of boot {boot}", partial(AgentDisk.keeps, boot=boot, stored=stored))


@pytest.mark.promise("after-power-cut-between")
@on_a_traced_process
@few_or_many
def test_an_agent_holds_all_that_it_told_before_the_power_went(
    fleet: Fleet, tmp_path: Path, cuts: int
) -> None:
    home = tmp_path / f"cut-off-{cuts}"
    notes = played_agent(fleet, home, tmp_path / "calls")
    calls = recorded(tmp_path / "calls", home)
    assert not AgentDisk(without_syncs(calls, home, tmp_path)).good(), "nothing was looked at"
    for number, (at_s, how, disk) in enumerate(disks(calls, home, tmp_path, cuts)):
        assert whole_or_absent(disk / KEY_NAME), how
        assert not notes.missing(at_s, AgentDisk(disk)), how
        if number % 12 == 0 and (disk / MEMBERSHIP_NAME).exists():
            with AgentProcess(disk) as agent:
                agent.until(lambda _: True, how)
