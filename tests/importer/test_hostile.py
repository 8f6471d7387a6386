"""Hostile and unusable model files are refused in one line that names cause and remedy; nothing is kept."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from stageloom.shared.errors import ModelError, OpenInput, SettingError, StorageError, UnpinnedShape
from stageloom.shared.importer.api import import_model
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import (
    ARTIFACT_NAME,
    VARIABLE,
    ImportLimits,
    how_to_raise,
    limits_in_force,
)
from tests.importer.models import allocating_2_gib, built_here, chained_functions, info, model_of

pytestmark = pytest.mark.more

Shapes = Mapping[str, Sequence[int]]


def _refusal(
    model: onnx.ModelProto | bytes,
    tmp_path: Path,
    shapes: Shapes | None = None,
    limits: ImportLimits | None = None,
) -> ModelError:
    """The error of importing `model`, after checking that nothing stayed on disk."""
    path = tmp_path / "model.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    out = tmp_path / "out"
    with pytest.raises(ModelError) as caught:
        import_model(path, shapes=shapes or {}, out_dir=out, limits=limits)
    assert not out.exists() or not list(out.iterdir())
    assert caught.value.cause and caught.value.remedy
    assert "\n" not in str(caught.value)
    return caught.value


def _fine() -> onnx.ModelProto:
    return model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x", [1, 4])], [info("y", [1, 4])])


@pytest.mark.promise("hostile-files-refused-reason")
def test_a_tiny_model_that_allocates_2_gib_is_refused_before_anything_runs(tmp_path: Path) -> None:
    data = allocating_2_gib()
    assert len(data) <= 67
    with pytest.raises(ModelError, match="would take 2147483648 bytes") as caught:
        built_here(onnx.ModelProto.FromString(data), tmp_path)
    assert not (tmp_path / "folded.onnx").exists()  # onnxruntime was never asked
    assert "tensor_bytes" in caught.value.remedy
    assert "2147483648" in str(_refusal(data, tmp_path))


def test_many_foldable_constants_are_refused_together(tmp_path: Path) -> None:
    nodes = [helper.make_node("ConstantOfShape", ["s"], [f"c{i}"]) for i in range(9)]
    nodes.append(helper.make_node("Sum", ["x", *(f"c{i}" for i in range(9))], ["y"]))
    model = model_of(nodes, [info("x", [1])], [info("y", ["?", "?"])], {"s": np.array([1 << 26])})
    with pytest.raises(ModelError, match="unsupported: weights and folded constants take 24"):
        built_here(model, tmp_path)


@pytest.mark.promise("hostile-files-refused-reason")
def test_an_allocation_hidden_from_shape_inference_meets_the_memory_limit(tmp_path: Path) -> None:
    # Range with computed bounds has no static size; the child's address space ends it.
    nodes = [
        helper.make_node("Mul", ["a", "a"], ["b"]),
        helper.make_node("Range", ["zero", "b", "one"], ["r"]),
        helper.make_node("ReduceSum", ["r"], ["t"], keepdims=0),
        helper.make_node("Add", ["x", "t"], ["y"]),
    ]
    weights = {name: np.array(value, np.float32) for name, value in {"a": 46340, "zero": 0, "one": 1}.items()}
    model = model_of(nodes, [info("x", [1])], [info("y", [1])], weights)
    error = _refusal(model, tmp_path, limits=ImportLimits(memory_bytes=2 << 30))
    assert "memory" in str(error) or "alloc" in str(error)


@pytest.mark.promise("dead-nodes-too-many")
def test_60000_dead_nodes_cost_next_to_nothing(tmp_path: Path) -> None:
    """They go before the checker, shape inference and onnxruntime, which took minutes of processor time."""
    dead = [helper.make_node("Sin", [f"d{i - 1}" if i else "x"], [f"d{i}"]) for i in range(60_000)]
    model = model_of([*dead, helper.make_node("Relu", ["x"], ["y"])], [info("x", [1])], [info("y", [1])])
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    report = import_model(
        tmp_path / "m.onnx", shapes={}, out_dir=tmp_path / "out", limits=ImportLimits(cpu_s=20)
    )
    assert report.operators == 1


@pytest.mark.promise("dead-nodes-too-many")
def test_too_many_nodes_are_refused_before_anything_runs(tmp_path: Path) -> None:
    chain = [helper.make_node("Sin", [f"d{i - 1}" if i else "x"], [f"d{i}"]) for i in range(50)]
    model = model_of(chain, [info("x", [1])], [info("d49", [1])])
    error = _refusal(model, tmp_path, limits=ImportLimits(nodes=49))
    assert str(error) == f"the model has more than 49 nodes; {how_to_raise('nodes', ImportLimits(nodes=49))}"


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("", ImportLimits()),
        ("memory_bytes=8G,wall_s=900", ImportLimits(memory_bytes=8 << 30, wall_s=900)),
        (" nodes=5 , tensor_bytes=3000, cpu_s=7,", ImportLimits(nodes=5, tensor_bytes=3000, cpu_s=7)),
    ],
)
def test_the_environment_sets_the_limits_of_imports(text: str, limits: ImportLimits) -> None:
    assert limits_in_force({VARIABLE: text}) == limits


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("seconds=900", "names no limit 'seconds'; .* memory_bytes, tensor_bytes, nodes, wall_s, cpu_s"),
        ("file_bytes=4G", "names no limit 'file_bytes'"),  # a protobuf cannot be larger
        ("nodes", "nodes = '' .* from 1 to 1073741824"),
        ("nodes=1M", "nodes = '1M'"),
        ("memory_bytes=8GB", "memory_bytes = '8GB' .* from 1 to 16T"),
        ("memory_bytes=99999T", "memory_bytes = '99999T'"),
        ("tensor_bytes=-1", "tensor_bytes = '-1'"),
        ("wall_s=0", "wall_s = '0'"),
        ("cpu_s=inf", "cpu_s = 'inf'"),
    ],
)
def test_limits_that_the_environment_cannot_set_are_refused(text: str, reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        limits_in_force({VARIABLE: text})


def test_what_a_refusal_says_to_set_raises_its_limit_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = [helper.make_node("Sin", [f"d{i - 1}" if i else "x"], [f"d{i}"]) for i in range(50)]
    model = model_of(chain, [info("x", [1])], [info("d49", [1])])
    monkeypatch.setenv(VARIABLE, "nodes=49,memory_bytes=6G")
    said = re.search(rf"set {VARIABLE}=(\S+) in the environment", _refusal(model, tmp_path).remedy)
    assert said is not None and said[1] == "memory_bytes=6G,nodes=98"
    monkeypatch.setenv(VARIABLE, said[1])
    assert import_model(tmp_path / "model.onnx", shapes={}, out_dir=tmp_path / "out").operators == 50


@pytest.mark.parametrize(
    ("name", "least", "setting"),
    [
        ("memory_bytes", 0, "memory_bytes=8G"),
        ("tensor_bytes", 5_000_000_001, "tensor_bytes=5000000001"),
        ("tensor_bytes", 1 << 62, "tensor_bytes=1T"),  # as far as it goes
        ("wall_s", 0, "wall_s=600"),
    ],
)
def test_a_limit_is_doubled_or_raised_to_what_is_known_to_be_needed(
    name: str, least: int, setting: str
) -> None:
    said = how_to_raise(name, ImportLimits(), least)
    assert said == f"set {VARIABLE}={setting} in the environment if you trust the file"
    assert getattr(limits_in_force({VARIABLE: setting}), name) > getattr(ImportLimits(), name)


@pytest.mark.promise("dead-nodes-too-many")
def test_functions_count_as_often_as_they_are_called(tmp_path: Path) -> None:
    """Thirty functions that call the next one twice make a graph of a thousand million nodes."""
    model = model_of(
        [helper.make_node("f0", ["x"], ["y"], domain="d")],
        [info("x", [1])],
        [info("y", [1])],
        extra_domains=["d"],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
    for index in range(30):
        kind, domain = (f"f{index + 1}", "d") if index < 29 else ("Relu", "")
        calls = [helper.make_node(kind, [a], [b], domain=domain) for a, b in (("a", "m"), ("m", "b"))]
        model.functions.append(helper.make_function("d", f"f{index}", ["a"], ["b"], calls, opsets))
    assert "more than 100000 nodes" in str(_refusal(model, tmp_path))


@pytest.mark.promise("hostile-files-refused-reason")
def test_3000_chained_functions_are_refused(tmp_path: Path) -> None:
    assert "importer crashed" not in str(_refusal(chained_functions(3000), tmp_path))


@pytest.mark.parametrize("keep", [1, 7, 40, -3])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    data = _fine().SerializeToString()
    _refusal(data[:keep], tmp_path)


@pytest.mark.parametrize("data", [b"", b"not a model", b"\x08\x08", bytes(range(256)) * 40])
def test_what_is_no_model_is_refused(tmp_path: Path, data: bytes) -> None:
    _refusal(data, tmp_path)


@pytest.mark.promise("hostile-files-refused-reason")
def test_an_oversized_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.truncate(3 << 30)  # sparse
    with pytest.raises(ModelError, match="3221225472 bytes, the limit is 2147483647"):
        import_model(path, shapes={}, out_dir=tmp_path / "out")


@pytest.mark.parametrize("what", ["absent.onnx", "."])
def test_a_path_that_is_no_file_is_refused(tmp_path: Path, what: str) -> None:
    with pytest.raises(ModelError, match=r"cannot read|not a readable file"):
        import_model(tmp_path / what, shapes={}, out_dir=tmp_path / "out")


@pytest.mark.promise("open-dimensions-inputs-named")
@pytest.mark.parametrize(
    ("shape", "claimed", "example"),
    [
        (["n", 4], "nx4", "1x4"),
        ([None, 4], "?x4", "1x4"),
        ([1, -1], "1x-1", "1x128"),
        ([0, 4], "0x4", "1x4"),
        (["n", 3, "h", "w"], "nx3xhxw", "1x3x224x224"),
        (["n", "h", "w", 3], "nxhxwx3", "1x224x224x3"),
        (["n", "c", "t"], "nxcxt", "1x128x128"),
        (["n"], "n", "1"),
        (None, "of any shape", "1x128"),
    ],
)
def test_an_open_dimension_is_named_with_an_example_of_the_right_rank(
    tmp_path: Path, shape: list[int | str] | None, claimed: str, example: str
) -> None:
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x", shape)], [info("y", None)])
    error = _refusal(model, tmp_path)
    assert isinstance(error, UnpinnedShape)
    assert error.inputs == (OpenInput("x", claimed, example),)
    path = tmp_path / "model.onnx"
    pinned = {"x": tuple(map(int, example.split("x")))}
    report = import_model(path, shapes=pinned, out_dir=tmp_path / "out")
    assert report.inputs[0].shape == pinned["x"]


@pytest.mark.promise("open-dimensions-inputs-named")
def test_open_dimensions_of_all_inputs_are_named_at_once(tmp_path: Path) -> None:
    inputs = [info("ids", ["b", "s"]), info("fixed", [1, 4]), info("mask", ["b", "s"])]
    nodes = [helper.make_node("Sum", ["ids", "fixed", "mask"], ["y"])]
    model = model_of(nodes, inputs, [info("y", ["b", "s"])])
    assert str(_refusal(model, tmp_path)).endswith("--shape ids=1x128 --shape mask=1x128")
    left = _refusal(model, tmp_path, shapes={"ids": (1, 4)})
    assert isinstance(left, UnpinnedShape) and [found.name for found in left.inputs] == ["mask"]


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"z": (1, 4)}, "no input 'z'"),
        ({"x": (1, 4, 4)}, "has 2 dimensions, not 3"),
        ({"x": (1, 5)}, "is 4 in the file, not 5"),
        ({"x": (-1, 4)}, "has a negative dimension"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(tmp_path: Path, shapes: Shapes, reason: str) -> None:
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x", ["n", 4])], [info("y", ["?", "?"])])
    with pytest.raises(ModelError, match=reason):
        built_here(model, tmp_path, shapes)


def test_shapes_that_contradict_an_operator_are_refused(tmp_path: Path) -> None:
    model = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [info("x", [1, 4])],
        [info("y", ["?", "?"])],
        {"w": np.ones((5, 5), np.float32)},
    )
    _refusal(model, tmp_path)


@pytest.mark.promise("hostile-files-refused-reason")
def test_an_import_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    error = _refusal(_endless(), tmp_path, limits=ImportLimits(wall_s=0.5))
    assert "took longer than 0.5 s" in str(error) and "wall_s" in error.remedy


def test_an_import_that_needs_too_much_processor_time_is_ended(tmp_path: Path) -> None:
    error = _refusal(_endless(), tmp_path, limits=ImportLimits(cpu_s=4))
    assert "processor time" in str(error)


def _endless() -> onnx.ModelProto:
    """A loop of 2^40 rounds, which the trial run of its claimed output shape enters."""
    shape = [1, 1 << 16]
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["co"]), helper.make_node("Sin", ["a"], ["ao"])],
        "body",
        [info("i", [], TensorProto.INT64), info("c", [], TensorProto.BOOL), info("a", shape)],
        [info("co", [], TensorProto.BOOL), info("ao", shape)],
    )
    return model_of(
        [helper.make_node("Loop", ["n", "t", "x"], ["y"], body=body)],
        [info("x", shape)],
        [info("y", shape)],
        {"n": np.array(1 << 40), "t": np.array(True)},
    )


def _importers_in(folder: Path) -> list[int]:
    """Processes that import into `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() if entry.name.isdecimal() else b""
        except OSError:  # it ended meanwhile
            continue
        if b"stageloom.shared.importer.child" in line and str(folder).encode() in line:
            found.append(int(entry.name))
    return found


def _until(condition: Callable[[], bool]) -> None:
    """Poll; the test's own time limit ends a wait for nothing."""
    while not condition():
        time.sleep(0.02)


@pytest.mark.promise("hostile-files-refused-reason")
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
def test_a_killed_importer_leaves_no_child_and_the_next_import_sweeps(tmp_path: Path) -> None:
    (tmp_path / "endless.onnx").write_bytes(_endless().SerializeToString())
    (tmp_path / "fine.onnx").write_bytes(_fine().SerializeToString())
    out = tmp_path / "out"
    code = (
        "from pathlib import Path; import sys; from stageloom.shared.importer.api import import_model;"
        "import_model(Path(sys.argv[1]), shapes={}, out_dir=Path(sys.argv[2]), progress=print)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-u", "-c", code, str(tmp_path / "endless.onnx"), str(out)], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    with parent.stdout:
        while parent.stdout.readline() != b"trying it\n":
            pass
        assert len(_importers_in(out)) == 1
        parent.kill()
        parent.wait()
    _until(lambda: not _importers_in(out))
    report = import_model(tmp_path / "fine.onnx", shapes={}, out_dir=out)
    assert [entry.name for entry in out.iterdir()] == [f"{report.digest}.artifact"]


def test_an_import_without_enough_memory_names_the_limit(tmp_path: Path) -> None:
    error = _refusal(_fine(), tmp_path, limits=ImportLimits(memory_bytes=160 << 20))
    assert "memory" in str(error).lower() or "alloc" in str(error).lower()


_UNDER_HARD_LIMIT = """
import resource, sys
from pathlib import Path
from stageloom.shared.errors import StageloomError
from stageloom.shared.importer.api import import_model

which, most = getattr(resource, sys.argv[3]), int(sys.argv[4])
resource.setrlimit(which, (most, most))
try:
    import_model(Path(sys.argv[1]), shapes={}, out_dir=Path(sys.argv[2]))
except StageloomError as error:
    sys.exit(str(error))
"""


def _said_under(which: str, most: int, tmp_path: Path) -> str:
    """What an import says on a host with a hard limit, which no process of a usual account may raise."""
    path = tmp_path / "model.onnx"
    path.write_bytes(_fine().SerializeToString())
    words = [sys.executable, "-c", _UNDER_HARD_LIMIT, str(path), str(tmp_path / "out"), which, str(most)]
    return subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False).stderr.strip()


@pytest.mark.parametrize(("which", "most"), [("RLIMIT_AS", 3 << 30), ("RLIMIT_CPU", 60)])
def test_an_import_makes_do_with_a_hard_limit_of_the_host(which: str, most: int, tmp_path: Path) -> None:
    assert _said_under(which, most, tmp_path) == ""
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_a_hard_limit_of_the_host_that_is_too_low_is_named(tmp_path: Path) -> None:
    said = _said_under("RLIMIT_AS", 160 << 20, tmp_path)
    assert "needs more than 167772160 bytes of memory" in said
    assert said.endswith("; raise the hard limit of this machine (`ulimit -Hv`) if you trust the file")


def test_the_memory_given_decides_whether_a_model_is_imported_never_how(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(_fine().SerializeToString())
    digests = set()
    for mebibytes in (300, 500, 700, 1000, 4096):
        limits = ImportLimits(memory_bytes=mebibytes << 20)
        try:
            digests.add(import_model(path, shapes={}, out_dir=tmp_path / "out", limits=limits).digest)
        except ModelError as error:
            assert "memory" in str(error)
    assert len(digests) == 1


def test_a_graph_that_no_artifact_can_hold_is_refused_before_it_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stageloom.shared.artifact.MAX_GRAPH_BYTES", 40)
    path = tmp_path / "model.onnx"
    path.write_bytes(_fine().SerializeToString())
    phases: list[str] = []
    with pytest.raises(
        ModelError, match=r"graph of 1 operator takes \d+ bytes, the limit is 40; export"
    ) as caught:
        import_here(path, {}, tmp_path, ImportLimits(), phases.append)
    assert caught.value.cause.startswith("unsupported: ")
    assert phases[-1] == "building the graph" and not (tmp_path / ARTIFACT_NAME).exists()


def test_the_small_graph_of_a_model_with_open_dimensions_is_what_an_artifact_must_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"a rather long name of a tensor, number {index}" for index in range(12)]
    nodes = [helper.make_node("Softmax", [a], [b]) for a, b in pairwise(["x", *names, "y"])]
    path = tmp_path / "model.onnx"
    path.write_bytes(model_of(nodes, [info("x", ["n", 4])], [info("y", ["n", 4])]).SerializeToString())
    monkeypatch.setattr("stageloom.shared.artifact.MAX_GRAPH_BYTES", 400)
    import_here(path, {"x": (4, 4)}, tmp_path, ImportLimits(), lambda _: None, {"x": (1, 4)})
    with pytest.raises(ModelError, match="graph of 13 operators"):
        import_here(path, {"x": (4, 4)}, tmp_path, ImportLimits(), lambda _: None)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            model_of([helper.make_node("Identity", ["x"], ["y"])], [info("x", [1], 74)],
                     [info("y", [1], 74)]),
            "unsupported: input 'x': type 74 tensors cannot be cut",
        ),
        (
            model_of(
                [helper.make_node("Identity", ["x"], ["y"])],
                [info("x", [1], TensorProto.STRING)],
                [info("y", [1], TensorProto.STRING)],
            ),
            "unsupported: input 'x': string",
        ),
        (
            model_of(
                [helper.make_node("SequenceConstruct", ["x"], ["y"])],
                [info("x", [1])],
                [helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)],
            ),
            "unsupported: output 'y': sequence",
        ),
        (
            model_of([helper.make_node("NonZero", ["x"], ["y"])], [info("x", [4])],
                     [info("y", ["?", "?"], TensorProto.INT64)]),
            "unsupported: output 'y': its shape is known only while running",
        ),
        (
            model_of([helper.make_node("Magic", ["x"], ["y"], domain="acme")], [info("x", [1])],
                     [info("y", [1])], extra_domains=["acme"]),
            "unsupported: onnxruntime cannot load the model",
        ),
        (
            model_of([helper.make_node("Relu", ["x" * 513], ["y"])], [info("x" * 513, [1])],
                     [info("y", [1])]),
            "unsupported: input 'x{80}' has 1 dimensions and a name of 513 characters, at most 32 and 512",
        ),
        (
            model_of([helper.make_node("Relu", ["x"], ["y" * 513])], [info("x", [1])],
                     [info("y" * 513, [1])]),
            "unsupported: output 'y{80}' has 1 dimensions and a name of 513 characters",
        ),
        (
            model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x", [1] * 33)], [info("y", [1] * 33)]),
            "unsupported: input 'x' has 33 dimensions",
        ),
    ],
    ids=["unknown type", "string input", "sequence output", "output of unknown shape", "custom operator",
         "long input name", "long output name", "input of many dimensions"],
)  # fmt: skip
def test_what_cannot_run_says_why(tmp_path: Path, model: onnx.ModelProto, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        built_here(model, tmp_path)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ("{", "unreadable"),
        ("[" * 100_000, "unreadable"),
        ('{"version": 2}', "not an object of version 1"),
        ('{"version": 1, "borders": [[1]]}', "a list of tensor names"),
        ('{"version": 1, "borders": [["q"]]}', "no operator of the graph makes"),
        ('{"version": 1, "borders": [["y"], ["a"]]}', "do not hold the one before"),
    ],
)
def test_borders_that_do_not_fit_are_refused(tmp_path: Path, metadata: str, reason: str) -> None:
    nodes = [helper.make_node("MaxPool", ["x"], ["a"], kernel_shape=[1, 1]),
             helper.make_node("Softmax", ["a"], ["y"])]  # fmt: skip
    model = model_of(nodes, [info("x", [1, 1, 4, 4])], [info("y", [1, 1, 4, 4])], metadata=metadata)
    with pytest.raises(ModelError, match=reason):
        built_here(model, tmp_path)


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(_fine().SerializeToString())
    (tmp_path / "out").write_text("a file, not a folder")
    with pytest.raises(StorageError, match="cannot write"):
        import_model(path, shapes={}, out_dir=tmp_path / "out")


def test_what_a_killed_import_left_is_swept_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(_fine().SerializeToString())
    out = tmp_path / "out"
    (out / ".import-999999999-x").mkdir(parents=True)
    report = import_model(path, shapes={}, out_dir=out)
    assert [entry.name for entry in out.iterdir()] == [f"{report.digest}.artifact"]
