"""`plan create --scheduler eop`: from what a device measured of parts to a plan, and its explanation."""

import dataclasses
import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.eop.models import imported, layers
from stageloom.planner.api.handlers import handler_of
from stageloom.planner.api.routes import PLAN_CREATE
from stageloom.planner.auto_plan import splits_carry_more
from stageloom.planner.costs.drift import Renewal
from stageloom.planner.costs.records import found_schedules
from stageloom.planner.dispatch.ports import TelemetryWrite
from stageloom.planner.explain.plan import explain
from stageloom.planner.export.plan import export_plan
from stageloom.planner.plan_request import request_of
from stageloom.planner.plan_search import model_choices, record
from stageloom.planner.replan.compare import trial_comparison
from stageloom.planner.replan.observing import observe
from stageloom.planner.replan.predict import evaluation_of, predict, serves
from stageloom.planner.rollout.version import search_with_version
from stageloom.planner.schema.explanation import CostSource, EvaluationVerdict
from stageloom.planner.schema.plan import (
    ArrivalRate,
    CoreSet,
    ExportFormat,
    FurtherExecutor,
    ModelOptions,
    PlanCreateRequest,
)
from stageloom.planner.split_search import (
    MOST_SPLITS,
    Entrants,
    check_request,
    clear_gain,
    entrants,
    make,
    measured_on,
    splits_operators,
)
from stageloom.planner.store.costs import renew_costs, stage_costs
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan, plan_info
from stageloom.planner.store.predictions import considered_plans
from stageloom.planner.store.profiles import open_requests, request_profile, request_stage_profile
from stageloom.planner.tournament.stored import create
from stageloom.planner.twin.stored import served_steps, stored_times
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import bind
from stageloom.shared.clock import ManualClock, SystemClock
from stageloom.shared.errors import InputError
from stageloom.shared.importer.splittable import SplitReader
from stageloom.shared.messages.control import Alarm, Origin
from stageloom.shared.messages.telemetry import (
    KIND_OF,
    PLAN_CHARS,
    CoreRange,
    ExecutorFact,
    ExecutorTime,
    MachineFacts,
    OperatorTiming,
    PartProfileResult,
    PartTiming,
    ProfileResult,
    RowData,
    StageProfileResult,
    StageTiming,
    StepTimings,
    TrialEnded,
)
from stageloom.shared.partition import Axis, Split
from stageloom.shared.plan import ExecutorOptions, Plan, QueueRule, StepChoice, decode_plan
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.eop import at_best_home, eop_at_most, splitters
from stageloom.shared.search.job import run_search
from stageloom.shared.search.measured_splits import PartSample, SplitMeasurements, alike, split_problem
from stageloom.shared.search.split_plan import ResourcePair, split_plan
from tests.learning.pools import InlinePool
from tests.planner.api.context import OPERATOR, planner_context
from tests.planner.jobs import running_job
from tests.store.helpers import NANO, enrol, row
from tests.store.migrated import new_store

CLASS = "cpu-2-core"
LAYERS = 4
FACTS = MachineFacts((CoreRange(0, 1),), (ExecutorFact("onnx"), ExecutorFact("openvino")), 1)
ONE = PlanCreateRequest(models=(ModelOptions(model="dense"),), device=NANO, scheduler="eop")
PAIR = ResourcePair((ExecutorOptions(), ExecutorOptions()), ((0,), (1,)))
AXES: Mapping[Axis, tuple[int, ...]] = {Axis.BATCH: (2, 4, 8, 12, 16), Axis.CHANNELS: (8, 24, 32, 48, 64)}
HANDOVER_US = 100.0
COPY = 1e10


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A chain of dense layers over 16 rows."""
    return imported(layers(LAYERS), tmp_path_factory.mktemp("model") / "dense")


class Rig:
    """A store with a device and the model; the device measures by a law of its own."""

    def __init__(self, folder: Path, artifact: Artifact) -> None:
        self.store = new_store(folder)
        enrol(self.store)
        self.artifact = artifact
        self.store.add_model("dense", artifact.path, artifact.digest)
        self.axes = AXES
        self._rows = 0

    def tells(self, *rows: RowData) -> None:
        for data in rows:
            write = TelemetryWrite(NANO, (row(self._rows, data, kind=KIND_OF[type(data)]),), ())
            self._rows += 1
            LinkStore(self.store).append_telemetry([write])

    def parts(self, layer_us: float) -> list[PartTiming]:
        """Parts take their share, and 5 % of the whole more."""
        first = alike(self.artifact.graph, SplitReader(self.artifact))
        return [
            PartTiming(op, axis, extent, layer_us * (0.05 + 0.95 * extent / extents[-1]), 1.0, 5)
            for op in sorted(set(first))
            for axis, extents in self.axes.items()
            for extent in extents
        ]

    def measures(
        self,
        executor: str,
        layer_us: float,
        *,
        first_us: float | None = None,
        handover_us: float = HANDOVER_US,
        operators: int = LAYERS,
    ) -> None:
        """The device answers a request for splits; it has time for so many operators."""
        digest, options = self.artifact.digest, ExecutorOptions(name=executor)
        first_us = layer_us if first_us is None else first_us
        (number,), _ = self.store.write(request_profile, NANO, ["dense"], executor=options, parts=9)
        self.tells(
            ExecutorTime(digest, executor, 1, 1, CLASS, LAYERS * layer_us, 9),
            PartProfileResult(number, digest, CLASS, tuple(self.parts(layer_us)), handover_us, COPY),
            ProfileResult(
                number,
                digest,
                1,
                CLASS,
                tuple(OperatorTiming(op, layer_us if op else first_us, 1.0, 5) for op in range(operators)),
                True,
            ),
        )

    def made(self, request: PlanCreateRequest = ONE) -> tuple[Plan, str]:
        found = make(self.store, request, check_request(request))
        bind(found.plan, {self.artifact.digest: self.artifact.graph})
        return found.plan, found.known


@pytest.fixture
def rig(tmp_path: Path, artifact: Artifact) -> Iterator[Rig]:
    made = Rig(tmp_path, artifact)
    made.tells(FACTS)
    yield made
    made.store.close()


def test_a_batch_split_through_the_model_is_chosen_where_the_second_core_is_as_fast(rig: Rig) -> None:
    rig.measures("onnx", 1000.0)
    plan, known = rig.made()
    (model,) = plan.models
    assert model.splits == (Split(0, LAYERS - 1, Axis.BATCH, 8),)
    assert [one.cores for one in plan.resources] == [(0,), (1,)] and plan.lanes == 1
    assert known == (
        "dense: batch split at 8, 1 split, predicted to take 2.1 ms, "
        "against 4 ms whole on onnx on core 0 and 4 ms whole on onnx on core 1"
    )


AUTO = replace(ONE, scheduler=None)


@pytest.mark.parametrize(
    ("layer_us", "handover_us", "more"),
    [(10_000.0, HANDOVER_US, True), (1000.0, HANDOVER_US, False), (10_000.0, 20_000.0, False)],
    ids=["long", "short", "dear hand-over"],
)
def test_a_plan_from_what_is_known_has_splits_where_these_carry_clearly_more(
    rig: Rig, layer_us: float, handover_us: float, more: bool
) -> None:
    """Tasks of 40 ms; at 4 ms what a step takes beside its inference tells, and two lanes carry more."""
    rig.measures("onnx", layer_us, handover_us=handover_us)

    context = planner_context(rig.store, ManualClock())
    reply = handler_of(PLAN_CREATE)(context, AUTO, OPERATOR)(running_job(ManualClock()))
    plan = decode_plan(reply.plan.wire)
    assert (reply.plan.scheduler, bool(plan.models[0].splits)) == (("eop", True) if more else ("auto", False))
    assert plan.lanes == (1 if more else 2)
    assert ("predicted to take" in reply.known) == more
    assert (plan.step_choice, plan.models[0].queue.rule) == (StepChoice.DEADLINE, QueueRule.DEADLINE)
    if more:
        again = request_of(rig.store, rig.store.read(plan_info, reply.plan.plan))
        assert rig.made(replace(again, device=NANO))[0].digest == plan.digest


def test_splits_that_carry_less_than_a_session_of_two_threads_are_left(rig: Rig) -> None:
    rig.measures("onnx", 10_000.0)
    split = clear_gain(rig.store, AUTO, NANO)
    assert split is not None and splits_carry_more(rig.store, AUTO, NANO, split.seconds)
    rig.tells(ExecutorTime(rig.artifact.digest, "onnx", 2, 1, CLASS, 20_000.0, 9))
    assert not splits_carry_more(rig.store, AUTO, NANO, split.seconds)


def test_nothing_is_split_where_it_is_not_known_to_gain_or_a_rule_forbids_it(rig: Rig) -> None:
    assert clear_gain(rig.store, AUTO, NANO) is None
    rig.measures("onnx", 10_000.0, handover_us=40_000.0)
    assert clear_gain(rig.store, AUTO, NANO) is None
    rig.measures("onnx", 10_000.0)
    assert clear_gain(rig.store, AUTO, NANO) is not None
    batch = replace(AUTO, models=(ModelOptions(model="dense", batch=4),))
    assert clear_gain(rig.store, batch, NANO) is None, "parts were measured of single tasks"


def test_without_a_gain_the_plan_has_no_split_and_says_so(rig: Rig) -> None:
    rig.measures("onnx", 10.0, handover_us=900.0)
    plan, known = rig.made()
    assert plan.models[0].splits == () and "no split is predicted to pay" in known


def test_a_plan_without_splits_tells_how_many_operators_run_whole_on_the_other_resource(rig: Rig) -> None:
    """`separate` has each operator on its faster resource, whatever a hand-over takes."""
    rig.measures("onnx", 1000.0, handover_us=20_000.0)
    rig.measures("openvino", 1100.0, first_us=500.0, handover_us=20_000.0)
    both = replace(ONE, scheduler="separate", further_executors=(FurtherExecutor(name="openvino"),))
    plan, known = rig.made(both)
    assert plan.models[0].splits == ()
    assert known.startswith(
        "dense: no split, 1 operator whole on the other resource, predicted to take 23.6 ms, against 4 ms"
    )


def test_the_pair_of_executors_that_is_predicted_to_be_fastest_is_taken_unless_one_is_named(rig: Rig) -> None:
    rig.measures("onnx", 1000.0)
    rig.measures("openvino", 500.0)
    plan, _ = rig.made()
    assert [one.name for one in plan.executors] == ["openvino"]
    named, _ = rig.made(replace(ONE, further_executors=(FurtherExecutor(name="openvino"),)))
    assert [one.name for one in named.executors] == ["openvino", "onnx"]
    assert named.models[0].splits[0].boundary == 11, "two thirds on the faster one"
    placed, _ = rig.made(replace(ONE, resources=(CoreSet(cores=(1,)), CoreSet(cores=(0,)))))
    assert [one.name for one in placed.executors] == ["onnx"]
    assert [one.cores for one in placed.resources] == [(1,), (0,)]


@pytest.mark.promise("split-plans-from-device")
@pytest.mark.parametrize("name", sorted(splitters()))
def test_each_splitter_finds_from_the_store_what_it_finds_from_the_same_times_directly(
    rig: Rig, name: str
) -> None:
    rig.measures("onnx", 1000.0)
    samples = [
        PartSample(one.operator, one.axis, one.extent, one.median_us / 1e6) for one in rig.parts(1000.0)
    ]
    measured = SplitMeasurements(
        alone_s=(1e-3,) * LAYERS,
        parts=samples,
        session_s=LAYERS * 1e-3,
        handover_s=HANDOVER_US / 1e6,
        copy_bytes_per_s=COPY,
    )
    graph = rig.artifact.graph
    problem = split_problem(graph, SplitReader(rig.artifact), (measured, measured))
    if name == "eop":
        choice = at_best_home(lambda one: eop_at_most(one, MOST_SPLITS), problem)
        wanted = {split_plan("dense", rig.artifact.digest, graph, choice, PAIR).models[0].splits}
        wanted.add((Split(0, LAYERS - 1, Axis.BATCH, 8),))
    else:
        wanted = {splitters()[name].choose(problem).splits}
    plan, _ = rig.made(replace(ONE, scheduler=name))
    assert plan.models[0].splits in wanted


def test_parts_are_compared_with_operators_of_the_same_state_of_a_device_that_drifted(rig: Rig) -> None:
    """1. Measured. 2. It drifts, so its operators' times double, and parts stay. 3. It measures again."""

    def known_us() -> tuple[float, float, float]:
        (choice,) = model_choices(rig.store, ONE.models)
        times, _ = measured_on(rig.store, NANO, choice, PAIR).times
        whole_part = max(times.parts, key=lambda one: one.extent)
        return 1e6 * times.alone_s[0], 1e6 * whole_part.seconds, 1e6 * times.session_s / LAYERS

    rig.measures("onnx", 1000.0)
    assert known_us() == pytest.approx((1000.0, 1000.0, 1000.0))
    renewal = Renewal(factors={}, others=2.0, stages=(), unseen=())
    rig.store.write(renew_costs, NANO, renewal, ExecutorOptions(), ratio=2.0, steps_since_us=0)
    assert known_us() == pytest.approx((1000.0, 1000.0, 1000.0))
    rig.measures("onnx", 2100.0)
    assert known_us() == pytest.approx((2100.0, 2100.0, 2100.0))


def test_a_plan_file_makes_the_plan_again(rig: Rig) -> None:
    rig.measures("onnx", 1000.0)
    rig.measures("openvino", 700.0)
    queue = ModelOptions(model="dense", queue_max_tasks=7, launch_interval_s=0.5)
    plan, _ = rig.made(replace(ONE, models=(queue,)))
    assert (plan.models[0].queue.max_tasks, plan.models[0].launch_interval_us) == (7, 500_000)
    rig.store.write(add_plan, "split", plan, "eop")
    again = request_of(rig.store, rig.store.read(plan_info, "split"))
    assert splits_operators(again)
    assert rig.made(replace(again, device=NANO))[0].digest == plan.digest


def test_a_version_of_a_split_model_is_planned_whole_where_the_split_one_begins(
    rig: Rig, tmp_path: Path
) -> None:
    """Nobody measured parts of the version."""
    rig.measures("onnx", 1000.0)
    rig.measures("openvino", 500.0)
    plan, _ = rig.made(replace(ONE, further_executors=(FurtherExecutor(name="openvino"),)))
    info = rig.store.write(add_plan, "split", plan, "eop")
    longer = imported(layers(LAYERS + 1), tmp_path / "longer")
    rig.store.add_model("dense", longer.path, longer.digest)
    made = run_search(search_with_version(rig.store, info, "dense", 2, longer.digest), lambda: 0.0)
    assert (made.models[0].artifact, made.models[0].splits) == (longer.digest, ())
    assert made.executors[made.combined[0].executor].name == "openvino"
    assert made.cores_of(0) == plan.cores_of(0)


def test_a_plan_is_explained_with_its_splits_and_what_it_takes_without(rig: Rig) -> None:
    rig.measures("onnx", 1000.0)
    found = make(rig.store, ONE, NANO)
    rig.store.write(add_plan, "split", found.plan, "eop")
    said = explain(rig.store, "split", NANO)
    (split,) = said.splits
    assert (split.model, split.first, split.last, split.axis, split.boundary) == (
        "dense", 0, LAYERS - 1, "n", 8
    )  # fmt: skip
    assert (split.extent, split.measured) == (16, True)
    assert split.halves_us == pytest.approx((2100.0, 2100.0), rel=1e-6)
    assert split.whole_us == pytest.approx(4000.0)
    assert said.unsplit_ms == pytest.approx(4.0)
    assert said.predicted_ms == pytest.approx(2.2), "the longer half and a hand-over"
    (block,) = said.blocks
    assert 0.0 <= block.over_bound < 0.06, "a half takes its part of the work and 5 % more"
    assert block.optimum_us is None, "the cheapest stages of one resource are no measure"
    told = {(line.source, line.sure, line.runs) for line in block.lines}
    assert told == {(CostSource.OPERATORS, True, 5)}, "the parts were measured"
    assert 1e3 * found.prediction.busy == pytest.approx(said.predicted_ms)


def test_half_of_a_batch_of_two_is_explained_by_what_the_half_was_measured_to_take(
    rig: Rig, tmp_path: Path
) -> None:
    """Two extents are all that such an axis has."""
    rig.artifact = imported(layers(LAYERS, rows=2), tmp_path / "two")
    rig.store.add_model("dense", rig.artifact.path, rig.artifact.digest)
    rig.axes = {Axis.BATCH: (1, 2)}
    rig.measures("onnx", 1000.0)
    rig.store.write(add_plan, "split", make(rig.store, ONE, NANO).plan, "eop")
    said = explain(rig.store, "split", NANO)
    assert said.splits[0].halves_us == pytest.approx((2100.0, 2100.0), rel=1e-6)
    assert said.predicted_ms == pytest.approx(2.2), "the half and a hand-over"


def test_every_figure_of_a_split_plan_counts_the_parts_that_were_measured(rig: Rig) -> None:
    """The table of plans, the exported timeline, and the comparison of a trial."""
    rig.measures("onnx", 1000.0)
    found = make(rig.store, ONE, NANO)
    rig.store.write(add_plan, "split", found.plan, "eop")
    graphs = {rig.artifact.digest: rig.artifact.graph}
    rows = [evaluation_of(found.plan, EvaluationVerdict.FOUND, scheduler="eop", how="operator")]
    record(rig.store, NANO, "eop", found.plan, graphs, rows)
    said = explain(rig.store, "split", NANO)
    (this,) = said.others
    assert this.now_ms == pytest.approx(said.predicted_ms)
    assert (said.operators, said.operators_measured) == (LAYERS, LAYERS)
    (file,) = export_plan(rig.store, "split", ExportFormat.PERFETTO, NANO).files
    runs = [event["dur"] for event in json.loads(file.text)["traceEvents"] if event.get("cat") == "group"]
    assert sorted(runs)[-2:] == pytest.approx(said.splits[0].halves_us)
    rig.tells(
        TrialEnded(
            *(1, 1, Origin.PLANNER, "trial", "accept", found.plan.digest, found.plan.digest),
            *(1.0, 0.9, 1.1, 8, 1, 2),
        )
    )
    compared = trial_comparison(rig.store, NANO, None)
    assert compared.predicted_candidate_busy is not None
    assert 1e3 * compared.predicted_candidate_busy == pytest.approx(said.predicted_ms)
    assert compared.predicted_control_busy == compared.predicted_candidate_busy


def test_a_re_plan_prices_the_split_plan_that_runs_as_its_explanation_does(rig: Rig) -> None:
    rig.measures("onnx", 1000.0)
    plan, _ = rig.made()
    rig.store.write(add_plan, "split", plan, "eop")
    alarm = Alarm(
        boot=7, number=1, at_us=1, cause="variance", value=2.0, threshold=1.0,
        plan=plan.digest, loads=(), samples=(),
    )  # fmt: skip
    number = LinkStore(rig.store).record_alarm(NANO, alarm)
    assert number is not None
    seen = observe(rig.store, NANO, number, 1)
    busy_s = predict(plan, seen.graphs, seen.costs, ()).busy
    assert 1e3 * busy_s == pytest.approx(explain(rig.store, "split", NANO).predicted_ms)


def test_nothing_of_a_split_plan_is_kept_as_a_schedule_of_its_model(rig: Rig) -> None:
    rig.measures("onnx", 1000.0)
    plan, _ = rig.made()
    assert found_schedules(plan, {rig.artifact.digest: rig.artifact.graph}) == {}


def test_stages_and_steps_of_a_split_plan_are_no_costs_of_its_model_without_splits(rig: Rig) -> None:
    """A split plan numbers operators anew, so its stages and steps are of others than the artifact's."""
    rig.measures("onnx", 1000.0)
    plan, _ = rig.made()
    rig.store.write(add_plan, "split", plan, "eop")
    number, _ = rig.store.write(request_stage_profile, NANO, "split")
    timing = StageTiming(0, 2100.0, 1.0, 9)
    rig.tells(
        StageProfileResult(number, plan.digest, 0, CLASS, (timing,), 2200.0, True),
        StepTimings(plan.digest[:PLAN_CHARS], 0, 1, 50, 110_000, 3_000),
    )
    assert rig.store.read(open_requests, [number]) == [], "the request is answered all the same"
    assert rig.store.read(stage_costs, CLASS, ExecutorOptions()) == []
    bound = bind(plan, {rig.artifact.digest: rig.artifact.graph})
    assert served_steps(rig.store, NANO, bound) == []


def test_what_is_missing_is_named_with_the_command_that_measures_it(rig: Rig) -> None:
    with pytest.raises(InputError, match="has not measured parts of dense on onnx") as missing:
        rig.made()
    assert "stageloom device profile nano --model dense --executor onnx --splits" in missing.value.remedy
    rig.measures("onnx", 1000.0)
    with pytest.raises(InputError, match="parts of dense on openvino"):
        rig.made(replace(ONE, further_executors=(FurtherExecutor(name="openvino"),)))
    with pytest.raises(InputError, match="two resources need 4 cores, and nano has 2"):
        rig.made(replace(ONE, intra_op_threads=2))
    with pytest.raises(InputError, match="two resources need 3 cores, and nano has 2"):
        rig.made(replace(ONE, further_executors=(FurtherExecutor(name="openvino", intra_op_threads=2),)))
    with pytest.raises(InputError, match="no core 7"):
        rig.made(replace(ONE, resources=(CoreSet(cores=(0,)), CoreSet(cores=(7,)))))


def test_the_command_that_measures_what_is_missing_names_the_version_that_is_planned(
    rig: Rig, tmp_path: Path
) -> None:
    longer = imported(layers(LAYERS + 1), tmp_path / "longer")
    rig.store.add_model("dense", longer.path, longer.digest)
    with pytest.raises(InputError, match="has not measured parts of dense@1 on onnx") as missing:
        rig.made(replace(ONE, models=(ModelOptions(model="dense@1"),)))
    assert "device profile nano --model dense@1 --executor onnx --splits" in missing.value.remedy


def test_an_operator_that_was_not_measured_is_missing_and_not_estimated(rig: Rig) -> None:
    """An estimate among measured times would change what all parts are scaled by."""
    rig.measures("onnx", 1000.0, operators=LAYERS - 1)
    with pytest.raises(InputError, match=r"and each of its operators; run .* with a longer --budget"):
        rig.made()
    rig.measures("onnx", 1000.0)
    rig.made()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": None}, "eop plans for a device"),
        ({"lanes": 2}, "eop decides lanes"),
        ({"budget_s": 5.0}, "eop decides budget s"),
        ({"precision": "bf16"}, "eop decides precision"),
        (
            {"further_executors": (FurtherExecutor(name="openvino", precision="bf16"),)},
            "eop decides precision of openvino",
        ),
        ({"models": (ModelOptions(model="dense", replicas=2),)}, "eop decides replicas of dense"),
        ({"models": (ModelOptions(model="dense"),) * 2}, "eop plans one model, and 2 are meant"),
        ({"resources": (CoreSet(cores=(0,)),)}, "plans for two resources"),
    ],
)
def test_what_a_split_plan_cannot_heed_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        check_request(replace(ONE, **changes))


def test_plans_with_splits_compete_for_a_budget_where_parts_were_measured_and_they_clearly_pay(
    rig: Rig,
) -> None:
    """The twin judges them by what was measured, and they are never the plan that is there at once."""
    asked = replace(ONE, scheduler=None, budget_s=2.0, rates=(ArrivalRate(model="dense", per_s=20.0),))
    assert entrants(rig.store, asked, NANO) == Entrants((), {})
    rig.measures("onnx", 1000.0, handover_us=3000.0)
    assert entrants(rig.store, asked, NANO).candidates == (), "no split pays with such hand-overs"
    rig.measures("onnx", 1000.0)
    found = entrants(rig.store, asked, NANO)
    assert "batch split at 8" in [one.name for one in found.candidates]
    assert len({one.plan.digest for one in found.candidates}) == len(found.candidates)
    heavy = replace(asked, models=(replace(asked.models[0], weight=3),))
    assert entrants(rig.store, heavy, NANO) == found, "one model takes no turns"
    none = entrants(rig.store, replace(asked, executor="openvino"), NANO)
    assert none == Entrants((), {})
    assert entrants(rig.store, replace(asked, precision="bf16"), NANO) == Entrants((), {})
    for one in (found, none):
        assert pickle.loads(pickle.dumps(one)) == one, "a tournament's plans are judged in other processes"
    reply = create(rig.store, InlinePool(), SystemClock(), asked, running_job(SystemClock()), found)
    assert reply.contest is not None
    judged = {one.name: one for one in reply.contest.judged}
    assert next(iter(judged)) == "sequential, whole"
    split, whole = judged["eop, batch split at 8"], judged["sequential, whole"]
    assert split.p99_s < whole.p99_s
    assert reply.contest.winner.startswith("eop, ") and reply.plan.scheduler == "eop"
    said = explain(rig.store, reply.plan.plan, NANO)
    looked_at = rig.store.read(considered_plans, serves(decode_plan(reply.plan.wire)), CLASS)
    (busy,) = [one.busy for one, _ in looked_at if one.plan == said.digest]
    assert busy is not None
    assert 1e3 * busy == pytest.approx(said.predicted_ms), "predicted from the same parts"


def test_a_tournaments_split_plan_is_a_plan_file_only_where_eop_chooses_it_itself(rig: Rig) -> None:
    """The tournament goes by what happens under load, eop by the least that one task takes."""
    rig.measures("onnx", 1000.0)
    asked = replace(ONE, scheduler=None, budget_s=2.0)
    found = {one.name: one for one in entrants(rig.store, asked, NANO).candidates}
    least = min(found.values(), key=lambda one: one.seconds)
    other = max(found.values(), key=lambda one: one.seconds)
    assert other.seconds > least.seconds
    for name, one in (("least", least), ("other", other)):
        rig.store.write(add_plan, name, one.plan, "eop")
        row = evaluation_of(one.plan, EvaluationVerdict.FOUND, scheduler=f"eop, {one.name}", how="contest")
        record(rig.store, NANO, "eop", one.plan, {rig.artifact.digest: rig.artifact.graph}, [row])
    again = request_of(rig.store, rig.store.read(plan_info, "least"))
    assert rig.made(replace(again, device=NANO))[0].digest == least.plan.digest
    with pytest.raises(InputError, match="this plan is of eop, and no scheduler"):
        request_of(rig.store, rig.store.read(plan_info, "other"))


def test_the_twin_takes_measured_parts_and_a_hand_over_per_split(rig: Rig) -> None:
    rig.measures("onnx", 1000.0)
    asked = replace(ONE, scheduler=None, budget_s=2.0)
    known = entrants(rig.store, asked, NANO)
    (batch,) = [one for one in known.candidates if one.name == "batch split at 8"]
    bound = bind(batch.plan, {rig.artifact.digest: rig.artifact.graph})
    times, _ = stored_times(rig.store, NANO, bound)
    assert times.costs.parts == known.parts
    overhead_s = times.device.step_s + times.device.item_s
    took_s = times.of_plan(bound).step(0, 1, (1,)).seconds
    assert took_s == pytest.approx(2.1e-3 + HANDOVER_US / 1e6 + overhead_s, rel=0.02)
    rig.store.write(add_plan, "split", batch.plan, "eop")
    assert 1e3 * (took_s - overhead_s) == pytest.approx(explain(rig.store, "split", NANO).predicted_ms)
    without_parts = StepTimes(times.device, dataclasses.replace(times.costs, parts={}))
    linear_s = without_parts.of_plan(bound).step(0, 1, (1,)).seconds
    assert linear_s < took_s, "without parts a half is half of the whole, and a join costs its bytes"


def test_parts_count_on_each_executor_of_a_twin_that_is_fitted_to_what_was_served(rig: Rig) -> None:
    rig.measures("onnx", 1000.0)
    rig.measures("openvino", 500.0)
    whole = compose([ModelChoice(name="dense", artifact=rig.artifact.digest, graph=rig.artifact.graph)])
    plan, _ = rig.made(replace(ONE, further_executors=(FurtherExecutor(name="openvino"),)))
    served = dataclasses.replace(whole, executor=plan.executor)
    rig.store.write(add_plan, "whole", served, "sequential")
    rig.tells(StepTimings(served.digest[:PLAN_CHARS], 0, 1, 50, 50 * LAYERS * 500, 9_000))
    bound = bind(plan, {rig.artifact.digest: rig.artifact.graph})
    times, source = stored_times(rig.store, NANO, bound)
    assert "fitted to 1 programs" in source
    for options in plan.executors:
        assert list(times.costs.under(options).parts) == [rig.artifact.digest]


def test_the_wire_form_keeps_the_splits(rig: Rig) -> None:
    rig.measures("onnx", 1000.0)
    plan, _ = rig.made()
    assert decode_plan(plan.wire) == plan and len(plan.wire) < 1024
