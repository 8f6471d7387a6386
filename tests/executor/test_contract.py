"""The contract of all executors that compute: whatever the schedule, the results are the whole model's.

Every tensor that crosses a block border is within 1e-4 of the whole model's in onnxruntime, with equal bits
in every repeat whatever the delays, on inputs that matter; and broken schedules are found. Here are models of
a quarter of their width, and ten repeats; with the marker `full` all models under all schedules, a hundred.
At full width, with the largest models too, in hours:

    STAGELOOM_CONTRACT_WIDTH=1 python -m pytest -m full tests/executor/test_contract.py
"""

import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from benchmarks import zoo
from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.executor.executors import EXECUTORS
from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.edge_agent.verify.standards import MAX_DIFFERENCE, MIN_SENSITIVITY
from stageloom.shared.bitmask import bits
from stageloom.shared.bound import BoundPlan
from stageloom.shared.errors import ExecutorError
from stageloom.shared.launch_list import Barrier
from stageloom.shared.plan import ExecutorOptions, Member
from stageloom.shared.schedule import Launch, StageSchedule, StreamSchedule
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.search.job import SearchJob, run_search
from stageloom.shared.search.rivals import policies, policy
from tests.executor.contract import cases
from tests.executor.contract.cases import (
    LARGE,
    LIGHT,
    SCHEDULES,
    Case,
    Outcome,
    Subject,
    Wave,
    artifact_subject,
    compare,
    loaded,
    onnx_subject,
    zoo_subject,
)
from tests.executor.contract.schedules import bound_of, plan_of
from tests.executor.installed import installed
from tests.scratch import scratch
from tests.verify.heads import ROUNDED, SATURATED, head_artifact

COMPUTING = [name for name in EXECUTORS if name not in ("null", "onnx_cuda", "torch_cuda")]
"""Executors that compute on any machine."""

WIDTH = float(os.environ.get("STAGELOOM_CONTRACT_WIDTH", "0.25"))
"""Of the zoo's models; from 1 on the large light models are compared, too."""

SLOW = [pytest.mark.full, pytest.mark.timeout(1200 if WIDTH < 1.0 else 7200)]
ZOO = tuple(zoo.ZOO)
LIGHT_MODELS = tuple(
    path.stem for path in sorted(LIGHT.glob("light_*.onnx")) if WIDTH >= 1.0 or path.stem not in LARGE
)
QUICK: dict[str, tuple[str, ...]] = {
    "squeezenet_bypass": ("sequential", "merged", "random_streams"),
    "googlenet": SCHEDULES,
    "inception_v3": ("ios", "merged", "opara"),
    "resnet50": ("greedy", "nimble"),
    "light_squeezenet": ("merged", "random_stages"),
}
"""Which schedules of which models run in every test run; the rest is `full`."""

ELSEWHERE = {"googlenet": ("ios", "merged", "random_streams")}
"""The same for executors other than `onnx`, whose sessions take far longer to make."""

FEW, MANY = 10, pytest.param(100, marks=SLOW)


@cache
def subject(name: str) -> Subject:
    """One model, made once per test process."""
    folder = scratch() / name
    if name in zoo.ZOO:
        return zoo_subject(name, folder, width=WIDTH, side=75 if WIDTH < 1.0 else None)
    return onnx_subject(name, LIGHT / f"{name}.onnx", folder)


@pytest.fixture(params=COMPUTING)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Every executor that computes; one whose packages are not installed is skipped."""
    made = installed(request.param)
    yield made
    made.close()


def agrees(executor: Executor, case: Case, repeats: int) -> Outcome:
    found = case.run(executor, repeats=repeats)
    assert min(one.pair.sensitivity for one in case.subjects) > MIN_SENSITIVITY
    assert not found.worst and found.stable and found.agrees, (case.name, found.worst)
    return found


def alone() -> Iterator[object]:
    """Every model under every schedule, on every executor."""
    for computing, name, schedule in itertools.product(COMPUTING, (*ZOO, *LIGHT_MODELS), SCHEDULES):
        quick = schedule in (QUICK if computing == "onnx" else ELSEWHERE).get(name, ())
        values, label = (computing, name, schedule), f"{computing}-{name}-{schedule}"
        yield pytest.param(*values, FEW, id=label, marks=[] if quick else SLOW)
        yield pytest.param(*values, 100, id=f"{label}-100", marks=SLOW)


@pytest.mark.promise("contract-suite-block-border")
@pytest.mark.parametrize(("executor", "name", "schedule", "repeats"), list(alone()), indirect=["executor"])
def test_every_block_border_equals_the_whole_model(
    executor: Executor, name: str, schedule: str, repeats: int
) -> None:
    case = cases.alone(subject(name), schedule, executor.name)
    found = agrees(executor, case, repeats)
    crossing = sum(len(block.live_out) for block in case.bound.models[0].blocks)
    assert found.tensors == crossing * repeats


@pytest.mark.promise("saturated-head-half-precision")
@pytest.mark.parametrize("kind", [*SATURATED, *ROUNDED])
def test_nets_with_saturated_heads_half_precision_and_int8_equal_the_whole_model(
    kind: str, executor: Executor
) -> None:
    one = artifact_subject(kind, head_artifact(kind), scratch())
    for schedule in ("greedy", "random_stages", "random_streams"):
        agrees(executor, cases.alone(one, schedule, executor.name), FEW)


def test_every_schedule_of_the_contract_runs_and_merges_are_among_them() -> None:
    """Else a mistake in the choice of cases could leave merges, or any other kind, without a test."""
    assert set(SCHEDULES) <= {schedule for schedules in QUICK.values() for schedule in schedules}
    for name, schedule in (
        ("squeezenet_bypass", "merged"),
        ("inception_v3", "ios"),
        ("googlenet", "ios_merge"),
    ):
        assert cases.alone(subject(name), schedule, "onnx").merges
    plan = cases.alone(subject("inception_v3"), "ios", "onnx").bound.plan
    assert any(
        len(stage.groups) > 1 and not stage.merge
        for one in plan.combined
        if isinstance(one.schedule, StageSchedule)
        for stage in one.schedule.stages
    )


TRIO = ("squeezenet_bypass", "googlenet", "squeezenet")
TOGETHER = [("ios", Barrier.DATA), ("random_streams", Barrier.FULL)]
"""Schedules and barriers of several models in every test run."""


@pytest.mark.promise("contract-suite-block-border")
@pytest.mark.parametrize("repeats", [FEW, MANY])
@pytest.mark.parametrize(
    ("schedule", "barrier"),
    [
        pytest.param(*one, marks=[] if one in TOGETHER else SLOW)
        for one in itertools.product(SCHEDULES, Barrier)
    ],
)
def test_combined_blocks_of_several_models_equal_the_whole_models(
    schedule: str, barrier: Barrier, repeats: int, executor: Executor
) -> None:
    agrees(
        executor,
        cases.together([subject(name) for name in TRIO[:2]], schedule, executor.name, barrier),
        repeats,
    )


@pytest.mark.promise("contract-suite-block-border")
@pytest.mark.parametrize("repeats", [2, MANY])
@pytest.mark.parametrize(
    "schedule", ["merged", pytest.param("random_stages", marks=pytest.mark.full), "opara"]
)
def test_every_mask_of_a_combined_block_equals_the_whole_models(
    schedule: str, repeats: int, executor: Executor
) -> None:
    seen = list(cases.masks([subject(name) for name in TRIO], schedule, executor.name))
    assert len(seen) == 2 * (2**3 - 1)
    with loaded(executor, seen[0].bound, seen[0].subjects):
        for case in seen:
            agrees(executor, case, repeats)


@pytest.mark.promise("contract-suite-block-border")
@pytest.mark.parametrize("repeats", [2, MANY])
@pytest.mark.parametrize("schedule", ["merged", pytest.param("random_stages", marks=pytest.mark.full)])
def test_rows_of_a_padded_batch_equal_single_runs(schedule: str, repeats: int, executor: Executor) -> None:
    seen = list(cases.batches(subject("squeezenet_bypass"), schedule, executor.name))
    with loaded(executor, seen[0].bound, seen[0].subjects):
        for case in seen:
            agrees(executor, case, repeats)


@pytest.mark.promise("contract-suite-block-border")
def test_replicas_in_one_combined_block_keep_their_instances_apart(executor: Executor) -> None:
    agrees(executor, cases.replicas(subject("googlenet"), "merged", executor.name), FEW)


# Broken schedules are found


def broken(bound: BoundPlan, schedule: StreamSchedule, before: int, after: int) -> BoundPlan:
    """The plan's only combined block under a schedule that does not know of one dependency."""
    (combined,) = bound.combined
    rows = list(combined.graph.predecessors)
    rows[after] &= ~(1 << before)
    graph = replace(combined.graph, predecessors=tuple(rows))
    return replace(
        bound, combined=(replace(combined, graph=graph, plan=replace(combined.plan, schedule=schedule)),)
    )


class SlowCaller:
    """A pause on the thread that runs the first stream, and none on the others'."""

    def __init__(self) -> None:
        self._slow = threading.get_ident()

    def __call__(self) -> None:
        if threading.get_ident() == self._slow:
            time.sleep(5e-3)


@pytest.mark.promise("merge-stage-convolution-equal")
@pytest.mark.parametrize("which", [3, 11, 20])
def test_a_dropped_edge_is_found(which: int, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. One operator runs on a stream of its own. 2. It does not wait for what it reads. 3. That shows."""
    one = subject("googlenet")
    bound = bound_of(
        replace(
            plan_of([one.artifact], [()], [[Member(0, 0, 0)]]), executor=ExecutorOptions(name=executor.name)
        ),
        [one.artifact],
    )
    graph = bound.combined[0].graph
    lone = [op for op in range(graph.size) if graph.predecessors[op].bit_count() == 1][which]
    (before,) = bits(graph.predecessors[lone])
    schedule = StreamSchedule(tuple(Launch(op, int(op == lone)) for op in range(graph.size)))
    whole = broken(bound, schedule, before, lone)
    sound = replace(whole, combined=(replace(whole.combined[0], graph=graph),))
    monkeypatch.setattr("tests.executor.contract.cases.Delays", lambda rng: SlowCaller())
    assert compare(executor, sound, [one], repeats=3).agrees
    assert any(not _agrees(executor, whole, one) for _ in range(5))


def _agrees(executor: Executor, bound: BoundPlan, one: Subject) -> bool:
    """A busy machine may start the operator after what it should have waited for; not five times in a row."""
    try:
        return compare(executor, bound, [one], repeats=3).agrees
    except ExecutorError:
        return False  # there was nothing to read


@pytest.mark.parametrize("block", [0, 2])
def test_a_stale_slot_is_found(block: int, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind one block there is, from the second instance on, what the instance before it left."""
    one = subject("squeezenet_bypass")
    bound = cases.alone(one, "greedy", executor.name).bound
    check, left = Wave.check, []

    def stale(
        self: Wave, repeat: int, member: Member, tensors: Mapping[str, np.ndarray], outcome: Outcome
    ) -> None:
        if member.block == block:
            left.append({name: array.copy() for name, array in tensors.items()})
            tensors = left[max(0, len(left) - 2)]
        check(self, repeat, member, tensors, outcome)

    monkeypatch.setattr(Wave, "check", stale)
    found = compare(executor, bound, [one], repeats=2)
    assert found.difference > MAX_DIFFERENCE and not found.agrees and f" {block}," in found.worst


# The part of the executor that computes nothing


@pytest.mark.promise("contract-suite-block-border")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_null_runs_every_operator_once_in_an_order_that_obeys_the_graph(schedule: str) -> None:
    for case in cases.masks([subject(name) for name in TRIO], schedule, "null"):
        null = NullExecutor()
        case.run(null, repeats=1)
        (record,) = null.history
        graph = case.bound.combined[0].graph
        seen = 0
        for _, ops in record.items:
            for op in ops:
                assert not seen >> op & 1 and not graph.predecessors[op] & ~seen
                seen |= 1 << op
        assert seen == graph.active_ops(sum(1 << model for model in case.models))


# Rival policies


def of_policies() -> Iterator[object]:
    """Every rival policy on every executor; of OpenVINO, which compiles for long, one in a usual run."""
    names = sorted(policies())
    for computing, name in itertools.product(COMPUTING, names):
        quick = computing != "openvino" or name == names[0]
        yield pytest.param(computing, name, marks=[] if quick else SLOW)


@pytest.mark.promise("plans-rival-policies-keep")
@pytest.mark.parametrize(("executor", "name"), list(of_policies()), indirect=["executor"])
def test_plans_of_rival_policies_equal_the_whole_models(name: str, executor: Executor) -> None:
    """Two real models under every policy, at the most tasks that an instance takes."""
    subjects = [subject("squeezenet_bypass"), subject("googlenet")]
    found = policy(name)
    job = SearchJob(
        models=tuple(
            ModelChoice(
                name=one.name,
                artifact=one.artifact.digest,
                graph=one.artifact.graph,
                partition=one.half,
                batch=3 if "batch" not in found.decides else 1,
            )
            for one in subjects
        ),
        scheduler="greedy" if "scheduler" not in found.decides else found.scheduler,
        executor=ExecutorOptions(name=executor.name),
    )
    plan = run_search(found.plan(job), lambda: 0.0)
    bound = bound_of(plan, [one.artifact for one in subjects])
    tasks = min(model.batch for model in plan.models)
    agrees(executor, Case(name, tuple(subjects), lambda: bound, tasks=tasks), 2)
