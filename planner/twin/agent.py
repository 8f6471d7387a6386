"""An agent over the wire as a `stageloom.planner.twin.interface.Device`: its telemetry, read from the
store."""

from collections.abc import Callable, Sequence
from typing import Final

from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.telemetry import telemetry_rows
from stageloom.planner.twin.replay import active_spans, measured_window
from stageloom.planner.twin.window import Window
from stageloom.shared.bound import BoundPlan
from stageloom.shared.errors import UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import Row, RowKind

POLL_S: Final = 0.5
_KINDS: Final = (
    RowKind.PLAN_ACTIVATED,
    RowKind.TASK_COUNTERS,
    RowKind.LATENCY_HISTOGRAM,
    RowKind.QUEUE_SAMPLE,
    RowKind.STEP_TIMINGS,
)
_MOST_ROWS: Final = 200_000


class AgentDevice:
    """One enrolled device. Its tasks come from its own applications.

    `push` makes a plan the device's desired one; `sleep` waits so many seconds. Moments are of the device's
    clock, as its rows tell them.
    """

    def __init__(
        self,
        store: ReadStore,
        device: DeviceId,
        push: Callable[[BoundPlan], None],
        sleep: Callable[[float], None],
        *,
        timeout_s: float = 120.0,
    ) -> None:
        self._store = store
        self._device = device
        self._push = push
        self._sleep = sleep
        self._timeout_s = timeout_s
        self._bound: BoundPlan | None = None
        self._reached_us = 0  # the newest row that a window or a deployment has taken account of

    def deploy(self, bound: BoundPlan) -> None:
        """Push the plan and wait until the device runs it: it may have to win a trial first.

        Raises:
            UnavailableError: it does not run it in time; what ran before goes on.
        """
        rows = self._rows()
        self._reached_us = max((row.at_us for row in rows), default=0)
        runs = active_spans(rows, bound.plan.digest)
        self._push(bound)
        self._bound = bound
        if runs and runs[-1][1] == self._reached_us:  # already, so that it need not say so again
            return
        self._bound, waited_s = None, 0.0
        while not (spans := self._active(bound)):
            if waited_s >= self._timeout_s:
                raise UnavailableError(
                    f"{self._device} does not run plan {bound.plan.digest[:12]} after {waited_s:.0f} s",
                    remedy=f"see `stageloom device show {self._device}`",
                )
            self._sleep(POLL_S)
            waited_s += POLL_S
        self._reached_us = max(self._reached_us, spans[-1][0])
        self._bound = bound

    def run(self, seconds: float, *, sample_at_s: Sequence[float] | None = None) -> Window:
        """Wait so long, then say what the device has sent of it; it samples its queues when it does.

        Raises:
            UnavailableError: no plan was deployed, or the device sent nothing of it in time.
        """
        if self._bound is None:
            raise UnavailableError(f"nothing was deployed on {self._device}", remedy="deploy a plan first")
        since_us = self._reached_us
        until_us = since_us + round(seconds * 1e6)
        self._sleep(seconds)
        waited_s = 0.0
        while True:
            rows = self._rows(since_us)
            newest_us = max((row.at_us for row in rows), default=since_us)
            window = measured_window(rows, self._bound.plan, since_us, until_us)
            if window is not None and newest_us >= until_us:
                self._reached_us = until_us
                return window
            if waited_s >= self._timeout_s:
                raise UnavailableError(f"{self._device} has sent nothing for {waited_s:.0f} s")
            self._sleep(POLL_S)
            waited_s += POLL_S

    def _rows(self, since_us: int = 0) -> list[Row]:
        return self._store.read(telemetry_rows, self._device, _KINDS, since_us=since_us, limit=_MOST_ROWS)

    def _active(self, bound: BoundPlan) -> list[tuple[int, int]]:
        """When the plan ran since it was pushed."""
        return active_spans(self._rows(self._reached_us + 1), bound.plan.digest)
