"""The agent's end of the engine process: start it, send it commands, read its reports.

One thread uses a handle. After a crash it reports `Exited`; which tasks were in flight, and whether to start
another process, is the caller's business.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from stageloom.edge_agent.worker import messages
from stageloom.edge_agent.worker.channel import Channel, ChannelClosed, channel_pair
from stageloom.edge_agent.worker.config import WorkerConfig, encode_config
from stageloom.edge_agent.worker.messages import Exited, Place, Profile, Report
from stageloom.shared.errors import UnavailableError
from stageloom.shared.ids import Digest, TaskId

MAX_REPORTS_PER_POLL = 1024
"""So that a flood of reports cannot keep the caller from its other sockets."""


class WorkerHandle:
    """One engine process."""

    def __init__(self, process: "subprocess.Popen[bytes]", channel: Channel) -> None:
        self._process = process
        self._channel = channel
        self._exited = False

    @classmethod
    def start(cls, config: WorkerConfig | None = None) -> "WorkerHandle":
        """Spawn the process; `Ready` is its first report.

        Raises:
            UnavailableError: the process cannot be started.
        """
        ours, theirs = channel_pair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        command = [sys.executable, "-m", "stageloom.edge_agent.worker", str(theirs.fileno())]
        try:
            process = subprocess.Popen(
                [*command, encode_config(config or WorkerConfig())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            ours.close()
            raise UnavailableError(f"the engine process cannot be started: {error}") from error
        finally:
            theirs.close()
        return cls(process, Channel(ours))

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    @property
    def wants_write(self) -> bool:
        """Commands wait for the socket: poll `fileno` for writing too, then call `poll`."""
        return not self._exited and self._channel.backlog > 0

    def fileno(self) -> int:
        """Readable when reports wait or the process is gone; -1 after `Exited` was reported."""
        return -1 if self._exited else self._channel.fileno()

    def poll(self) -> list[Report]:
        """The reports that have come, in order, at most MAX_REPORTS_PER_POLL of them."""
        if self._exited:
            return []
        reports: list[Report] = []
        try:
            self._channel.flush()
        except ChannelClosed:
            pass  # what the process said before it died is still to be read; the read below ends with Exited
        try:
            while len(reports) < MAX_REPORTS_PER_POLL and (received := self._channel.receive()):
                reports.append(messages.decode_report(received[0]))
        except ChannelClosed:
            reports.append(self._reap())
        return reports

    def load_plan(self, plan_key: int, plan_wire: bytes, artifacts: Mapping[Digest, str]) -> None:
        """Load beside the active plan; answered by PlanLoaded, PlanTooLarge or PlanFailed."""
        with _memory_file(plan_wire) as fd:
            self._send(messages.LoadPlan(plan_key, {str(d): path for d, path in artifacts.items()}), [fd])

    def activate(self, plan_key: int, *, keep: bool = False) -> None:
        """Send new launches to a loaded plan; answered by PlanActive, or PlanFailed if it is unknown.

        The plan before is freed when nothing runs on it any more; with `keep` it stays loaded.
        """
        self._send(messages.Activate(plan_key, keep))

    def measure(self, window: messages.Measure) -> None:
        """Count what happens between two instants; answered by Measured."""
        self._send(window)

    def unload(self, plan_key: int) -> None:
        """Free a loaded plan that was not activated; answered by PlanReleased, or PlanFailed."""
        self._send(messages.Unload(plan_key))

    def add_arena(self, arena_id: int, fd: int, size: int) -> None:
        """Share a client's memory file of `size` bytes, sealed against shrinking; `fd` stays the caller's."""
        self._send(messages.AddArena(arena_id, size), [fd])

    def drop_arena(self, arena_id: int) -> None:
        """Forget an arena; tasks that lie in it end as cancelled and nothing more is written there."""
        self._send(messages.DropArena(arena_id))

    def declare(
        self, layout_id: int, models: Sequence[str], inputs: Sequence[Place], outputs: Sequence[Place]
    ) -> None:
        """Say where tasks of a layout have their tensors. See `messages.Place` for the names.

        Raises:
            ValueError: it has too many tensors for a message.
            UnavailableError: as `submit`.
        """
        self._send(messages.Declare(layout_id, tuple(models), tuple(inputs), tuple(outputs)))

    def retract(self, layout_id: int) -> None:
        """Forget a layout; tasks that lie in it end as they would have."""
        self._send(messages.Retract(layout_id))

    def submit(
        self, task_id: TaskId, layout_id: int, priority: int = 0, deadline_s: float | None = None
    ) -> None:
        """Submit one task; answered by one TaskDone.

        Raises:
            UnavailableError: the process is gone, or has not read for a long time.
        """
        self._send(messages.Submit(task_id, layout_id, priority, deadline_s))

    def cancel(self, task_id: TaskId) -> None:
        """End a task early; nothing happens if it has ended."""
        self._send(messages.Cancel(task_id))

    def profile(self, request: Profile) -> None:
        """Time the operators of an artifact; answered by OperatorTimes."""
        self._send(request)

    def profile_stages(self, request: messages.ProfileStages, plan_wire: bytes) -> None:
        """Time the stages of a plan; answered by StageTimes."""
        with _memory_file(plan_wire) as fd:
            self._send(request, [fd])

    def trace(self, on: bool) -> None:
        """Report every step as Traced, or stop doing so."""
        self._send(messages.Trace(on))

    def record(self, order: messages.Record, fd: int) -> None:
        """Record everything for a while into a file; answered by RecordingEnded. `fd` stays the caller's."""
        self._send(order, [fd])

    def drain(self, *, refuse: bool = True) -> None:
        """Launch nothing more until the next `activate`; answered by Drained when nothing is in flight.

        With `refuse` queued tasks and those still to come are refused; without, they wait.
        """
        self._send(messages.Drain(refuse))

    def stop(self, timeout_s: float = 5.0) -> int:
        """End the process, by force after `timeout_s`, and return its exit code."""
        if self._exited:
            return self._process.returncode
        try:
            self._send(messages.Stop())
        except UnavailableError:
            pass  # it is gone or does not read; the wait below ends either way
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return self._reap().returncode

    def _send(self, message: messages.Command, fds: Sequence[int] = ()) -> None:
        if self._exited:
            raise ChannelClosed
        self._channel.send(messages.encode(message), fds)

    def _reap(self) -> Exited:
        self._exited = True
        self._channel.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # it closed its channel and lives on: nothing can talk to it
        return Exited(self._process.wait())


@contextmanager
def _memory_file(content: bytes) -> Iterator[int]:
    """A descriptor to send along with a command."""
    fd = os.memfd_create("stageloom-plan", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        yield fd
    finally:
        os.close(fd)
