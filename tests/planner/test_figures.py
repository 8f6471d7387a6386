"""Rates from telemetry, the cost table from measurements, and what starting the command line imports."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import stageloom
from stageloom.planner.cli import prediction, simulate
from stageloom.planner.costs.measured import cost_table
from stageloom.planner.costs.records import OperatorCost
from stageloom.planner.schema.prediction import PredictionInfo
from stageloom.planner.telemetry import model_rates
from stageloom.planner.twin.replay import figures, relative_errors
from stageloom.planner.twin.window import ModelWindow, Window
from stageloom.shared.engine.stats import Counts
from stageloom.shared.ids import DeviceId, Digest, OpId
from stageloom.shared.messages.telemetry import QueueSample, Row, TaskCounters, histogram_of
from stageloom.shared.version import __version__
from tests.store.helpers import chain

NANO = DeviceId("nano")

SECOND = 1_000_000


def test_rates_of_two_models_in_closed_form() -> None:
    rows = [
        Row(5 * SECOND, TaskCounters("b", SECOND, 9, 5, 1, 1, 1, 1)),
        Row(5 * SECOND, histogram_of("b", [2_000] * 50)),
        Row(5 * SECOND, QueueSample("a", 3, 0, 0)),
        Row(6 * SECOND, TaskCounters("b", SECOND, 9, 15, 0, 0, 0, 0)),
        Row(6 * SECOND, histogram_of("b", [8_000] * 50)),
        Row(6 * SECOND, QueueSample("a", 1, 0, 0)),
    ]
    a, b = model_rates(NANO, rows)
    assert (a.model, a.throughput_per_s, a.latency_p99_ms, a.queued) == ("a", 0.0, 0.0, 1)
    assert (b.model, b.throughput_per_s, b.queued) == ("b", 10.0, 0)
    assert b.latency_p50_ms == pytest.approx(2.0, rel=0.2)
    assert b.latency_p99_ms == pytest.approx(8.0, rel=0.2)


def test_a_model_without_a_completed_task_has_no_latency(capsys: pytest.CaptureFixture[str]) -> None:
    """It is overloaded: nothing is done a second, which is told; a latency of 0 would read as the best."""
    model = ModelWindow(name="a", submitted=50, ended=Counts(expired=50), queued=0, busy_s=0.0)
    window = Window(
        plan=Digest("ab" * 32),
        began_s=0.0,
        seconds=10.0,
        busy_s=0.0,
        used_s=0.0,
        models=(model,),
        steps=(),
        glances=(),
        open_before=0,
        open_after=0,
    )
    found = figures(window)
    made = PredictionInfo(
        number=7,
        made_at_us=1,
        device=NANO,
        plan="busy",
        digest=Digest("ab" * 32),
        twin="nano",
        arrivals="poisson",
        seconds=10.0,
        predicted=found,
        measured={"throughput_per_s": 4.0, "p50_ms": 20.0, "p99_ms": 0.0, "steps_running": 1.0},
    )
    simulate._tell(made)
    _, row = capsys.readouterr().out.splitlines()
    assert row.split("\t")[:6] == ["a", "5", "0", "50", "-", "-"]
    assert [row[4:] for row in prediction._rows(made)] == [
        ("throughput_per_s", "0", "4", "-100"),
        ("p50_ms", "", "20", ""),
        ("p99_ms", "", "", ""),
        ("steps_running", "0", "1", "-100"),
    ]
    assert made.measured is not None
    assert relative_errors(found, made.measured) == {"throughput_per_s": -1.0, "steps_running": -1.0}


def test_a_model_that_had_no_task_in_most_intervals_has_its_tasks_over_all_of_them() -> None:
    """`slow` ends a task every 5 s, and sends no counters of the 4 s between; `busy` ends three a second."""
    rows = []
    for second in range(1, 11):
        rows.append(Row(second * SECOND, TaskCounters("busy", SECOND, 3, 3, 0, 0, 0, 0)))
        if second % 5 == 0:
            rows.append(Row(second * SECOND, TaskCounters("slow", SECOND, 1, 1, 0, 0, 0, 0)))
    assert [(one.model, one.throughput_per_s) for one in model_rates(NANO, rows)] == [
        ("busy", 3.0),
        ("slow", 0.2),
    ]


def test_time_in_which_only_queues_were_sampled_counts_too() -> None:
    rows = [Row(second * SECOND, QueueSample("m", 0, 0, 0)) for second in range(1, 11)]
    rows.append(Row(10 * SECOND, TaskCounters("m", SECOND, 9, 9, 0, 0, 0, 0)))
    (rate,) = model_rates(NANO, rows)
    assert rate.throughput_per_s == 1.0  # the first sample was at 1 s


def test_a_measured_operator_replaces_its_estimate_and_no_other() -> None:
    graph, artifact = chain("relu", 3), Digest("ab" * 32)
    table = cost_table({artifact: {1: OperatorCost(1, 250.0, 1.0, 9, 5)}}, {artifact: 1})
    assert table.operator_s(artifact, graph, OpId(1)) == pytest.approx(250e-6)
    assert table.operator_s(artifact, graph, OpId(0)) == table.estimate_s(graph, OpId(0))
    assert table.operator_s(Digest("cd" * 32), graph, OpId(1)) == table.estimate_s(graph, OpId(1))


def test_the_command_line_starts_without_its_heavy_libraries() -> None:
    code = """
import sys
from stageloom.planner.cli.app import execute
assert execute(["plan", "create", "--help"]) == 0
heavy = {"sqlalchemy", "alembic", "rich", "onnx", "onnxruntime", "numpy", "zmq", "ray", "torch"}
found = sorted(heavy & set(sys.modules))
assert not found, found
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_version_is_the_distributions() -> None:
    assert version("stageloom") == __version__ == stageloom.__version__
