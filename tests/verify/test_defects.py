"""Broken schedules must be found: each defect is planted in the real executor, on real models."""

from itertools import combinations

import pytest

from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.verify.check import verify_artifact
from stageloom.edge_agent.verify.report import VerifyReport
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import bind
from stageloom.shared.errors import ExecutorError, ExitCode
from stageloom.shared.graph import Graph
from stageloom.shared.ids import TensorId
from stageloom.shared.launch_list import lower
from stageloom.shared.search.compose import ModelChoice, compose
from tests.executor.models import artifact_of
from tests.verify.broken import (
    Broken,
    DroppedEdge,
    Failing,
    Poisoned,
    StaleSlot,
    SwappedGroups,
    Unprepared,
    Unsteady,
)

pytestmark = pytest.mark.more

MODELS = ["squeezenet_bypass", "googlenet"]
EVERY = [10, pytest.param(1, marks=pytest.mark.full)]
"""Break every n-th operator or block, one at a time."""


def check(artifact: Artifact, executor: OnnxExecutor, schedule: str = "greedy") -> VerifyReport:
    return verify_artifact(artifact, schedule, executor, repeats=2, delays=False)


def caught(artifact: Artifact, executor: Broken, schedule: str = "greedy") -> None:
    report = check(artifact, executor, schedule)
    assert executor.hits, "the defect never struck"
    assert report.exit_code is ExitCode.FAILED
    assert report.sensitivity > 1e-2
    assert report.difference > 1e-4


def first_in_session(artifact: Artifact, partition: str = "paper") -> list[int]:
    """Operators that do not run in one session with the operator before them."""
    graph = artifact.graph
    choice = ModelChoice(name="m", artifact=artifact.digest, graph=graph, partition=partition)
    bound = bind(compose([choice], scheduler="greedy"), {artifact.digest: graph})
    return [
        int(block.graph.model_op(item.ops[0]))
        for block in bound.combined
        for item in lower(block.plan.schedule, block.graph, block.full_mask)
    ]


@pytest.mark.promise("broken-schedules-caught-verify")
@pytest.mark.parametrize("schedule", ["sequential", "greedy"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_executor_without_a_defect_agrees(name: str, schedule: str) -> None:
    report = check(artifact_of(name), Broken(), schedule)
    assert report.exit_code is ExitCode.OK


@pytest.mark.promise("broken-schedules-caught-verify")
@pytest.mark.parametrize("stale", [False, True], ids=["zero", "stale"])
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", MODELS)
def test_dropped_edge_is_caught(name: str, every: int, stale: bool) -> None:
    artifact = artifact_of(name)
    for op in first_in_session(artifact)[::every]:
        caught(artifact, DroppedEdge(artifact.graph, op, stale=stale))


@pytest.mark.promise("broken-schedules-caught-verify")
@pytest.mark.parametrize("schedule", ["sequential", "greedy"])
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", MODELS)
def test_stale_slot_is_caught(name: str, every: int, schedule: str) -> None:
    artifact = artifact_of(name)
    for block in range(0, len(artifact.graph.partition("paper")) + 1, every):
        caught(artifact, StaleSlot(block), schedule)


def twins(graph: Graph) -> list[tuple[TensorId, TensorId]]:
    """Pairs of operators of one shape that can run in one stage, by what they make."""
    made = [operator.outputs[0] for operator in graph.operators]
    return [
        (made[a], made[b])
        for a, b in combinations(range(len(graph.operators)), 2)
        if graph.predecessors[a] == graph.predecessors[b]
        and graph.tensors[made[a]].shape == graph.tensors[made[b]].shape
        and graph.tensors[made[a]].dtype == graph.tensors[made[b]].dtype
    ]


@pytest.mark.promise("broken-schedules-caught-verify")
@pytest.mark.parametrize("name", MODELS)
def test_swapped_groups_are_caught(name: str) -> None:
    artifact = artifact_of(name)
    pairs = twins(artifact.graph)
    assert pairs
    for left, right in pairs:
        caught(artifact, SwappedGroups(left, right))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_value_that_is_no_number_is_never_agreement(value: float) -> None:
    artifact = artifact_of("squeezenet_bypass")
    executor = Poisoned(len(artifact.graph.operators) - 1, value)
    report = check(artifact, executor)
    assert executor.hits
    assert report.difference == float("inf")
    assert report.exit_code is ExitCode.FAILED
    assert report.to_json()["difference"] is None


def test_repeats_with_other_bits_are_caught_below_the_tolerance() -> None:
    report = check(artifact_of("squeezenet_bypass"), Unsteady())
    assert report.difference <= 1e-4
    assert not report.stable
    assert report.exit_code is ExitCode.FAILED


def test_task_that_fails_is_no_agreement() -> None:
    report = check(artifact_of("squeezenet_bypass"), Failing(7))
    assert report.failed_tasks == report.runs
    assert "planted" in report.reason
    assert report.exit_code is ExitCode.FAILED


def test_schedule_that_was_never_run_proves_nothing() -> None:
    with pytest.raises(ExecutorError, match="could not prepare the schedule"):
        check(artifact_of("squeezenet_bypass"), Unprepared())
