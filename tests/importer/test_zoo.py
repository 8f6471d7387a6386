"""The zoo's networks have the published sizes, and the blocks that the papers schedule."""

import json
import math
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks import zoo
from benchmarks.algorithms import SpaceSize, measure_space
from benchmarks.zoo.__main__ import main
from benchmarks.zoo.networks import watts_strogatz
from stageloom.shared.graph import Graph
from stageloom.shared.importer.build import Built, build_graph, unit_views
from stageloom.shared.importer.cuts import METADATA_KEY, parse_borders
from stageloom.shared.importer.operators import critical_path
from stageloom.shared.importer.values import infer_values
from stageloom.shared.search.endings import Endings, GroupRule
from tests.importer.models import info, run
from tests.search.graphs import union

DATA = Path(__file__).parents[1] / "data"


@cache
def _model(name: str, width: float = 1.0) -> onnx.ModelProto:
    return zoo.build(name, width=width)


@cache
def _built(name: str, width: float = 1.0) -> Built:
    """The graph straight from the file: the zoo writes what folding would leave."""
    model = _model(name, width)
    (carried,) = (e.value for e in model.metadata_props if e.key == METADATA_KEY)
    return build_graph(model, infer_values(model), parse_borders(carried))


@pytest.mark.more
@pytest.mark.promise("parameters-gflop-fused-units")
@pytest.mark.parametrize(
    ("name", "parameters_m", "gflop", "units", "path"),
    [
        ("inception_v3", 23.8, 5.68, 120, 62),
        ("inception_v3_299", 23.8, 11.4, 120, 62),
        ("resnet50", 25.5, 8.18, 56, 52),
        ("squeezenet", 1.25, 1.64, 38, 30),
        ("squeezenet_bypass", 1.59, 2.37, 46, 38),
        ("googlenet", 6.62, 3.00, 81, 36),
        pytest.param("nasnet_large", 88.7, 47.6, 642, 177, marks=pytest.mark.full),  # 350 MB of weights
    ],
)
def test_sizes_are_the_published_ones(
    name: str, parameters_m: float, gflop: float, units: int, path: int
) -> None:
    graph = _built(name).graph
    stored = zoo.parameters(_model(name)) / 1e6
    work = sum(operator.flop for operator in graph.operators) / 1e9
    assert stored == pytest.approx(parameters_m, rel=0.005)
    assert work == pytest.approx(gflop, rel=0.005)
    assert graph.fused_units == units
    assert critical_path(unit_views(graph), [o.fused_unit for o in graph.operators]) == path


@pytest.mark.full
def test_nasnet_has_the_parameters_of_two_published_implementations() -> None:
    """Folding leaves a bias of a BatchNorm's two trained parameters, or of its four with the moving ones."""
    model = _model("nasnet_large")
    sizes = {weight.name: math.prod(weight.dims) for weight in model.graph.initializer}
    biases = sum(
        sizes[node.input[2]] for node in model.graph.node if node.op_type == "Conv" and len(node.input) == 3
    )
    assert zoo.parameters(model) + biases == 88_753_150  # timm, PyTorch
    assert zoo.parameters(model) + 3 * biases == 88_949_818  # Keras


@pytest.mark.full
def test_randwire_is_as_large_as_the_published_mean_over_random_graphs() -> None:
    """61.5 M parameters and 7.9 G multiply-adds; the graphs' numbers of entry nodes decide the rest."""
    work = sum(operator.flop for operator in _built("randwire").graph.operators)
    assert zoo.parameters(_model("randwire")) / 1e6 == pytest.approx(61.5, rel=0.01)
    assert work / 2e9 == pytest.approx(7.9, rel=0.04)


def test_randwire_has_the_120_operators_of_table_2_where_a_node_counts_as_one() -> None:
    nodes = _model("randwire", 0.25).graph.node
    kinds = [node.op_type for node in nodes]
    depthwise = [node for node in nodes if any(a.name == "group" for a in node.attribute)]
    own = kinds.count("Conv") - 2 * len(depthwise)  # the first one and the head's
    head = 2  # Relu and pool
    assert len(depthwise) == 16 + 3 * 32
    assert len(depthwise) + kinds.count("Mean") + own + head == 120


@pytest.mark.parametrize(("name", "blocks"), [("randwire", 6), ("nasnet_large", 24)])
def test_a_stage_or_a_cell_is_a_block(name: str, blocks: int) -> None:
    assert len(_built(name, 0.25).graph.partition("paper")) + 1 == blocks


def test_small_world_graph_without_rewiring_is_the_ring() -> None:
    assert watts_strogatz(6, 4, 0.0, 0) == [(), (0,), (0, 1), (1, 2), (0, 2, 3), (0, 1, 3, 4)]


@pytest.mark.parametrize("seed", range(20))
def test_rewiring_keeps_the_number_of_edges_and_makes_no_loop(seed: int) -> None:
    graph = watts_strogatz(32, 4, 0.75, seed)
    assert sum(len(before) for before in graph) == 32 * 4 // 2
    assert all(p < node for node, before in enumerate(graph) for p in before)
    assert graph != watts_strogatz(32, 4, 0.75, seed + 1)


@pytest.mark.promise("parameters-gflop-fused-units")
@pytest.mark.parametrize(
    ("name", "blocks", "operators"),
    [("inception_v3", 13, 119), ("resnet50", 5, 87), ("squeezenet_bypass", 12, 50)],
)
def test_blocks_and_operators_are_those_of_table_2_without_the_classifier(
    name: str, blocks: int, operators: int
) -> None:
    built = _built(name)
    assert len(built.graph.partition("paper")) + 1 == blocks
    assert len(built.graph.operators) - built.classifier.bit_count() == operators


def test_inception_counts_94_convolutions_14_pools_and_11_flat_concats() -> None:
    kinds = [o.kind for o in _built("inception_v3").graph.operators]
    assert kinds.count("Conv") == 94
    assert sum("Pool" in kind for kind in kinds) == 14
    assert kinds.count("Concat") == 11
    assert kinds.count("Gemm") == 1


def test_resnet_counts_a_residual_add_and_its_relu_as_two() -> None:
    kinds = [o.kind for o in _built("resnet50").graph.operators]
    assert (kinds.count("Conv"), kinds.count("Add"), kinds.count("Relu")) == (53, 16, 16)


def _blocks(built: Built) -> list[tuple[list[str], set[tuple[int, int]]]]:
    """Kinds as IOS names them and edges, per block of the paper's partition, without the classifier."""
    graph: Graph = built.graph
    edges = (0, *graph.partition("paper"), len(graph.operators))
    blocks = []
    for first, last in pairwise(edges):
        ops = [op for op in range(first, last) if not built.classifier >> op & 1]
        kinds = ["Pool" if "Pool" in (kind := graph.operators[op].kind) else kind for op in ops]
        kinds = ["Identity" if kind in ("Concat", "Add") else kind for kind in kinds]
        inner = {(ops.index(p), ops.index(op)) for op in ops for p in ops if graph.predecessors[op] >> p & 1}
        blocks.append((kinds, inner))
    return blocks


def _isomorphic(
    left: tuple[list[str], set[tuple[int, int]]], right: tuple[list[str], set[tuple[int, int]]]
) -> bool:
    """Whether a bijection keeps kinds and edges; by backtracking over candidates of equal kind and degree."""
    (kinds, edges), (others, other_edges) = left, right
    if sorted(kinds) != sorted(others) or len(edges) != len(other_edges):
        return False

    def degree(node: int, of: set[tuple[int, int]]) -> tuple[int, int]:
        return sum(a == node for a, _ in of), sum(b == node for _, b in of)

    def extend(mapped: list[int]) -> bool:
        node = len(mapped)
        if node == len(kinds):
            return True
        for other in range(len(others)):
            fits = (
                other not in mapped
                and kinds[node] == others[other]
                and degree(node, edges) == degree(other, other_edges)
                and all(((i, node) in edges) == ((m, other) in other_edges) for i, m in enumerate(mapped))
                and all(((node, i) in edges) == ((other, m) in other_edges) for i, m in enumerate(mapped))
            )
            if fits and extend([*mapped, other]):
                return True
        return False

    return extend([])


@pytest.mark.promise("parameters-gflop-fused-units")
@pytest.mark.parametrize(
    ("name", "oracle"), [("inception_v3", "inception_v3"), ("squeezenet_bypass", "squeezenet")]
)
@pytest.mark.parametrize("width", [1.0, 0.25])
def test_blocks_are_isomorphic_to_those_of_ios(name: str, oracle: str, width: float) -> None:
    expected = json.loads((DATA / "ios_blocks.json").read_text())[oracle]
    blocks = _blocks(_built(name, width))
    assert sum(len(kinds) for kinds, _ in blocks) == expected["table_2_operators"]
    assert len(blocks) == len(expected["blocks"])
    for index, (ours, theirs) in enumerate(zip(blocks, expected["blocks"], strict=True)):
        right = theirs["ops"], {(a, b) for a, b in theirs["edges"]}
        assert _isomorphic(ours, right), f"block {index}: {ours} is not {right}"


@pytest.mark.parametrize(("key", "r", "s"), [("r3_s8", 3, 8), ("unpruned", None, None)])
def test_imported_inception_blocks_have_exactly_the_search_spaces_of_ios(
    key: str, r: int | None, s: int | None
) -> None:
    """States, transitions and schedules under the rooted groups of IOS's released code."""
    expected = json.loads((DATA / "ios_blocks.json").read_text())["inception_v3"]["blocks"]
    for index, ((kinds, edges), theirs) in enumerate(
        zip(_blocks(_built("inception_v3", 0.25)), expected, strict=True)
    ):
        graph = union([[p for p, op in sorted(edges) if op == node] for node in range(len(kinds))])
        found = measure_space(Endings(graph, rule=GroupRule.ROOTED, r=r, s=s))
        assert found == SpaceSize(**theirs["rooted"][key]), f"block {index}"


def test_isomorphism_check_tells_a_moved_edge() -> None:
    left = (["Conv", "Conv", "Pool"], {(0, 2), (1, 2)})
    assert _isomorphic(left, (["Conv", "Pool", "Conv"], {(0, 1), (2, 1)}))
    assert not _isomorphic(left, (["Conv", "Pool", "Conv"], {(0, 2), (2, 1)}))


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not() -> None:
    first, again, other = (
        zoo.build("squeezenet", width=0.25, seed=seed).SerializeToString(deterministic=True)
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", zoo.ZOO)
def test_activations_stay_near_unit_variance_and_depend_on_the_input(name: str) -> None:
    model = zoo.build(name, width=0.25)
    inner = [node.output[0] for node in model.graph.node if node.op_type == "Conv"]
    model.graph.output.extend(info(tensor, None) for tensor in inner)
    size = zoo.ZOO[name].size
    rng = np.random.default_rng(3)

    def image() -> np.ndarray:
        coarse = rng.standard_normal((1, 3, 7, 7)).astype(np.float32)
        return np.kron(coarse, np.ones((1, 1, 48, 48), np.float32))[:, :, :size, :size]

    first, second = (run(model, {"image": image()}, optimise=True) for _ in range(2))
    spread = [float(first[tensor].std()) for tensor in inner]
    assert 0.05 < min(spread) and max(spread) < 50.0
    change = np.linalg.norm(first["logits"] - second["logits"]) / np.linalg.norm(first["logits"])
    assert change > 0.05


def test_command_line_writes_models_and_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--model", "squeezenet", "--width", "0.25", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    model = onnx.load(row["path"])
    assert row["parameters"] == zoo.parameters(model)
    assert row["size_bytes"] == Path(row["path"]).stat().st_size
