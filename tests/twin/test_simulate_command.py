"""`stageloom prediction create` and `prediction list`, from the store's plans, costs and telemetry."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from stageloom.planner.api.bounds import RequestLimits
from stageloom.planner.api.route import unbind
from stageloom.planner.api.routes import PREDICTION_CREATE
from stageloom.planner.cli import simulate
from stageloom.planner.cli.app import execute
from stageloom.planner.dispatch.ports import StoredRow, TelemetryWrite
from stageloom.planner.schema.prediction import RECORDED_MAX, PredictionCreateRequest, PredictionInfo
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.predictions import keep_prediction, newest_predictions
from stageloom.planner.store.profiles import request_profile
from stageloom.planner.twin.stored import base_device
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import ExitCode, InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Origin
from stageloom.shared.messages.telemetry import (
    KIND_OF,
    Ledger,
    OperatorTiming,
    PlanActivated,
    ProfileResult,
    RowData,
    StepTimings,
    TaskCounters,
    histogram_of,
)
from stageloom.shared.plan import Plan
from tests.store.helpers import NANO, add_model, enrol, row, small_plan
from tests.store.migrated import new_store

SECOND = 1_000_000
CREATE = ("prediction", "create", "tuned")


class Home:
    """A planner's data with a device, a model of four operators and its sequential plan."""

    def __init__(self, path: Path, clock: ManualClock) -> None:
        self.path = path / "home"
        self.path.mkdir()
        self.store = new_store(self.path, clock=clock)
        enrol(self.store)
        self.artifact: Digest = add_model(self.store, path)
        self.plan: Plan = small_plan(self.store)
        self.store.write(add_plan, "tuned", self.plan, "sequential")
        self._sequence = 0
        self.ahead_us = 0  # of the device's clock

    def send(self, at_us: int, *rows: RowData) -> None:
        """Telemetry of the device, `at_us` after the beginning."""
        made = []
        for data in rows:
            one = row(self.ahead_us + at_us, data, kind=KIND_OF[type(data)])
            made.append(StoredRow(7, self._sequence, one.at_us, one.kind, one.body, data))
            self._sequence += 1
        ledger = Ledger(7, self._sequence, 0)
        LinkStore(self.store).append_telemetry([TelemetryWrite(NANO, tuple(made), (ledger,))])

    def profile(self, seconds: float) -> None:
        """The device measured every operator."""
        (request,), _ = self.store.write(request_profile, NANO, ["relu"])
        timings = tuple(OperatorTiming(op, 1e6 * seconds, 0.0, 5) for op in range(4))
        self.send(0, ProfileResult(request, self.artifact, 1, "", timings, True))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def home(tmp_path: Path, clock: ManualClock) -> Home:
    return Home(tmp_path, clock)


def run(
    home: Home, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = ExitCode.OK
) -> tuple[str, str]:
    assert execute([*arguments, "--data-dir", str(home.path)]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def simulated(home: Home, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    out, _ = run(home, capsys, *CREATE, *arguments, "--json")
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_plan_is_simulated_on_a_device_file(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(
        home, capsys, "--twin", "tx2", "--rate", "relu=50", "--arrivals", "periodic", "--seconds", "4"
    )
    assert found["predicted"]["throughput_per_s"] == pytest.approx(50.0, abs=0.3)
    assert found["predicted"]["relu.queued_mean"] == 0.0
    assert 0.0 < found["predicted"]["utilisation"] < 0.1
    assert (found["twin"], found["device"]) == ("derived from tx2", None)
    assert found["arrivals"] == "periodic: relu 50/s"
    assert found["number"] == 1
    rare = home.path / "scenario.toml"
    rare.write_text("keep = false\nseed = 7\n")
    out, err = run(home, capsys, *CREATE, "--twin", "tx2", "--rate", "relu=50", "--from", str(rare))
    assert out.splitlines()[0].startswith("model\tarrivals/s")
    assert "60 s simulated" in err and "kept" not in err


def test_a_few_seconds_of_overload_show_queues_that_grow(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tasks of 4 ms, twice as many as that leaves room for."""
    home.profile(0.001)
    load = ("--rate", "relu=500", "--arrivals", "periodic", "--seconds", "3")
    found = simulated(home, capsys, "--device", str(NANO), "--twin", "nano", *load)
    assert found["predicted"]["relu.queued_mean"] > 1.0
    assert found["predicted"]["relu.queued_max"] > found["predicted"]["relu.queued_mean"]
    assert "its queues grow" in found["doubt"]


def test_what_arrived_at_a_device_is_replayed_on_what_it_measured(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """Operators of 1 ms; 30 and then 60 tasks a second for 2 s each."""
    home.profile(0.001)
    for second in range(1, 5):
        arrived = 30 if second < 3 else 60
        home.send(second * SECOND, TaskCounters("relu", SECOND, arrived, arrived, 0, 0, 0, 0))
    found = simulated(home, capsys, "--device", str(NANO), "--twin", "nano")
    assert found["seconds"] == pytest.approx(4.0)
    assert found["predicted"]["relu.arrivals_per_s"] == pytest.approx(45.0)
    assert found["predicted"]["p50_ms"] == pytest.approx(4.0, rel=0.2)
    assert "operators measured on" in found["twin"]
    assert found["arrivals"] == f"the last 4 s of {NANO}"
    assert simulated(home, capsys, "--device", str(NANO), "--twin", "nano")["predicted"] == found["predicted"]


def test_served_steps_of_a_known_plan_are_what_the_twin_is_fitted_to(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """Operators of 1 ms alone, but a step of all four took 2 ms: the session saves half."""
    home.profile(0.001)
    home.send(SECOND, StepTimings(home.plan.digest[:16], 0, 1, 500, 500 * 2000, 3000))
    found = simulated(
        home, capsys, "--device", str(NANO), "--twin", "nano", "--rate", "relu=10", "--arrivals", "periodic"
    )
    assert found["predicted"]["p50_ms"] == pytest.approx(2.0, rel=0.05)
    assert "fitted to 1 programs that it served" in found["twin"]


def test_a_recording_is_replayed_from_a_file(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "arrivals.json"
    path.write_text(json.dumps({"relu": [0.0, 0.1, 0.1, 1.9]}))
    found = simulated(home, capsys, "--twin", "nano", "--recording", str(path), "--seconds", "2")
    assert found["predicted"]["relu.arrivals_per_s"] == pytest.approx(2.0)
    for text, why in (
        ("[1]", "no table of lists"),
        ('{"relu": ["x"]}', "no table of lists"),
        ("{", "cannot be read as JSON"),
        ('{"other": [0.1]}', "the plan has no model 'other'"),
        ('{"relu": [0.2, 0.1]}', "sort them"),
        ('{"relu": [1e300, Infinity]}', "has an arrival at 1e+300 s; write seconds"),
        ("{}", "holds no arrival; write it like"),
        ('{"relu": []}', "holds no arrival; write it like"),
        ('{"relu": [0, 86400]}', "a recording of 86400 s, and a day is the most that is simulated; cut it"),
        ('{"relu": [1795336918, 1795436918]}', "a recording of 100000 s, and a day is the most"),
    ):
        path.write_text(text)
        _, err = run(home, capsys, *CREATE, "--twin", "nano", "--recording", str(path), code=ExitCode.USAGE)
        assert why in err


def recorded(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str], times: list[float], *arguments: str
) -> dict[str, Any]:
    path = tmp_path / "arrivals.json"
    path.write_text(json.dumps({"relu": times}))
    return simulated(home, capsys, "--twin", "nano", "--recording", str(path), *arguments)


def test_the_last_arrival_of_a_recording_happens(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = recorded(home, tmp_path, capsys, [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
    assert found["predicted"]["relu.arrivals_per_s"] * found["seconds"] == pytest.approx(7.0)
    assert found["seconds"] == pytest.approx(3.0, abs=0.01)


def test_a_recording_in_seconds_since_1970_counts_from_its_first_arrival(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    since_1970 = recorded(home, tmp_path, capsys, [1795336918.0, 1795336918.5, 1795336920.0])
    from_0 = recorded(home, tmp_path, capsys, [0.0, 0.5, 2.0])
    assert since_1970["predicted"] == from_0["predicted"]
    assert since_1970["seconds"] == from_0["seconds"]
    path = tmp_path / "request.toml"
    path.write_text("[recording]\nrelu = [1795336918.0, 1795336918.5, 1795336920.0]\n")
    in_a_request = simulated(home, capsys, "--twin", "nano", "--from", str(path))
    assert in_a_request["predicted"] == from_0["predicted"]


def test_as_many_arrivals_of_a_model_as_are_promised_fit_into_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day of them, in microseconds since 1970."""
    asked: list[PredictionCreateRequest] = []

    def run_job(route: Any, request: PredictionCreateRequest) -> None:
        asked.append(request)
        raise InputError("there is no planner")

    monkeypatch.setattr(simulate, "run_job", run_job)
    path = tmp_path / "arrivals.json"
    times = [1795336918.123456 + 1.318357 * number for number in range(RECORDED_MAX)]
    path.write_text(json.dumps({"relu": times}))
    assert execute([*CREATE, "--twin", "nano", "--recording", str(path)]) == ExitCode.USAGE
    (request,) = asked
    _, body = unbind(PREDICTION_CREATE, request)
    assert len(body) <= RequestLimits().body_bytes
    assert request.recording is not None
    late_s = (abs(at_s - 1.318357 * number) for number, at_s in enumerate(request.recording["relu"]))
    assert max(late_s) < 1e-6


def test_a_recording_within_a_day_counts_from_0(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recorded(home, tmp_path, capsys, [5.0, 6.0])["seconds"] == pytest.approx(6.0, abs=0.01)


def test_the_beginning_of_a_recording_longer_than_a_day_is_simulated_on_request(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = recorded(home, tmp_path, capsys, [0.5, 1.5, 200_000.0], "--seconds", "2")
    assert found["predicted"]["relu.arrivals_per_s"] == pytest.approx(1.0)


def test_what_cannot_be_simulated_says_why(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    cases: list[tuple[list[str], str]] = [
        (["--twin", "nano"], "nothing says what arrives"),
        (["--rate", "relu=1"], "nothing says what device"),
        (["--twin", "nano", "--rate", "relu"], "is not MODEL=PER_S"),
        (["--twin", "nano", "--rate", "relu=-1"], "is not MODEL=PER_S"),
        (["--twin", "nano", "--rate", "other=1"], "the plan has no model 'other'"),
        (["--twin", "tx3", "--rate", "relu=1"], "there is no device file 'tx3'"),
        (["--twin", "nano", "--device", "nobody"], "nobody"),
        (["--twin", "nano", "--device", "nano"], "counted no task of this plan's models"),
        (["--twin", "nano", "--rate", "relu=1", "--recording", "x.json"], "x.json cannot be read"),
        (["--twin", "nano", "--rate", "relu=1000000"], "60000000 tasks would arrive"),
        (["--twin", "nano", "--rate", "relu=1", "--seconds", "inf"], "--seconds inf is not acceptable"),
        (["--twin", "nano", "--rate", "relu=1", "--from", "x.toml"], "x.toml cannot be read"),
        (["--twin", "nano", "--arrivals", "periodic"], "no --rate; give --rate MODEL=PER_S, or leave"),
        (["--device", "nano", "--arrivals", "poisson"], "--arrivals poisson says how the tasks of"),
    ]
    for arguments, why in cases:
        _, err = run(home, capsys, *CREATE, *arguments, code=ExitCode.USAGE)
        assert why in err
    assert not home.store.read(newest_predictions)


@pytest.mark.promise("prediction-stands-beside-was")
def test_a_prediction_is_shown_beside_what_was_measured_since(
    home: Home, clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    """1. a prediction is kept; 2. the plan runs for three seconds; 3. both stand side by side."""
    assert run(home, capsys, "prediction", "list", "--json")[0] == "[]\n"
    figures = {"throughput_per_s": 55.0, "p50_ms": 4.0, "p99_ms": 8.0, "steps_running": 0.2}
    made = PredictionInfo(
        number=0,
        made_at_us=clock.wall_us(),
        device=NANO,
        plan="tuned",
        digest=home.plan.digest,
        twin="toy",
        arrivals="some",
        seconds=3.0,
        predicted=figures,
    )
    assert home.store.database.change(keep_prediction, made) == 1
    assert [one.predicted for one in home.store.read(newest_predictions, NANO)] == [figures]
    assert home.store.read(newest_predictions, DeviceId("another")) == []
    out, _ = run(home, capsys, "prediction", "list", "--json")
    (found,) = json.loads(out)
    assert found["measured"] is None
    home.send(SECOND, PlanActivated(home.plan.digest, Origin.PLANNER, 1, 1))
    for second in (2, 3, 4):
        home.send(
            second * SECOND,
            TaskCounters("relu", SECOND, 50, 50, 0, 0, 0, 0),
            histogram_of("relu", [5000] * 50),
            StepTimings(home.plan.digest[:16], 0, 1, 50, 50 * 5000, 6000),
        )
    out, _ = run(home, capsys, "prediction", "list", "--device", str(NANO), "--json")
    (found,) = json.loads(out)
    assert found["measured"]["throughput_per_s"] == pytest.approx(50.0)
    assert found["measured"]["steps_running"] == pytest.approx(0.25)
    assert found["relative_errors"]["throughput_per_s"] == pytest.approx(0.1)
    assert found["relative_errors"]["steps_running"] == pytest.approx(-0.2)
    out, _ = run(home, capsys, "prediction", "list")
    assert "throughput_per_s\t55\t50\t10" in out
    assert found["doubt"] == ""
    busy = structs.replace(made, predicted={**figures, "steps_running": 0.99})
    home.store.database.change(keep_prediction, busy)
    _, err = run(home, capsys, "prediction", "list")
    assert "prediction 2: lanes were predicted to be busy 99 % of the time and were 25 %" in err


@pytest.mark.parametrize("ahead_days", [-50 * 365, 2])
def test_what_was_measured_since_is_shown_whatever_the_clock_of_the_device_says(
    home: Home, clock: ManualClock, capsys: pytest.CaptureFixture[str], ahead_days: int
) -> None:
    """What was measured before counts no more than with a clock that is right."""

    def runs(began_s: int, tasks: int) -> None:
        home.send(began_s * SECOND, PlanActivated(home.plan.digest, Origin.PLANNER, 1, 1))
        for second in range(began_s + 1, began_s + 4):
            home.send(
                second * SECOND,
                TaskCounters("relu", SECOND, tasks, tasks, 0, 0, 0, 0),
                histogram_of("relu", [5000] * tasks),
            )

    home.ahead_us = ahead_days * 86_400 * SECOND
    runs(1, 10)
    clock.advance(60.0)
    made = PredictionInfo(
        number=0,
        made_at_us=clock.wall_us(),
        device=NANO,
        plan="tuned",
        digest=home.plan.digest,
        twin="toy",
        arrivals="some",
        seconds=3.0,
        predicted={"throughput_per_s": 55.0},
    )
    home.store.database.change(keep_prediction, made)
    clock.advance(1.0)
    runs(61, 50)
    (found,) = json.loads(run(home, capsys, "prediction", "list", "--json")[0])
    assert found["measured"]["throughput_per_s"] == pytest.approx(50.0)


def test_a_device_class_begins_with_the_file_of_its_gpu_or_a_cpu_of_its_cores() -> None:
    xavier = "NVIDIA Jetson Xavier NX Developer Kit; onnxruntime-1.2; fp32"
    assert base_device(xavier, "torch_cuda").name == "xavier_nx"
    assert base_device(xavier, "onnx").cores == 1
    assert base_device("NVIDIA A100-SXM4-40GB, driver 550; torch-2.5; fp32", "onnx_cuda").name == "a100"
    assert base_device("AMD EPYC x2 avx2; onnxruntime-1.2; fp32", "onnx").cores == 2
    assert base_device("NVIDIA H100 80GB HBM3, driver 580; torch-2.5; fp32", "torch_cuda").name == "h100"
    assert base_device("NVIDIA Jetson TX2i; torch-2.5; fp32", "torch_cuda").name == "tx2"


@pytest.mark.parametrize("gpu", ["NVIDIA Voodoo", "NVIDIA RTX A1000 Laptop GPU", "NVIDIA Jetson Orin Nano"])
def test_a_gpu_that_no_device_file_is_for_is_no_other_one_of_a_similar_name(gpu: str) -> None:
    with pytest.raises(InputError, match="no device file is for"):
        base_device(f"{gpu}; torch-2.5; fp32", "torch_cuda")
