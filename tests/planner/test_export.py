"""Plans in formats of other tools, each read by a stranger: pydot, a reader of traces, onnxruntime."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pydot
import pytest
from onnx import helper

from stageloom.planner.cli.app import execute
from stageloom.planner.costs.drift import Renewal
from stageloom.planner.export.perfetto import chrome_trace
from stageloom.planner.export.plan import export_plan
from stageloom.planner.schema.plan import ExportFormat
from stageloom.planner.store.costs import renew_costs
from stageloom.planner.store.plans import add_plan
from stageloom.shared.artifact import open_artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.errors import ExitCode
from stageloom.shared.importer.api import artifact_path, import_model
from stageloom.shared.partition import Axis, Split
from stageloom.shared.plan import ExecutorOptions, Plan
from stageloom.shared.search.compose import Combination, ModelChoice, compose
from stageloom.shared.search.split_plan import ResourcePair, split_plan
from stageloom.shared.search.split_problem import SplitChoice, Whole
from stageloom.shared.search.stage_costs import StageCosts
from tests.agent.chrome_format import problems
from tests.engine.plans import chains
from tests.importer.models import info, model_of
from tests.planner.processes import ok
from tests.planner.world import World
from tests.store.helpers import NANO
from tests.store.migrated import new_store

SCHEDULERS = ("greedy", "nimble", "sequential")


def branches() -> onnx.ModelProto:
    """Two stages of parallel operators that are joined; nodes without a name, and one with quotes in it."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name='say "a"\\'),
        helper.make_node("Sigmoid", ["a"], ["b"]),
        helper.make_node("Tanh", ["a"], ["c"]),
        helper.make_node("Softplus", ["a"], ["d"]),
        helper.make_node("Concat", ["b", "c", "d"], ["y"], axis=1),
    ]
    return model_of(nodes, [info("x", (1, 4))], [info("y", (1, 12))])


class Exported:
    """A store with a network of branches under two names, and a plan of each scheduler."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        file = home.parent / "branches.onnx"
        file.write_bytes(branches().SerializeToString())
        report = import_model(file, shapes={}, out_dir=home.parent)
        path = artifact_path(home.parent, report.digest)
        self.graph = open_artifact(path, report.digest).graph
        self.store = new_store(home)
        self.plans: dict[str, Plan] = {}
        for name in ("left", "right"):
            self.store.add_model(name, path, report.digest)
        choices = [
            ModelChoice(name=name, artifact=report.digest, graph=self.graph) for name in ("left", "right")
        ]
        for scheduler in SCHEDULERS:
            plan = compose(choices[:1], scheduler=scheduler)
            self.plans[scheduler] = plan
            self.store.write(add_plan, scheduler, plan, scheduler)
        joint = compose(choices, scheduler="greedy", combination=Combination.ALIGNED)
        self.plans["joint"] = joint
        self.store.write(add_plan, "joint", joint, "greedy")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    made = Exported(tmp_path_factory.mktemp("export") / "home")
    yield made
    made.store.close()


@pytest.mark.promise("exports-read-by-strangers")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pydot's, of its own parser
@pytest.mark.parametrize("plan", [*SCHEDULERS, "joint"])
def test_graphviz_text_has_every_operator_and_edge_once(exported: Exported, plan: str) -> None:
    graphs = pydot.graph_from_dot_data(ok(exported.home, "plan", "export", plan, "--format", "dot"))
    assert graphs is not None and len(graphs) == 1
    graph = graphs[0]
    models = len(exported.plans[plan].models)
    names: list[str] = []
    todo: list[pydot.Graph] = [graph]
    while todo:
        part = todo.pop()
        names += [node.get_name() for node in part.get_nodes() if node.get_name() not in ("node", '"\\n"')]
        todo += part.get_subgraphs()
    operators = exported.graph.operators
    assert sorted(names) == sorted(
        {f"m{model}_r0_o{op}" for model in range(models) for op in range(len(operators))}
    )
    read = sum(
        len({maker for maker, one in enumerate(operators) if set(one.outputs) & set(operator.inputs)})
        for operator in operators
    )
    assert len(graph.get_edges()) == models * read


@pytest.mark.promise("exports-read-by-strangers")
@pytest.mark.parametrize("plan", [*SCHEDULERS, "joint"])
def test_the_timeline_is_a_trace_in_which_every_operator_runs_once(exported: Exported, plan: str) -> None:
    trace = json.loads(ok(exported.home, "plan", "export", plan, "--format", "perfetto"))
    assert problems(trace) == []
    groups = [event for event in trace["traceEvents"] if event.get("cat") == "group"]
    ran = [name for event in groups for name in event["args"]["operators"].split(", ")]
    models = len(exported.plans[plan].models)
    assert sorted(ran) == sorted([operator.name for operator in exported.graph.operators] * models)
    if plan == "sequential":
        assert len({event["tid"] for event in groups}) == 1
    else:
        assert len({event["tid"] for event in groups}) > 1


def _steps(bound: BoundPlan) -> list[str]:
    """Names of a timeline's steps in the order of time; each operator takes a millisecond."""
    costs = [StageCosts(operators_s=(1e-3,) * combined.graph.size) for combined in bound.combined]
    events = chrome_trace(bound, costs, "plan", "estimated")["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "step"]


def test_a_model_runs_its_blocks_in_their_order_wherever_they_are_combined() -> None:
    """Block 0 of `a` is combined with block 2 of `b`, so it waits for blocks that lie deeper than it."""
    bound = chains(2, 3, groups=[[(0, 0, 0), (1, 0, 2)], [(0, 0, 1)], [(1, 0, 0)], [(1, 0, 1)]])
    assert _steps(bound) == ["b#0.0", "b#0.1", "a#0.0 + b#0.2", "a#0.1"]


def test_a_timeline_of_blocks_that_form_a_cycle_has_each_once() -> None:
    bound = chains(2, 2, groups=[[(0, 0, 0), (1, 0, 1)], [(0, 0, 1), (1, 0, 0)]])
    assert _steps(bound) == ["a#0.0 + b#0.1", "a#0.1 + b#0.0"]


PROGRAM = """
import sys, numpy as np, onnxruntime
model, partition, out = sys.argv[1:]
options = onnxruntime.SessionOptions()
options.log_severity_level = 0
options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
options.add_session_config_entry("session.node_partition_config_file", partition)
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
feeds = {one.name: np.ones(one.shape, np.float32) for one in session.get_inputs()}
np.savez(out, *session.run(None, feeds))
"""


@pytest.mark.promise("exports-read-by-strangers")
def test_an_unmodified_onnxruntime_session_takes_the_partition_file_and_computes_the_same(
    exported: Exported, tmp_path: Path
) -> None:
    model = tmp_path / "left.onnx"
    assert execute(["model", "export", "left", str(model), "--data-dir", str(exported.home)]) == 0
    written = {}
    for plan in SCHEDULERS:
        out = tmp_path / plan
        ok(exported.home, "plan", "export", plan, "--format", "ort-partition", "-o", str(out))
        written[plan] = out / "left.partition.json"
    documents = {plan: json.loads(path.read_text()) for plan, path in written.items()}
    assert {plan: len(document["streams"]) > 1 for plan, document in documents.items()} == {
        "greedy": True,
        "nimble": True,
        "sequential": False,
    }
    plain = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    feeds = {one.name: np.ones(one.shape, np.float32) for one in plain.get_inputs()}
    wanted = plain.run(None, feeds)
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({**documents["greedy"], "devices": []}))
    for name, path in {**written, "broken": broken}.items():
        out = tmp_path / f"{name}.npz"
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(model), str(path), str(out)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert ("Invalid DeviceBasedPartitioner" in done.stderr) == (name == "broken")
        for found, expected in zip(np.load(out).values(), wanted, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_halves_of_operators_are_refused_where_a_file_lists_whole_nodes(
    exported: Exported, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node is on one stream; both halves of an operator are the same nodes."""
    whole = (Whole(0),) * len(exported.graph.operators)
    choice = SplitChoice(states=whole, splits=(Split(0, 0, Axis.CHANNELS, 2),), seconds=1.0)
    pair = ResourcePair((ExecutorOptions(), ExecutorOptions()), ((0,), (1,)))
    artifact = exported.plans["sequential"].models[0].artifact
    exported.store.write(add_plan, "split", split_plan("left", artifact, exported.graph, choice, pair), "eop")
    command = ["plan", "export", "split", "--data-dir", str(exported.home), "--format"]
    assert execute([*command, "dot"]) == ExitCode.OK
    assert execute([*command, "ort-partition"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "the plan splits operators of left" in said and "export a plan without splits" in said


def test_a_timeline_says_whose_costs_it_has(tmp_path: Path) -> None:
    """1. Nothing was measured. 2. The class has costs. 3. The device drifted from them."""
    world = World(tmp_path / "home")
    world.kept("greedy")

    def costs() -> str:
        (file,) = export_plan(world.store, "greedy", ExportFormat.PERFETTO, NANO).files
        said: str = json.loads(file.text)["otherData"]["costs"]
        return said

    assert costs() == "estimated"
    world.profiled()
    assert costs() == "of cpu-2-core"
    drifted = Renewal(factors={}, others=2.0, stages=(), unseen=())
    world.store.write(renew_costs, NANO, drifted, ExecutorOptions(), ratio=2.0, steps_since_us=0)
    assert costs() == f"of {NANO}"
    world.store.close()


def test_several_files_need_a_folder(exported: Exported, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "export", "joint", "--format", "ort-partition", "--data-dir", str(exported.home)]
    assert execute(command) == ExitCode.USAGE
    assert "that makes 2 files; name a folder with --output" in capsys.readouterr().err
