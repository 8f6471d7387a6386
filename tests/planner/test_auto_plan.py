"""`plan create` without a scheduler: what is known of a device makes its plan; a shown plan is made again."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stageloom.planner.auto_plan import KnownModel, chosen_rules, is_auto, make, named, sentence
from stageloom.planner.dispatch.ports import TelemetryWrite
from stageloom.planner.plan_request import request_of
from stageloom.planner.plan_search import search_job
from stageloom.planner.replan.predict import evaluation_of
from stageloom.planner.schema.explanation import EvaluationVerdict
from stageloom.planner.schema.plan import CoreSet, FurtherExecutor, ModelOptions, PlanCreateRequest
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.machines import Machine
from stageloom.planner.store.plans import add_plan, plan_info
from stageloom.planner.store.predictions import keep_considered
from stageloom.shared.artifact import pack_artifact
from stageloom.shared.bound import bind
from stageloom.shared.errors import InputError, PlanError
from stageloom.shared.messages.telemetry import CoreRange, ExecutorFact, ExecutorTime, MachineFacts, RowData
from stageloom.shared.plan import (
    CombinedBlock,
    ExecutorOptions,
    Place,
    PlacementPolicy,
    Plan,
    QueueRule,
    Resource,
    StepChoice,
)
from stageloom.shared.schedule import Stage, StageSchedule
from stageloom.shared.search.arrangements import express_of
from stageloom.shared.search.compose import Combination
from stageloom.shared.search.job import run_search
from tests.store.helpers import NANO, add_model, chain, enrol, row, small_plan
from tests.store.migrated import new_store

CLASS = "cpu-2-core"
FACTS = MachineFacts(
    (CoreRange(0, 1),), (ExecutorFact("onnx"), ExecutorFact("openvino"), ExecutorFact("null")), 1
)
AUTO = PlanCreateRequest(device=NANO)


class Rig:
    """A store with a device, `long` of 40 operators and `short` of 4."""

    def __init__(self, folder: Path) -> None:
        self.store = new_store(folder)
        enrol(self.store)
        self.artifacts = {
            name: add_model(self.store, folder, name, operators)
            for name, operators in (("long", 40), ("short", 4))
        }
        self._rows = 0

    def tells(self, *rows: RowData) -> None:
        for data in rows:
            write = TelemetryWrite(NANO, (row(self._rows, data),), ())
            self._rows += 1
            LinkStore(self.store).append_telemetry([write])

    def took(self, model: str, executor: str, ms: float | None, threads: int = 1, *, batch: int = 1) -> None:
        """The device measured a model."""
        us = None if ms is None else 1e3 * ms
        self.tells(ExecutorTime(self.artifacts[model], executor, threads, batch, CLASS, us, 9))

    def made(self, request: PlanCreateRequest = AUTO) -> tuple[Plan, str]:
        asked = named(self.store, request)
        assert is_auto(self.store, asked)
        plan, known = make(self.store, asked, NANO)
        bind(plan, {model.artifact: self.store.graph(model.artifact) for model in plan.models})
        return plan, known


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.store.close()


def run_by(plan: Plan) -> dict[str, set[str]]:
    """Per model the executors of its blocks."""
    found: dict[str, set[str]] = {}
    for block in plan.combined:
        for member in block.members:
            name = plan.models[member.model].name
            found.setdefault(name, set()).add(plan.executors[block.executor].name)
    return found


def test_a_device_that_told_what_it_has_gets_a_lane_per_core_and_the_fastest_executors(rig: Rig) -> None:
    rig.tells(FACTS)
    for model, executor, ms in [
        *(("long", "onnx", 8.0), ("long", "openvino", 4.0)),
        *(("short", "onnx", 1.0), ("short", "openvino", 2.0)),
    ]:
        rig.took(model, executor, ms)
    plan, known = rig.made()
    assert (plan.lanes, [one.cores for one in plan.resources]) == (2, [(0,), (1,)])
    assert plan.step_choice is StepChoice.DEADLINE
    assert {model.queue.rule for model in plan.models} == {QueueRule.DEADLINE}
    assert run_by(plan) == {"long": {"openvino"}, "short": {"onnx"}}
    assert known == (
        "nano has 2 cores and onnx and openvino; "
        "long on openvino in 4 ms (8 ms on onnx), short on onnx in 1 ms (2 ms on openvino)"
    )


def test_an_executor_that_computes_nothing_is_never_the_fastest(rig: Rig) -> None:
    rig.tells(FACTS)
    for model in ("long", "short"):
        rig.took(model, "onnx", 8.0)
        rig.took(model, "null", 0.01)
    plan, _ = rig.made()
    assert run_by(plan) == {"long": {"onnx"}, "short": {"onnx"}}


def test_lanes_are_wider_where_the_device_measured_that_two_threads_carry_more(rig: Rig) -> None:
    rig.tells(FACTS)
    for threads, long_ms, short_ms in ((1, 42.0, 5.0), (2, 19.0, 2.4)):
        rig.took("long", "onnx", long_ms, threads)
        rig.took("short", "onnx", short_ms, threads)
    plan, known = rig.made()
    assert (plan.lanes, plan.cores_of(0)) == (1, (0, 1))
    assert "long on onnx with 2 threads in 19 ms (42 ms on onnx)" in known


def test_cores_are_said_to_be_used_as_far_as_the_plan_names_them(rig: Rig) -> None:
    """1. A lane for one core each. 2. Two threads carry more, on lanes of two. 3. On a GPU lanes keep to
    none."""
    executors = (ExecutorFact("onnx"), ExecutorFact("torch_cuda"))
    rig.tells(MachineFacts((CoreRange(0, 19),), executors, 1))
    assert "nano has 20 cores, 16 of them used and onnx" in rig.made()[1]
    for threads, ms in ((1, 42.0), (2, 19.0)):
        for model in ("long", "short"):
            rig.took(model, "onnx", ms, threads)
    plan, known = rig.made()
    assert (plan.lanes, plan.cores_of(9)) == (10, (18, 19)) and "nano has 20 cores and onnx" in known
    for model in ("long", "short"):
        rig.took(model, "torch_cuda", 0.1)
    plan, known = rig.made()
    assert not plan.resources and "nano has 20 cores and onnx" in known


def test_a_gpu_that_the_device_measured_runs_all_models(rig: Rig) -> None:
    rig.tells(MachineFacts((CoreRange(0, 1),), (ExecutorFact("onnx"), ExecutorFact("torch_cuda")), 1))
    for model in ("long", "short"):
        rig.took(model, "onnx", 30.0)
        rig.took(model, "torch_cuda", 1.0)
    plan, known = rig.made()
    assert run_by(plan) == {"long": {"torch_cuda"}, "short": {"torch_cuda"}}
    assert known == (
        "nano has 2 cores and onnx and torch_cuda; "
        "long on torch_cuda in 1 ms (30 ms on onnx), short on torch_cuda in 1 ms (30 ms on onnx)"
    )


def test_what_was_not_measured_is_said_with_the_command_that_measures_it(rig: Rig) -> None:
    rig.tells(FACTS)
    rig.took("long", "onnx", 8.0)
    plan, known = rig.made()
    assert run_by(plan) == {"long": {"onnx"}, "short": {"onnx"}}
    assert "long on onnx in 8 ms" in known
    assert "short not measured on onnx yet, `stageloom device profile nano --executor onnx` does it" in known
    assert (
        "long, short not measured on openvino yet, `stageloom device profile nano --executor openv" in known
    )


def add_batchable(rig: Rig, folder: Path, *names: str) -> None:
    """A model of 40 operators whose tasks may share a run, under each name."""
    graph = dataclasses.replace(chain("wide", 40), batchable=True)
    digest, blob = pack_artifact(graph, b"wide")
    path = folder / "wide.artifact"
    path.write_bytes(blob)
    for name in names:
        rig.store.add_model(name, path, digest)
        rig.artifacts[name] = digest


def test_a_model_with_a_batch_is_measured_by_the_command_that_is_named(rig: Rig, tmp_path: Path) -> None:
    """1. Nothing is known. 2. One task alone was measured. 3. The batch was measured."""
    rig.tells(FACTS)
    add_batchable(rig, tmp_path, "wide")
    request = replace(AUTO, models=(ModelOptions(model="wide", batch=8), ModelOptions(model="short")))
    command = "`stageloom device profile nano --executor openvino --batch 8`"
    missing = f"wide not measured on openvino in batches of 8 yet, {command} does it"
    said = rig.made(request)[1]
    assert missing in said and "short not measured on openvino yet, `stageloom device profile nano" in said
    rig.took("wide", "onnx", 8.0)
    rig.took("wide", "openvino", 4.0)
    plan, said = rig.made(request)
    assert run_by(plan)["wide"] == {"openvino"}
    assert "wide on openvino in about 32 ms (64 ms on onnx)" in said and missing in said
    rig.took("wide", "openvino", 20.0, batch=8)
    said = rig.made(request)[1]
    assert "wide on openvino in 20 ms" in said and missing not in said


def test_an_older_version_is_named_in_the_command_that_measures_it(rig: Rig, tmp_path: Path) -> None:
    """Without a name the command would measure the newest one."""
    rig.tells(FACTS)
    add_batchable(rig, tmp_path, "long")
    rig.took("long", "onnx", 1.0)
    rig.took("short", "onnx", 1.0)
    said = rig.made(replace(AUTO, models=(ModelOptions(model="long@1"), ModelOptions(model="short"))))[1]
    command = "`stageloom device profile nano --executor onnx --model long@1`"
    assert f"long@1 not measured on onnx yet, {command} does it" in said
    assert "short not measured on openvino yet, `stageloom device profile nano --executor openvino`" in said


def test_a_file_that_is_served_under_two_names_takes_what_each_ones_batch_takes(
    rig: Rig, tmp_path: Path
) -> None:
    rig.tells(FACTS)
    add_batchable(rig, tmp_path, "wide", "many")
    rig.took("wide", "onnx", 8.0)
    rig.took("wide", "onnx", 20.0, batch=8)
    models = (ModelOptions(model="wide"), ModelOptions(model="many", batch=8))
    for chosen in (models, models[::-1]):
        _, said = rig.made(replace(AUTO, models=chosen))
        assert "wide on onnx in 8 ms" in said and "many on onnx in 20 ms" in said


def test_a_model_that_an_executor_cannot_run_stays_on_the_usual_one(rig: Rig) -> None:
    rig.tells(FACTS)
    rig.took("long", "openvino", None)
    plan, known = rig.made()
    assert run_by(plan)["long"] == {"onnx"}
    assert "long on onnx (cannot run on openvino)" in known


def test_a_time_on_an_executor_that_is_gone_counts_no_more(rig: Rig) -> None:
    rig.tells(FACTS)
    rig.took("long", "openvino", 1.0)
    rig.tells(MachineFacts((CoreRange(0, 1),), (ExecutorFact("onnx"), ExecutorFact("openvino", "gone")), 1))
    plan, known = rig.made()
    assert run_by(plan)["long"] == {"onnx"} and "openvino" not in known


def test_the_executor_that_the_agent_is_set_to_runs_what_was_not_measured(rig: Rig) -> None:
    rig.tells(MachineFacts((CoreRange(0, 0),), (ExecutorFact("openvino"), ExecutorFact("onnx")), 1))
    assert run_by(rig.made()[0]) == {"long": {"openvino"}, "short": {"openvino"}}


def test_without_models_those_that_the_device_should_run_are_meant_else_all(rig: Rig) -> None:
    rig.tells(FACTS)
    assert [model.name for model in rig.made()[0].models] == ["long", "short"]
    rig.store.write(add_plan, "one", small_plan(rig.store, "short"), "sequential")
    rig.store.write(push, Push(device=NANO, plan="one", decided_by="operator"))
    assert [model.name for model in rig.made()[0].models] == ["short"]
    with pytest.raises(InputError, match="a plan needs models"):
        named(rig.store, PlanCreateRequest())


def test_without_models_a_device_keeps_the_version_that_it_should_run(rig: Rig, tmp_path: Path) -> None:
    """1. It should run a version, and a newer one is added. 2. Its version is removed."""
    rig.store.write(add_plan, "one", small_plan(rig.store, "long"), "sequential")
    rig.store.write(push, Push(device=NANO, plan="one", decided_by="operator"))
    add_model(rig.store, tmp_path, "long", 12)
    assert [model.model for model in named(rig.store, AUTO).models] == ["long@1"]
    rig.store.remove_model("long@1", force=True)
    with pytest.raises(InputError, match=r"the version of long that plan \w+ has was removed; add it again"):
        named(rig.store, AUTO)


def test_a_models_own_batch_and_queue_bound_stay(rig: Rig) -> None:
    rig.tells(FACTS)
    own = ModelOptions(model="short", queue_max_tasks=7, launch_interval_s=0.5)
    (model,) = rig.made(replace(AUTO, models=(own,)))[0].models
    assert (model.queue.max_tasks, model.queue.rule, model.launch_interval_us) == (
        7,
        QueueRule.DEADLINE,
        500_000,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"lanes": 3},
        {"executor": "openvino"},
        {"wait": "all"},
        {"scheduler": "greedy"},
        {"policy": "sequential"},
    ],
)
def test_a_rule_of_ones_own_turns_it_off(rig: Rig, changes: dict[str, Any]) -> None:
    rig.tells(FACTS)
    assert not is_auto(rig.store, replace(AUTO, **changes))


def test_a_device_that_told_nothing_and_one_on_a_gpu_get_a_plan_as_before(rig: Rig) -> None:
    assert not is_auto(rig.store, AUTO)
    rig.tells(MachineFacts((CoreRange(0, 1),), (ExecutorFact("torch_cuda"), ExecutorFact("onnx")), 1))
    assert not is_auto(rig.store, AUTO)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "nano has not told of cores"),
        ({"device": None}, "auto plans for a device"),
        ({"lanes": 3}, "auto decides lanes"),
        ({"models": (ModelOptions(model="long", partition="base"),)}, "auto decides partition of long"),
        ({"budget_s": 1.0}, "auto searches nothing"),
        ({"policy": "sequential"}, "auto searches nothing"),
    ],
)
def test_auto_by_name_is_refused_where_it_cannot_be_heeded(
    rig: Rig, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        is_auto(rig.store, replace(AUTO, scheduler="auto", **changes))


def test_every_rule_of_a_plan_counts_as_a_rule_of_ones_own() -> None:
    """A field that is added to requests is decided by `auto`, or says for what and how long to search."""
    for_all = {"plan", "models", "scheduler", "policy", "device", "budget_s", "rates"}
    rules: dict[str, Any] = {
        name: object() for name in PlanCreateRequest.__struct_fields__ if name not in for_all
    }
    assert len(chosen_rules(PlanCreateRequest(**rules))) == len(rules)


def test_the_sentence_names_a_few_models_and_counts_the_rest() -> None:
    machine = Machine((0,), {"onnx": "", "openvino": ""}, 1)
    onnx = ExecutorOptions(name="onnx")
    models = {f"m{at}": KnownModel({onnx: 1e-3}, onnx) for at in range(20)}
    said = sentence("nano", machine, models, 1)
    assert (
        "nano has 1 core" in said and "m7, 12 more not measured on openvino" in said and "m8 not" not in said
    )
    alone = sentence("nano", Machine((0,), {"onnx": ""}, 1), {"m": KnownModel({}, onnx)}, 1)
    assert "nothing to choose between" in alone


# -- plan files -------------------------------------------------------------------------------------------


def again(rig: Rig, plan: Plan, scheduler: str) -> Plan:
    """The plan that its own plan file makes."""
    info = rig.store.write(add_plan, plan.digest[:12], plan, scheduler)
    request = request_of(rig.store, info)
    return run_search(search_job(rig.store, request), lambda: 0.0)


@pytest.mark.parametrize(("short_ms", "express"), [(1.0, {1}), (6.0, set())])
def test_a_plan_of_several_executors_resources_and_lanes_is_made_again(
    rig: Rig, short_ms: float, express: set[int]
) -> None:
    rig.tells(FACTS)
    for model, executor, ms in [
        ("long", "onnx", 90.0),
        ("long", "openvino", 80.0),
        ("short", "onnx", short_ms),
    ]:
        rig.took(model, executor, ms)
    plan, _ = rig.made()
    assert len(plan.further_executors) == 1, "two executors"
    assert express_of(plan) == express and bool(plan.models[0].cuts) is not bool(express)
    assert again(rig, plan, "auto") == plan


def test_a_plan_of_an_older_version_names_it_and_is_made_again(rig: Rig, tmp_path: Path) -> None:
    """1. auto makes a plan of the only version. 2. One with other operators is added. 3. Then the plan file
    names the first."""
    rig.tells(FACTS)
    plan, _ = rig.made()
    info = rig.store.write(add_plan, "first", plan, "auto")
    assert [one.model for one in request_of(rig.store, info).models] == ["long", "short"]
    add_model(rig.store, tmp_path, "long", 12)
    assert [one.model for one in request_of(rig.store, info).models] == ["long@1", "short"]
    assert again(rig, plan, "auto") == plan


def test_a_plan_of_a_version_that_was_removed_is_no_plan_file(rig: Rig, tmp_path: Path) -> None:
    info = rig.store.write(add_plan, "old", small_plan(rig.store, "long"), "sequential")
    add_model(rig.store, tmp_path, "long", 12)
    rig.store.remove_model("long@1", force=True)
    with pytest.raises(InputError, match=r"the version of long that plan \w+ has was removed"):
        request_of(rig.store, info)


def test_blocks_on_executors_and_resources_of_their_own_are_made_again(rig: Rig) -> None:
    models = (
        ModelOptions(model="long", cuts=(20,), executors=(0, 1), resources=((0,), (1,)), replicas=2),
        ModelOptions(model="short", resources=((0, 1),)),
    )
    request = PlanCreateRequest(
        models=models,
        scheduler="greedy",
        further_executors=(FurtherExecutor(name="openvino", intra_op_threads=2),),
        resources=(CoreSet(cores=(0, 1)), CoreSet(cores=(2, 3))),
        lane_resources=(1, 0),
        lanes=2,
    )
    plan = run_search(search_job(rig.store, request), lambda: 0.0)
    assert [(block.executor, block.resources) for block in plan.combined] == [
        *((0, (0,)), (1, (1,)), (0, (0,)), (1, (1,))),
        (0, (0, 1)),
    ]
    assert again(rig, plan, "greedy") == plan
    assert again(rig, plan, "a re-plan") == plan, "greedy is found out"


@pytest.mark.parametrize("placement", list(PlacementPolicy)[1:])
def test_a_plan_that_places_blocks_on_the_resources_that_they_name_or_on_any_is_made_again(
    rig: Rig, placement: PlacementPolicy
) -> None:
    request = PlanCreateRequest(
        models=(
            ModelOptions(model="long", cuts=(20,), resources=((0,), (0, 1))),
            ModelOptions(model="short"),
        ),
        scheduler="greedy",
        resources=(CoreSet(cores=(0,)), CoreSet(cores=(1,))),
        lane_resources=(0, 1),
        lanes=2,
        placement=placement,
    )
    plan = run_search(search_job(rig.store, request), lambda: 0.0)
    assert plan.placement is placement
    assert [block.resources for block in plan.combined] == [(0,), (0, 1), (0, 1)]
    assert again(rig, plan, "greedy") == plan


def test_an_executor_that_the_device_cannot_use_is_refused_also_where_it_is_the_default(rig: Rig) -> None:
    broken = ExecutorFact("onnx", "onnxruntime is not installed")
    rig.tells(MachineFacts((CoreRange(0, 1),), (ExecutorFact("torch_cuda"), broken), 1))
    request = PlanCreateRequest(models=(ModelOptions(model="long"),), device=NANO, scheduler="greedy")
    said = "nano cannot use the executor onnx: onnxruntime is not installed; choose one of torch_cuda"
    with pytest.raises(InputError, match=said):
        search_job(rig.store, request)
    assert search_job(rig.store, replace(request, executor="torch_cuda")).executor.name == "torch_cuda"


def test_a_placed_plan_of_several_executors_a_block_is_no_plan_file(rig: Rig) -> None:
    plan = small_plan(rig.store, "long")
    (block,) = plan.combined
    placed = dataclasses.replace(
        plan,
        combined=(dataclasses.replace(block, resources=(0,), further_places=(Place(1, 1),)),),
        further_executors=(ExecutorOptions(name="openvino"),),
        lanes=2,
        resources=(Resource(cores=(0,)), Resource(cores=(1,))),
        lane_resources=(0, 1),
        placement=PlacementPolicy.DM,
    )
    info = rig.store.write(add_plan, "placed", placed, "greedy")
    with pytest.raises(InputError, match="several executors, as they are placed"):
        request_of(rig.store, info)


def test_a_placement_without_resources_is_refused(rig: Rig) -> None:
    request = PlanCreateRequest(models=(ModelOptions(model="long"),), placement=PlacementPolicy.DM)
    with pytest.raises(InputError, match="no resources to choose among"):
        search_job(rig.store, request)


def test_a_plan_that_no_scheduler_makes_again_is_refused_and_not_shown_as_another(rig: Rig) -> None:
    plan = small_plan(rig.store, "long")
    (block,) = plan.combined
    odd = Plan(models=plan.models, combined=(CombinedBlock(block.members, odd_schedule()),))
    info = rig.store.write(add_plan, "odd", odd, "maddpg")
    with pytest.raises(InputError, match="this plan is of maddpg, and no scheduler"):
        request_of(rig.store, info)
    assert rig.store.read(plan_info, "odd").scheduler == "maddpg"


@pytest.mark.parametrize("combination", Combination)
def test_a_plan_is_made_again_however_its_blocks_are_combined(rig: Rig, combination: Combination) -> None:
    """The models have two blocks and one, so that the five ways differ."""
    models = (ModelOptions(model="long", partition="base", replicas=2), ModelOptions(model="short"))
    request = PlanCreateRequest(
        models=models, combination=combination.value, members_max=3, scheduler="greedy"
    )
    plan = run_search(search_job(rig.store, request), lambda: 0.0)
    assert again(rig, plan, "greedy") == plan
    assert again(rig, plan, "refined") == plan


def test_blocks_that_are_combined_in_no_way_that_has_a_name_are_no_plan_file(rig: Rig) -> None:
    request = PlanCreateRequest(models=(ModelOptions(model="long", replicas=3),), scheduler="greedy")
    plan = run_search(search_job(rig.store, request), lambda: 0.0)
    odd = dataclasses.replace(plan, combined=plan.combined[::-1])
    info = rig.store.write(add_plan, "odd", odd, "ios")
    with pytest.raises(InputError, match="this plan is of ios, and no scheduler"):
        request_of(rig.store, info)


@pytest.mark.parametrize(
    ("scheduler", "found_by", "how", "limits"),
    [
        ("ios", "ios r=3 s=8", "operator", (3, 8)),
        ("beam", "instances beam s=2", "operator", (None, 2)),
        ("ios", "ios", "operator", (None, None)),
        ("ios", "ios, whole r=4", "contest", (4, None)),
        ("ios", "ios, whole", "contest", (3, 8)),
    ],
)
def test_a_plan_file_has_the_limits_of_the_search_that_found_the_plan(
    rig: Rig, scheduler: str, found_by: str, how: str, limits: tuple[int | None, int | None]
) -> None:
    """A tournament whose row has none was under those that all had where nobody gave others."""
    plan = small_plan(rig.store, "long")
    row = evaluation_of(plan, EvaluationVerdict.FOUND, scheduler=found_by, how=how)
    rig.store.write(keep_considered, [row], device_class=CLASS)
    request = request_of(rig.store, rig.store.write(add_plan, "found", plan, scheduler))
    assert (request.scheduler, request.r, request.s) == (scheduler, *limits)


@pytest.mark.parametrize("scheduler", ["greedy", "ios"])
def test_schedules_that_the_plans_own_scheduler_cannot_have_made_are_refused(
    rig: Rig, scheduler: str
) -> None:
    """One group of two operators: of another version of greedy, and above what the search was allowed."""
    plan = small_plan(rig.store, "long")
    odd = Plan(models=plan.models, combined=(CombinedBlock(plan.combined[0].members, odd_schedule()),))
    row = evaluation_of(odd, EvaluationVerdict.FOUND, scheduler=f"{scheduler} r=1", how="operator")
    rig.store.write(keep_considered, [row], device_class=CLASS)
    info = rig.store.write(add_plan, "odd", odd, scheduler)
    with pytest.raises(InputError, match=f"this plan is of {scheduler}, and no scheduler"):
        request_of(rig.store, info)


def odd_schedule() -> StageSchedule:
    """Two operators in the first stage, the others one after another."""
    stages = [Stage(((0, 1),)), *(Stage(((op,),)) for op in range(2, 40))]
    return StageSchedule(tuple(stages))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lane_resources": (0, 0), "resources": (CoreSet(cores=(0,)),), "lanes": 2}, "1 cores for 2 lanes"),
        (
            {"lane_resources": (0, 1), "resources": (CoreSet(cores=(0,)),) * 2, "lanes": 2},
            "core 0 belongs to two resources",
        ),
        ({"lane_resources": (1,), "resources": (CoreSet(cores=(0,)),)}, "resource 1 of a plan with 1"),
        ({"models": (ModelOptions(model="long", executors=(1,)),)}, "names executor 1 of a plan with 1"),
        ({"models": (ModelOptions(model="long", resources=((0,),)),)}, "names resource 0, which has no lane"),
        (
            {"models": (ModelOptions(model="long", cuts=(10, 20), executors=(0, 0)),)},
            "of 2 blocks are given for a model that has more",
        ),
        (
            {
                "models": (ModelOptions(model="long", executors=(1,)), ModelOptions(model="short")),
                "further_executors": (FurtherExecutor(name="openvino"),),
                "combination": "aligned",
            },
            "combined have different executors",
        ),
    ],
)
def test_rules_that_contradict_each_other_are_refused(rig: Rig, changes: dict[str, Any], said: str) -> None:
    usual = PlanCreateRequest(models=(ModelOptions(model="long"),))
    with pytest.raises(PlanError, match=said):
        run_search(search_job(rig.store, replace(usual, **changes)), lambda: 0.0)
