"""Every way of serving models, in its own process, on two tiny ones."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Queue

import numpy as np
import pytest

from stageloom.edge_agent.bench.contest import Contest, ContestLoad
from stageloom.edge_agent.bench.contestant import Contestant, ContestantSetting, TimedTask
from stageloom.edge_agent.bench.contestant_process import ContestantError, ContestantProcess
from stageloom.edge_agent.bench.load import ArrivalWindow
from stageloom.edge_agent.bench.model_files import ModelUnderTest, prepare
from stageloom.edge_agent.bench.rival_settings import (
    NAIVE,
    OPENVINO_LATENCY,
    by_deadline,
    every_onnxruntime,
    every_openvino,
    reduced,
)
from stageloom.edge_agent.bench.rival_threads import Runtime, ThreadedRival
from stageloom.edge_agent.bench.runtime_options import RuntimeName, RuntimeOptions
from stageloom.edge_agent.bench.runtimes import service_times_s
from stageloom.edge_agent.bench.stageloom_contestant import AgentSetting, kept_times, own_plan
from stageloom.edge_agent.bench.termination import ended_politely
from stageloom.edge_agent.executor_choice import TIMES_NAME
from stageloom.shared.errors import ExitCode
from stageloom.shared.plan import ExecutorOptions, decode_plan
from tests.agent.models import write_tiny
from tests.planner.processes import ROOT, environment, until

pytestmark = pytest.mark.more

WINDOW = ArrivalWindow(np.array([0.0, 0.01, 0.02]), np.array([0, 1, 0]), np.array([20.0, 20.0]))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[ModelUnderTest]:
    folder = tmp_path_factory.mktemp("models")
    return [prepare(f"tiny{n}", write_tiny(folder / f"source{n}.onnx", n), {}, folder) for n in range(2)]


def onnx_plan(models: Sequence[ModelUnderTest]) -> bytes:
    return own_plan(models, {model.name: {ExecutorOptions(name="onnx"): 1e-3} for model in models}).wire


PARENT, GROUP, SESSION = 1, 2, 3
"""Fields of a process's `stat` behind its name."""


def states(field: int, number: int) -> dict[int, str]:
    """A parent's, a group's or a session's processes with their states, as in /proc: `T` is suspended."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[field]) == number:
                found[int(entry.name)] = fields[0]
    return found


def states_of_group(group: int) -> set[str]:
    return set(states(GROUP, group).values())


def serves(setting: ContestantSetting, models: Sequence[ModelUnderTest]) -> None:
    """It answers every task, waits suspended, and leaves nothing running."""
    process = ContestantProcess(setting, models)
    group = process.group
    try:
        process.wait_ready()
        assert process.window(WINDOW).in_time.all()
        assert process.window(WINDOW).in_time.all()
        until(lambda: states_of_group(group) == {"T"})  # a signal reaches a thread when it is scheduled
    finally:
        process.stop()
    until(lambda: states_of_group(group) <= {"Z"})


ONNXRUNTIME = {one.name: one for one in every_onnxruntime(2)}
RIVALS = (NAIVE, *ONNXRUNTIME.values(), by_deadline({}, 2))
OPENVINO_RIVALS = (
    OPENVINO_LATENCY,
    *every_openvino(2),
    reduced(OPENVINO_LATENCY),
    by_deadline({"tiny0": RuntimeName.OPENVINO}, 2),
)


KINDS = {"naive", "ort_2x1", "ort_per_model", "ov_latency", "ov_2x1", by_deadline({}, 2).name}
"""One setting of each kind; others of a kind differ from it in numbers and are for the marker `full`."""


def of_each_kind(settings: Sequence[ContestantSetting]) -> list[object]:
    return [
        pytest.param(one, id=one.name, marks=[] if one.name in KINDS else [pytest.mark.full])
        for one in settings
    ]


@pytest.mark.promise("contestants-wait-suspended")
@pytest.mark.parametrize("setting", of_each_kind(RIVALS))
def test_onnxruntime_serves_by_each_setting(setting: ContestantSetting, models: list[ModelUnderTest]) -> None:
    serves(setting, models)


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
@pytest.mark.parametrize("setting", of_each_kind(OPENVINO_RIVALS))
def test_openvino_serves_by_each_setting(setting: ContestantSetting, models: list[ModelUnderTest]) -> None:
    serves(setting, models)


@pytest.mark.promise("contestants-wait-suspended")
@pytest.mark.parametrize("given", [False, True], ids=["its own plan", "a given plan"])
def test_an_agent_serves_its_own_plan_or_one_that_is_given(given: bool, models: list[ModelUnderTest]) -> None:
    serves(AgentSetting("stageloom", onnx_plan(models) if given else b""), models)


def test_an_agent_serves_one_file_under_two_names(models: list[ModelUnderTest]) -> None:
    twins = [models[0], replace(models[0], name="twin")]
    serves(AgentSetting("stageloom", onnx_plan(twins)), twins)


def test_an_agent_measures_no_ways_for_a_plan_that_is_given(
    models: list[ModelUnderTest], tmp_path: Path
) -> None:
    wire = onnx_plan(models)
    assert served_plan(AgentSetting("stageloom", wire, times_folder=str(tmp_path)), models) == digest_of(wire)
    assert not (tmp_path / TIMES_NAME).exists()


def test_an_agent_tells_the_plan_that_it_serves(models: list[ModelUnderTest], tmp_path: Path) -> None:
    """The one of what it measured, or the first one, where that is no better or was rolled back."""
    served = served_plan(AgentSetting("stageloom", times_folder=str(tmp_path)), models)
    times = kept_times(models, str(tmp_path))
    assert all(times.values())
    known, unknown = own_plan(models, times), own_plan(models, {name: {} for name in times})
    assert served in (known.digest, unknown.digest)


def test_an_agent_that_serves_one_model_gives_tasks_of_another_up_and_has_no_problem(
    models: list[ModelUnderTest],
) -> None:
    """Contestants are warmed up with all models."""
    contestant = AgentSetting("stageloom", onnx_plan(models[:1]), serves=(models[0].name,)).make(models)
    ended = Queue[tuple[int, bool]]()
    try:
        contestant.start(lambda task, completed: ended.put((task.model, completed)))
        for number, model in enumerate(models):
            contestant.submit(TimedTask(number, number, 0.0), model.feeds(1)[0])
            assert ended.get(timeout=60.0) == (number, number == 0)
        assert not contestant.problem
    finally:
        contestant.stop()


def served_plan(setting: AgentSetting, models: Sequence[ModelUnderTest]) -> str:
    """The digest of it, as an agent tells it once it is started."""
    contestant = setting.make(models)
    try:
        contestant.start(lambda task, completed: None)
        return contestant.plan
    finally:
        contestant.stop()


def digest_of(wire: bytes) -> str:
    return decode_plan(wire).digest


class Unable:
    """Cannot serve anything."""

    name = "unable"
    measures = False

    def make(self, models: Sequence[ModelUnderTest]) -> Contestant:
        return ThreadedRival(_refuse, len(models), workers=1)


def _refuse() -> Runtime:
    raise ValueError("no such operator")


def test_a_contestant_that_cannot_serve_is_absent_with_its_reason(models: list[ModelUnderTest]) -> None:
    load = ContestLoad(weights=(1.0, 1.0), deadlines_s=(1.0, 1.0))
    with Contest(models, load, lambda line: None) as contest:
        contest.enter([Unable()])
        assert contest.names == []
        assert "no such operator" in contest.absent["unable"]


def test_a_contestant_that_dies_is_told(models: list[ModelUnderTest]) -> None:
    process = ContestantProcess(ONNXRUNTIME["ort_1x1"], models)
    process.wait_ready()
    os.killpg(process.group, signal.SIGKILL)
    with pytest.raises(ContestantError, match="has died"):
        process.window(WINDOW)
    process.stop()


def test_an_agent_that_dies_is_told_with_its_exit_status_and_its_last_line(
    models: list[ModelUnderTest], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process = ContestantProcess(AgentSetting("stageloom", onnx_plan(models), folder=str(tmp_path)), models)
    try:
        process.wait_ready()
        assert [(home / "run").is_dir() for home in tmp_path.iterdir()] == [True]
        children = states(PARENT, process.group)
        (agent,) = [one for one in children if b"plan_agent" in Path(f"/proc/{one}/cmdline").read_bytes()]
        os.kill(agent, signal.SIGKILL)
        with pytest.raises(ContestantError) as told:
            process.window(WINDOW)
    finally:
        process.stop()
    assert "stageloom: the agent has ended with exit status -9; its last line: " in told.value.cause
    assert told.value.exit_code is ExitCode.BACKEND
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.promise("contestants-wait-suspended")
def test_a_comparison_that_is_told_to_end_leaves_nothing_running(models: list[ModelUnderTest]) -> None:
    load = ContestLoad(weights=(1.0, 1.0), deadlines_s=(1.0, 1.0))
    groups = []
    with pytest.raises(SystemExit), ended_politely():
        with Contest(models, load, lambda line: None) as contest:
            contest.enter([ONNXRUNTIME["ort_1x1"], AgentSetting("stageloom", onnx_plan(models))])
            assert contest.absent == {}
            groups = [contest.group(name) for name in contest.names]
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
    assert len(groups) == 2
    assert all(states_of_group(group) <= {"Z"} for group in groups)


@contextlib.contextmanager
def contest_that_hangs(where: str, home: Path) -> Iterator["subprocess.Popen[str]"]:
    """A contest in a session of its own, where one of its contestants hangs now; nothing of it may stay."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.interrupted_contest", where],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(home),
        cwd=ROOT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == f"{where}\n"
        yield process
        assert process.wait(60) == -signal.SIGINT
        until(lambda: set(states(SESSION, process.pid).values()) <= {"Z"})
    finally:
        for number in states(SESSION, process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.mark.promise("contestants-wait-suspended")
def test_a_second_ctrl_c_ends_a_comparison_whose_contestants_do_not_end(tmp_path: Path) -> None:
    with contest_that_hangs("stop", tmp_path) as process:  # after the first
        process.send_signal(signal.SIGINT)


@pytest.mark.promise("contestants-wait-suspended")
def test_ctrl_c_ends_a_comparison_whose_contestants_still_start(tmp_path: Path) -> None:
    with contest_that_hangs("start", tmp_path) as process:
        process.send_signal(signal.SIGINT)


def test_a_contest_gives_all_the_same_arrivals(models: list[ModelUnderTest]) -> None:
    load = ContestLoad(weights=(1.0, 3.0), deadlines_s=(5.0, 5.0), window_s=0.2, seed=3)
    with Contest(models, load, lambda line: None) as contest:
        contest.enter([ONNXRUNTIME["ort_2x1"], ONNXRUNTIME["ort_1x1"]])
        found = contest.windows_at(contest.names, 50.0, 2)
        one, other = found.values()
        assert [list(result.model) for result in one] == [list(result.model) for result in other]
        saturated = contest.saturated(contest.names, (1.0, 0.0), 0.1, 2)
        assert all(rate > 0.0 for rates in saturated.values() for rate in rates)


def test_a_service_time_is_told_for_a_model_that_runs_and_the_reason_for_one_that_does_not(
    models: list[ModelUnderTest], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"nothing")
    wrong = ModelUnderTest("broken", broken, models[0].artifact, models[0].digest, models[0].inputs)
    found = service_times_s([models[0], wrong], RuntimeOptions(workers=1, threads=1), 0.01)
    assert isinstance(found["tiny0"], float)
    assert 0.0 < found["tiny0"] < 1.0
    assert "broken" in str(found["broken"]) or "protobuf" in str(found["broken"]).lower()
