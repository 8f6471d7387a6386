"""Rollouts to real agents that serve tasks meanwhile."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from stageloom import Client
from tests.e2e.fleet import PATIENCE_S, Device, Fleet
from tests.e2e.networks import rows, write_chain, write_heavy
from tests.planner.processes import until


class Load:
    """One task after another on a device; what was answered, and what was not."""

    def __init__(self, device: Device) -> None:
        self.answered, self.lost = 0, list[str]()
        self._stop = Event()
        self._thread = Thread(target=self._run, args=(device.running.socket,))
        self._thread.start()

    def _run(self, socket: Path) -> None:
        row = rows(1)[0]
        with Client(socket) as client:
            while not self._stop.is_set():
                with self._counted():
                    assert "output" in client.run("alpha", {"input": row}, timeout_s=60)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
            self.answered += 1
        except Exception as error:
            self.lost.append(str(error))

    def end(self) -> None:
        """Stop, and wait for the last answer."""
        self._stop.set()
        self._thread.join()


@contextmanager
def loaded(devices: list[Device]) -> Iterator[list[Load]]:
    """A load on each device until the block ends."""
    loads = [Load(device) for device in devices]
    try:
        yield loads
    finally:
        for load in loads:
            load.end()


def ended(fleet: Fleet, name: str) -> dict[str, Any]:
    """A rollout once it neither runs nor is paused."""

    def reached() -> Any:
        found = fleet.ask("rollout", "show", name)
        return found if found["rollout"]["state"] not in ("running", "paused") else None

    result: dict[str, Any] = until(reached, timeout_s=PATIENCE_S)
    return result


@pytest.mark.more
@pytest.mark.promise("rollout-goes-on-after-kill")
def test_agents_take_a_good_version_and_a_bad_one_reaches_the_first_alone(
    own_fleet: Fleet, tmp_path: Path
) -> None:
    """1. Two agents serve version 1 under load. 2. Version 2 has other weights: both keep it. 3. Version 3
    has other inputs: the first agent rejects it, the rollout stops, the second agent never hears of it.
    4. The version before runs on both, and every task was answered."""
    fleet = own_fleet
    fleet.do("model", "add", str(write_chain(tmp_path / "two.onnx", 7)), "--name", "alpha")
    fleet.do("model", "add", str(write_heavy(tmp_path / "three.onnx", 7, 64)), "--name", "alpha")
    with ExitStack() as stack:
        devices = [stack.enter_context(Device(fleet, name, tmp_path)).join() for name in ("r1", "r2")]
        for device in devices:
            device.start()
            device.run("alpha")
        with loaded(devices) as loads:
            fleet.do("rollout", "create", "--model", "alpha@2", "--waves", "1,100%", "--name", "good")
            good = ended(fleet, "good")
            assert (good["rollout"]["state"], good["rollout"]["done"]) == ("completed", 2), good
            kept = {device.name: device.seen()["desired_plan"] for device in devices}
            fleet.do("rollout", "create", "--model", "alpha@3", "--waves", "1,100%", "--name", "bad")
            bad = ended(fleet, "bad")
            assert (bad["rollout"]["state"], bad["rollout"]["failed"]) == ("stopped", 1), bad
            assert [one["state"] for one in bad["devices"]] == ["failed", "waiting"]
            for device in devices:
                device.until_seen(
                    lambda seen: (
                        (seen["report"]["active"], seen["report"]["state"])
                        == (kept[seen["device"]], "committed")
                    ),
                    "the version before",
                )
            before = [load.answered for load in loads]
            until(lambda: all(load.answered > at for load, at in zip(loads, before, strict=True)))
    assert [load.lost for load in loads] == [[], []]
