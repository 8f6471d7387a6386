"""Models with open dimensions: what their artifacts say, and which ranges are refused."""

from dataclasses import replace
from pathlib import Path

import msgpack
import onnx
import pytest

from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.digest import canonical
from stageloom.shared.errors import DecodeError, ModelError
from stageloom.shared.graph import graph_from_wire, graph_problem, graph_to_wire
from stageloom.shared.importer.api import artifact_path, import_model
from stageloom.shared.importer.open_dimensions import require_ranges
from stageloom.shared.importer.process import ImportLimits
from stageloom.shared.importer.report import ImportReport
from stageloom.shared.shape_ranges import ShapeRanges
from tests.importer.open_models import LARGEST, SMALLEST, write_spans

pytestmark = pytest.mark.promise("open-dimensions")


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImportReport, Artifact]:
    folder = tmp_path_factory.mktemp("spans")
    report = import_model(
        write_spans(folder / "spans.onnx"), shapes=LARGEST, out_dir=folder, smallest=SMALLEST
    )
    return report, open_artifact(artifact_path(folder, report.digest), report.digest)


def test_the_graph_is_one_operator_whose_tensors_are_the_largest(
    spans: tuple[ImportReport, Artifact],
) -> None:
    _, artifact = spans
    graph = artifact.graph
    assert [len(graph.operators), graph.base_cuts, graph.batchable] == [1, (), False]
    assert {tensor.name: tensor.shape for tensor in graph.tensors} == {
        **LARGEST,
        "maps": (4, 4, 32, 32),
        "means": (4, 4, 1, 1),
        "rows": (16, 5),
    }
    smallest = {graph.tensors[t].name: graph.smallest(t) for t in (*graph.inputs, *graph.outputs)}
    assert smallest == {**SMALLEST, "maps": (1, 4, 4, 4), "means": (1, 4, 1, 1), "rows": (1, 5)}


def test_memory_and_work_are_those_of_the_largest_shapes(spans: tuple[ImportReport, Artifact]) -> None:
    report, artifact = spans
    images, maps = 4 * 4 * 3 * 64 * 64, 4 * 4 * 4 * 32 * 32
    assert artifact.graph.largest_tensor_bytes == images
    assert report.activation_bytes >= images + maps
    assert report.gflop * 1e9 >= 2 * 27 * 4 * 4 * 32 * 32


def test_the_file_keeps_its_open_dimensions_and_its_nodes(spans: tuple[ImportReport, Artifact]) -> None:
    _, artifact = spans
    model = onnx.ModelProto.FromString(artifact.onnx_bytes())
    assert [node.op_type for node in model.graph.node] == ["Conv", "Sigmoid", "GlobalAveragePool", "Gather"]
    assert [dim.dim_param for dim in model.graph.input[0].type.tensor_type.shape.dim] == ["n", "", "h", "w"]


def test_the_form_on_disk_is_canonical_and_checked(spans: tuple[ImportReport, Artifact]) -> None:
    _, artifact = spans
    wire = msgpack.unpackb(canonical(graph_to_wire(artifact.graph)))
    assert graph_from_wire(wire) == artifact.graph
    upside_down = ShapeRanges(((9, 3, 8, 8), *artifact.graph.ranges.smallest[1:]), 1)  # type: ignore[union-attr]
    assert "begins at [9, 3, 8, 8]" in graph_problem(replace(artifact.graph, ranges=upside_down))
    assert "one operator" in graph_problem(replace(artifact.graph, batchable=True))
    for broken in ([[], 1], [["x"], 1], [wire[-1][0], -1], [[[-1]], 1], [1, 2], []):
        with pytest.raises(DecodeError, match="not a graph"):
            graph_from_wire([*wire[:-1], broken])


def test_the_same_file_again_is_the_same_artifact(
    spans: tuple[ImportReport, Artifact], tmp_path: Path
) -> None:
    again = import_model(
        write_spans(tmp_path / "other.onnx"), shapes=LARGEST, out_dir=tmp_path, smallest=SMALLEST
    )
    assert again == spans[0]


@pytest.mark.parametrize(
    ("changes", "smallest", "message"),
    [
        ({"x": (4, 4, 64, 64)}, {"x": (1, 3, 8, 8)}, "dimension 1 of input 'x' is 3 in the file, not 4"),
        ({}, {"x": (1, 2, 8, 8)}, "dimension 1 of input 'x' is 3 in the file, not 2"),
        ({}, {"x": (5, 3, 8, 8)}, "from \\[5, 3, 8, 8\\] to \\[4, 3, 64, 64\\] are no range"),
        ({}, {"x": (0, 3, 8, 8)}, "are no range"),
        ({}, {"x": (1, 3, 8)}, "are no range"),
        ({}, {"y": (1,)}, "from \\[1\\] to \\[\\] are no range"),
    ],
)
def test_a_range_that_cannot_be_is_refused_before_anything_runs(
    changes: dict[str, tuple[int, ...]], smallest: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    model = onnx.load(write_spans(tmp_path / "spans.onnx"))
    with pytest.raises(ModelError, match=message):
        require_ranges(model, smallest, {**LARGEST, **changes})


def test_a_range_that_needs_too_much_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="would take 196608 bytes, the limit is 1024"):
        import_model(
            write_spans(tmp_path / "spans.onnx"),
            shapes=LARGEST,
            out_dir=tmp_path,
            smallest=SMALLEST,
            limits=ImportLimits(tensor_bytes=1 << 10),
        )


def test_a_range_whose_end_the_model_does_not_run_is_refused(tmp_path: Path) -> None:
    file = write_spans(tmp_path / "spans.onnx", channels="c")
    with pytest.raises(ModelError, match=r"does not run with x=1x2x8x8, ids=1: .*; give a range whose ends"):
        import_model(file, shapes=LARGEST, out_dir=tmp_path, smallest={**SMALLEST, "x": (1, 2, 8, 8)})


def test_an_output_that_is_an_input_is_refused(tmp_path: Path) -> None:
    file = write_spans(tmp_path / "spans.onnx", passes=True)
    with pytest.raises(ModelError, match="output 'x' of a model with open dimensions is an input"):
        import_model(file, shapes=LARGEST, out_dir=tmp_path, smallest=SMALLEST)
