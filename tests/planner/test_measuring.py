"""`stageloom plan create --measure`: a real planner process, a device that measures by a law of its own."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stageloom.shared.messages import control
from stageloom.shared.messages.telemetry import StageProfileResult, StageTiming
from stageloom.shared.plan import decode_plan
from stageloom.shared.schedule import StageSchedule
from tests.planner.processes import PlannerProcess, ok, plan_file
from tests.planner.test_replanning import SETTINGS, Rig, new_device, stock


@pytest.fixture
def rig(tmp_path: Path, model_file: Path) -> Iterator[Rig]:
    (tmp_path / "planner.toml").write_text(SETTINGS)
    planner = PlannerProcess(tmp_path / "home", "--config", str(tmp_path / "planner.toml"))
    stock(planner.home, model_file)
    with new_device(planner.home) as device:
        yield Rig(planner, device)
    planner.stop()


class Measuring(threading.Thread):
    """Answers every stage profile: groups side by side take what the longest of them takes."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(daemon=True)
        self._rig = rig
        self.answered: list[int] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            if not self._rig.device.socket("control").poll(200):
                continue
            desired = self._rig.device.receive("control", control.TO_DEVICE)
            wanted = getattr(desired, "stage_profile", None)
            if wanted is not None and wanted.request not in self.answered:
                self.answered.append(wanted.request)
                self._rig.rows(*answers(wanted, self._rig.device.device_class))


def answers(wanted: control.StageProfileRequest, environment: str) -> Iterator[Any]:
    operators_us = (1000.0, 1000.0, 10.0)
    blocks = wanted.combined_blocks or range(len(decode_plan(wanted.plan).combined))
    for index in blocks:
        schedule = decode_plan(wanted.plan).combined[index].schedule
        assert isinstance(schedule, StageSchedule)
        times = tuple(
            StageTiming(at, max(sum(operators_us[op] for op in group) for group in stage.groups), 1.0, 9)
            for at, stage in enumerate(schedule.stages)
        )
        yield StageProfileResult(
            wanted.request, wanted.plan_digest, index, environment, times, 2000.0, index == blocks[-1]
        )


@pytest.mark.more
def test_what_could_still_win_is_measured_wins_and_is_not_asked_for_again(rig: Rig, tmp_path: Path) -> None:
    """1. The formula sees no gain in it. 2. It is hoped for and measured. 3. It is chosen, and sure."""
    create = (
        *("plan", "create", "--model", "branches", "--executor", "null", "--device", rig.device.name),
        *("--scheduler", "ios", "--json"),
    )
    before = json.loads(ok(rig.home, *create))
    measure = ("--from", plan_file(tmp_path / "measure.toml", measure_s=5.0))
    measuring = Measuring(rig)
    measuring.start()
    try:
        chosen = json.loads(ok(rig.home, *create, *measure))
        first = list(measuring.answered)
        again = json.loads(ok(rig.home, *create, *measure))
        second = list(measuring.answered)
        profile = ("device", "profile", rig.device.name, "--plan", chosen["plan"], "--json")
        all_stages = json.loads(ok(rig.home, *profile))
    finally:
        measuring.ended.set()
        measuring.join()
    assert groups(before) == 1 and groups(chosen) == 2
    assert first and second == first, "the second time nothing was asked"
    assert again["digest"] == chosen["digest"]
    assert len(all_stages["requests"]) == len(measuring.answered) - len(first) == 1, "sure or not"
    assert all_stages["reasons"] == []


def test_who_asks_while_a_device_has_yet_to_measure_is_answered_too(rig: Rig) -> None:
    """What a device is to do names the stages of one plan: the second request waits for its turn."""
    profile = ("device", "profile", rig.device.name, "--plan", "first", "--json")
    first, second = (json.loads(ok(rig.home, *profile, "--no-wait"))["requests"] for _ in range(2))
    measuring = Measuring(rig)
    measuring.start()
    try:
        third = json.loads(ok(rig.home, *profile))["requests"]  # it waits for its results
        said = ok(rig.home, *profile[:-1])
    finally:
        measuring.ended.set()
        measuring.join()
    assert measuring.answered[:3] == [*first, *second, *third]
    assert re.fullmatch(r"[1-9]\d* stages? measured\n", said)


def groups(made: dict[str, Any]) -> int:
    """The most groups of a stage of a plan's first combined block."""
    schedule = decode_plan(msgspec.convert(made["wire"], bytes)).combined[0].schedule
    assert isinstance(schedule, StageSchedule)
    return max(len(stage.groups) for stage in schedule.stages)
