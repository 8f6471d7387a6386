"""A push ends in a verdict within the time that the device announced, with real processes."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any

import pytest
import tomli_w

from benchmarks import zoo
from benchmarks.pays.device import PaysDevice
from benchmarks.processes import PLANNER
from stageloom import Client
from stageloom.edge_agent.bench.model_files import ModelUnderTest, prepare

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

SLACK_S = 10.0
"""What the last window, a restored plan and the way to the planner take beyond the trial."""

_ANNOUNCED = re.compile(r"(?:the trial takes up to|runs guarded for) (\d+) (s|min)")


def model(name: str, folder: Path, width: float) -> ModelUnderTest:
    folder.mkdir(exist_ok=True)
    zoo.write("squeezenet", folder / f"{name}.zoo", width=width, seed=1)
    return prepare(name, folder / f"{name}.zoo", {}, folder)


def make_plan(device: PaysDevice, name: str, lanes: int, max_skips: int) -> None:
    file = device.folder / f"{name}.toml"
    models = [{"model": one.name, "queue": "deadline", "replicas": lanes} for one in device.models]
    rules = {"lanes": lanes, "scheduler": "sequential", "step_choice": "deadline", "max_skips": max_skips}
    file.write_text(tomli_w.dumps({**rules, "models": models}))
    device.planner("plan", "create", "--device", device.device, "--name", name, "--from", str(file))


@contextmanager
def load(device: PaysDevice, rates_per_s: list[float]) -> Iterator[None]:
    """Poisson arrivals of each model until the block ends."""
    stop = Event()

    def arrive(client: Client, one: ModelUnderTest, rate_per_s: float) -> None:
        random, feeds = Random(one.name), one.feeds(1)[0]
        while not stop.wait(random.expovariate(rate_per_s)):
            client.submit(one.name, feeds)

    with Client(device.socket) as client:
        threads = [
            Thread(target=arrive, args=(client, one, rate))
            for one, rate in zip(device.models, rates_per_s, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def pushed(device: PaysDevice, plan: str) -> tuple[dict[str, Any], float, float]:
    """`plan push --wait`: how it ended, the seconds announced, and those from then to the end."""
    command = [sys.executable, "-m", PLANNER, "plan", "push", device.device, plan, "--wait", "--json"]
    announced_s, told_s, lines = 0.0, 0.0, []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=device.processes.environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if (found := _ANNOUNCED.search(line)) and not announced_s:
                announced_s = float(found[1]) * (60.0 if found[2] == "min" else 1.0)
                told_s = time.monotonic()
        out = process.stdout.read()
        took_s = time.monotonic() - told_s
    assert announced_s, lines
    entry: dict[str, Any] = json.loads(out)
    assert process.returncode == (0 if entry["state"] == "committed" else 1)
    return entry, announced_s, took_s


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two lanes need two cores")
def test_a_push_ends_within_the_time_that_was_announced_idle_and_under_slow_load(tmp_path: Path) -> None:
    """1. Nothing comes: the plan runs guarded. 2. 10/s and 1/s, the second model far heavier: a trial."""
    models = [model("light", tmp_path / "models", 0.25), model("heavy", tmp_path / "models", 1.0)]
    with PaysDevice(tmp_path / "system", models, profile_s=5.0) as device:
        device.start()
        for one in models:
            device.planner("model", "add", f"{one.name}={one.path}")
        device.replanning(False)
        for at, (name, lanes) in enumerate((("first", 1), ("idle", 2), ("loaded", 2))):
            make_plan(device, name, lanes, 8 + at)
        device.run_plan("first")
        entry, announced_s, took_s = pushed(device, "idle")
        assert entry["state"] == "committed" and took_s <= announced_s + SLACK_S
        device.run_plan("first")
        with load(device, [10.0, 1.0]):
            entry, announced_s, took_s = pushed(device, "loaded")
        assert entry["state"] in ("committed", "no_gain", "rejected"), entry
        assert took_s <= announced_s + SLACK_S
