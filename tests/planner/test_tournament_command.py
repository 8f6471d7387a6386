"""`stageloom plan create --budget` without a scheduler, through a real planner and its workers."""

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from stageloom.planner.cli.app import execute
from stageloom.planner.schema.explanation import EvaluationVerdict
from stageloom.planner.store.predictions import considered_plans
from stageloom.planner.store.store import ReadStore
from tests.planner.processes import PlannerProcess, environment, ok, plan_file

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlannerProcess]:
    """A planner with a model of two operators side by side."""
    folder = tmp_path_factory.mktemp("contest")
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Sigmoid", ["x"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "fork",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8])],
    )
    file = folder / "fork.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    settings = folder / "planner.toml"
    settings.write_text('[planner]\nsearch = "local"\n')
    process = PlannerProcess(folder / "home", "--config", str(settings))
    ok(process.home, "model", "add", str(file), "--name", "fork")
    yield process
    process.stop()


def _contest(planner: PlannerProcess, name: str, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", "from stageloom.planner.cli import main; main()"]
    create = ["plan", "create", "--model", "fork", "--name", name, "--budget", "5m", "--json", *options]
    return subprocess.Popen(
        [*command, *create],
        env=environment(planner.home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.promise("contest-answer-before-anything")
def test_ctrl_c_keeps_the_best_so_far_and_its_curve_is_told_and_kept(
    planner: PlannerProcess, tmp_path: Path
) -> None:
    """Stopped as soon as there is a best so far, long before the budget ends."""
    rates = plan_file(tmp_path / "rates.toml", rates=[{"model": "fork", "per_s": 5.0}])
    with _contest(planner, "best", "--from", rates) as process:
        assert process.stdout is not None and process.stderr is not None
        assert any("best so far" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        made = json.loads(process.stdout.read())
    assert process.returncode == 0
    contest = made["contest"]
    curve = [one for one in contest["judged"] if one["led"]]
    assert curve and contest["winner"] in {one["name"] for one in contest["judged"]}
    assert contest["arrivals"] == "poisson: fork 5/s"
    assert contest["twin"].startswith("assumed")
    assert contest["unchecked"] == "" and contest["fresh"] and not contest["failed"]
    assert contest["left"] + len(contest["judged"]) >= 10, "rivals and searches"
    explained: dict[str, Any] = json.loads(ok(planner.home, "plan", "explain", "best", "--json"))
    assert {one["last"]["how"] for one in explained["others"]} == {"contest"}
    store = ReadStore.open(planner.home)
    try:
        kept = [
            evaluation
            for evaluation, _ in store.read(considered_plans, explained["others"][0]["last"]["serves"], "")
        ]
    finally:
        store.close()
    assert {
        (one.scheduler.removesuffix(" r=3 s=8"), one.judged_at_s, one.throughput_per_s, one.p99_s)
        for one in kept
        if one.verdict in (EvaluationVerdict.LED, EvaluationVerdict.FOUND)
    } >= {(one["name"], one["at_s"], one["throughput_per_s"], one["p99_s"]) for one in curve}


def test_ctrl_c_at_once_keeps_a_valid_plan(planner: PlannerProcess) -> None:
    """Nothing says what arrives: that is assumed, and told."""
    with _contest(planner, "early") as process:
        assert process.stdout is not None and process.stderr is not None
        assert any("evaluated" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        made = json.loads(process.stdout.read())
    assert process.returncode == 0
    assert made["plan"] == "early"
    assert made["contest"]["arrivals"].startswith("assumed")


def test_what_candidates_decide_cannot_be_asked_for(planner: PlannerProcess, tmp_path: Path) -> None:
    def rates(*pairs: tuple[str, object]) -> tuple[str, str]:
        file = plan_file(tmp_path / "rates.toml", rates=[{"model": name, "per_s": at} for name, at in pairs])
        return "--from", file

    cases: list[tuple[str, str, Callable[[], tuple[str, ...]], str]] = [
        ("fork", "3s", lambda: ("--lanes", "2"), "each decides lanes"),
        ("fork:batch=2", "3s", lambda: (), "each decides batch of fork"),
        ("fork", "3s", lambda: rates(("spoon", 5.0)), "the plan has no model 'spoon'"),
        ("fork", "3s", lambda: rates(("fork", "no")), "rates[0].per_s: expected"),
        ("fork", "3s", lambda: rates(("fork", 5.0), ("fork", 6.0)), "rates name fork twice"),
        ("fork", "soon", lambda: (), "is no duration"),
        ("fork", "", lambda: rates(("fork", 5.0)), "rates say what arrives in a tournament"),
    ]
    for model, budget, options, reason in cases:
        create = ["plan", "create", "--model", model, *(("--budget", budget) if budget else ()), *options()]
        with contextlib.redirect_stderr(io.StringIO()) as said:
            assert execute([*create, "--data-dir", str(planner.home)]) != 0
        assert reason in said.getvalue()


def test_a_budget_with_a_scheduler_is_one_search(planner: PlannerProcess) -> None:
    for budget in ("0.05", "50ms"):
        made = json.loads(
            ok(
                planner.home,
                "plan",
                "create",
                "--model",
                "fork",
                "--scheduler",
                "ios",
                "--budget",
                budget,
                "--json",
            )
        )
        assert made["contest"] is None and made["scheduler"] == "ios"


def test_a_name_that_is_taken_is_refused_before_the_budget_is_spent(planner: PlannerProcess) -> None:
    ok(planner.home, "plan", "create", "--model", "fork", "--name", "taken")
    with _contest(planner, "taken") as process:
        _, said = process.communicate(timeout=60)  # of a budget of five minutes
    assert process.returncode != 0
    assert "there is a plan 'taken' already" in said and "choose another --name" in said


def test_a_plan_whose_name_was_taken_during_the_search_is_kept_under_its_digest(
    planner: PlannerProcess,
) -> None:
    with _contest(planner, "late") as process:
        assert process.stdout is not None and process.stderr is not None
        assert any("evaluated" in line for line in process.stderr)
        ok(planner.home, "plan", "create", "--model", "fork:replicas=7", "--name", "late")
        process.send_signal(signal.SIGINT)
        made = json.loads(process.stdout.read())
    assert process.returncode == 0
    assert made["plan"] == made["digest"][:12]
    assert made["known"] == f"'late' was given to another plan meanwhile, so this one is {made['plan']!r}"
    assert json.loads(ok(planner.home, "plan", "show", made["plan"], "--json"))["digest"] == made["digest"]
