"""The agent's end of the process that speaks the protocol: starts, watches, restarts and ends it."""

import contextlib
import logging
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Final

import msgspec
from msgspec import Struct

from stageloom.edge_agent.loop import READ, Loop
from stageloom.edge_agent.serving.settings import FAILED, ServingConfig, ServingSettings, encode_serving
from stageloom.shared.backoff import backoff_s
from stageloom.shared.module_command import module_command

_log = logging.getLogger(__name__)

_STEADY_S: Final = 60.0
"""After a life that was as long, the next one begins without the delays of earlier ones."""

_END_S: Final = 8.0

_REPORT_BYTES: Final = 1 << 16

_KEEP_PAGES: Final = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""For mallopt(3): bodies of requests reuse pages. Taken anew for each, they cost more than copying does."""


class ServingStatus(Struct, frozen=True, kw_only=True):
    """The process, and the addresses that it serves; they are empty while it does not."""

    pid: int | None
    http: str = ""
    grpc: str = ""
    restarts: int = 0
    last_exit: str = ""


class ServerKeeper:
    """At most one server's process at a time, on the main loop."""

    def __init__(
        self,
        loop: Loop,
        name: str,
        command: Callable[[int], Sequence[str]] | None,
        note: Callable[[str, str], None],
        rng: Random,
    ) -> None:
        """`name`: under which trouble is noted, in the journal's `note` by code and text.

        `command`: the words that start it, from the descriptor on which it reports the addresses that it has
        bound; None: nothing is to be served.
        """
        self._loop = loop
        self._name = name
        self._command = command
        self._note = note
        self._rng = rng
        self._delays = self._new_delays()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid_file = self._report = -1
        self._started_s = 0.0
        self._bound: dict[str, str] = {}
        self._failure = ""  # why the process ends, as it told
        self.counts = b""  # of requests, as the process told them last; `decode_requests` reads it
        self._restarts = 0
        self._last_exit = ""
        self._ending = False

    def _new_delays(self) -> Iterator[float]:
        return backoff_s(self._rng, first_s=0.2, cap_s=30.0)

    @property
    def status(self) -> ServingStatus | None:
        """None where nothing is to be served."""
        if self._command is None:
            return None
        return ServingStatus(
            pid=self._process.pid if self._process else None,
            http=self._bound.get("http", ""),
            grpc=self._bound.get("grpc", ""),
            restarts=self._restarts,
            last_exit=self._last_exit,
        )

    def start(self) -> None:
        """Start the process if one is wanted and none runs."""
        if self._command is None or self._process is not None or self._ending:
            return
        ours, reporting = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._report, theirs = ours.detach(), reporting.detach()
        try:
            self._process = subprocess.Popen(
                self._command(theirs),
                pass_fds=(theirs,),
                stdin=subprocess.DEVNULL,
                env=os.environ | _KEEP_PAGES,
            )
        except OSError as error:
            os.close(self._report)
            self._again(f"cannot be started: {error}")
            return
        finally:
            os.close(theirs)
        self._started_s = self._loop.now()
        self._pid_file = os.pidfd_open(self._process.pid)
        self._loop.watch(self._report, READ, self._reported)
        self._loop.watch(self._pid_file, READ, self._exited)

    def begin_stop(self) -> None:
        """Have the process take no more requests, and end once it has answered those that it has."""
        self._ending = True
        if self._process is not None:
            self._process.terminate()

    def stop(self) -> None:
        """End the process for good, by force after a few seconds."""
        self.begin_stop()
        process = self._process
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        if process.poll() is None:
            process.kill()
            process.wait()
        self._forget()

    def _reported(self, events: int) -> None:
        """The addresses that were bound, then counts of requests; or why it ends; or its end."""
        try:
            body = os.read(self._report, _REPORT_BYTES)
        except OSError:
            body = b""  # it ended before it took what it was sent
        if not body:
            self._close_report()
        elif self._bound:
            self.counts = body
        else:
            with contextlib.suppress(msgspec.DecodeError):
                self._bound = msgspec.json.decode(body, type=dict[str, str])
                self._failure = self._bound.pop(FAILED, "")

    def _exited(self, events: int) -> None:
        assert self._process is not None
        returncode = self._process.wait()
        if self._report >= 0:
            self._reported(READ)  # what it told at its end may not have been read
        self._forget()
        if self._ending:
            return
        if self._loop.now() - self._started_s > _STEADY_S:
            self._delays = self._new_delays()
        how = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
        why, self._failure = self._failure, ""
        self._again(f"{how} ({why})" if why else how)

    def _again(self, how: str) -> None:
        self._last_exit = how
        self._restarts += 1
        delay_s = next(self._delays)
        self._note(self._name, f"the process for {self._name} ended: {how}; again in {delay_s:.1f} s")
        self._loop.call_at(self._loop.now() + delay_s, self.start)

    def _forget(self) -> None:
        self._close_report()
        self._loop.watch(self._pid_file, 0, self._exited)
        os.close(self._pid_file)
        self._process, self._pid_file, self._bound, self.counts = None, -1, {}, b""

    def _close_report(self) -> None:
        if self._report >= 0:
            self._loop.watch(self._report, 0, self._reported)
            os.close(self._report)
            self._report = -1


def serving_keeper(
    loop: Loop,
    settings: ServingSettings,
    agent_socket: Path,
    note: Callable[[str, str], None],
    rng: Random,
    log_level: str = "INFO",
    *,
    count: bool = False,
) -> ServerKeeper:
    """Of the process that serves models over HTTP and gRPC, to the agent that listens at `agent_socket`.

    `count`: it counts requests, for metrics.
    """

    def command(report: int) -> Sequence[str]:
        config = ServingConfig(
            settings=settings,
            socket=str(agent_socket.absolute()),
            agent=os.getpid(),
            report=report,
            log_level=log_level,
            count=count,
        )
        return module_command("stageloom.edge_agent.serving", encode_serving(config))

    return ServerKeeper(loop, "serving", command if settings.wanted else None, note, rng)
