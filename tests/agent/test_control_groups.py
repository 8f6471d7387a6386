"""How much processor time control groups leave, and what is made of it."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from stageloom.edge_agent.bench.own_models import short_of_time
from stageloom.edge_agent.machine.control_groups import cpu_quota, has_own_cores, usable_cores
from stageloom.edge_agent.machine.doctor import quota_check
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.arrangements import computing_lanes, express_of, unpinned
from stageloom.shared.search.auto import auto_plan
from stageloom.shared.search.compose import ModelChoice
from tests.search.graphs import CHAIN, DIAMOND, model

ONNX = ExecutorOptions(name="onnx")
CHOICES = [
    ModelChoice(name=name, artifact=one[0], graph=one[1])
    for name, one in [("a", model("a", DIAMOND)), ("b", model("b", CHAIN))]
]


def machine(root: Path, line: str, files: dict[str, str]) -> Path:
    """A file system in which the process is in the group that `line` says."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(line)
    for name, text in files.items():
        at = root / "sys/fs/cgroup" / name
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(f"{text}\n")
    return root


def of_32_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))


@pytest.mark.parametrize(
    ("line", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "200000 100000"}, 2.0),  # as in a container
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "250000 50000"}, 4.0),
        ("0::/a\n", {"a/cpu.max": "max 100000"}, math.inf),
        (
            "5:cpu,cpuacct:/docker/x\n1:memory:/y\n",
            {"cpu/docker/cpu.cfs_quota_us": "300000", "cpu/docker/cpu.cfs_period_us": "100000"},
            3.0,
        ),
        ("5:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, math.inf),
        ("0::/a\n", {"a/cpu.max": "what is this"}, math.inf),
        ("5:memory:/a\n", {"memory/a/cpu.max": "100000 100000"}, math.inf),
    ],
)
def test_the_tightest_quota_up_to_the_root_counts(
    line: str, files: dict[str, str], quota: float, tmp_path: Path
) -> None:
    assert cpu_quota(machine(tmp_path, line, files)) == quota


def test_a_machine_that_says_nothing_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == math.inf


@pytest.mark.parametrize(
    ("quota", "cores", "own"), [("2.9", 2, False), ("0.5", 1, False), ("32", 32, True), ("64", 32, True)]
)
def test_a_plan_reckons_with_as_many_cores_as_it_has_the_time_of(
    quota: str, cores: int, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_32_cores(monkeypatch)
    root = machine(tmp_path, "0::/\n", {"cpu.max": f"{round(float(quota) * 100_000)} 100000"})
    assert usable_cores(root) == tuple(range(cores)) and has_own_cores(root) is own


def test_with_a_quota_lanes_keep_to_no_core() -> None:
    """Every container with a quota would choose the same."""
    plan = auto_plan(CHOICES, [{}, {}], ONNX, (0, 1), pinned=False)
    assert plan.lanes == 2 and not any(plan.cores_of(lane) for lane in range(plan.lanes))
    assert auto_plan(CHOICES, [{}, {}], ONNX, (0, 1)).cores_of(1) == (1,)


def test_an_express_lane_stays_one_where_lanes_keep_to_no_core() -> None:
    times = [{ONNX: 0.001}, {ONNX: 0.1}]
    kept = auto_plan(CHOICES, times, ONNX, (0, 1), whole=True)
    assert express_of(kept) == {0}
    plan = auto_plan(CHOICES, times, ONNX, (0, 1), whole=True, pinned=False)
    assert [block.resources for block in plan.combined] == [block.resources for block in kept.combined]
    assert plan.lane_resources == kept.lane_resources and not any(one.cores for one in plan.resources)
    assert express_of(plan) == {0} and computing_lanes(plan) == 2 and unpinned(plan) == plan


def test_without_cores_a_lane_that_takes_what_others_take_is_no_express_lane() -> None:
    times = [{ONNX: 0.001}, {ONNX: 0.1}]
    plan = auto_plan(CHOICES, times, ONNX, (0, 1), whole=True, pinned=False)
    anywhere = [replace(block, resources=()) for block in plan.combined if block.members[0].model]
    for blocks in (anywhere, [replace(block, resources=(0, 2)) for block in anywhere]):
        shared = tuple(block for block in plan.combined if not block.members[0].model) + tuple(blocks)
        assert not express_of(replace(plan, combined=shared))
    one_lane = replace(plan, lanes=1, lane_resources=(0,), resources=plan.resources[:1])
    assert not express_of(replace(one_lane, combined=tuple(anywhere))) and computing_lanes(one_lane) == 1


def test_doctor_and_bench_warn_of_a_quota_and_say_how_to_give_whole_cores() -> None:
    found = quota_check(32, 2.0)
    assert found.result == "warn" and found.detail.startswith("a quota of 2.0 cores on 32: ")
    assert "--cpuset-cpus" in found.remedy and "AllowedCPUs=" in found.remedy
    assert short_of_time(32, 2.0) == [f"{found.detail}; {found.remedy}"]
    assert quota_check(32, math.inf).result == "ok" and short_of_time(2, 2.0) == []


def test_this_machine_has_a_core_at_least() -> None:
    assert usable_cores()
