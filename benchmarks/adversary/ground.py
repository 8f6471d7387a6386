"""Where an attack takes place: a planner of some version on a database of its own, with devices enrolled."""

import contextlib
import json
import os
import select
import signal
import sqlite3
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psycopg

from benchmarks.adversary.peer import Credentials, unpacked
from benchmarks.adversary.tree import Tree
from benchmarks.control_plane.planner import free_ports

_READY_S = 60.0


class Ground:
    """A planner's data directory and its process. `database_url` empty: SQLite in the data directory."""

    def __init__(self, tree: Tree, folder: Path, database_url: str = "") -> None:
        self.tree = tree
        self.folder = folder
        self.database_url = database_url
        self.home = folder / "planner"
        self.process: subprocess.Popen[str] | None = None
        # The same ports after a restart: devices keep the endpoints that they were told.
        self.listen = f"127.0.0.1:{free_ports()}"
        self.strangers = ""  # the ZeroMQ socket that lets unknown keys in, of a version that has one
        self.api = ""  # where other machines reach the API, if they do

    @property
    def on_postgres(self) -> bool:
        """The database is Postgres."""
        return bool(self.database_url)

    def start(
        self,
        *,
        home: Path | None = None,
        first: Path | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> bool:
        """Start the planner; False if it ends or is not ready in time.

        `home`: another data directory; `first`: see `Tree.environment`; `settings` joins its environment.
        """
        home = home or self.home
        log = (self.folder / "planner.log").open("a")
        url = ("--database-url", self.database_url) if self.database_url else ()
        process = subprocess.Popen(
            [
                *self.tree.command("planner", "up", "--json", "--listen", self.listen),
                *("--data-dir", str(home), *url),
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=self.tree.environment(first, **settings),
            cwd=self.tree.root,
            start_new_session=True,
        )
        log.close()
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], _READY_S)
        line = process.stdout.readline() if ready else ""
        if not line:
            _end(process)
            return False
        self.process = process
        told = json.loads(line)
        self.strangers = told["endpoints"].get("enrol", "")
        self.api = told.get("api", "")
        return True

    @property
    def alive(self) -> bool:
        """The planner runs."""
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; nothing if it does not run."""
        if self.process is not None:
            _end(self.process)
            self.process = None

    def pin(self, core: int) -> None:
        """Keep the planner and its children to one core."""
        assert self.process is not None
        for pid in [self.process.pid, *_children(self.process.pid)]:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})

    def memory_mib(self) -> float:
        """Resident memory of the planner and of its children."""
        assert self.process is not None
        return sum(_resident_mib(pid) for pid in [self.process.pid, *_children(self.process.pid)])

    def ask(self, *arguments: str, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
        """Run one `stageloom` command against this planner."""
        return self.tree.run("planner", *arguments, "--data-dir", str(self.home), timeout_s=timeout_s)

    def answers(self, *arguments: str) -> bool:
        """The command succeeds and does so in time."""
        try:
            return self.ask(*arguments).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def ok(self, *arguments: str) -> str:
        """The command's output.

        Raises:
            RuntimeError: it failed.
        """
        done = self.ask(*arguments)
        if done.returncode:
            raise RuntimeError(f"stageloom {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def enrol(self, name: str) -> Credentials:
        """Join as a user does, by the agent's own command, and read what that left behind."""
        home = self.folder / f"agent-{name}"
        token = self.ok("device", "token", name).strip().splitlines()[-1]
        done = self.tree.run("edge_agent", "join", token, "--name", name, "--home", str(home))
        if done.returncode:
            raise RuntimeError(f"stageloom-agent join: {done.stderr.strip()}")
        return credentials(home)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """What the database holds, past all code of the project."""
        if self.database_url:
            with psycopg.connect(self.database_url.replace("+psycopg", "")) as connection:
                return connection.execute(statement).fetchall()
        path = self.home / "planner.sqlite"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30.0)) as database:
            return database.execute(statement).fetchall()


def credentials(home: Path) -> Credentials:
    """What a joined agent's state directory holds."""
    public, secret = (home / "device.key").read_text().split()
    found = unpacked((home / "membership").read_bytes())
    lanes = dict(zip(("control", "telemetry", "bulk"), found["endpoints"], strict=False))
    return Credentials(found["device"], public, secret, found["planner_key"], lanes)


@contextlib.contextmanager
def ground(
    tree: Tree, folder: Path, database_url: str = "", settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Ground]:
    """A started planner, gone at the end. `settings` joins its environment.

    Raises:
        RuntimeError: it does not start.
    """
    made = Ground(tree, folder, database_url)
    try:
        if not made.start(settings=settings):
            raise RuntimeError("the planner did not start: " + (folder / "planner.log").read_text()[-2000:])
        yield made
    finally:
        made.stop()


def _end(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20.0)
    except subprocess.TimeoutExpired:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _children(pid: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:
        return []


def _resident_mib(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
