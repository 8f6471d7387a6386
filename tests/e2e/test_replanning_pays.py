"""A load that rises and stays, with real processes: where something can be gained, and where nothing can."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomli_w

from benchmarks import zoo
from benchmarks.pays.device import COMMITTED, PENDING, PaysDevice
from benchmarks.pays.intervals import Tasks, in_time
from benchmarks.pays.load import Application
from examples.demo.load import StayingLoad
from stageloom import Client
from stageloom.edge_agent.bench.load import deadlines_s
from stageloom.edge_agent.bench.model_files import ModelUnderTest, prepare

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.promise("replan-pays-or-changes-nothing"),
]

WINDOWS = 5  # at either end of the load
DECIDED_S = 240.0


def model(name: str, folder: Path, seed: int) -> ModelUnderTest:
    """A small network; another seed makes another one."""
    file = folder / f"{name}.zoo"
    folder.mkdir(exist_ok=True)
    zoo.write("squeezenet", file, width=0.5, seed=seed)
    return prepare(name, file, {}, folder)


def one_lane(device: PaysDevice) -> str:
    """The poorest plan that serves: one after the other, on one thread, whatever cores there are."""
    file = device.folder / "one.toml"
    file.write_text(
        tomli_w.dumps({"models": [{"model": one.name, "queue": "deadline"} for one in device.models]})
    )
    device.planner("plan", "create", "--device", device.device, "--name", "one", "--from", str(file))
    device.run_plan("one")
    return device.plan("one").structure


@contextmanager
def load_of(device: PaysDevice, share: float) -> Iterator[StayingLoad]:
    """So much of what the running plan carries, until the block ends."""
    even = [1.0] * len(device.models)
    deadlines = deadlines_s({one.name: device.alone_s(one.name) for one in device.models})
    with Client(device.socket) as client:
        application = Application(client, device.models, [deadlines[one.name] for one in device.models])
        application.warm_up(even)
        capacity_per_s = application.saturated_per_s(even, 2.0)
        device.replanning(True)
        load = StayingLoad(application, even, share * capacity_per_s, seed=1)
        try:
            yield load
        finally:
            load.end()
    assert application.outcomes["lost"] == 0


def share_in_time(windows: list[Tasks]) -> float:
    together = Tasks.together(windows)
    return in_time(together) / len(together.in_time)


@contextmanager
def on_one_core() -> Iterator[None]:
    """For all that is started in the block."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a second lane gains nothing on one core")
def test_a_load_beyond_the_plan_leads_to_one_that_was_tried_and_serves_more_tasks_in_time(
    tmp_path: Path,
) -> None:
    models = [model(name, tmp_path / "models", seed) for seed, name in enumerate(("alpha", "beta"))]
    with PaysDevice(tmp_path / "system", models, profile_s=20.0) as device:
        device.measure()
        first = one_lane(device)
        with load_of(device, 1.5) as load:
            begun_us = time.time_ns() // 1000

            def won() -> bool:
                return any(one.outcome == COMMITTED and one.ratio for one in device.replans(begun_us))

            device.until("a plan to win its trial", won, patience_s=DECIDED_S)
            tried_s = (device.trials(begun_us)[0].began_us - begun_us) / 1e6
            active_s = time.monotonic()
            while time.monotonic() < active_s + 2.0 * WINDOWS + 1.0:
                time.sleep(0.2)
        won_by = next(one for one in device.replans(begun_us) if one.outcome == COMMITTED and one.ratio)
        assert won_by.ratio_low is not None and won_by.ratio_low > 1.0
        assert won_by.digest is not None and device.plan(won_by.digest).structure != first
        before = load.windows(load.began_s, load.began_s + tried_s)
        after = load.windows(active_s, active_s + 2.0 * WINDOWS)
        assert share_in_time(after) > share_in_time(before)


def test_where_nothing_can_be_gained_the_plan_stays(tmp_path: Path) -> None:
    with on_one_core():
        device = PaysDevice(tmp_path / "system", [model("alpha", tmp_path / "models", 1)], profile_s=20.0)
        with device:
            device.prepare()
            first = device.plan("day").structure
            with load_of(device, 1.3):
                begun_us = time.time_ns() // 1000

                def decided() -> bool:
                    found = device.replans(begun_us)
                    return bool(found) and all(one.outcome != PENDING for one in found)

                device.until("a re-plan to be decided", decided, patience_s=DECIDED_S)
            active = device.active()
            assert active is not None and device.plan(active).structure == first
            assert all(one.ratio_low is None or one.ratio_low <= 1.0 for one in device.replans(begun_us))
