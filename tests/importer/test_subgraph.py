"""Sub-models: run one after another they compute what the whole model does, however it is cut."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from stageloom.shared.errors import ModelError
from stageloom.shared.graph import Graph, graph_problem
from stageloom.shared.ids import OpId
from stageloom.shared.importer.smoke_run import relative_difference
from stageloom.shared.importer.subgraph import ModelSource, extract
from tests.importer.conftest import Imported
from tests.importer.models import built_here, feeds_for, info, model_of, run, run_in_parts

pytestmark = pytest.mark.more

ZOO = ["inception_v3", "resnet50", "squeezenet", "squeezenet_bypass", "googlenet"]


def _ranges(graph: Graph, cuts: Sequence[int]) -> list[range]:
    return [range(a, b) for a, b in pairwise((0, *cuts, len(graph.operators)))]


def _require_equal(source: ModelSource, parts: Sequence[Sequence[int]], batch: int = 1) -> None:
    graph = source.graph
    feeds = feeds_for(graph, batch=batch)
    whole = run(
        source.extract([OpId(op) for op in range(len(graph.operators))], batch=batch).onnx_bytes, feeds
    )
    cut = run_in_parts(source, parts, feeds, batch)
    assert set(whole) == {graph.tensors[t].name for t in graph.outputs}
    for name, value in whole.items():
        assert relative_difference(cut[name], value) <= 1e-5


@pytest.mark.promise("artifact-computes-file-run")
@pytest.mark.parametrize("name", [*ZOO, "light_shufflenet", "light_densenet121"])
@pytest.mark.parametrize("partition", ["whole", "base", "paper"])
def test_blocks_of_every_partition_reproduce_the_model(imported: Imported, name: str, partition: str) -> None:
    _, artifact = imported(name)
    if partition not in dict(artifact.graph.partitions):
        assert name.startswith("light_")
        return
    source = ModelSource.open(artifact)
    _require_equal(source, _ranges(artifact.graph, artifact.graph.partition(partition)))


@pytest.mark.promise("artifact-computes-file-run")
@pytest.mark.parametrize("name", ["inception_v3", "squeezenet_bypass", "light_shufflenet"])
def test_single_operators_reproduce_the_model(imported: Imported, name: str) -> None:
    _, artifact = imported(name)
    _require_equal(ModelSource.open(artifact), [[op] for op in range(len(artifact.graph.operators))])


def test_the_extracted_whole_equals_the_stored_file(imported: Imported) -> None:
    _, artifact = imported("resnet50")
    feeds = feeds_for(artifact.graph)
    stored = run(artifact.onnx_bytes(), feeds)
    cut = extract(
        artifact.onnx_bytes(), artifact.graph, [OpId(i) for i in range(len(artifact.graph.operators))]
    )
    np.testing.assert_array_equal(run(cut.onnx_bytes, feeds)["logits"], stored["logits"])


@pytest.mark.promise("batch-allowed-where-rows")
def test_a_batch_of_blocks_equals_single_runs(imported: Imported) -> None:
    _, artifact = imported("squeezenet_bypass")
    graph, source = artifact.graph, ModelSource.open(artifact)
    rows = [feeds_for(graph, seed) for seed in (1, 2, 3)]
    together = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    parts = _ranges(graph, graph.partition("paper"))
    batched = run_in_parts(source, parts, together, batch=3)["logits"]
    for index, row in enumerate(rows):
        alone = run_in_parts(source, parts, row)["logits"]
        assert relative_difference(batched[index : index + 1], alone) <= 1e-5


def test_a_batch_of_an_unbatchable_model_is_refused(tmp_path: Path) -> None:
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x", [4])], [info("y", [4])])
    folded, built = built_here(model, tmp_path)
    source = ModelSource(folded.SerializeToString(), built.graph)
    with pytest.raises(ModelError, match="batch 1 only"):
        source.extract([OpId(0)], batch=2)
    with pytest.raises(ModelError, match="needs an operator"):
        source.extract([])


def test_the_digest_tells_sub_models_apart_and_ignores_order(imported: Imported) -> None:
    _, artifact = imported("squeezenet")
    source, again = ModelSource.open(artifact), ModelSource.open(artifact)
    one = source.extract([OpId(1), OpId(2)])
    assert one.digest == again.sub_digest([OpId(2), OpId(1)]) == again.extract([OpId(2), OpId(1)]).digest
    assert one.onnx_bytes == again.extract([OpId(2), OpId(1)]).onnx_bytes
    assert (
        len({one.digest, source.sub_digest([OpId(1)]), source.sub_digest([OpId(1), OpId(2)], batch=2)}) == 3
    )


def test_a_sub_model_holds_only_its_own_weights(imported: Imported) -> None:
    _, artifact = imported("inception_v3")
    source, graph = ModelSource.open(artifact), artifact.graph
    for op in (0, 50, len(graph.operators) - 1):
        size = len(source.extract([OpId(op)]).onnx_bytes)
        assert graph.operators[op].weight_bytes <= size < graph.operators[op].weight_bytes + 10_000


@pytest.mark.parametrize("name", ["inception_v3", "light_shufflenet"])
def test_any_order_of_operators_that_respects_dependencies_reproduces_the_model(
    imported: Imported, name: str
) -> None:
    """Stages take operators of a block in any dependency order, not only in ours."""
    _, artifact = imported(name)
    graph, source = artifact.graph, ModelSource.open(artifact)
    rng = np.random.default_rng(5)
    done, parts = 0, []
    while done.bit_count() < len(graph.operators):
        ready = [
            op
            for op in range(len(graph.operators))
            if not done >> op & 1 and graph.predecessors[op] & ~done == 0
        ]
        chosen = rng.permutation(ready)[: rng.integers(1, 5)].tolist()
        parts.append(sorted(chosen))
        for op in chosen:
            done |= 1 << op
    _require_equal(source, parts)


_UNARY = ["Relu", "Sigmoid", "Tanh", "Neg", "Identity", "Softmax"]
_BINARY = ["Add", "Mul", "Sub", "Max"]


@st.composite
def _random_model(draw: st.DrawFn) -> tuple[list[tuple[str, list[str]]], list[int], list[int]]:
    """Operators by kind and inputs over tensors of shape [1, 4, 3, 3], output indices, and cut positions."""
    names = ["x0", "x1"]
    rows: list[tuple[str, list[str]]] = []
    for index in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from([*_UNARY, *_BINARY, "Conv", "Flat", "Bias", "Gate", "MaxPool"]))
        arity = 2 if kind in _BINARY else 1
        rows.append((kind, [draw(st.sampled_from(names)) for _ in range(arity)]))
        names.append(f"t{index}")
    outputs = sorted({len(rows) - 1, *draw(st.sets(st.integers(0, len(rows) - 1), max_size=2))})
    return rows, outputs, draw(st.lists(st.integers(1, 40), max_size=4))


@pytest.mark.promise("artifact-computes-file-run")
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(_random_model())
def test_random_graphs_are_reproduced_from_random_cuts(
    tmp_path: Path, case: tuple[list[tuple[str, list[str]]], list[int], list[int]]
) -> None:
    rows, outputs, positions = case
    rng = np.random.default_rng(len(rows))
    weights: dict[str, object] = {
        "flat": np.array([1, 36]), "back": np.array([1, 4, 3, 3]),
        "bias": rng.standard_normal((1, 4, 1, 1)).astype(np.float32),
    }  # fmt: skip
    nodes = []
    for index, (kind, reads) in enumerate(rows):
        made = f"t{index}"
        if kind == "Conv":
            weights[f"w{index}"] = (rng.standard_normal((4, 4, 3, 3)) / 6).astype(np.float32)
            nodes.append(helper.make_node("Conv", [reads[0], f"w{index}"], [made], pads=[1] * 4))
        elif kind == "Flat":
            nodes.append(helper.make_node("Reshape", [reads[0], "flat"], [f"f{index}"]))
            nodes.append(helper.make_node("Reshape", [f"f{index}", "back"], [made]))
        elif kind == "Bias":
            nodes.append(helper.make_node("Add", [reads[0], "bias"], [made]))
        elif kind == "Gate":
            nodes.append(helper.make_node("Sigmoid", reads, [f"g{index}"]))
            nodes.append(helper.make_node("Mul", [reads[0], f"g{index}"], [made]))
        elif kind == "MaxPool":
            nodes.append(helper.make_node("MaxPool", reads, [made], kernel_shape=[3, 3], pads=[1] * 4))
        else:
            nodes.append(helper.make_node(kind, reads, [made]))
    shape = [1, 4, 3, 3]
    inputs, wanted = [info("x0", shape), info("x1", shape)], [info(f"t{i}", shape) for i in outputs]
    model = model_of(nodes, inputs, wanted, weights)
    folded, built = built_here(model, tmp_path)
    graph = built.graph
    assert graph_problem(graph) == ""
    assert sorted(i for o in graph.operators for i in o.nodes) == list(range(len(folded.graph.node)))
    feeds = feeds_for(graph)
    whole = run(model, feeds)
    cuts = sorted({p % len(graph.operators) for p in positions} - {0})
    source = ModelSource(folded.SerializeToString(), graph)
    parts = run_in_parts(source, _ranges(graph, cuts), feeds)
    for name, value in whole.items():
        assert relative_difference(parts[name], value) <= 1e-5
