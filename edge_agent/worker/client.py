"""The agent's end of the engine process: starts and ends it, sends it commands, hands on its reports."""

import contextlib
import logging
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence

from stageloom.edge_agent.loop import READ, WRITE, Loop, Timer
from stageloom.edge_agent.worker.channel import MAX_BACKLOG, Channel, ChannelClosed, channel_pair
from stageloom.edge_agent.worker.messages import (
    Command,
    Exited,
    PassOn,
    Report,
    Stop,
    WorkerConfig,
    decode_report,
    encode,
    encode_config,
)
from stageloom.shared.errors import UnavailableError
from stageloom.shared.module_command import module_command

_log = logging.getLogger(__name__)

_REPORTS_PER_TURN = 1024
"""So that a flood of reports cannot keep the loop from its other sockets."""

_SEND_BUFFER_BYTES = 1 << 20
_RETRY_S = 1.0


class EngineClient:
    """At most one engine process at a time, on the main loop.

    `on_report` receives every report in order. `Exited` is the last report of a process, made here; which
    tasks were in flight, and whether to start another process, is the caller's business.
    """

    def __init__(self, loop: Loop, config: WorkerConfig, on_report: Callable[[Report], None]) -> None:
        self.life = 0  # counts processes: a new one knows nothing of what the last one was told
        self.sign_s = loop.now()  # when the process last spoke, was started or was seen to end
        self._loop = loop
        self._config = config
        self._on_report = on_report
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None  # open exactly while there is a process, as is
        self._ends: Channel | None = None  # what is read without being woken, see `take_ends`
        self._start_timer: Timer | None = None
        self._heard_s = loop.now()
        self._watched = 0  # readiness that the loop was last asked for

    @property
    def pid(self) -> int | None:
        """Process id; None while no process runs."""
        return self._process.pid if self._process else None

    @property
    def busy(self) -> bool:
        """The process has not read for so long that it cannot be sent anything."""
        return self._channel is not None and self._channel.backlog >= MAX_BACKLOG

    def send(self, command: Command, fds: Sequence[int] = ()) -> bool:
        """Send a command with file descriptors, which stay the caller's; never waits.

        False: no process takes it. `Exited` has been reported or is on its way, or `check_alive` will end a
        process that does not read.

        Raises:
            ValueError: the command does not fit a message.
        """
        channel = self._channel
        if channel is None:
            return False
        try:
            channel.send(encode(command), fds)
        except UnavailableError as error:
            _log.warning("a command did not reach the engine process: %s", error)
            return False
        if channel.backlog:
            self._watch(channel)
        return True

    # Life

    def start_in(self, delay_s: float) -> None:
        """Start a process after `delay_s`; replaces an earlier request."""
        if self._start_timer is not None:
            self._start_timer.cancel()
        self._start_timer = self._loop.call_at(self._loop.now() + delay_s, self.start)

    def start(self) -> None:
        """Start a process if there is none; its first report is `Ready`. A failed start is repeated later."""
        if self._process is not None:
            return
        self.life += 1
        opened: list[socket.socket] = []
        try:
            opened += channel_pair()
            opened += channel_pair()
            ours, theirs, our_ends, their_ends = opened
            for end in (ours, theirs, their_ends):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            passed = [theirs.fileno(), their_ends.fileno()]
            arguments = [*map(str, passed), encode_config(self._config)]
            self._process = subprocess.Popen(
                module_command("stageloom.edge_agent.worker", *arguments),
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            for end in opened:
                end.close()
            _log.error("the engine process cannot be started: %s; trying again in a second", error)
            self.start_in(_RETRY_S)
            return
        theirs.close()
        their_ends.close()
        self._channel, self._ends = Channel(ours), Channel(our_ends)
        self._watched = 0
        self._heard_s = self.sign_s = self._loop.now()
        self._watch(self._channel)

    def check_alive(self, limit_s: float, *, busy: bool) -> None:
        """Kill a process that has been silent for longer than `limit_s`, unless it is loading (`busy`)."""
        if self._process is None or busy:
            self._heard_s = self._loop.now()
        elif self._loop.now() - self._heard_s > limit_s:
            _log.error("the engine process has been silent for %g s and is killed", limit_s)
            self.end()

    def end(self) -> None:
        """End the process, by force if it does not end at once; `Exited` is reported as after a crash."""
        if self._process is not None:
            self._on_report(Exited(self._stop(0.2)))

    def shut_down(self, timeout_s: float = 2.0) -> int | None:
        """End the process for good, without a report, and return its exit code; None if there was none."""
        if self._start_timer is not None:
            self._start_timer.cancel()
        return None if self._process is None else self._stop(timeout_s)

    def _stop(self, timeout_s: float) -> int:
        self.send(Stop())
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert self._process is not None
            self._process.wait(timeout_s)
        return self._reap(0.0)

    def _reap(self, grace_s: float) -> int:
        """Close the channels and return the exit code; a process that lives on after `grace_s` is killed.

        Ends that it told are handed on, and what it left for applications; whatever else it said is void.
        """
        process, channel, ends = self._process, self._channel, self._ends
        assert process is not None
        assert channel is not None
        assert ends is not None
        self._process = self._channel = None
        self.sign_s = self._loop.now()
        self._loop.watch(channel.fileno(), 0, self._ready)
        try:
            returncode = process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            returncode = process.wait()
        self.take_ends()  # nothing is added any more
        with contextlib.suppress(ChannelClosed):
            while received := channel.receive():
                report = decode_report(received[0])
                if isinstance(report, PassOn):
                    self._on_report(report)
        channel.close()
        self._ends = None
        ends.close()
        return returncode

    # Reports

    def take_ends(self) -> None:
        """Hand on the ends of tasks that applications have been told of; nothing wakes this process for them.

        It happens before every other report, which keeps their order, and once the process is gone.
        """
        with contextlib.suppress(ChannelClosed):
            while self._ends is not None and (received := self._ends.receive()):
                self._on_report(decode_report(received[0]))

    def _watch(self, channel: Channel) -> None:
        events = READ | (WRITE if channel.backlog else 0)
        if events != self._watched:
            self._watched = events
            self._loop.watch(channel.fileno(), events, self._ready)

    def _ready(self, events: int) -> None:
        channel = self._channel
        if channel is None:
            return
        reports: list[Report] = []
        # A process that died may have said something before: read that first, the read ends with `Exited`.
        with contextlib.suppress(ChannelClosed):
            channel.flush()
        try:
            while len(reports) < _REPORTS_PER_TURN and (received := channel.receive()):
                reports.append(decode_report(received[0]))
        except ChannelClosed:
            reports.append(Exited(self._reap(1.0)))
        self._heard_s = self.sign_s = self._loop.now()
        self.take_ends()
        for report in reports:
            self._on_report(report)
        if self._channel is not None:
            self._watch(self._channel)


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """The descriptor of a memory file, to send along with a command that is too large for a message."""
    fd = os.memfd_create("stageloom-plan", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        yield fd
    finally:
        os.close(fd)
