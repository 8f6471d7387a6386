"""A real device and a real planner with a network between them that misbehaves in one way after the other."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from stageloom import Client
from stageloom.edge_agent.link.connection import load_membership, save_membership
from stageloom.edge_agent.link.factory import MEMBERSHIP_NAME
from stageloom.shared.token import Endpoints
from tests.e2e.fleet import PATIENCE_S, Device, Fleet
from tests.e2e.networks import rows, write_heavy
from tests.fault_proxy import FaultProxy
from tests.planner.processes import until

pytestmark = pytest.mark.more


class Path4:
    """One proxy for each of the planner's four sockets."""

    def __init__(self, fleet: Fleet, stack: ExitStack) -> None:
        names = Endpoints.__struct_fields__
        self.lanes = {name: stack.enter_context(FaultProxy(fleet.port + at)) for at, name in enumerate(names)}

    def endpoints(self) -> Endpoints:
        return Endpoints(**{name: f"tcp://127.0.0.1:{proxy.port}" for name, proxy in self.lanes.items()})

    def each(self, what: str, *arguments: float) -> None:
        """The same misfortune on all of them."""
        for proxy in self.lanes.values():
            getattr(proxy, what)(*arguments)


@contextmanager
def behind(fleet: Fleet, device: Device) -> Iterator[Path4]:
    """The device reaches the planner through proxies from now on."""
    with ExitStack() as stack:
        path = Path4(fleet, stack)
        file = device.home / MEMBERSHIP_NAME
        membership = load_membership(file)
        assert membership is not None
        save_membership(file, msgspec.structs.replace(membership, endpoints=path.endpoints()))
        yield path


def serves(device: Device) -> bool:
    with Client(device.running.socket) as client:
        return "output" in client.run("alpha", {"input": rows(1)[0]}, timeout_s=60)


@pytest.mark.promise("network-cut-hangs-late")
@pytest.mark.parametrize("fault", ["cut", "hang"])
def test_broken_network_is_noticed_the_device_comes_back_and_no_row_is_lost(
    device: Device, fleet: Fleet, fault: str
) -> None:
    """The network goes away and comes back.

    1. A device runs `whole` through the proxies.
    2. Every connection is reset and refused, or hangs with nobody told.
    3. The planner sees the device go; the device serves on, and `cut` is pushed.
    4. The network heals: the same agent process comes back and commits `cut`. Every telemetry row is stored
       once or counted as dropped.
    """
    with behind(fleet, device) as path:
        agent = device.start()
        device.run("whole")
        path.each("refuse" if fault == "cut" else "hang")
        device.until_seen(lambda s: not s["online"], "the planner to notice")
        assert serves(device)
        device.push("cut")
        path.each("heal")
        device.until_seen(lambda s: s["report"]["generation"] == 2, "the device to come back")
        device.until_seen(lambda s: s["report"]["state"] == "committed", "the plan that was pushed meanwhile")
        books = device.drain_telemetry().link
        assert books.telemetry_produced >= books.telemetry_acknowledged > 0
        assert agent.process.poll() is None


@pytest.mark.full
def test_slow_and_late_network_changes_nothing_but_the_time(device: Device, fleet: Fleet) -> None:
    """A round trip of a fifth of a second, then 20 kB/s: plans and telemetry still get through."""
    with behind(fleet, device) as path:
        device.start()
        path.each("delay", 0.1)
        device.run("whole")
        path.each("heal")
        path.each("throttle", 20_000.0)
        device.run("cut")
        path.each("heal")
        device.drain_telemetry()


@pytest.mark.promise("network-cut-hangs-late")
@pytest.mark.full
def test_connections_that_end_inside_a_frame_lose_and_repeat_nothing(device: Device, fleet: Fleet) -> None:
    """Frames that stop half-way.

    1. A device runs `whole`.
    2. Again and again each lane is cut a few hundred bytes further on.
    3. `cut` is pushed and taken, and the telemetry's books balance.
    """
    with behind(fleet, device) as path:
        device.start()
        device.run("whole")
        telemetry = path.lanes["telemetry"]
        first = telemetry.accepted
        for at, nbytes in enumerate((300, 700, 1500, 4000), 1):
            path.each("truncate_after", nbytes)
            until(lambda at=at: telemetry.accepted >= first + at, timeout_s=PATIENCE_S)  # type: ignore[misc]
        path.each("heal")
        device.run("cut")
        device.drain_telemetry()


@pytest.mark.promise("network-cut-hangs-late")
@pytest.mark.full
def test_transfer_of_an_artifact_resumes_after_every_cut(own_fleet: Fleet, tmp_path: Path) -> None:
    """A bulk lane that does not last.

    1. A plan names an artifact of 36 MiB.
    2. The bulk lane is cut in the middle of chunks, three times.
    3. The plan is committed, and less than twice the artifact crossed the wire.
    """
    file = write_heavy(tmp_path / "heavy.onnx", 3)
    own_fleet.do("model", "add", str(file), "--name", "heavy")
    own_fleet.make_plan("heavy", "--model", "heavy")
    size = file.stat().st_size
    with Device(own_fleet, "resumes", tmp_path).join() as fetching, behind(own_fleet, fetching) as path:
        fetching.start()
        bulk = path.lanes["bulk"]
        fetching.push("heavy")
        for quarter in (1, 2, 3):
            until(lambda quarter=quarter: bulk.passed_bytes > quarter * size // 5, timeout_s=PATIENCE_S)  # type: ignore[misc]
            bulk.truncate_after(1_000_000)
            until(lambda: bulk.connections == 0, timeout_s=PATIENCE_S)
        fetching.until_seen(lambda s: s["report"]["state"] == "committed", "the plan to be committed")
        assert bulk.passed_bytes < 2 * size
