"""Child processes of the demo: each in its own group, all ended on every way out."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

STOP_S = 15.0
_SET_PARENT_DEATH_SIGNAL = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)  # found before there are threads: a forked child must not wait for a lock


class DemoFailed(Exception):
    """A step of the demo did not work; the text names the step and the log to read."""


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
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then stops them in order
                preexec_fn=_end_with_the_demo,
            )
        self.running[name] = process
        return process

    def call(self, name: str, module: str, *arguments: str) -> Any:
        """Run a command to its end; with `--json` among its arguments what it printed is decoded.

        Raises:
            DemoFailed: it exited with another code than 0.
        """
        process = self.start(name, module, *arguments)
        out, _ = process.communicate()
        del self.running[name]
        if process.returncode:
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


def _end_with_the_demo() -> None:
    """In the child before it starts: should the demo be killed, the child ends as if told to."""
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))


class Lines:
    """The newest JSON object that a process printed, read by a thread so that its pipe never fills."""

    def __init__(self, stream: IO[str], keep: int = 1) -> None:
        self.kept: deque[Any] = deque(maxlen=keep)
        self.thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self.thread.start()

    def _read(self, stream: IO[str]) -> None:
        try:
            for line in stream:
                if line.startswith("{"):
                    self.kept.append(json.loads(line))
        except ValueError:
            return  # the pipe was closed while stopping

    @property
    def latest(self) -> Any:
        """The newest object, or None."""
        return self.kept[-1] if self.kept else None
