"""An agent over the wire is a device, too: deployed when its telemetry says so, measured by what it sent."""

from pathlib import Path

import pytest

from stageloom.planner.twin.replay import AgentDevice
from stageloom.planner.twin.window import TargetDevice
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import UnavailableError
from stageloom.shared.messages.control import Origin
from stageloom.shared.messages.telemetry import PlanActivated, RowData, StepTimings, TaskCounters
from tests.store.helpers import NANO
from tests.twin.test_simulate_command import SECOND, Home


class Wire:
    """A device that obeys a push after two seconds, and sends telemetry every second."""

    def __init__(self, home: Home, *, obeys: bool = True) -> None:
        self.home = home
        self._obeys = obeys
        self._now_s = 0.0
        self._sent_s = 0
        self._pushed: BoundPlan | None = None
        self._pushed_s = 0.0
        self._running = False

    def push(self, bound: BoundPlan) -> None:
        if not self._running:
            self._pushed, self._pushed_s = bound, self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds
        while self._sent_s + 1 <= self._now_s:
            self._sent_s += 1
            rows: list[RowData] = [TaskCounters("relu", SECOND, 20, 20, 0, 0, 0, 0)]
            if self._pushed is not None and self._obeys and self._sent_s >= self._pushed_s + 2:
                digest = self._pushed.plan.digest
                if not self._running:
                    rows.append(PlanActivated(digest, Origin.PLANNER, 1, 1))
                    self._running = True
                rows.append(StepTimings(digest[:16], 0, 1, 20, 20 * 4000, 5000))
            self.home.send(self._sent_s * SECOND, *rows)


def agent(tmp_path: Path, *, obeys: bool = True) -> tuple[AgentDevice, BoundPlan]:
    home = Home(tmp_path, ManualClock())
    wire = Wire(home, obeys=obeys)
    wire.sleep(1.0)
    bound = bind(home.plan, {home.artifact: home.store.graph(home.artifact)})
    return AgentDevice(home.store, NANO, wire.push, wire.sleep, timeout_s=10.0), bound


@pytest.mark.promise("prediction-stands-beside-was")
def test_an_agent_runs_a_plan_and_says_what_happened(tmp_path: Path) -> None:
    found, bound = agent(tmp_path)
    device: TargetDevice = found
    for _ in range(2):
        device.deploy(bound)  # the second time it runs already
        window = device.run(3.0)
        assert window.plan == bound.plan.digest
        assert window.seconds == pytest.approx(3.0)
        assert window.throughput_per_s == pytest.approx(20.0)
        assert window.busy_s == pytest.approx(60 * 0.004)


def test_a_plan_that_does_not_come_to_run_is_given_up(tmp_path: Path) -> None:
    found, bound = agent(tmp_path, obeys=False)
    with pytest.raises(UnavailableError, match="nothing was deployed"):
        found.run(1.0)
    with pytest.raises(UnavailableError, match="does not run plan"):
        found.deploy(bound)
