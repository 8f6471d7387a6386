"""Measured times become a problem, and a choice of splits becomes a plan that says just that."""

import random
from functools import cache
from math import inf

import onnx
import pytest

from benchmarks import zoo
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.bound import bind
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits
from stageloom.shared.importer.splittable import SplitReader
from stageloom.shared.operator_parts import SplitAxis
from stageloom.shared.partition import Axis
from stageloom.shared.plan import ExecutorOptions, decode_plan
from stageloom.shared.schedule import OWN_RESOURCE, StageSchedule
from stageloom.shared.search.eop import splitter, splitters
from stageloom.shared.search.measured_splits import (
    ResourceTimes,
    SharedMemoryJoins,
    alike,
    batch_splits,
    granule_of,
    measured_problem,
)
from stageloom.shared.search.split_plan import ResourcePair, split_plan
from stageloom.shared.search.split_problem import Halves, SplitChoice, SplitProblem, Whole
from stageloom.shared.split_graph import SplitRole
from tests.executor.models import artifact_of
from tests.scratch import scratch

pytestmark = pytest.mark.more

NETWORKS = ["squeezenet", "googlenet", "inception_v3"]
PAIRS = [
    ResourcePair((ExecutorOptions(name="onnx"), ExecutorOptions(name="openvino")), ((0,), (1,))),
    ResourcePair((ExecutorOptions(name="onnx"), ExecutorOptions(name="onnx")), ((0,), (1,))),
]


@cache
def reader_of(name: str) -> SplitReader:
    return SplitReader(artifact_of(name))


@cache
def axes_of(name: str) -> tuple[tuple[SplitAxis, ...], ...]:
    return tuple(reader_of(name).axes(op) for op in range(len(artifact_of(name).graph.operators)))


def problem_of(name: str, seed: int, *, handover_s: float = 1e-5, slow: float = 3.0) -> SplitProblem:
    """Seeded times, by the operators' work."""
    artifact, rng = artifact_of(name), random.Random(seed)
    whole_s = [1e-5 + rng.uniform(0.5, 2) * 1e-10 * one.flop for one in artifact.graph.operators]
    times = []
    for factor in (1.0, slow):
        parts = {
            (op, axis.axis): {
                x: factor * whole_s[op] * x / axis.extent for x in {1, axis.extent // 2 or 1, axis.extent}
            }
            for op, offered in enumerate(axes_of(name))
            for axis in offered
        }
        alone_s = [factor * one for one in whole_s]
        times.append(ResourceTimes.of(alone_s, parts, 0.9 * sum(alone_s)))
    joins = SharedMemoryJoins(
        graph=artifact.graph,
        nodes=reader_of(name),
        axes=axes_of(name),
        handover_s=handover_s,
        copy_bytes_per_s=1e10,
        border_s=(times[0].border_s, times[1].border_s),
    )
    return measured_problem(artifact.graph, axes_of(name), (times[0], times[1]), joins)


def roles(artifact: Artifact, choice: SplitChoice, pair: ResourcePair) -> dict[SplitRole, int]:
    plan = split_plan("m", artifact.digest, artifact.graph, choice, pair)
    plan = decode_plan(plan.wire, plan.digest)
    bound = bind(plan, {artifact.digest: artifact.graph})
    schedule = plan.combined[0].schedule
    assert isinstance(schedule, StageSchedule)
    found = dict.fromkeys(SplitRole, 0)
    seen: list[int] = []
    origins = bound.models[0].origins
    for stage in schedule.stages:
        for number, group in enumerate(stage.groups):
            seen += group
            named = stage.resource(number)
            on = plan.lane_resources[0] if named == OWN_RESOURCE else named
            for op in group:
                role = bound.models[0].origin(op).role
                found[role] += 1
                if role is SplitRole.WHOLE:
                    assert choice.states[bound.models[0].origin(op).ops[0]] == Whole(on)
                else:
                    assert on == {SplitRole.FIRST: 0, SplitRole.SECOND: 1}.get(role, choice.home.resource)
    assert sorted(seen) == list(range(len(bound.models[0].graph.operators)))
    made = [(one.ops[0], one.ops[-1], one.boundary) for one in origins if one.role is SplitRole.FIRST]
    assert made == [(one.first, one.last, one.boundary) for one in choice.splits]
    return found


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("way", sorted(splitters()))
def test_a_choice_becomes_a_legal_plan_of_just_its_splits_and_resources(
    way: str, name: str, pair: ResourcePair
) -> None:
    for seed, slow in enumerate((3.0, 1.0, 0.5)):
        choice = splitter(way).choose(problem_of(name, seed, slow=slow))
        assert not reader_of(name).violations(choice.splits)
        found = roles(artifact_of(name), choice, pair)
        assert found[SplitRole.FIRST] == found[SplitRole.SECOND] == found[SplitRole.JOIN]
        assert found[SplitRole.FIRST] == len(choice.splits)


def test_chains_are_run_beside_each_other_where_splits_do_not_pay() -> None:
    artifact = artifact_of("googlenet")
    choice = splitter("eop").choose(problem_of("googlenet", 0, slow=1.0, handover_s=2e-5))
    assert choice.beside
    assert roles(artifact, choice, PAIRS[0])[SplitRole.WHOLE] > 0


def test_a_model_that_stays_whole_is_one_group() -> None:
    artifact = artifact_of("squeezenet")
    for home in (0, 1):
        whole = Whole(home)
        count = len(artifact.graph.operators)
        choice = SplitChoice(states=(whole,) * count, splits=(), seconds=1.0, home=whole)
        plan = split_plan("m", artifact.digest, artifact.graph, choice, PAIRS[0])
        schedule = plan.combined[0].schedule
        assert isinstance(schedule, StageSchedule)
        assert [stage.groups for stage in schedule.stages] == [(tuple(range(count)),)]
        assert plan.lane_resources == (home,) and plan.combined[0].executor == home


@pytest.mark.parametrize("name", NETWORKS)
def test_the_problem_has_each_axis_that_the_nodes_offer_and_legal_boundaries(name: str) -> None:
    problem, reader = problem_of(name, 1), reader_of(name)
    for op, (operator, offered) in enumerate(zip(problem.operators, axes_of(name), strict=True)):
        assert [(one.axis, one.extent) for one in operator.axes] == [(a.axis, a.extent) for a in offered]
        for times, axis in zip(operator.axes, offered, strict=True):
            assert times.granule == granule_of(axis) and times.granule % axis.quantum == 0
            assert all(0 < end < axis.extent and end % axis.quantum == 0 for end in times.boundaries), op
    assert any(operator.axes for operator in problem.operators)
    assert reader.axes(0) == axes_of(name)[0]


@pytest.mark.parametrize("name", ["squeezenet", "inception_v3"])
def test_what_is_carried_is_a_legal_run_and_a_halo_is_not_carried(name: str) -> None:
    problem, reader, graph = problem_of(name, 0), reader_of(name), artifact_of(name).graph
    carried = refused = 0
    for chain in problem.chains:
        for op in chain[1:]:
            for axis in problem.operators[op - 1].axes:
                for end in axis.boundaries[:3]:
                    state = problem.joins.carried(op, Halves(axis.axis, end))
                    if state is None:
                        refused += 1
                        continue
                    assert isinstance(state, Halves)
                    assert problem.operators[op].seconds(state) < inf
                    run = next(one for one in reader.axes(op - 1, op) if one.axis is state.axis)
                    assert state.boundary % run.quantum == 0
                    kind = graph.operators[op].kind
                    assert not (kind == "Conv" and state.axis is Axis.CHANNELS)
                    carried += 1
    assert carried and refused


def test_operators_are_alike_that_have_the_same_nodes_and_shapes() -> None:
    graph = artifact_of("googlenet").graph
    first = alike(graph, reader_of("googlenet"))
    assert all(place <= op and first[place] == place for op, place in enumerate(first))
    assert len(set(first)) < len(first)
    for op, place in enumerate(first):
        one, other = graph.operators[op], graph.operators[place]
        assert (one.kind, one.flop, one.weight_bytes) == (other.kind, other.flop, other.weight_bytes)


def test_shares_in_a_session_add_up_to_it_and_the_rest_is_border() -> None:
    times = ResourceTimes.of([1.0, 3.0], {(0, Axis.ROWS): {2: 1.0}}, 2.0)
    assert times.whole_s == (0.5, 1.5) and times.border_s == (0.5, 1.5)
    assert times.part_s == {(0, Axis.ROWS): {2: 0.5}}
    longer = ResourceTimes.of([1.0, 3.0], {}, 5.0)
    assert sum(longer.whole_s) == 5.0 and longer.border_s == (0.0, 0.0)


def imported(model: onnx.ModelProto) -> Artifact:
    folder = scratch()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    import_here(folder / "model.onnx", {}, folder, ImportLimits(), lambda line: None)
    return open_artifact(folder / ARTIFACT_NAME)


@cache
def batched() -> Artifact:
    model = zoo.build("googlenet", width=0.25, size=75)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 6
    return imported(model)


def test_a_batch_is_split_through_all_of_a_model_with_branches() -> None:
    artifact = batched()
    reader = SplitReader(artifact)
    choices = batch_splits(artifact.graph, reader, (1.0, 2.0), 0.1)
    assert [one.splits[0].boundary for one in choices] == [4, 3, 5]
    assert choices[0].seconds == pytest.approx(4 / 6 + 0.1)
    for choice in choices:
        assert not reader.violations(choice.splits)
        found = roles(artifact, choice, PAIRS[0])
        assert found == {SplitRole.WHOLE: 0, SplitRole.FIRST: 1, SplitRole.SECOND: 1, SplitRole.JOIN: 1}


def test_a_batch_of_one_is_not_split() -> None:
    assert batch_splits(artifact_of("squeezenet").graph, reader_of("squeezenet"), (1.0, 1.0), 0.0) == ()
