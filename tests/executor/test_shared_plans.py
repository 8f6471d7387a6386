"""Plans whose blocks run on several executors and whose lanes keep to their cores."""

import errno
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.executor.executors import Executors
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.executor.onnx.program import SessionProgram
from stageloom.edge_agent.executor.slot_store import Values
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.errors import ExecutorError, TaskFailed
from stageloom.shared.ids import Digest
from stageloom.shared.plan import ExecutorOptions, Plan, Resource
from stageloom.shared.search.compose import ModelChoice, compose
from tests.executor.installed import installed
from tests.executor.models import artifact_of, difference, random_inputs, reference
from tests.executor.split_cases import SplitSubject, random_splits, split_plan

TIMEOUT_S = 60.0
CORES = tuple(sorted(os.sched_getaffinity(0)))


class Watched(OnnxExecutor):
    """Sessions of onnxruntime under another name, that notes on which cores items ran; may break."""

    name = "watched"

    def __init__(self) -> None:
        super().__init__()
        self.cores: set[frozenset[int]] = set()
        self.broken = self.refuses = False

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        if self.refuses:
            raise ExecutorError("no such operator")
        super().load(key, bound, artifacts)

    def _run_item(self, program: SessionProgram, index: int, slots: Mapping[int, Values]) -> None:
        self.cores.add(frozenset(os.sched_getaffinity(0)))
        if self.broken:
            raise RuntimeError("the backend broke")
        super()._run_item(program, index, slots)


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def engine(watched: Watched) -> Iterator[InProcessEngine]:
    def make(name: str) -> Executor:
        return watched if name == "watched" else installed(name)

    with InProcessEngine(Executors(make)) as made:
        yield made


def in_turns(lanes: int = 2) -> Plan:
    """SqueezeNet in its paper's blocks, every second one run by the other executor."""
    model = artifact_of("squeezenet")
    choice = ModelChoice(
        name="a", artifact=model.digest, graph=model.graph, partition="paper", replicas=lanes
    )
    plan = compose([choice], lanes=lanes)
    return replace(
        plan,
        further_executors=(ExecutorOptions(name="watched"),),
        combined=tuple(replace(one, executor=one.members[0].block % 2) for one in plan.combined),
    )


def test_blocks_of_two_executors_hand_their_tensors_over(engine: InProcessEngine) -> None:
    model = artifact_of("squeezenet")
    engine.activate(engine.load(in_turns(), {model.digest: model}))
    inputs = [random_inputs(model.graph, seed) for seed in range(8)]
    futures = [engine.submit("a", one) for one in inputs]
    for one, future in zip(inputs, futures, strict=True):
        got = future.result(TIMEOUT_S)
        wanted = reference(model, one, list(got))
        assert all(difference(got[name], wanted[name]) <= 1e-4 for name in got)


PAIRS = [("onnx", "openvino"), ("onnx", "torch_cpu")]
ALL = ("torch_cpu", "openvino", "onnx")
SIDE_BY_SIDE = [*(pytest.param(one, marks=pytest.mark.full) for one in PAIRS), ALL]
"""Compiling for OpenVINO takes long, so every run of the tests has all three in one plan once."""
QUICK_SIDE_BY_SIDE = [PAIRS[1], *(pytest.param(one, marks=pytest.mark.full) for one in (PAIRS[0], ALL))]
"""Of what is about the engine that passes tensors on, whoever computes them."""


def shuffled(
    names: tuple[str, ...], seed: int, *, batch: int = 1, lanes: int = 2, delay_us: int = 1000
) -> Plan:
    """Two networks in their papers' blocks, each block (in all replicas) on a random one of the executors."""
    rng = random.Random(seed)
    chosen: dict[tuple[int, int], int] = {}
    choices = [
        ModelChoice(
            name=name,
            artifact=model.digest,
            graph=model.graph,
            partition="paper",
            replicas=lanes,
            batch=batch,
            batch_max_delay_us=delay_us if batch > 1 else 0,
        )
        for name, model in (("a", artifact_of("squeezenet")), ("b", artifact_of("inception_v3", side=75)))
    ]
    plan = compose(choices, scheduler="greedy", lanes=lanes, executor=ExecutorOptions(name=names[0]))
    return replace(
        plan,
        further_executors=tuple(ExecutorOptions(name=name) for name in names[1:]),
        combined=tuple(
            replace(
                one,
                executor=chosen.setdefault(
                    (one.members[0].model, one.members[0].block), rng.randrange(len(names))
                ),
            )
            for one in plan.combined
        ),
    )


def answers(engine: InProcessEngine, tasks: int = 6) -> dict[tuple[str, int, str], np.ndarray]:
    """What tasks of both networks come to, checked by the reference: by model, task and output."""
    models = {"a": artifact_of("squeezenet"), "b": artifact_of("inception_v3", side=75)}
    inputs = [
        (name, seed, random_inputs(model.graph, seed))
        for seed in range(tasks)
        for name, model in models.items()
    ]
    futures = [engine.submit(name, one) for name, _, one in inputs]
    found = {}
    for (name, seed, one), future in zip(inputs, futures, strict=True):
        got = future.result(TIMEOUT_S)
        wanted = reference(models[name], one, list(got))
        for output, array in got.items():
            assert difference(array, wanted[output]) <= 1e-4, (name, seed, output)
            found[name, seed, output] = array.copy()
    return found


@pytest.mark.more
@pytest.mark.promise("executors-side-by-side")
@pytest.mark.parametrize("names", SIDE_BY_SIDE, ids="+".join)
@pytest.mark.parametrize("seed", [0, *(pytest.param(one, marks=pytest.mark.full) for one in (1, 2))])
def test_blocks_on_any_of_several_executors_compute_the_whole_models_bit_by_bit_alike(
    engine: InProcessEngine, names: tuple[str, ...], seed: int
) -> None:
    models = {one.digest: one for one in (artifact_of("squeezenet"), artifact_of("inception_v3", side=75))}
    engine.activate(engine.load(shuffled(names, seed), models))
    first, second = answers(engine), answers(engine)
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("names", QUICK_SIDE_BY_SIDE, ids="+".join)
def test_batches_pass_from_one_executor_to_another(engine: InProcessEngine, names: tuple[str, ...]) -> None:
    models = {one.digest: one for one in (artifact_of("squeezenet"), artifact_of("inception_v3", side=75))}
    engine.activate(engine.load(shuffled(names, 7, batch=3), models))
    answers(engine, 8)


@pytest.mark.parametrize("tasks", [3, 7])
@pytest.mark.parametrize("names", QUICK_SIDE_BY_SIDE, ids="+".join)
def test_a_batch_that_is_partly_filled_passes_from_one_executor_to_another(
    engine: InProcessEngine, names: tuple[str, ...], tasks: int
) -> None:
    """The last step has three tasks in programs made for four."""
    models = {one.digest: one for one in (artifact_of("squeezenet"), artifact_of("inception_v3", side=75))}
    engine.activate(engine.load(shuffled(names, 7, batch=4, delay_us=100_000), models))
    answers(engine, tasks)


@pytest.mark.parametrize("names", QUICK_SIDE_BY_SIDE, ids="+".join)
def test_instances_that_move_to_a_plan_of_other_blocks_keep_their_tensors(
    engine: InProcessEngine, names: tuple[str, ...]
) -> None:
    """Plans that give the blocks to other executors take turns while tasks are in flight."""
    small = {one.digest: one for one in (artifact_of("squeezenet"), artifact_of("inception_v3", side=75))}
    keys = [engine.load(shuffled(names, seed), small) for seed in range(3)]
    engine.activate(keys[0])
    model = artifact_of("inception_v3", side=75)
    inputs = [random_inputs(model.graph, seed) for seed in range(18)]
    futures = []
    for at, one in enumerate(inputs):
        futures.append(engine.submit("b", one))
        if at % 3 == 2:
            engine.activate(keys[(at // 3 + 1) % 3], keep=True)
    for one, future in zip(inputs, futures, strict=True):
        got = future.result(TIMEOUT_S)
        wanted = reference(model, one, list(got))
        assert all(difference(got[name], wanted[name]) <= 1e-4 for name in got)


def test_a_step_that_fails_on_one_executor_leaves_nothing_on_the_others(
    engine: InProcessEngine, watched: Watched
) -> None:
    model = artifact_of("squeezenet")
    engine.activate(engine.load(in_turns(), {model.digest: model}))
    watched.broken = True
    with pytest.raises(TaskFailed, match="the backend broke"):
        engine.submit("a", random_inputs(model.graph, 1)).result(TIMEOUT_S)
    watched.broken = False
    assert engine.submit("a", random_inputs(model.graph, 2)).result(TIMEOUT_S)


def test_lanes_keep_to_their_cores_until_another_plan_runs(engine: InProcessEngine, watched: Watched) -> None:
    model = artifact_of("squeezenet")
    cores = CORES[:2]
    free = in_turns(len(cores))
    resources = tuple(Resource(cores=(core,)) for core in cores)
    pinned = replace(free, resources=resources, lane_resources=tuple(range(len(cores))))
    for plan, wanted in [
        (pinned, {frozenset({core}) for core in cores}),
        (free, {frozenset(CORES)}),
    ]:
        watched.cores.clear()
        engine.activate(engine.load(plan, {model.digest: model}))
        futures = [engine.submit("a", random_inputs(model.graph, seed)) for seed in range(8)]
        assert all(isinstance(one, np.ndarray) for f in futures for one in f.result(TIMEOUT_S).values())
        assert watched.cores <= wanted and watched.cores


def test_a_lane_whose_core_has_gone_runs_on_any_and_that_is_said_once(
    engine: InProcessEngine,
    watched: Watched,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A power mode takes a core away while the plan is loaded: a thread can no longer be kept to it."""
    model = artifact_of("squeezenet")
    plan = replace(in_turns(1), resources=(Resource(cores=CORES[:1]),), lane_resources=(0,))
    keys = [engine.load(plan, {model.digest: model}) for _ in range(2)]
    without_cores(monkeypatch, CORES[:1])
    for key in (*keys, keys[0]):
        engine.activate(key, keep=True)
        assert engine.submit("a", random_inputs(model.graph, 1)).result(TIMEOUT_S)
    free = engine.load(in_turns(1), {model.digest: model})
    engine.activate(free)
    assert engine.submit("a", random_inputs(model.graph, 1)).result(TIMEOUT_S)
    assert watched.cores == {frozenset(CORES)}
    assert caplog.text.count("can be used any more") == 1


def without_cores(monkeypatch: pytest.MonkeyPatch, gone: tuple[int, ...]) -> None:
    """From now on the kernel refuses to keep a thread to these cores."""
    keep_to = os.sched_setaffinity

    def refusing(thread: int, cores: Iterable[int]) -> None:
        if set(cores) <= set(gone):
            raise OSError(errno.EINVAL, "Invalid argument")
        keep_to(thread, cores)

    monkeypatch.setattr(os, "sched_setaffinity", refusing)


def test_a_core_that_the_process_may_not_use_is_refused(engine: InProcessEngine) -> None:
    model = artifact_of("squeezenet")
    absent = replace(in_turns(1), resources=(Resource(cores=(1023,)),), lane_resources=(0,))
    with pytest.raises(ExecutorError, match="resource 0 wants core 1023, and the process may use"):
        engine.load(absent, {model.digest: model})


def test_a_plan_that_the_second_executor_refuses_leaves_no_session_in_its_cache(
    engine: InProcessEngine, watched: Watched
) -> None:
    """The first one makes those of the groups that the second is to run, and puts them there."""
    model = artifact_of("squeezenet")
    engine.activate(engine.load(in_turns(), {model.digest: model}))
    before = watched.sessions
    splits = random_splits(SplitSubject.of(model), random.Random(1))
    plan = split_plan(model, splits, executors=("onnx", "watched"))
    watched.refuses = True
    with pytest.raises(ExecutorError, match="no such operator"):
        engine.load(plan, {model.digest: model})
    assert watched.sessions == before
    watched.refuses = False
    engine.load(plan, {model.digest: model})
    assert watched.sessions > before


def test_executors_whose_tensors_lie_elsewhere_share_no_plan(engine: InProcessEngine) -> None:
    model = artifact_of("squeezenet")
    plan = replace(in_turns(1), further_executors=(ExecutorOptions(name="null"),))
    with pytest.raises(ExecutorError, match="'null' cannot share a plan with onnx; use one executor"):
        engine.load(plan, {model.digest: model})
