"""The onnxruntime executor: sessions that plans share, what they state, what fails alone, timing."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stageloom.edge_agent.executor.base import NOT_TIMED, TimingRequest
from stageloom.edge_agent.executor.onnx.cache import SessionCache, SessionKey, weight_bytes
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor, OnnxSession, open_session
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.onnx.timing import windows
from stageloom.edge_agent.executor.slot_store import Values
from stageloom.edge_agent.executor.timing import summary
from stageloom.shared.artifact import open_artifact
from stageloom.shared.engine.steps import InstanceId, PlanKey
from stageloom.shared.errors import ExecutorError
from stageloom.shared.importer.api import artifact_path, import_model
from stageloom.shared.plan import ExecutorOptions, IssueOrder, Member, Plan
from tests.executor.contract.schedules import StepMaker, bound_of, plan_of
from tests.executor.drive import KEY, load, run
from tests.executor.models import artifact_of, difference, random_inputs, reference
from tests.executor.small_models import SHARED_BYTES, unrolled
from tests.importer.classes import CLASSES

TOLERANCE = 1e-4


@pytest.fixture
def onnx() -> Iterator[OnnxExecutor]:
    """A new one."""
    made = OnnxExecutor()
    yield made
    made.close()


@pytest.mark.promise("second-plan-reuses-sessions")
def test_a_second_plan_reuses_sessions_and_states_no_bytes_for_them(onnx: OnnxExecutor) -> None:
    model = artifact_of("squeezenet")
    cuts = model.graph.partition("paper")
    groups = [[Member(0, 0, block)] for block in range(len(cuts) + 1)]
    first = plan_of([model], [cuts], groups)
    twice = [[Member(0, replica, block)] for replica in (0, 1) for block in range(len(cuts) + 1)]
    second = plan_of([model], [cuts], twice, replicas=2)
    assert onnx.stated_bytes(bound_of(first, [model])) > 0
    load(onnx, first, [model])
    count = onnx.sessions
    assert count == len(cuts) + 1
    assert onnx.stated_bytes(bound_of(second, [model])) == 0
    load(onnx, second, [model], PlanKey(2))
    assert onnx.sessions == count
    onnx.unload(KEY)
    assert onnx.sessions == count
    onnx.unload(PlanKey(2))
    assert onnx.sessions == 0


def test_weights_that_many_operators_read_count_once(onnx: OnnxExecutor) -> None:
    model = unrolled()
    assert sum(operator.weight_bytes for operator in model.graph.operators) == 8 * SHARED_BYTES
    bound = bound_of(plan_of([model], [()], [[Member(0, 0, 0)]]), [model])
    assert SHARED_BYTES < onnx.stated_bytes(bound) < 1.5 * SHARED_BYTES
    first_half = model.graph.weight_bytes(range(len(model.graph.operators) // 2))
    assert SHARED_BYTES < first_half < 1.1 * SHARED_BYTES


def test_copies_of_sessions_with_threads_are_stated_held_and_kept(onnx: OnnxExecutor) -> None:
    model = artifact_of("squeezenet")
    groups = [[Member(0, replica, 0)] for replica in (0, 1)]
    plans = [
        replace(plan_of([model], [()], groups, replicas=2, lanes=2), executor=options)
        for options in (ExecutorOptions(), ExecutorOptions(intra_op_threads=2))
    ]
    (key,) = onnx._session_bytes(bound_of(plans[0], [model]))
    stated = [onnx.stated_bytes(bound_of(plan, [model])) for plan in plans]
    assert stated[1] - stated[0] == weight_bytes(key, model.graph)
    load(onnx, plans[1], [model])
    assert onnx.sessions == 2 and onnx.held_bytes == stated[1]
    onnx.unload(KEY)
    assert sorted(one.copy for one in onnx._cache.idle()) == [0, 1]


@pytest.mark.promise("second-plan-reuses-sessions")
def test_a_plan_that_comes_back_states_no_bytes_until_its_memory_is_wanted(onnx: OnnxExecutor) -> None:
    model = artifact_of("squeezenet")
    plan = plan_of([model], [()], [[Member(0, 0, 0)]])
    bound = bound_of(plan, [model])
    alone = onnx.stated_bytes(bound)
    load(onnx, plan, [model])
    activations = onnx.held_bytes - sum(onnx._cache._weights.values())
    onnx.unload(KEY)
    assert onnx.stated_bytes(bound) == activations
    assert onnx.held_bytes == alone - activations, "what is kept is accounted for"
    onnx.drop_idle()
    assert (onnx.stated_bytes(bound), onnx.held_bytes) == (alone, 0)


def test_kept_sessions_are_bounded_by_their_weights_and_the_longest_idle_goes_first() -> None:
    model = artifact_of("squeezenet")
    keys = [SessionKey(model.digest, (op,), 1, 1) for op in range(4)]
    weights = [weight_bytes(key, model.graph) for key in keys]
    cache = SessionCache(open_session, idle_bytes=sum(weights[1:3]))
    made = [
        cache.ensure(key, PlanKey(number), lambda: ModelParts(model)) for number, key in enumerate(keys[:3])
    ]
    for number in range(3):
        cache.release(PlanKey(number))
    assert list(cache.idle()) == keys[1:3] and len(cache) == 0
    assert cache.get(keys[0]) is None
    again = cache.ensure(keys[1], PlanKey(9), lambda: pytest.fail("it is there"))
    assert again is made[1] and list(cache.idle()) == [keys[2]]
    cache.drop_idle()
    assert cache.get(keys[1]) is made[1] and cache.get(keys[2]) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ExecutorOptions(precision="fp4"), "does not know the precision 'fp4'"),
        (ExecutorOptions(issue=IssueOrder.SCHEDULE), "does not issue launches in the order 'schedule'"),
    ],
)
def test_a_plan_with_an_unknown_option_is_refused_and_leaves_nothing(
    options: ExecutorOptions, said: str, onnx: OnnxExecutor
) -> None:
    model = artifact_of("squeezenet")
    plan = plan_of([model], [()], [[Member(0, 0, 0)]])
    odd = Plan(models=plan.models, combined=plan.combined, executor=options)
    with pytest.raises(ExecutorError, match=said):
        load(onnx, odd, [model])
    assert onnx.sessions == 0


def test_a_plan_whose_second_artifact_cannot_be_opened_leaves_nothing_of_the_first(
    onnx: OnnxExecutor, tmp_path: Path
) -> None:
    first, second = sorted((artifact_of("squeezenet", seed=seed) for seed in (0, 1)), key=lambda a: a.digest)
    gone = replace(second, path=tmp_path / "gone")
    plan = plan_of([first, second], [(), ()], [[Member(0, 0, 0)], [Member(1, 0, 0)]])
    with pytest.raises(FileNotFoundError):
        load(onnx, plan, [first, gone])
    assert onnx.sessions == 0
    onnx.drop_idle()
    assert onnx.held_bytes == 0


def test_a_failed_step_fails_alone(onnx: OnnxExecutor) -> None:
    """1. An instance is fed an array of a wrong shape. 2. Its step fails. 3. The next instance is served."""
    model = artifact_of("squeezenet")
    bound = load(onnx, plan_of([model], [()], [[Member(0, 0, 0)]]), [model])
    steps = StepMaker(KEY, bound)
    with pytest.raises(ExecutorError):
        wrong = {"image": np.zeros((1, 3, 8, 8), np.float32)}
        run(onnx, steps.step(0, {0: (InstanceId(1), 1)}), {InstanceId(1): [wrong]})
    inputs = random_inputs(model.graph, 1)
    made = run(onnx, steps.step(0, {0: (InstanceId(2), 1)}), {InstanceId(2): [inputs]})
    wanted = reference(model, inputs, ["logits"])["logits"]
    assert difference(made[InstanceId(2)][0]["logits"], wanted) < TOLERANCE


def test_operators_are_timed_only_while_idle(onnx: OnnxExecutor) -> None:
    model = artifact_of("squeezenet")
    times = onnx.time_operators(model, TimingRequest(repeats=2), lambda: True)
    assert len(times) == len(model.graph.operators)
    assert min(time.median_us for time in times) > 0
    assert {time.runs for time in times} == {2}
    busy = onnx.time_operators(model, TimingRequest(wall_s=0.02), lambda: False)
    assert set(busy) == {NOT_TIMED}


@pytest.mark.promise("whatever-onnxruntime-runs-pinned")
def test_an_operator_that_refuses_seeded_values_is_not_timed_and_those_behind_it_are(
    onnx: OnnxExecutor, tmp_path: Path
) -> None:
    """A branch for a sample rate that only the model's users know; costs are estimated there."""
    sample = CLASSES["branch_that_never_runs"]()
    path = tmp_path / "m.onnx"
    path.write_bytes(sample.model.SerializeToString())
    report = import_model(path, shapes=sample.shapes, out_dir=tmp_path)
    model = open_artifact(artifact_path(tmp_path, report.digest))
    times = onnx.time_operators(model, TimingRequest(repeats=2), lambda: True)
    assert [time.runs for time in times] == [2, 0, 2]


def test_spread_of_an_operator_is_half_the_distance_of_its_16th_and_84th_percentile() -> None:
    one = summary([at / 1e6 for at in range(101)])
    assert (one.median_us, one.spread_us) == pytest.approx((50.0, 34.0))
    assert one.runs == 101
    assert summary([1.0]).spread_us == 0.0


def test_operators_are_loaded_in_windows_of_bounded_weights_and_each_once(onnx: OnnxExecutor) -> None:
    """Else a profile would hold a model's weights twice."""
    graph = artifact_of("squeezenet").graph
    sizes = [operator.weight_bytes for operator in graph.operators]
    for limit_bytes in (0, max(sizes), sum(sizes) // 3, sum(sizes)):
        found = list(windows(sizes, limit_bytes))
        assert [op for window in found for op in window] == list(range(len(sizes)))
        for window in found:
            assert sum(sizes[op] for op in window) <= limit_bytes or sum(sizes[op] > 0 for op in window) == 1
    assert len(list(windows(sizes, sum(sizes)))) == 1


def test_operators_take_turns_so_that_none_finds_its_data_in_the_cache(
    onnx: OnnxExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ran = artifact_of("squeezenet"), []
    run = OnnxSession.run

    def noted(self: OnnxSession, values: Values) -> None:
        ran.append(self.outputs)
        run(self, values)

    monkeypatch.setattr(OnnxSession, "run", noted)
    onnx.time_operators(model, TimingRequest(repeats=2), lambda: True)
    once = [tuple(operator.outputs) for operator in model.graph.operators]
    assert ran == once * 3, "one round to warm up, then the two that count"
