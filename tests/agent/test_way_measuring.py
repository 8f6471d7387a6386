"""The ways of a planner's models: what is measured, when, and what is told of it."""

from pathlib import Path

from stageloom.edge_agent.executor_choice import ExecutorTimes, ways
from stageloom.edge_agent.store import StateFile
from stageloom.edge_agent.way_measuring import (
    ATTEMPTS,
    BUSY_PAUSE_S,
    GPU_LIMIT_S,
    HELD_S,
    LIMIT_S,
    OWN_REQUESTS,
    PAUSE_S,
    QUIET_PAUSE_S,
    RECOVERY_S,
    ROUNDS,
    PlannedWays,
    WayRequests,
)
from stageloom.shared.messages.control import ArtifactNeed
from stageloom.shared.plan import ExecutorOptions, decode_plan
from stageloom.shared.search.compose import ModelChoice
from tests.search.graphs import CHAIN, DIAMOND, model

MODELS = [
    (ModelChoice(name=name, artifact=one[0], graph=one[1]), ArtifactNeed(name, one[0], 8))
    for name, one in (("a", model("a", DIAMOND)), ("b", model("b", CHAIN)))
]


def made(tmp_path: Path, cores: int = 2) -> tuple[PlannedWays, ExecutorTimes]:
    times = ExecutorTimes(StateFile(tmp_path / "times"), "here")
    wanted = ways(("onnx",), cores)
    return PlannedWays(WayRequests(times, wanted, first=OWN_REQUESTS)), times


def test_each_model_is_measured_in_each_way_twice_under_numbers_of_its_own(tmp_path: Path) -> None:
    found, _ = made(tmp_path)
    found.add(MODELS, 0.0)
    seen, now_s = [], 0.0
    while (request := found.next(now_s)) is not None:
        assert request.request >= OWN_REQUESTS and request.budget_s == LIMIT_S
        plan = decode_plan(request.plan, request.plan_digest)
        of = found.answered(1e3, now_s, quiet=True)
        assert of is not None and of[1] == plan.executor and of[0].name == plan.models[0].name
        seen.append((of[0].name, of[1].intra_op_threads))
        now_s += QUIET_PAUSE_S
    assert sorted(seen) == sorted([(name, threads) for name in "ab" for threads in (1, 2)] * ROUNDS)
    assert found.left == 0


def test_a_model_is_measured_once_and_what_is_known_never(tmp_path: Path) -> None:
    found, times = made(tmp_path)
    times.note(MODELS[0][0].artifact, ExecutorOptions(), 0.01)
    found.add(MODELS[:1], 0.0)
    assert found.left == ROUNDS, "two threads alone"
    found.add(MODELS[:1], 0.0)
    assert found.left == ROUNDS
    found.add(MODELS, 0.0)
    assert found.left == ROUNDS + 2 * ROUNDS


def test_models_that_no_plan_names_any_more_hold_nobody_up_and_are_measured_once_they_are_back(
    tmp_path: Path,
) -> None:
    found, _ = made(tmp_path)
    found.add(MODELS[:1], 0.0)
    found.add(MODELS[1:], 0.0)
    request = found.next(0.0)
    assert request is not None and decode_plan(request.plan).models[0].name == "b"
    assert found.left == len(found.requests.open) == 2 * ROUNDS, "of the one that the plan names"
    found.add(MODELS, 0.0)
    assert found.left == 4 * ROUNDS


def test_with_one_core_and_one_executor_there_is_nothing_to_measure(tmp_path: Path) -> None:
    found, _ = made(tmp_path, cores=1)
    found.add(MODELS, 0.0)
    assert found.left == 0 and found.next(100.0) is None


def test_one_measurement_at_a_time_with_pauses_that_are_longer_while_tasks_come(tmp_path: Path) -> None:
    found, _ = made(tmp_path)
    found.add(MODELS, 5.0)
    assert found.next(4.9) is None, "a plan's first tasks come first"
    assert found.next(5.0) is not None
    assert found.next(50.0) is None, "one is under way"
    found.answered(1e3, 50.0, quiet=False)
    assert found.next(50.0 + PAUSE_S - 0.1) is None
    assert found.next(50.0 + PAUSE_S) is not None


def test_a_measurement_is_no_reason_to_plan_anew_for_a_while_and_no_longer(tmp_path: Path) -> None:
    found, _ = made(tmp_path)
    found.add(MODELS, 5.0)
    assert not found.disturbs(5.0)
    found.next(5.0)
    assert found.disturbs(5.0) and found.disturbs(4.9 + HELD_S)
    assert not found.disturbs(5.0 + HELD_S), "what waits for longer waits for something else"
    found.answered(1e3, 6.0, quiet=False)
    assert found.disturbs(5.9 + RECOVERY_S) and not found.disturbs(6.0 + RECOVERY_S)


def test_a_gpu_that_is_measured_may_hold_tasks_up_while_kernels_are_looked_for(
    tmp_path: Path,
) -> None:
    times = ExecutorTimes(StateFile(tmp_path / "times"), "here")
    found = PlannedWays(WayRequests(times, ways(("torch_cuda", "onnx_cuda"), 2), first=OWN_REQUESTS))
    found.add(MODELS, 0.0)
    assert found.next(0.0) is not None
    assert found.disturbs(GPU_LIMIT_S - 0.1) and not found.disturbs(GPU_LIMIT_S)


def test_what_found_no_moment_is_made_again_later_and_given_up_in_the_end(tmp_path: Path) -> None:
    found, _ = made(tmp_path)
    found.add(MODELS[:1], 0.0)
    asked, now_s, given_up = 0, 0.0, 0
    while found.left:
        assert found.next(now_s) is not None
        asked += 1
        given_up += found.answered(None, now_s, quiet=False) is not None
        assert found.next(now_s + BUSY_PAUSE_S - 1.0) is None
        now_s += BUSY_PAUSE_S
    assert asked == ATTEMPTS * 2 * ROUNDS and given_up == 2 * ROUNDS


def test_after_a_way_ended_the_engine_process_that_executor_is_left_out_for_that_model(
    tmp_path: Path,
) -> None:
    """Whatever the threads, and when the model comes back, too."""
    times = ExecutorTimes(StateFile(tmp_path / "times"), "here")
    found = PlannedWays(WayRequests(times, ways(("onnx", "openvino"), 4), first=OWN_REQUESTS))
    found.add(MODELS, 0.0)
    seen, now_s = [], 0.0
    while (request := found.next(now_s)) is not None:
        plan = decode_plan(request.plan)
        ends = (plan.models[0].name, plan.executor.name) == ("a", "openvino")
        found.answered(None if ends else 1e3, now_s, quiet=True, cannot=ends, fatal=ends)
        seen.append((plan.models[0].name, plan.executor.name))
        now_s += QUIET_PAUSE_S
    assert seen.count(("a", "openvino")) == 1
    assert {seen.count(one) for one in set(seen)} == {1, 3 * ROUNDS} and not found.requests.open
    found.add(MODELS[1:], now_s)
    assert found.next(now_s) is None
    found.add(MODELS, now_s)
    asked = {(choice.name, options.name) for choice, options in found.requests.open.values()}
    assert ("a", "onnx") in asked and ("a", "openvino") not in asked


def test_what_cannot_run_is_not_tried_again(tmp_path: Path) -> None:
    found, _ = made(tmp_path)
    found.add(MODELS, 0.0)
    before = found.left
    assert found.next(0.0) is not None
    ended = found.answered(None, 0.0, quiet=True, cannot=True)
    assert ended is not None
    assert found.left == len(found.requests.open) == before - ROUNDS
    now_s = QUIET_PAUSE_S
    while found.next(now_s) is not None:
        assert found.answered(1e3, now_s, quiet=True) != ended
        now_s += QUIET_PAUSE_S
    assert found.left == 0
