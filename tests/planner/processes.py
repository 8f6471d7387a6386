"""Real planner processes and the command line, for end-to-end tests."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from stageloom.planner.api.client import PlannerClient
from stageloom.planner.api.route import Route
from stageloom.planner.cli.app import execute
from stageloom.planner.schema.base import Request
from stageloom.shared import failpoint
from tests.store.migrated import begin_migrated

Q = TypeVar("Q", bound=Request)
R = TypeVar("R")

ROOT = Path(__file__).parents[2]
_COMMAND = [sys.executable, "-W", "error", "-c", "from stageloom.planner.cli import main; main()"]


def environment(home: Path, search: str = "local", first_path: str = "") -> dict[str, str]:
    """A clean environment whose default data directory is `home`.

    Searches run where `search` says: `ray`, the planner's default, starts half a dozen processes with the
    first one and takes ten seconds of a processor, so tests that are not about it do without.
    Modules are looked for in `first_path` before everywhere else, then in this checkout: another one may be
    installed.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("STAGELOOM_") or name == failpoint.VARIABLE
    }
    ours = {
        "STAGELOOM_HOME": str(home),
        "STAGELOOM_PLANNER_SEARCH": search,
        "PYTHONPATH": os.pathsep.join(filter(None, (first_path, str(ROOT / "src"), str(ROOT)))),
    }
    return {**kept, **ours}


def stageloom(home: Path, *arguments: str, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
    """Run one command to its end."""
    return subprocess.run(
        [*_COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(home),
        cwd=home.parent,
        check=False,
    )


def ok(home: Path, *arguments: str) -> str:
    """Run one command that must succeed, inside this process, which is far faster; returns its stdout."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = execute([*arguments, "--data-dir", str(home)])
    assert code == 0, err.getvalue()
    return out.getvalue()


def ask(home: Path, route: Route[Q, R], request: Q, *, timeout_s: float = 60.0) -> R:
    """What the planner of a data directory answers; of a job, its result."""
    with PlannerClient(data_dir=home) as client:
        return client.call(route, request, timeout_s=timeout_s)


def plan_file(path: Path, **fields: Any) -> str:
    """A plan file for `plan create --from`, at `path`."""
    path.write_text(tomli_w.dumps(fields))
    return str(path)


def until(condition: Callable[[], Any], *, timeout_s: float = 30.0, pause_s: float = 0.02) -> Any:
    """Poll until `condition` is true and return its value; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(pause_s)
    return value


class PlannerProcess:
    """`stageloom up --json`, ready when made."""

    def __init__(
        self,
        home: Path,
        *arguments: str,
        group: bool = False,
        search: str = "local",
        first_path: str = "",
    ) -> None:
        """`group`: as the first of a group of its own, as a terminal starts it.

        `search` and `first_path`: as `environment`.
        """
        self.home = home
        home.parent.mkdir(parents=True, exist_ok=True)
        migrates = "--database-url" in arguments or "migration" in os.environ.get(failpoint.VARIABLE, "")
        if not home.exists() and not migrates:
            begin_migrated(home)
        self._log = (home.parent / f"{home.name}.log").open("a")
        self.process = subprocess.Popen(
            [*_COMMAND, "up", "--json", "--listen", "127.0.0.1:0", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment(home, search, first_path),
            cwd=home.parent,
            start_new_session=group,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log()
        self.ready: dict[str, Any] = json.loads(line)

    def log(self) -> str:
        """What it wrote to stderr so far, over all its lives."""
        return (self.home.parent / f"{self.home.name}.log").read_text()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait; returns the exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait until it is gone; returns the exit code."""
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        return code
