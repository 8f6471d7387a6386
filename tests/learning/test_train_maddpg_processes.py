"""Real processes: whatever is killed in mid-training, at most one validation's interval is lost."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stageloom.planner.learning.kept_run import FOLDER
from stageloom.planner.learning.maddpg.train import FILE
from stageloom.planner.store.devices import device_infos
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.policies import newest_policy
from stageloom.planner.store.store import Store
from stageloom.shared.errors import ExitCode
from tests.cluster.listening import descendants
from tests.cluster.test_ray_processes import alive
from tests.learning.test_train_maddpg_command import ALONE, MODELS, RATES, command
from tests.planner.processes import ROOT, PlannerProcess, environment, until

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

START_S = 120.0
_MAIN = [sys.executable, "-W", "error", "-c", "from stageloom.planner.cli import main; main()"]


class Training:
    """`stageloom policy train maddpg` as a process of its own group, as a terminal starts it."""

    def __init__(self, home: Path, out: Path, *more: str, rare: str = ALONE) -> None:
        self.home = home
        arguments = command(home, *MODELS, *RATES, "--output", str(out), *more, rare=rare)
        self.process = subprocess.Popen(
            [*_MAIN, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(home),
            cwd=ROOT,
            start_new_session=True,
        )

    def reached(self, transitions: int) -> None:
        """Wait until so much of the run is kept."""
        until(lambda: kept_transitions(self.home) >= transitions or self.over(), timeout_s=START_S)
        assert not self.over(), "it was over before it could be killed"

    def over(self) -> bool:
        return self.process.poll() is not None

    def result(self) -> tuple[dict[str, Any], str]:
        """What it printed at its end, and what it said."""
        out, err = self.process.communicate(timeout=START_S)
        assert self.process.returncode == 0, err
        found: dict[str, Any] = json.loads(out)
        return found, err

    def kill(self) -> None:
        """`kill -9`; whatever it started ends by itself."""
        below = descendants(self.process.pid)
        self.process.kill()
        self.process.communicate()
        until(lambda: not alive(below), timeout_s=60)


def kept_transitions(home: Path) -> int:
    """The transitions at the last validation that is on disk; -1 before the first."""
    import io

    import torch

    try:
        (path,) = (home / FOLDER).glob(f"*/{FILE}")
        _, state = path.read_bytes().split(b"\n", 1)
    except (FileNotFoundError, ValueError):
        return -1
    plain = json.loads(torch.load(io.BytesIO(state), weights_only=True)["plain"])
    return int(plain["history"][-1]["transitions"])


@pytest.fixture
def home(template: Path, tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "home"
    home.mkdir()
    for file in template.rglob("*"):
        target = home / file.relative_to(template)
        target.mkdir(parents=True, exist_ok=True) if file.is_dir() else target.write_bytes(file.read_bytes())
    yield home


def history(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / "curves.json").read_text())
    return found


LONG = ["--transitions", "420", "--budget", "5m"]


@pytest.mark.promise("worker-trains-this-process")
def test_a_killed_learner_goes_on_from_its_last_validation_and_ends_as_if_it_had_not_been(
    home: Path, tmp_path: Path
) -> None:
    """1. kill -9 after a validation; 2. its worker ends; 3. the same command ends as an undisturbed one."""
    first = Training(home, tmp_path / "out", *LONG)
    first.reached(200)
    first.kill()
    begun = kept_transitions(home)
    again = Training(home, tmp_path / "out", *LONG)
    printed, said = again.result()
    assert "it went on after" in said
    whole, _ = Training(home, tmp_path / "whole", *LONG).result()
    assert begun in [one["transitions"] for one in history(tmp_path / "out")]
    assert history(tmp_path / "out") == history(tmp_path / "whole")
    assert printed["rows"] == whole["rows"] and printed["plan"] == whole["plan"]


def test_a_killed_worker_is_replaced_and_the_training_ends_with_all_its_transitions(
    home: Path, tmp_path: Path
) -> None:
    training = Training(home, tmp_path / "out", *LONG, rare="workers = 2")
    training.reached(0)
    workers = [pid for pid in descendants(training.process.pid) if _is_worker(pid)]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    printed, _ = training.result()
    assert printed["ended"] == "done" and printed["transitions"] == 420


@pytest.mark.promise("worker-trains-this-process")
def test_a_killed_ray_actor_loses_nothing_but_its_work(home: Path, tmp_path: Path) -> None:
    """While Ray starts, plain processes do the work; the actor of Ray is killed while it does some."""
    training = Training(home, tmp_path / "out", *LONG, rare='workers = 1\nray_address = "local"')
    below = until(
        lambda: [p for p in descendants(training.process.pid) if _runs_rollouts(p)], timeout_s=START_S
    )
    os.kill(below[0], signal.SIGKILL)
    printed, _ = training.result()
    assert printed["ended"] == "done" and printed["transitions"] == 420
    assert [one["transitions"] for one in history(tmp_path / "out")][-1] == 420


def test_ctrl_c_keeps_the_best_so_far_and_leaves_no_process(home: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches the command, which ends the training; nothing else ends it before."""
    training = Training(home, tmp_path / "out", "--transitions", "20000", "--budget", "5m")
    training.reached(0)
    below = descendants(training.process.pid)
    os.killpg(training.process.pid, signal.SIGINT)
    printed, _ = training.result()
    assert printed["ended"] == "interrupted" and printed["transitions"] < 20000
    assert printed["rows"]["best plan"]["throughput_per_s"] > 0.0
    until(lambda: not alive(below), timeout_s=60)
    assert Store(home).read(plan_info, printed["plan"])


@pytest.mark.promise("worker-trains-this-process")
def test_a_training_ends_with_its_planner_and_goes_on_with_the_next(home: Path, tmp_path: Path) -> None:
    """1. the planner is killed in mid-training; 2. its processes end; 3. the next one goes on from there."""
    planner = PlannerProcess(home)
    first = Training(home, tmp_path / "out", *LONG)
    first.reached(200)
    below = descendants(planner.process.pid)
    planner.stop(signal.SIGKILL)
    first.process.communicate()
    assert first.process.returncode == ExitCode.UNAVAILABLE
    until(lambda: not alive(below), timeout_s=60)
    following = PlannerProcess(home)
    printed, said = Training(home, tmp_path / "out", *LONG).result()
    assert printed["ended"] == "done" and printed["resumed_s"] > 0.0
    assert "it went on after" in said
    assert following.stop() == 0
    store = Store(home)
    assert store.read(newest_policy, "maddpg", store.read(device_infos)[0].device_class) is not None
    store.close()


def _runs_rollouts(pid: int) -> bool:
    try:
        return b"ray::rollout" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _is_worker(pid: int) -> bool:
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
