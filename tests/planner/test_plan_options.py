"""`stageloom plan create`: every field of a plan that a person may choose, and what two of them do."""

import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from stageloom.edge_agent.executor.base import Rows, StepResult
from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.planner.cli.app import execute
from stageloom.planner.cli.options import Combine
from stageloom.shared.artifact import open_artifact
from stageloom.shared.engine.steps import InstanceId, Step
from stageloom.shared.ids import StepId
from stageloom.shared.launch_list import Barrier
from stageloom.shared.messages import control, enrol
from stageloom.shared.plan import (
    ExecutorOptions,
    ModelPlan,
    Plan,
    QueuePlan,
    QueueRule,
    StepChoice,
    Wait,
    decode_plan,
)
from stageloom.shared.search.compose import Combination
from tests.planner.fake_device import FakeDevice
from tests.planner.processes import PlannerProcess, ok, plan_file, stageloom

TIMEOUT_S = 60.0
_NUMBERS = count(1)
PRIORITIES = (0, 9, 1, 2)  # of each four tasks
NOT_CHOSEN = {
    Plan: {
        "models": "named one by one",
        "combined": "found by the search",
        "further_executors": "found by the device, which measures them",
        "resources": "as many as the device has cores",
        "lane_resources": "one each",
        "placement": "of use where there are resources; a test of its own",
    },
    ModelPlan: {
        "name": "the store's name of it",
        "artifact": "follows from the name",
        "splits": "found by the search, with the schedules that run them",
    },
    QueuePlan: {},
    ExecutorOptions: {},
}


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlannerProcess]:
    """A planner with one model: a chain of three operators, `x` of 1x8 to `y`."""
    folder = tmp_path_factory.mktemp("options")
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Sigmoid", ["a"], ["b"]),
        helper.make_node("Tanh", ["b"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
    )
    file = folder / "chain.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    process = PlannerProcess(folder / "home")
    assert ok(process.home, "model", "add", f"chain={file}:x=1x8") == "chain\n"
    yield process
    process.stop()


def test_a_model_that_no_tried_input_ran_is_added_with_a_notice(
    planner: PlannerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exporter wrote the length 12 into a Reshape, so that no task of the pinned 64 can succeed."""
    nodes = [helper.make_node("Reshape", ["x", "exported"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "stiff",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "length"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 12])],
        [numpy_helper.from_array(np.array([1, 12]), "exported")],
    )
    file = tmp_path / "stiff.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    add = ("model", "add", f"stiff={file}:x=1x64", "--data-dir", str(planner.home))
    assert execute([*add]) == 0
    notice = capsys.readouterr().err
    assert "notice: onnxruntime ran it on none of the inputs that were tried" in notice
    assert "model stiff@1: 1 operator, 0 base cuts" in notice


def _made(planner: PlannerProcess, *options: str) -> Plan:
    """The plan that the options make, as a device would get it."""
    with FakeDevice(ok(planner.home, "device", "token"), f"made-{next(_NUMBERS)}") as device:
        assert isinstance(device.enrol(), enrol.EnrolReply)
        device.hello()
        ok(planner.home, "plan", "create", *options, "--device", device.name, "--push")
        desired = device.expect("control", control.TO_DEVICE, control.Desired)
        return decode_plan(desired.plan, desired.plan_digest)


def _left_at_default(part: Any) -> set[str]:
    """Fields that a person may choose and that hold what they hold when nobody chose."""
    kind = type(part)
    return {
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in NOT_CHOSEN[kind] and getattr(part, field.name) == field.default
    }


def test_every_field_that_a_person_may_choose_can_be_chosen(planner: PlannerProcess, tmp_path: Path) -> None:
    """A field that is added to a plan and to no request keeps its default, and is named here."""
    keys = (
        "partition=base,replicas=2,batch=4,delay=0.02,interval=0.5,strict=yes,weight=3,"
        "queue=priority,queue-tasks=16,queue-bytes=4096"
    )
    rare = plan_file(
        tmp_path / "plan.toml",
        **{
            "intra_op_threads": 2,
            "precision": "bf16",
            "issue": "schedule",
            "step_choice": "weighted",
            "wait": "timeout",
            "wait_timeout_s": 0.25,
        },
        **{"run_ahead": 3, "max_skips": 5, "barrier": "data"},
    )
    plan = _made(
        planner,
        *("--model", f"chain:{keys}", "--lanes", "2", "--executor", "null", "--from", rare),
    )
    (model,) = plan.models
    for part in (plan, model, model.queue, plan.executor):
        assert _left_at_default(part) == set(), type(part)
    assert (plan.step_choice, plan.wait, plan.wait_timeout_us) == (
        StepChoice.WEIGHTED,
        Wait.TIMEOUT,
        250_000,
    )
    assert (plan.run_ahead, plan.max_skips, plan.barrier) == (3, 5, Barrier.DATA)
    assert (model.batch_max_delay_us, model.launch_interval_us) == (20_000, 500_000)
    assert (model.work_conserving, model.weight) == (False, 3)
    assert model.queue == QueuePlan(rule=QueueRule.PRIORITY, max_tasks=16, max_bytes=4096)


@pytest.mark.more
def test_a_policy_makes_its_plan_and_refuses_to_be_overruled(planner: PlannerProcess, tmp_path: Path) -> None:
    made = _made(planner, "--model", "chain:replicas=3", "--policy", "instances", "--executor", "null")
    assert (made.lanes, made.models[0].replicas, len(made.combined)) == (3, 3, 3)
    weighted = _made(planner, "--model", "chain:weight=4", "--policy", "proportional")
    assert (weighted.step_choice, weighted.models[0].weight) == (StepChoice.WEIGHTED, 4)
    waits = plan_file(tmp_path / "waits.toml", wait="all")
    for model, policy, options, reason in [
        ("chain", "instances", ("--lanes", "2"), "decides lanes"),
        ("chain:replicas=2", "sequential", (), "decides replicas of chain"),
        ("chain", "sequential", ("--scheduler", "greedy"), "decides scheduler"),
        ("chain", "synchronised", ("--from", waits), "decides wait"),
        ("chain", "pos", (), "there is no policy 'pos'"),
    ]:
        refused = stageloom(planner.home, "plan", "create", "--model", model, "--policy", policy, *options)
        assert refused.returncode != 0 and reason in refused.stderr, refused.stderr


def test_nothing_chosen_is_the_plans_own_defaults(planner: PlannerProcess) -> None:
    plan = _made(planner, "--model", "chain")
    for part in (plan, plan.models[0], plan.models[0].queue, plan.executor):
        chosen = {field.name for field in dataclasses.fields(part)} - set(NOT_CHOSEN[type(part)])
        assert _left_at_default(part) == chosen


def test_an_option_goes_before_the_plan_file(planner: PlannerProcess, tmp_path: Path) -> None:
    model = {"model": "chain", "batch": 4, "batch_max_delay_s": 0.5, "queue": "deadline"}
    file = ("--from", plan_file(tmp_path / "plan.toml", models=[model], lanes=2))
    plain = _made(planner, *file)
    assert (plain.models[0].batch_max_delay_us, plain.models[0].queue.rule) == (500_000, QueueRule.DEADLINE)
    own = _made(planner, *file, "--model", "chain:delay=0.1,batch=3,queue=drop_oldest")
    assert (own.models[0].batch, own.models[0].queue.rule) == (3, QueueRule.DROP_OLDEST)
    assert plain.lanes == own.lanes == 2
    cut = _made(planner, *file, "--lanes", "1", "--partition", "base")
    assert (cut.lanes, cut.models[0].batch, bool(cut.models[0].cuts)) == (1, 4, True)


def test_a_shown_plan_makes_itself_again(planner: PlannerProcess, tmp_path: Path) -> None:
    """`plan show --toml` is a plan file of the same plan, whatever was chosen."""
    rare = plan_file(tmp_path / "rare.toml", step_choice="weighted", run_ahead=3, wait="all", barrier="data")
    options = ("--model", "chain:batch=2,delay=0.5,strict=yes,weight=3,partition=base,queue-tasks=9")
    create = ("plan", "create", "--json", *options, "--executor", "null", "--lanes", "2", "--from", rare)
    made = json.loads(ok(planner.home, *create, "--name", "once"))
    (tmp_path / "plan.toml").write_text(ok(planner.home, "plan", "show", "once", "--toml"))
    again = ("plan", "create", "--json", "--from", str(tmp_path / "plan.toml"), "--name", "twice")
    assert json.loads(ok(planner.home, *again))["digest"] == made["digest"]


def test_the_help_names_every_way_to_combine_blocks() -> None:
    _, option = get_args(Combine)
    assert all(f"{one.value}: " in option.help for one in Combination)


def test_a_shown_plan_tells_what_was_chosen(planner: PlannerProcess, tmp_path: Path) -> None:
    weighted = plan_file(tmp_path / "plan.toml", step_choice="weighted")
    options = ("--model", "chain:batch=2,delay=0.5,strict=yes,weight=3", "--from", weighted)
    ok(planner.home, "plan", "create", *options, "--name", "shown")
    text = json.loads(ok(planner.home, "plan", "show", "shown", "--json"))["text"]
    assert "delay_us=500000 strict=yes weight=3" in text


class _Gated(NullExecutor):
    """Steps end only while the gate is open; `launched` holds the first value of each row, by launch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.running = threading.Event()
        self.launched: list[list[int]] = []

    def issue(self, step: Step, feeds: Mapping[InstanceId, Rows]) -> None:
        self.launched += [[int(row["x"][0, 0]) for row in feeds[m.instance]] for m in step.members]
        super().issue(step, feeds)

    def wait(self, step: StepId) -> StepResult:
        self.running.set()
        assert self.gate.wait(TIMEOUT_S)
        return super().wait(step)


def test_a_pushed_plan_fills_its_batches_and_takes_the_highest_priority_first(
    planner: PlannerProcess, tmp_path: Path
) -> None:
    """1. a plan with batches of four, a delay far beyond the test and a priority queue is pushed and fetched;
    2. four tasks that come one by one leave as one batch; 3. while it runs, four come that may be launched
    behind it, then eight that must queue, the more urgent ones last; 4. each batch is of one priority.
    """
    with FakeDevice(ok(planner.home, "device", "token"), "batches") as device, _Shell() as (shell, executor):
        assert isinstance(device.enrol(), enrol.EnrolReply)
        device.hello()
        chain = "chain:batch=4,delay=60,queue=priority"
        rare = plan_file(tmp_path / "plan.toml", run_ahead=1)
        create = ("plan", "create", "--model", chain, "--from", rare, "--executor", "null")
        ok(planner.home, *create, "--device", "batches", "--push")
        desired = device.expect("control", control.TO_DEVICE, control.Desired)
        (need,) = desired.artifacts
        blob = tmp_path / "artifact"
        blob.write_bytes(device.fetch(need))
        plan = decode_plan(desired.plan, desired.plan_digest)
        shell.activate(shell.load(plan, {need.digest: open_artifact(blob, need.digest)}))

        def submit(number: int) -> Any:
            return shell.submit(
                "chain", {"x": np.full((1, 8), number, np.float32)}, priority=PRIORITIES[number // 4]
            )

        futures = [submit(number) for number in range(4)]
        assert executor.running.wait(TIMEOUT_S)
        futures += [submit(number) for number in range(4, 16)]
        executor.gate.set()
        for future in futures:
            assert future.result(TIMEOUT_S)["y"].shape == (1, 8)
    assert executor.launched == [[0, 1, 2, 3], [4, 5, 6, 7], [12, 13, 14, 15], [8, 9, 10, 11]]


class _Shell:
    """An engine over the gated executor; the gate opens when the test ends, however it does."""

    def __enter__(self) -> tuple[InProcessEngine, _Gated]:
        self.executor = _Gated()
        self.shell = InProcessEngine(self.executor)
        self.shell.__enter__()
        return self.shell, self.executor

    def __exit__(self, *error: Any) -> None:
        self.executor.gate.set()
        self.shell.__exit__(*error)
