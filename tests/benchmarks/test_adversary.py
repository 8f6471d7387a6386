"""What counts as broken by a flood or by pings, each bound by itself, and attacks that never took place."""

import io
import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from benchmarks.adversary import beside, pinged, scripts
from benchmarks.adversary.__main__ import VERSION_0_1_0
from benchmarks.adversary.beside import MOST_GROWN_MIB, Noticed, flooded
from benchmarks.adversary.kills import Kill, KillRounds
from benchmarks.adversary.peer import Credentials
from benchmarks.adversary.pinged import Survived
from benchmarks.adversary.pings import Outcome
from benchmarks.adversary.postgres import binaries, postgres_server
from benchmarks.adversary.tree import checked_out
from benchmarks.adversary.world import World
from stageloom.planner.store.database import Database

HELD = Noticed(
    sent=1, alone_p99_ms=100.0, p99_ms=300.0, unanswered=0, died=0, grown_mib=MOST_GROWN_MIB, alive=True
)
SURVIVED = Survived(
    aborts=0, admitted=1, refused=0, sent_mib=1.0, acknowledged=5, lost=0, unanswered=0, grown_mib=1.0
)


def test_what_stays_within_every_bound_is_held() -> None:
    assert HELD.broken == "" and replace(HELD, alone_p99_ms=1.0, p99_ms=250.0).broken == ""
    assert SURVIVED.broken == ""


@pytest.mark.parametrize(
    "noticed",
    [
        replace(HELD, p99_ms=301.0),
        replace(HELD, alone_p99_ms=1.0, p99_ms=251.0),
        replace(HELD, unanswered=1),
        replace(HELD, died=1),
        replace(HELD, grown_mib=MOST_GROWN_MIB + 1),
        replace(HELD, alive=False),
    ],
)
def test_a_flood_beyond_one_bound_is_not_held(noticed: Noticed) -> None:
    assert noticed.broken


@pytest.mark.parametrize(
    "survived", [replace(SURVIVED, aborts=1), replace(SURVIVED, lost=1), replace(SURVIVED, unanswered=1)]
)
def test_an_abort_or_anything_lost_under_pings_is_told(survived: Survived) -> None:
    assert survived.broken


class Inline:
    """A process that has done its work once it is started; if that fails, it dies without a word."""

    pid = None

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        with suppress(ArithmeticError):
            self._target(*self._args)


def tuple_of(*words: object) -> tuple[object, ...]:
    """A command line."""
    return words


class OpenGround:
    """A planner that lives, and that no device and no clock disturbs."""

    alive, strangers = True, ""
    tree = SimpleNamespace(command=tuple_of, script=tuple_of, environment=dict, root="")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "planner.log").write_text("the clock is ahead")

    def enrol(self, name: str) -> Credentials:
        return Credentials(name, "", "", "", dict.fromkeys(("control", "telemetry", "bulk"), ""))

    def start(self, *, first: Path | None = None, settings: object = None) -> bool:
        return first is None

    def stop(self) -> None: ...
    def pin(self, core: int) -> None: ...

    def memory_mib(self) -> float:
        return 1.0

    def query(self, statement: str) -> list[tuple[int]]:
        return [(5,)]


@pytest.fixture
def open_ground(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Ground on which an attack runs in this process, beside devices that are served."""
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    for module in (beside, pinged):
        monkeypatch.setattr(module, "_SPAWN", SimpleNamespace(Pipe=Pipe, Process=Inline))
    monkeypatch.setattr(beside, "_target", lambda ground, bad: None)
    served = ([1.0, 1.0], [1.0, 1.0])  # alone, beside the attacker
    monkeypatch.setattr(beside, "_good_device", lambda who, orders: [orders.send(one) for one in served])
    fleet = (None, (5, 0, 0))  # all are served; five rows acknowledged
    monkeypatch.setattr(pinged, "_fleet", lambda who, orders: [orders.send(one) for one in fleet])
    return OpenGround(tmp_path)


def dies(*_: object, **__: object) -> Any:
    """An attacker that fails before it attacks."""
    raise ArithmeticError


@pytest.mark.parametrize("attack", [dies, lambda target, seconds: 0])
def test_a_flood_whose_attacker_dies_or_sends_nothing_is_an_error(
    open_ground: Any, monkeypatch: pytest.MonkeyPatch, attack: Any
) -> None:
    monkeypatch.setattr(attack, "name", "alarms", raising=False)
    monkeypatch.setattr(beside, "FLOODS", [attack])
    with pytest.raises(RuntimeError, match=r"attacker died|nothing was sent"):
        flooded(open_ground, "alarms", 1.0)


def is_refused(*_: object, **__: object) -> Outcome:
    """An attacker that no socket admits."""
    return Outcome(refused=40)


@pytest.mark.parametrize(("enrolled", "attack"), [(False, dies), (True, is_refused)])
def test_pings_of_an_attacker_that_dies_or_that_is_enrolled_and_not_admitted_are_an_error(
    open_ground: Any, monkeypatch: pytest.MonkeyPatch, enrolled: bool, attack: Any
) -> None:
    monkeypatch.setattr(pinged, "attack", attack)
    with pytest.raises(RuntimeError, match=r"attacker died|admitted"):
        pinged.pinged(open_ground, 0.0, enrolled=enrolled, devices=1)


def test_pings_of_a_stranger_that_nobody_admits_are_held(
    open_ground: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinged, "attack", is_refused)
    assert pinged.pinged(open_ground, 0.0, enrolled=False, devices=1).broken == ""


class Scripted:
    """A device on open ground: what the good one says is acknowledged, what the bad one sends fails."""

    boot, tried = 1, threading.Event()

    def __init__(self, who: Credentials) -> None: ...
    def __enter__(self) -> "Scripted":
        return self

    def __exit__(self, *_: object) -> None: ...
    def hello(self) -> None: ...

    def send(self, *_: object, **__: object) -> None:
        self.tried.set()
        raise ArithmeticError

    def rows(self, *_: object, **__: object) -> dict[str, str]:
        return {"type": "telemetry_ack"}

    def report(self, *_: object, **__: object) -> dict[str, str]:
        assert self.tried.wait(10.0)
        return {"type": "reported_ack"}


class Program:
    """A child process that has printed whatever it prints; nothing, where it was to ask for a trace."""

    def __init__(self, words: tuple[object, ...], **_: object) -> None:
        self.stdout = io.StringIO("" if "trace_into_pipe.py" in str(words) else "serving\n0.1\n")

    def communicate(self, timeout: float) -> tuple[str, None]:
        return self.stdout.read(), None

    def kill(self) -> None: ...
    def wait(self) -> None: ...


@pytest.mark.parametrize("attack", [scripts.nul, scripts.clock_ahead, scripts.full_pipe])
def test_a_script_that_cannot_attack_is_an_error_and_not_held(
    open_ground: Any, monkeypatch: pytest.MonkeyPatch, attack: Any
) -> None:
    monkeypatch.setattr(scripts, "Peer", Scripted)
    monkeypatch.setattr(scripts, "write_model", lambda path, operators: path)
    monkeypatch.setattr(scripts, "subprocess", SimpleNamespace(Popen=Program, PIPE=None, DEVNULL=None))
    with pytest.raises(RuntimeError, match=r"attacker died|clock ahead|no trace"):
        attack(open_ground)


def test_no_backend_to_kill_is_that_of_the_benchmark_which_waits_between_two_looks() -> None:
    programs = binaries()
    if programs is None:
        pytest.skip("no Postgres: install the extra `dev`")
    with (
        postgres_server(programs) as server,
        create_engine(server.url, poolclass=NullPool).connect() as served,
    ):
        looking = Database(server.onlooker_url)
        looking.engine.connect().close()
        (pid,) = served.exec_driver_sql("SELECT pg_backend_pid()").one()
        assert server.backends() == [pid]
        looking.close()


class Lives:
    """Processes of a world: one with a failpoint crashes before it, and each does that is told to."""

    crashed = False

    def __init__(self) -> None:
        self.running: dict[str, Any] = {}

    def start(self, name: str, *_: str, STAGELOOM_FAILPOINT: str, **__: str) -> Any:
        self.crashed = bool(STAGELOOM_FAILPOINT)
        printed = io.StringIO('{"ready": true}\n')
        self.running[name] = SimpleNamespace(stdout=printed, poll=lambda: 1 if self.crashed else None)
        return self.running[name]

    def kill(self, name: str) -> None:
        del self.running[name]

    def stop(self, name: str) -> None:
        del self.running[name]

    def tail(self, name: str) -> str:
        return "IndexError"


@pytest.mark.parametrize("failpoint", ["", "planner.commit.after=kill@9"])
@pytest.mark.parametrize("victim", ["planner", "agent"])
def test_a_process_that_crashes_before_it_is_killed_is_told_and_counts_as_no_kill(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, victim: str, failpoint: str
) -> None:
    lives: Any = Lives()
    nothing: Any = None
    world = World(lives, tmp_path, 0)
    rounds = KillRounds(world, nothing, nothing, nothing, nothing)
    monkeypatch.setattr(rounds, "acknowledged", SimpleNamespace(check=lambda *_: None))
    monkeypatch.setattr(rounds, "_agree", lambda: None)
    world.start_planner()
    world.start_agent()
    lives.crashed = True
    rounds.round(Kill(victim, "serve", 0.0, 0.0, failpoint))
    (told,) = rounds.hung
    assert f"the {victim} ended with 1: IndexError" in told and not rounds.counts


@pytest.mark.parametrize("name", ["served_application.py", "trace_into_pipe.py"])
def test_applications_of_a_script_run_with_the_packages_of_0_1_0_too(name: str) -> None:
    with checked_out(VERSION_0_1_0) as before:
        if before is None:
            pytest.skip(f"the history does not hold {VERSION_0_1_0}")
        command = before.script(Path(scripts.__file__).with_name(name), "--help")
        asked = subprocess.run(command, env=before.environment(), capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
