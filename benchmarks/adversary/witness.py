"""A device that knows what it has sent and what was acknowledged to it: what must not be lost."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final

import zmq
from msgspec.structs import replace

from benchmarks.control_plane.clients import SimulatedDevice, Tally
from stageloom.edge_agent.link.connection import load_membership
from stageloom.edge_agent.link.factory import KEY_NAME, MEMBERSHIP_NAME
from stageloom.shared.ids import DeviceId
from stageloom.shared.keyfile import read_keys
from stageloom.shared.messages import control, telemetry

_TURN_S: Final = 0.02
_BEAT_S: Final = 0.2


class Witness(SimulatedDevice):
    """Keeps every row and report that it sends. One batch is out at a time, so sequences come in order.

    What was acknowledged may be read from any thread and only rises: `rows_acknowledged` (sequences 0 to
    n - 1 of its one boot) and `revision_acknowledged`.
    """

    def __init__(self, context: Any, home: Path, rng: Random) -> None:
        """`home`: where `stageloom-agent join` put this device's key and membership."""
        membership = load_membership(home / MEMBERSHIP_NAME)
        assert membership is not None
        self.rows: list[bytes] = []
        self.reports: dict[int, control.Report] = {}
        super().__init__(
            context,
            DeviceId(membership.device),
            read_keys(home / KEY_NAME),
            membership.planner_key,
            membership.endpoints,
            Tally(),
            rng,
        )

    def next_batch(self, now_s: float) -> telemetry.TelemetryBatch:
        batch = super().next_batch(now_s)
        self.rows += batch.rows
        return batch

    def report_on(self, desired: control.Desired, revision: int) -> control.Report:
        report = replace(super().report_on(desired, revision), reason=f"report {revision} of this device")
        self.reports[revision] = report
        return report

    def turn(self, now_s: float) -> None:
        """What it has to do now: connect, listen, beat, and send rows as fast as they are acknowledged."""
        if self.wants_connection(now_s):
            self.connect()
        if self.connected:
            for lane in (0, 1):
                self.drain(lane, now_s)
        if now_s - self._beat_at_s >= _BEAT_S:
            self._beat_at_s = now_s
            self.beat(now_s)
        self.measure(now_s, new_rows=True)
        if self.silent(now_s):
            for socket in self.disconnect(now_s):
                socket.close(linger=0)

    _beat_at_s = float("-inf")


@contextmanager
def witness(home: Path, rng: Random) -> Iterator[Witness]:
    """A witness that lives on a thread of its own until the end of the block."""
    ended = threading.Event()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Witness(context, home, rng)

    def live() -> None:
        while not ended.wait(_TURN_S):
            made.turn(time.monotonic())
        context.destroy(linger=0)

    thread = threading.Thread(target=live, name="witness", daemon=True)
    thread.start()
    try:
        yield made
    finally:
        ended.set()
        thread.join()
