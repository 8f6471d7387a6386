"""Which executor a device finds fastest: what it asks, what it concludes, what it remembers."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from stageloom.edge_agent import executor_choice
from stageloom.edge_agent.config import AgentConfig
from stageloom.edge_agent.executor_choice import ExecutorChoice, ExecutorTimes, OwnModels, ways
from stageloom.edge_agent.lifecycle.alone import first_plan
from stageloom.edge_agent.lifecycle.events import PlanMeasured
from stageloom.edge_agent.reporting.profiles import ENDED_TWICE
from stageloom.edge_agent.store import StateFile
from stageloom.edge_agent.way_measuring import GPU_LIMIT_S, ROUNDS
from stageloom.shared.messages.control import ArtifactNeed
from stageloom.shared.messages.telemetry import Row, decode_row, encode_row
from stageloom.shared.plan import MAX_LANES, ExecutorOptions, decode_plan
from stageloom.shared.search.compose import ModelChoice
from tests.search.graphs import CHAIN, DIAMOND, model

NAMES = ("onnx", "openvino")
A, B = model("a", DIAMOND), model("b", CHAIN, cuts=[1])
MODELS = OwnModels(
    tuple(ModelChoice(name=name, artifact=one[0], graph=one[1]) for name, one in [("a", A), ("b", B)]),
    tuple(ArtifactNeed(name, one[0], 8) for name, one in [("a", A), ("b", B)]),
    (0, 1),
)
ONNX, OPENVINO = (ExecutorOptions(name=name) for name in NAMES)


def times(tmp_path: Path, environment: str = "here") -> ExecutorTimes:
    return ExecutorTimes(StateFile(tmp_path / "times"), environment)


def choice(known: ExecutorTimes, names: tuple[str, ...] = NAMES, cores: int = 1) -> ExecutorChoice:
    return ExecutorChoice(MODELS, known, MODELS.best(known), ways(names, cores))


def answer(
    asking: ExecutorChoice, us: dict[tuple[str, str], float | None], *, cannot: bool = True
) -> list[PlanMeasured | None]:
    """Answer every request as measured; None: it was not, `cannot` says whether it ever can be."""
    answers = []
    for request in asking.requests():
        plan = decode_plan(request.plan, request.plan_digest)
        (need,) = request.artifacts
        assert plan.models[0].artifact == need.digest
        taken_us = us[plan.models[0].name, plan.executor.name]
        never = cannot and taken_us is None
        answers.append(asking.answered(request.request, taken_us, "why not", "here", cannot=never))
    return answers


SLOW_A = {("a", "onnx"): 3e3, ("a", "openvino"): 1e3, ("b", "onnx"): 1e3, ("b", "openvino"): 2e3}


def test_the_better_plan_comes_after_the_last_answer_and_says_why(tmp_path: Path) -> None:
    *before, last = answer(choice(times(tmp_path)), dict(SLOW_A))
    assert before == [None] * (ROUNDS * 4 - 1), "two models, two executors"
    assert last is not None and last.cause == "a 3.0 times as fast on openvino"
    plan = decode_plan(last.plan.wire, last.plan.ref.digest)
    assert {(one.members[0].model, plan.executors[one.executor].name) for one in plan.combined} == {
        (0, "openvino"),
        (1, "onnx"),
    }
    assert last.plan.artifacts == MODELS.needs


def test_more_replicas_than_lanes_share_as_many_lanes_as_a_plan_may_have(tmp_path: Path) -> None:
    config = AgentConfig(executor="onnx", replicas=64)
    plan = first_plan(config, MODELS, times(tmp_path), lambda line: None)
    read = decode_plan(plan.wire, plan.digest)
    assert read.lanes == MAX_LANES and {one.replicas for one in read.models} == {64}


def test_the_shortest_measurement_counts(tmp_path: Path) -> None:
    known = times(tmp_path)
    asking = choice(known)
    numbers = [request.request for request in asking.requests()]
    for number in numbers:
        asking.answered(number, 1e3 * (number + 1), "", "here")
    assert known.of(A[0]) == {ONNX: 2e-3, OPENVINO: 3e-3}


def test_what_was_measured_is_known_at_the_next_start(tmp_path: Path) -> None:
    answer(choice(times(tmp_path)), dict(SLOW_A))
    again = times(tmp_path)
    assert again.of(A[0]) == {ONNX: 3e-3, OPENVINO: 1e-3}
    assert [one.name for one in MODELS.best(again).executors] == ["openvino", "onnx"]
    assert choice(again).requests() == []


def test_what_was_measured_alone_is_told_to_a_planner_that_the_device_joins(tmp_path: Path) -> None:
    answer(choice(times(tmp_path)), {**SLOW_A, ("a", "openvino"): None})
    rows = [row for row in times(tmp_path).rows() if row.artifact == A[0]]
    assert [(row.executor, row.time_us, row.environment) for row in rows] == [
        ("onnx", 3e3, "here"),
        ("openvino", None, "here"),
    ]
    assert all(decode_row(encode_row(Row(1, row))).data == row for row in rows)


def test_another_environment_or_a_damaged_file_makes_it_void(tmp_path: Path) -> None:
    answer(choice(times(tmp_path)), dict(SLOW_A))
    assert not times(tmp_path, "power mode 2").of(A[0])
    StateFile(tmp_path / "times").save(b"\x93nothing")
    assert not times(tmp_path).of(A[0])


@pytest.mark.parametrize("changed", [range(3, 99), range(3, 5)])
def test_what_was_measured_while_the_power_mode_changed_is_not_remembered(
    tmp_path: Path, changed: range
) -> None:
    """For good or for a while: times of two modes say nothing of which executor is faster in either."""
    answer(choice(times(tmp_path), names=("onnx", "openvino")), dict.fromkeys(SLOW_A, 5e3))
    before = times(tmp_path).of(A[0])
    asking = choice(times(tmp_path), cores=2)
    requests = asking.requests()
    assert len(requests) > 5
    for number, request in enumerate(requests):
        environment = "in another mode" if number in changed else "here"
        assert asking.answered(request.request, 1e3 * (number + 1), "", environment) is None
    assert asking.left == 0
    (problem,) = asking.problems
    assert "changed while models were measured" in problem
    assert times(tmp_path).of(A[0]) == before


@pytest.mark.parametrize("cores", [1, 4])
def test_a_model_that_an_executor_cannot_run_stays_on_the_other_and_is_said_once(
    tmp_path: Path, cores: int
) -> None:
    """Each number of threads is tried some times, and fails alike."""
    asking = choice(times(tmp_path), cores=cores)
    answers = answer(asking, {**SLOW_A, ("a", "openvino"): None})
    assert answers[:-1] == [None] * (len(answers) - 1)
    assert asking.problems == ["model 'a' is not measured on openvino: why not"]
    of_a = times(tmp_path).of(A[0])
    assert {options.name: seconds for options, seconds in of_a.items()} == {
        "onnx": 3e-3,
        "openvino": math.inf,
    }


def test_an_executor_that_ends_the_engine_process_in_a_later_round_is_not_chosen(tmp_path: Path) -> None:
    known, seen = times(tmp_path), set[tuple[str, str]]()
    asking = choice(known)
    for request in asking.requests():
        plan = decode_plan(request.plan, request.plan_digest)
        way = plan.models[0].name, plan.executor.name
        ended = way == ("a", "openvino") and way in seen
        seen.add(way)
        taken_us, reason = (None, ENDED_TWICE) if ended else (SLOW_A[way], "")
        better = asking.answered(request.request, taken_us, reason, "here", cannot=ended)
    assert known.of(A[0]) == {ONNX: 3e-3, OPENVINO: math.inf}
    assert better is None


def test_what_found_no_time_is_not_remembered_and_is_asked_for_at_the_next_start(tmp_path: Path) -> None:
    """1. The device is too busy for one model on one executor: a plan is made without. 2. Only that is asked
    for. 3. It is measured, and counts."""
    asking = choice(times(tmp_path))
    assert answer(asking, {**SLOW_A, ("a", "openvino"): None}, cannot=False)[-1] is None
    assert asking.problems == ["model 'a' is not measured on openvino: why not"]
    again = choice(times(tmp_path))
    wanted = [decode_plan(one.plan, one.plan_digest) for one in again.requests()]
    assert [(plan.models[0].name, plan.executor.name) for plan in wanted] == [("a", "openvino")] * ROUNDS
    *_, last = answer(choice(times(tmp_path)), dict(SLOW_A))
    assert last is not None and last.cause == "a 3.0 times as fast on openvino"


@pytest.mark.parametrize("names", [(), ("onnx",)])
def test_with_one_executor_nothing_is_measured(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert choice(times(tmp_path), names).requests() == []


def test_every_width_of_a_lane_is_measured_on_every_executor(tmp_path: Path) -> None:
    asked = [decode_plan(one.plan, one.plan_digest) for one in choice(times(tmp_path), cores=4).requests()]
    found = {(plan.models[0].name, plan.executor.name, plan.executor.intra_op_threads) for plan in asked}
    assert found == {(model, name, threads) for model in "ab" for name in NAMES for threads in (1, 2, 4)}
    assert len(asked) == ROUNDS * len(found)


@pytest.mark.parametrize(
    ("a_s", "b_s", "threads_help", "cause"),
    [
        (0.006, 0.040, False, "b in 2 blocks"),
        (0.001, 0.080, False, "a in an express lane"),
        (0.001, 0.400, True, "1 lane of 2 threads, a in an express lane"),
    ],
)
def test_what_is_another_in_the_better_plan_is_said(
    tmp_path: Path, a_s: float, b_s: float, threads_help: bool, cause: str
) -> None:
    asking = choice(times(tmp_path), ("onnx",), cores=2)
    answers = []
    for request in asking.requests():
        plan = decode_plan(request.plan, request.plan_digest)
        width = plan.executor.intra_op_threads if threads_help else 1
        seconds = {"a": a_s, "b": b_s}[plan.models[0].name] / width
        answers.append(asking.answered(request.request, 1e6 * seconds, "", "here"))
    assert answers[-1] is not None
    assert answers[-1].cause == cause


def test_a_gpu_is_measured_once_with_time_to_look_for_kernels_and_takes_over(tmp_path: Path) -> None:
    asking = choice(times(tmp_path), ("onnx", "torch_cuda"), cores=2)
    asked = [(one.budget_s, decode_plan(one.plan, one.plan_digest).executor) for one in asking.requests()]
    on_gpu = [(budget_s, options) for budget_s, options in asked if options.name == "torch_cuda"]
    assert on_gpu == [(GPU_LIMIT_S, ExecutorOptions(name="torch_cuda"))] * 2

    asking = choice(times(tmp_path), ("onnx", "torch_cuda"))
    measured = {(model, name): us for model in "ab" for name, us in (("onnx", 3e4), ("torch_cuda", 1e3))}
    *_, last = answer(asking, dict(measured))
    assert last is not None
    assert last.cause == "a 30.0 times as fast on torch_cuda, b 30.0 times as fast on torch_cuda"
    assert decode_plan(last.plan.wire, last.plan.ref.digest).executors == (
        ExecutorOptions(name="torch_cuda"),
    )


def test_fewer_bits_are_tried_where_they_are_allowed_and_the_executor_knows_them() -> None:
    def tried(precision: str) -> set[tuple[str, str]]:
        found = ways(("onnx", "openvino", "torch_cuda", "onnx_cuda"), 1, precision)
        return {(one.name, one.precision) for one in found if one.precision != "fp32"}

    assert tried("fp32") == set()
    assert tried("bf16") == {("openvino", "bf16")}
    assert tried("fp16") == {("torch_cuda", "fp16"), ("onnx_cuda", "fp16")}
    assert tried("tf32") == {("torch_cuda", "tf32"), ("onnx_cuda", "tf32")}


@pytest.mark.parametrize(("flags", "runs"), [({"avx512_bf16"}, "bf16"), ({"avx512_vnni"}, "fp32")])
def test_a_processor_without_bf16_runs_in_fp32_whatever_was_remembered(
    flags: set[str], runs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_choice, "cpu_flags", lambda: flags)
    known = times(tmp_path)
    for artifact in (A[0], B[0]):
        known.note(artifact, OPENVINO, 2e-3)
        known.note(artifact, replace(OPENVINO, precision="bf16"), 1e-3)
    executors = replace(MODELS, precision="bf16").best(known).executors
    assert {one.precision for one in executors} == {runs}
