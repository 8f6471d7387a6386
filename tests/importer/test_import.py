"""Importing whole models: what the report says, that it is stable, and that older files keep working."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from benchmarks import zoo
from stageloom.shared.artifact import open_artifact
from stageloom.shared.errors import ModelError, NotNow
from stageloom.shared.graph import graph_problem
from stageloom.shared.importer import process
from stageloom.shared.importer.api import artifact_path, import_model, inspect_model
from stageloom.shared.importer.process import ImportLimits
from stageloom.shared.importer.report import ImportReport, report_rows
from stageloom.shared.importer.subgraph import ModelSource
from tests.importer.conftest import LIGHT, Imported
from tests.importer.models import built_here, feeds_for, info, model_of, run, varying_loop

SMALL_LIGHT = ["light_densenet121", "light_inception_v1", "light_inception_v2", "light_shufflenet",
               "light_squeezenet"]  # fmt: skip
SLOW_LIGHT = ["light_densenet121", "light_inception_v2"]
LARGE_LIGHT = ["light_bvlc_alexnet", "light_resnet50", "light_vgg19", "light_zfnet512"]


def _light(name: str) -> object:
    later = [pytest.mark.more] if name in SLOW_LIGHT else []
    return pytest.param(name, marks=[pytest.mark.full] if name in LARGE_LIGHT else later)


@pytest.mark.promise("old-files-gain-phantom")
@pytest.mark.parametrize("name", [_light(name) for name in SMALL_LIGHT + LARGE_LIGHT])
def test_light_models_import_without_phantom_inputs(imported: Imported, name: str) -> None:
    """Folded initializers of IR 3 files must not stay behind as inputs; vgg19 grows from 9 KB to 513 MB."""
    report, artifact = imported(name)
    assert len(report.inputs) == len(report.outputs) == 1
    assert report.inputs[0].shape == (1, 3, 224, 224)
    assert graph_problem(artifact.graph) == ""
    assert report.batchable, report.batch_reason
    assert not report.opaque


def test_every_light_model_of_the_package_is_tested() -> None:
    assert {path.stem for path in LIGHT.glob("*.onnx")} == {*SMALL_LIGHT, *LARGE_LIGHT}


@pytest.mark.promise("artifact-computes-file-run")
@pytest.mark.parametrize("name", ["light_squeezenet", "light_shufflenet"])
def test_the_normalised_model_computes_what_the_file_does(imported: Imported, name: str) -> None:
    _, artifact = imported(name)
    source = onnx.load(LIGHT / f"{name}.onnx")
    feeds = feeds_for(artifact.graph)
    before, after = run(source, feeds), run(artifact.onnx_bytes(), feeds)
    assert before.keys() == after.keys()
    for output in before:
        np.testing.assert_allclose(after[output], before[output], rtol=1e-4, atol=1e-6)


@pytest.mark.promise("old-files-gain-phantom")
def test_one_file_gives_one_digest_in_every_process(tmp_path: Path) -> None:
    """onnxruntime orders by hash tables that differ from process to process."""
    path = LIGHT / "light_shufflenet.onnx"
    reports = [import_model(path, shapes={}, out_dir=tmp_path) for _ in range(3)]
    assert len({report.digest for report in reports}) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == [f"{reports[0].digest}.artifact"]


def test_the_report_survives_json_and_agrees_with_the_artifact(imported: Imported) -> None:
    report, artifact = imported("inception_v3")
    assert ImportReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    graph = artifact.graph
    assert report.digest == artifact.digest and report.size == artifact.size
    assert (report.operators, report.fused_units) == (len(graph.operators), graph.fused_units)
    assert report.base_cuts == graph.base_cuts
    assert [p.name for p in report.partitions] == ["whole", "base", "paper"]
    paper = report.partitions[2]
    assert (paper.blocks, sum(paper.operators), report.paper_operators) == (13, 119, 119)
    assert report.memory_bytes > report.weight_bytes > 4 * 1_000_000


def test_borders_are_base_cuts_and_each_is_one_tensor_wide(imported: Imported) -> None:
    for name in ("inception_v3", "resnet50", "squeezenet_bypass"):
        _, artifact = imported(name)
        graph = artifact.graph
        assert set(graph.partition("paper")) <= set(graph.base_cuts)
        assert all(len(graph.live_at(cut)) == 1 for cut in graph.partition("paper"))


def test_progress_is_told_in_order(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x", [1])],
                              [info("y", [1])]).SerializeToString())  # fmt: skip
    told: list[str] = []
    import_model(path, shapes={}, out_dir=tmp_path / "out", progress=told.append)
    assert told == [
        "reading", "checking", "folding constants", "building the graph", "trying it", "writing",
    ]  # fmt: skip


def test_inspect_keeps_nothing_and_renders_every_partition(tmp_path: Path) -> None:
    path = tmp_path / "squeezenet.onnx"
    zoo.write("squeezenet", path, width=0.25, size=64)
    report = inspect_model(path, {})
    rows = dict(report_rows(report))
    assert {"partition whole", "partition base", "partition paper", "input", "output"} <= rows.keys()
    assert "64x64" in rows["input"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["squeezenet.onnx"]


def test_open_dimensions_are_pinned_by_the_caller(tmp_path: Path) -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Relu", ["c"], ["y"])]
    model = model_of(
        nodes,
        [info("x", ["n", 3, "h", "w"])],
        [info("y", ["n", 4, "h", "w"])],
        {"w": np.ones((4, 3, 1, 1), np.float32)},
    )
    _, built = built_here(model, tmp_path, {"x": (1, 3, 8, 6)})
    (operator,) = built.graph.operators
    assert [built.graph.tensors[t].shape for t in operator.outputs] == [(1, 4, 8, 6)]
    assert operator.flop == 2 * 4 * 8 * 6 * 3
    assert operator.weight_bytes == 4 * 4 * 3


@pytest.mark.promise("cannot-cut-stays-opaque")
def test_control_flow_stays_one_opaque_operator_that_runs(tmp_path: Path) -> None:
    then, other = (
        helper.make_graph([helper.make_node(kind, ["r"], ["o"])], kind, [], [info("o", [1, 4])])
        for kind in ("Neg", "Abs")
    )
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("If", ["c"], ["i"], then_branch=then, else_branch=other),
        helper.make_node("Softmax", ["i"], ["y"]),
    ]
    model = model_of(nodes, [info("x", [1, 4]), info("c", [1], TensorProto.BOOL)], [info("y", [1, 4])])
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    report = import_model(path, shapes={}, out_dir=tmp_path / "out")
    (opaque,) = report.opaque
    assert (opaque.kind, opaque.why) == ("If", "control flow: If")
    artifact = open_artifact(artifact_path(tmp_path / "out", report.digest))
    source = ModelSource.open(artifact)
    cut = source.extract([opaque.operator])  # type: ignore[list-item]
    names = {artifact.graph.tensors[t].name for t in cut.inputs}
    assert names == {"r", "c"}, "what the branches capture is an input"
    feeds = {"r": np.array([[1, 2, 3, 4]], np.float32), "c": np.array([True])}
    np.testing.assert_array_equal(run(cut.onnx_bytes, feeds)["i"], -feeds["r"])


@pytest.mark.promise("cannot-cut-stays-opaque")
def test_operators_of_other_domains_run_as_opaque_ones(tmp_path: Path) -> None:
    """onnx knows neither their types nor their shapes; onnxruntime does."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("FastGelu", ["r"], ["g"], domain="com.microsoft"),
        helper.make_node("Softmax", ["g"], ["y"]),
    ]
    model = model_of(nodes, [info("x", [1, 4])], [info("y", [1, 4])], extra_domains=["com.microsoft"])
    _, built = built_here(model, tmp_path)
    assert [(o.kind, o.opaque) for o in built.graph.operators] == [
        ("Relu", ""), ("FastGelu", "custom operator: com.microsoft.FastGelu"), ("Softmax", ""),
    ]  # fmt: skip


def test_model_local_functions_are_cut_like_anything_else(tmp_path: Path) -> None:
    inner = [
        helper.make_node("MaxPool", ["a"], ["p"], kernel_shape=[1, 1]),
        helper.make_node("Softmax", ["p"], ["b"]),
    ]
    shape = [1, 2, 4, 4]
    node = helper.make_node("f", ["x"], ["y"], domain="d")
    model = model_of([node], [info("x", shape)], [info("y", shape)], extra_domains=["d"])
    opsets = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("d", "f", ["a"], ["b"], inner, opsets))
    _, built = built_here(model, tmp_path)
    assert [o.kind for o in built.graph.operators] == ["MaxPool", "Softmax"]


def test_a_disk_that_takes_no_more_is_a_storage_error(tmp_path: Path) -> None:
    """Files of this process and its children are limited to 4 KiB; the model needs more."""
    path = tmp_path / "squeezenet.onnx"
    zoo.write("squeezenet", path, width=0.25, size=64)
    code = (
        "import resource, sys, pathlib\n"
        "from stageloom.shared.errors import StorageError\n"
        "from stageloom.shared.importer.api import import_model\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "model, out = map(pathlib.Path, sys.argv[1:])\n"
        "try:\n    import_model(model, shapes={}, out_dir=out)\n"
        "except StorageError as error:\n    print(error, sorted(out.iterdir()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "out")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "cannot write the artifact to" in done.stdout and done.stdout.strip().endswith("[]")


@pytest.mark.promise("cannot-cut-stays-opaque")
def test_sequences_stay_inside_one_opaque_operator(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("SplitToSequence", ["r"], ["s"], axis=1),
        helper.make_node("SequenceAt", ["s", "zero"], ["a"]),
        helper.make_node("ConcatFromSequence", ["s"], ["b"], axis=1),
        helper.make_node("Mul", ["a", "b"], ["y"]),
    ]
    model = model_of(nodes, [info("x", [1, 4])], [info("y", [1, 4])], {"zero": np.array(0)})
    _, built = built_here(model, tmp_path)
    opaque = [operator for operator in built.graph.operators if operator.opaque]
    assert len(opaque) == 1 and "sequence" in opaque[0].opaque
    assert graph_problem(built.graph) == ""


def test_strings_inside_a_model_stay_in_one_opaque_operator(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["s"], to=TensorProto.STRING),
        helper.make_node("Equal", ["s", "word"], ["e"]),
        helper.make_node("Cast", ["e"], ["y"], to=TensorProto.FLOAT),
    ]
    words = {"word": np.array(["1"], object)}
    model = model_of(nodes, [info("x", [1, 3], TensorProto.INT64)], [info("y", [1, 3])], words, opset=19)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    report = import_model(path, shapes={}, out_dir=tmp_path / "out")
    assert [(o.kind, o.why) for o in report.opaque] == [("Cast", "string tensors cannot be cut")]
    artifact = open_artifact(artifact_path(tmp_path / "out", report.digest))
    found = run(artifact.onnx_bytes(), {"x": np.array([[0, 1, 2]])})["y"]
    np.testing.assert_array_equal(found, [[0, 1, 0]])


def test_a_model_that_ran_on_none_of_the_inputs_that_were_tried_is_imported_with_a_notice(
    tmp_path: Path,
) -> None:
    """1. An exporter writes the sequence's length into a Reshape, and claims that it is open.
    2. A user pins another length: shape inference sees nothing wrong, onnxruntime refuses every run.
    3. The report says so, apart from why there is no batch; at the exported length it does not.
    """
    ids = info("ids", [1, "length"], TensorProto.INT64)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Reshape", ["rows", "exported"], ["y"]),
    ]
    weights = {"table": np.ones((4, 2), np.float32), "exported": np.array([1, 12, 2])}
    model = model_of(nodes, [ids], [info("y", [1, 12, 2])], weights)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    broken = inspect_model(path, shapes={"ids": (1, 64)})
    assert "none of the inputs that were tried" in broken.never_ran
    assert "Reshape" in broken.never_ran
    assert ("notice", broken.never_ran) in report_rows(broken)
    fine = inspect_model(path, shapes={"ids": (1, 12)})
    assert fine.never_ran == ""
    assert "notice" not in dict(report_rows(fine))


def test_a_classifier_that_ends_in_a_map_is_refused_with_the_converters_option(tmp_path: Path) -> None:
    """Converters of scikit-learn's models end classifiers so, unless told otherwise."""
    zipped = helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2])
    map_of = helper.make_map_type_proto(
        TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, ())
    )
    output = helper.make_value_info("y", helper.make_sequence_type_proto(map_of))
    model = model_of([zipped], [info("x", [1, 3])], [output])
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"'y': sequence values.*zipmap.*False"):
        import_model(path, shapes={}, out_dir=tmp_path / "out")


@pytest.mark.parametrize("with_map", [False, True])
def test_a_classifier_with_string_labels_is_refused_with_what_makes_them_integers(
    tmp_path: Path, with_map: bool
) -> None:
    """Tensors of fixed shape they may be: that is no remedy. Both hints are given at once."""
    nodes = [helper.make_node("Cast", ["x"], ["label"], to=TensorProto.STRING)]
    outputs = [info("label", [1, 3], TensorProto.STRING)]
    if with_map:
        nodes.append(
            helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_strings=["a", "b", "c"])
        )
        map_of = helper.make_map_type_proto(
            TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, ())
        )
        outputs.append(helper.make_value_info("y", helper.make_sequence_type_proto(map_of)))
    model = model_of(nodes, [info("x", [1, 3])], outputs, extra_domains=["ai.onnx.ml"])
    with pytest.raises(ModelError, match=r"'label': string tensors.*integer labels, or remove") as refused:
        _report(model, tmp_path)
    assert ("zipmap" in str(refused.value)) == with_map
    assert "fixed shape" not in str(refused.value)


@pytest.mark.promise("runs-overrule-claims-shapes")
def test_a_run_overrules_a_false_shape_claim(tmp_path: Path) -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["co"]), helper.make_node("Concat", ["a", "a"], ["ao"], axis=1)],
        "body",
        [info("i", [], TensorProto.INT64), info("c", [], TensorProto.BOOL), info("a", ["p", "q"])],
        [info("co", [], TensorProto.BOOL), info("ao", ["p", "q2"])],
    )
    nodes = [helper.make_node("Loop", ["n", "t", "x"], ["y"], body=body)]
    model = model_of(nodes, [info("x", [1, 4])], [info("y", [1, 8])], {"n": np.array(2), "t": np.array(True)})
    assert _report(model, tmp_path).outputs[0].shape == (1, 16)


@pytest.mark.promise("runs-overrule-claims-shapes")
def test_an_output_whose_shape_differs_from_run_to_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="unsupported: output 'rows': its shape differs"):
        _report(varying_loop(), tmp_path)


@pytest.mark.promise("runs-overrule-claims-shapes")
def test_a_model_that_no_run_satisfies_is_taken_as_inference_describes_it(tmp_path: Path) -> None:
    """Only its users know what it asks for: here a position that zeros and ones do not name."""
    nodes = [
        helper.make_node("Add", ["i", "far"], ["at"]),
        helper.make_node("Gather", ["table", "at"], ["r"]),
        helper.make_node("Add", ["r", "x"], ["y"]),
    ]
    weights = {"far": np.array([-40, 3]), "table": np.ones((30, 4), np.float32)}
    inputs = [info("x", [2, 4]), info("i", [2], TensorProto.INT64)]
    report = _report(model_of(nodes, inputs, [info("y", [2, 4])], weights), tmp_path)
    assert report.outputs[0].shape == (2, 4) and not report.batchable
    assert report.batch_reason


def _report(model: onnx.ModelProto, tmp_path: Path) -> ImportReport:
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return import_model(path, shapes={}, out_dir=tmp_path / "out")


@pytest.mark.promise("batch-allowed-where-rows")
@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (helper.make_node("Softmax", ["x"], ["y"], axis=0), "rows of 'y' differ"),
        (helper.make_node("Transpose", ["x"], ["y"], perm=[1, 0]), "no leading dimension of 1"),
        (helper.make_node("ReduceMean", ["x"], ["y"], axes=[0]), "does not scale with the batch"),
        (helper.make_node("Mul", ["x", "zero"], ["y"]), "does not depend on the input"),
    ],
)
def test_a_batch_is_refused_where_rows_would_mix(tmp_path: Path, node: onnx.NodeProto, reason: str) -> None:
    shape = [4, 1] if node.op_type == "Transpose" else [1, 4]
    model = model_of([node], [info("x", [1, 4])], [info("y", shape)], {"zero": np.array(0, np.float32)})
    report = _report(model, tmp_path)
    assert not report.batchable and reason in report.batch_reason


def test_a_baked_in_batch_dimension_of_a_reshape_does_not_forbid_a_batch(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "s"], ["r"]), helper.make_node("MatMul", ["r", "w"], ["y"])]
    rng = np.random.default_rng(0)
    weights = {"s": np.array([1, 12]), "w": rng.standard_normal((12, 5)).astype(np.float32)}
    assert _report(model_of(nodes, [info("x", [1, 3, 4])], [info("y", [1, 5])], weights), tmp_path).batchable


@pytest.mark.parametrize("what", ["weight", "input"])
def test_an_output_that_nothing_computes_still_imports(tmp_path: Path, what: str) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    name = "w" if what == "weight" else "x"
    model = model_of(nodes, [info("x", [2])], [info("y", [2]), info(name, [2])],
                     {"w": np.array([3, 4], np.float32)})  # fmt: skip
    folded, built = built_here(model, tmp_path)
    feeds = {"x": np.array([-1, 1], np.float32)}
    np.testing.assert_array_equal(run(folded, feeds)[name], [3, 4] if what == "weight" else [-1, 1])
    assert graph_problem(built.graph) == ""


def test_importing_the_api_loads_neither_onnx_nor_onnxruntime() -> None:
    code = (
        "import sys, stageloom.shared.importer.api, stageloom.shared.importer.api;"
        "print([m for m in ('onnx', 'onnxruntime', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("ending", "kind", "said"),
    [
        (
            "import os; os.kill(os.getpid(), 9)",
            NotNow,
            "was killed, most likely for want of memory; free some, or",
        ),
        (
            "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (2, 2))\nwhile True: pass",
            ModelError,
            "used more than 2 s of processor time; set STAGELOOM_IMPORT_LIMITS=cpu_s=4 ",
        ),
    ],
    ids=["memory", "processor time"],
)
def test_a_kill_is_put_down_to_processor_time_only_where_that_was_used(
    ending: str, kind: type[ModelError], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel kills for want of memory, and at a hard limit on processor time, by the same signal."""
    monkeypatch.setattr(process, "module_command", lambda *_: [sys.executable, "-c", ending])
    (tmp_path / "m.onnx").write_bytes(b"unread")
    with pytest.raises(ModelError, match=f"importing m.onnx {said}") as caught:
        import_model(tmp_path / "m.onnx", shapes={}, out_dir=tmp_path / "out", limits=ImportLimits(cpu_s=2))
    assert type(caught.value) is kind


def test_an_import_that_took_too_long_may_succeed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "module_command", lambda *_: [sys.executable, "-c", "input()"])
    (tmp_path / "m.onnx").write_bytes(b"unread")
    with pytest.raises(NotNow, match="took longer than 0 s; set STAGELOOM_IMPORT_LIMITS=wall_s="):
        import_model(tmp_path / "m.onnx", shapes={}, out_dir=tmp_path / "out", limits=ImportLimits(wall_s=0))
