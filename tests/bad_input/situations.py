"""What must be there before a case runs, made once for all cases of a situation.

A situation gives the words in braces of a case's command, and knows what must still hold afterwards.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from msgspec.structs import replace

from stageloom import Client
from stageloom.edge_agent.ingest.channel import socket_of
from stageloom.edge_agent.lifecycle.statefile import load_state, save_state
from stageloom.edge_agent.lifecycle.states import PlanRef
from stageloom.edge_agent.link.factory import STATE_NAME
from stageloom.edge_agent.reporting.status import ask_status
from stageloom.shared.errors import UnavailableError
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Origin
from stageloom.shared.messages.telemetry import CoreRange, ExecutorFact, MachineFacts
from tests.agent.models import ROW_SHAPE, import_tiny, plan_for, write_state
from tests.agent.process import AgentProcess
from tests.bad_input.files import write_files
from tests.planner.fake_device import FakeDevice
from tests.planner.processes import ROOT, PlannerProcess, environment, ok, until

DISK_BYTES = 8 << 20
FACTS = MachineFacts(
    (CoreRange(0, 1),), (ExecutorFact("onnx"), ExecutorFact("torch_cuda", "there is no GPU")), 1
)


class Situation(Protocol):
    """Named by `setup` in a case."""

    @property
    def words(self) -> Mapping[str, str]:
        """By which the braces of a command are filled in."""

    def check_nothing_lost(self) -> None:
        """Fails if a case has changed what it should have left alone."""


class Files:
    """Nothing runs; `{files}` holds what `files.py` writes."""

    def __init__(self, folder: Path) -> None:
        write_files(folder)
        self.words = {"files": str(folder)}
        self._folder = folder
        self._before = self._contents()

    def _contents(self) -> dict[str, int]:
        """Model files and settings by size, and whatever an import left behind."""
        kinds = (".onnx", ".bin", ".toml", ".json")
        return {
            str(path.relative_to(self._folder)): path.stat().st_size
            for path in sorted(self._folder.rglob("*"))
            if path.suffix in kinds or path.name.startswith((".import", ".incoming"))
        }

    def check_nothing_lost(self) -> None:
        assert self._contents() == self._before


class RunningPlanner:
    """A planner with one model, one plan, one device, and join tokens that are no good."""

    def __init__(self, home: Path, files: Files) -> None:
        self.process = PlannerProcess(home)
        self.home = home
        used = self._token("taken")
        joined = join(home.parent / "taken", used, "taken")
        assert joined.returncode == 0, joined.stderr
        expired = self._token("late", "--lifetime", "0.001")
        with FakeDevice(self._token("told"), "told") as told:  # with two cores, and no GPU
            told.enrol()
            told.hello()
            told.rows(0, [FACTS])
        ok(home, "model", "add", f"{files.words['files']}/fine.onnx", "--name", "fine")
        ok(home, "plan", "create", "--name", "first", "--model", "fine")
        fresh = self._token("fresh")
        # The secret lies between the planner's key and the endpoints, in the second quarter.
        at = len(fresh) // 4 + 2
        wrong = fresh[:at] + ("A" if fresh[at] != "A" else "B") + fresh[at + 1 :]
        self.words = {
            **files.words,
            "home": str(home),
            "used": used,
            "expired": expired,
            "wrong": wrong,
            "cut": fresh[:-9],
        }
        self._before = self._contents()

    def _token(self, device: str, *more: str) -> str:
        found: str = json.loads(ok(self.home, "device", "token", device, "--json", *more))["token"]
        return found

    def _contents(self) -> list[object]:
        devices = json.loads(ok(self.home, "device", "list", "--json"))
        return [
            json.loads(ok(self.home, "model", "list", "--json")),
            json.loads(ok(self.home, "plan", "list", "--json")),
            [device["device"] for device in devices],
            sorted(path.name for path in (self.home / "artifacts").rglob("*") if path.is_file()),
        ]

    def check_nothing_lost(self) -> None:
        assert self._contents() == self._before


class RunningAgent:
    """An agent that serves the model `tiny` from last-known-good."""

    def __init__(self, home: Path) -> None:
        write_state(home, good=plan_for({"tiny": import_tiny(home / "artifacts")}))
        self.process = AgentProcess(home)
        self.words = {"home": str(home), "socket": str(self.process.socket)}
        self.process.until_ready()

    def check_nothing_lost(self) -> None:
        status = self.process.now()
        assert status.ready and status.engine.restarts == 0, status
        assert all(one.open == 0 and one.failed == 0 for one in status.tasks)
        serve(self.process.socket)


class DamagedAgent:
    """An agent's state directory, damaged in one way; it must start each time, and keep what is whole."""

    def __init__(self, home: Path, damage: Callable[[Path], None], serves: bool) -> None:
        tiny = import_tiny(home / "artifacts")
        good = plan_for({"tiny": tiny})
        write_state(home, good=good)
        write_state(home, good=good)
        damage(home)
        self.words = {"home": str(home)}
        self._home, self._serves = home, serves

    def check_nothing_lost(self) -> None:
        """The next start works as well; a whole plan is served."""
        with AgentProcess(self._home) as agent:
            if self._serves:
                serve(agent.socket_when_ready())
            else:
                agent.until(lambda status: status.engine.up and not status.ready, "it waits, idle")
            assert agent.stop() == 0


class FullDisk:
    """A planner and an agent's state on a small file system of their own without a free byte."""

    def __init__(self, folder: Path, files: Files) -> None:
        self.home, self.agent_home = folder / "planner", folder / "agent"
        self._filler = folder / "filler"
        self._files = files
        self.process = PlannerProcess(self.home)
        self._token = json.loads(ok(self.home, "device", "token", "--json"))["token"]
        good = plan_for({"tiny": import_tiny(self.agent_home / "artifacts")})
        write_state(self.agent_home, good=good)
        self._state = (self.agent_home / STATE_NAME).read_bytes()
        self._fill()
        self.words = {
            **files.words,
            "home": str(self.home),
            "agent_home": str(self.agent_home),
            "new_home": str(folder / "new"),
            "token": self._token,
        }

    def _fill(self) -> None:
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                with suppress(OSError):
                    while True:
                        file.write(b"\0" * size)

    def check_nothing_lost(self) -> None:
        """What was there is there; with space again everything works; then the disk is full again."""
        assert (self.agent_home / STATE_NAME).read_bytes() == self._state
        assert not list(self.agent_home.rglob("*.new"))
        assert not list(self.home.rglob(".incoming-*"))
        assert self.process.process.poll() is None, self.process.log()
        self._filler.unlink()
        ok(self.home, "model", "add", f"{self._files.words['files']}/fine.onnx", "--name", "fine")
        ok(self.home, "plan", "create", "--name", "first", "--model", "fine")
        ok(self.home, "model", "remove", "fine", "--force")
        self._fill()


def join(home: Path, token: str, name: str) -> "subprocess.CompletedProcess[str]":
    """`stageloom-agent join`."""
    return subprocess.run(
        [sys.executable, "-m", "stageloom.edge_agent", "join", token, "--home", str(home), "--name", name],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(home),
        cwd=ROOT,
        check=False,
    )


def serve(socket: Path) -> None:
    """A task that must come back."""
    with Client(socket) as client:
        found = client.run("tiny", {"input": np.ones(ROW_SHAPE, np.float32)}, timeout_s=60)
    assert found["output"].shape == ROW_SHAPE


def _newest_copy(home: Path) -> None:
    (home / STATE_NAME).write_bytes(b"rubbish")


def _both_copies(home: Path) -> None:
    _newest_copy(home)
    (home / f"{STATE_NAME}.previous").write_bytes(b"")


def _plan_bytes(home: Path) -> None:
    state, _ = load_state(home / STATE_NAME)
    assert state.last_good is not None
    save_state(home / STATE_NAME, replace(state, last_good=replace(state.last_good, wire=b"rubbish")))


def _desired_bytes(home: Path) -> None:
    state, _ = load_state(home / STATE_NAME)
    assert state.last_good is not None
    wanted = replace(state.last_good, ref=PlanRef(Digest("00" * 32), Origin.PLANNER), wire=b"rubbish")
    write_state(home, good=state.last_good, desired=wanted)


def _artifact(home: Path) -> None:
    (path,) = (path for path in (home / "artifacts").iterdir() if path.suffix != ".onnx")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


DAMAGES: dict[str, tuple[Callable[[Path], None], bool]] = {
    "corrupt state": (_newest_copy, True),
    "wholly corrupt state": (_both_copies, False),
    "damaged artifact": (_artifact, False),
    "corrupt good plan": (_plan_bytes, False),
    "corrupt desired plan": (_desired_bytes, True),
}

Make: TypeAlias = Callable[[str], Situation]


@contextmanager
def situations(folder: Path, disk: Callable[[], Path]) -> Iterator[Make]:
    """Makes each situation when a case first names it; ends what it started.

    Args:
        folder: for everything.
        disk: an empty file system of `DISK_BYTES`, or it skips the test.
    """
    made: dict[str, Situation] = {}
    (folder / "files").mkdir()
    files = Files(folder / "files")
    with ExitStack() as started:

        def make(name: str) -> Situation:
            home = folder / name.replace(" ", "_")
            match name:
                case "files":
                    return files
                case "planner":
                    planner = RunningPlanner(home, files)
                    started.callback(planner.process.stop)
                    return planner
                case "agent":
                    agent = RunningAgent(home)
                    started.callback(agent.process.kill)
                    return agent
                case "full disk":
                    full = FullDisk(disk(), files)
                    started.callback(full.process.stop)
                    return full
                case _:
                    return DamagedAgent(home, *DAMAGES[name])

        def get(name: str) -> Situation:
            if name not in made:
                made[name] = make(name)
            return made[name]

        yield get


def run_until_it_answers(arguments: list[str], home: Path) -> tuple[int, str]:
    """Run an agent that is to start in spite of all, end it politely; its exit code and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stageloom.edge_agent", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(home),
        cwd=ROOT,
    )

    def settled() -> bool:
        try:
            found = ask_status(socket_of(home))
        except UnavailableError:
            return process.poll() is not None
        return found.ready or (found.engine.up and bool(found.problems))

    until(settled)
    process.terminate()
    _, err = process.communicate(timeout=60)
    return process.returncode, err
