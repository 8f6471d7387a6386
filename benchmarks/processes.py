"""Planner, agent and other commands as child processes: each in its own group, all ended on every way out."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Self

import tomli_w

from stageloom.edge_agent.config import SETTINGS_NAME, TABLE
from stageloom.planner.store.store import ReadStore
from stageloom.shared.ids import DeviceId

PLANNER, AGENT = "stageloom.planner", "stageloom.edge_agent"
STOP_S = 15.0
_SET_PARENT_DEATH_SIGNAL = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)  # found before there are threads: a forked child must not wait for a lock


class DemoFailed(Exception):
    """A step did not work; the text names the step and the log to read."""


class Processes:
    """Starts commands, keeps their logs in one folder, and leaves nothing running."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = {**os.environ, **environment}
        self.running: dict[str, subprocess.Popen[str]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self.running)):
            self.stop(name)

    def start(self, name: str, module: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start `python -m module arguments`; stderr goes to NAME.log, stdout to the returned pipe.

        `variables` join the environment of this process alone.
        """
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**self.environment, **variables},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops them in order
                preexec_fn=_end_with_the_parent,
            )
        self.running[name] = process
        return process

    def call(self, name: str, module: str, *arguments: str, answers: Sequence[int] = (0,)) -> Any:
        """Run a command to its end; with `--json` among its arguments what it printed is decoded.

        Raises:
            DemoFailed: it exited with another code than `answers`.
        """
        process = self.start(name, module, *arguments)
        out, _ = process.communicate()
        del self.running[name]
        if process.returncode not in answers:
            raise DemoFailed(
                f"{module} {' '.join(arguments)} exited with {process.returncode}: {self.tail(name)}"
            )
        return json.loads(out) if "--json" in arguments else out

    def tail(self, name: str) -> str:
        """The last line of a log."""
        lines = (self.folder / f"{name}.log").read_text().strip().splitlines()
        return lines[-1] if lines else f"nothing in {self.folder / name}.log"

    def require_alive(self, names: Sequence[str]) -> None:
        """Raises:
        DemoFailed: one of the long-running processes has ended.
        """
        for name in names:
            process = self.running[name]
            if process.poll() is not None:
                raise DemoFailed(f"{name} ended with {process.returncode}: {self.tail(name)}")

    def kill(self, name: str) -> None:
        """SIGKILL to this process alone, not to its group; returns when it is gone."""
        process = self.running.pop(name)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def stop(self, name: str) -> int:
        """Ask the group to end (SIGTERM), then force it; returns the exit code."""
        process = self.running.pop(name)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                break
            try:
                os.killpg(process.pid, number)
                process.wait(STOP_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        if process.stdout is not None:
            process.stdout.close()
        return process.wait()


def _end_with_the_parent() -> None:
    """In the child before it starts: should the parent be killed, the child ends as if told to."""
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))


class Lines:
    """The newest JSON object that a process printed, or None; a thread reads, so its pipe never fills."""

    def __init__(self, stream: IO[str]) -> None:
        self.latest: Any = None
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        try:
            for line in stream:
                if line.startswith("{"):
                    self.latest = json.loads(line)
        except ValueError:
            return  # the pipe was closed while stopping


class System:
    """A planner and an agent with folders of their own, and the commands that a user would type."""

    def __init__(
        self,
        folder: Path,
        device: str,
        settings: Mapping[str, Any],
        *,
        patience_s: float,
        **environment: str,
    ) -> None:
        """`settings` are the agent's file; `patience_s` is for whatever is waited for."""
        self.folder, self.device = folder, DeviceId(device)
        self.socket = folder / "agent" / "run" / "agent.sock"
        self._settings, self._patience_s = settings, patience_s
        (folder / "agent").mkdir(parents=True, exist_ok=True)
        paths = {
            "STAGELOOM_HOME": str(folder / "planner"),
            "STAGELOOM_AGENT_HOME": str(folder / "agent"),
            "STAGELOOM_AGENT_SOCKET": str(self.socket),
            "PYTHONUNBUFFERED": "1",
        }
        self.processes = Processes(folder / "logs", {**paths, **environment})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if "store" in vars(self):
            self.store.close()
        self.processes.__exit__()

    def start(self) -> None:
        """Planner up, agent enrolled with a one-time token and connected."""
        up = self.processes.start("planner", PLANNER, "up", "--listen", "127.0.0.1:0", "--json")
        assert up.stdout is not None
        ready = Lines(up.stdout)
        self.until("the planner to listen", lambda: ready.latest is not None, ["planner"])
        token = self.planner("device", "token", self.device)["token"]
        self.processes.call("agent-join", AGENT, "join", token)
        (self.folder / "agent" / SETTINGS_NAME).write_text(tomli_w.dumps({TABLE: dict(self._settings)}))
        agent = self.processes.start("agent", AGENT, "run")
        assert agent.stdout is not None
        Lines(agent.stdout)
        self.until("the agent to connect", lambda: self.planner("device", "show", self.device)["online"])

    def planner(self, *words: str, answers: Sequence[int] = (0,)) -> Any:
        """One `stageloom` command; what it printed, decoded."""
        return self.processes.call("-".join(words[:2]), PLANNER, *words, "--json", answers=answers)

    @cached_property
    def store(self) -> ReadStore:
        """The planner's database, read in this process: starting commands disturbs what is measured."""
        return ReadStore.open(self.folder / "planner")

    def until(
        self,
        what: str,
        condition: Callable[[], Any],
        alive: Sequence[str] = ("planner", "agent"),
        *,
        patience_s: float | None = None,
    ) -> Any:
        """Poll a condition while the named processes live; what it gave. `patience_s`: instead of the usual.

        Raises:
            DemoFailed: it took too long, or one of the processes ended.
        """
        patience_s = self._patience_s if patience_s is None else patience_s
        give_up_s = time.monotonic() + patience_s
        while not (found := condition()):
            self.processes.require_alive(alive)
            if time.monotonic() > give_up_s:
                raise DemoFailed(
                    f"waited {patience_s:g} s for {what}; see the logs in {self.processes.folder}"
                )
            time.sleep(0.1)
        return found
