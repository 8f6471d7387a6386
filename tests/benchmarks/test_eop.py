"""What the EOP benchmark works out: its networks are the published ones, and its lines say what they ask."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np
import onnx
import pytest

from benchmarks.eop.models import Subject
from benchmarks.eop.networks import FLOAT_BYTES, NETWORKS, bert, gru, lstm, squeezenet
from benchmarks.eop.paper import EDGE_SERVER, derived, figure_10, near, of_tables, table_5, times_of, within
from benchmarks.eop.part_times import OPENERS, Run, cases, judged, measured_s
from benchmarks.eop.problems import Shares, extents_of
from benchmarks.eop.search_time import measure_search, with_patterns
from benchmarks.runner import Report
from stageloom.planner.twin.device_pair import load_pair
from stageloom.shared.graph import graph_problem
from stageloom.shared.partition import Axis
from stageloom.shared.search.eop import eop
from stageloom.shared.search.split_problem import SplitProblem, Whole, coupled_s

PAIR = load_pair(EDGE_SERVER)


@pytest.mark.parametrize(
    ("name", "parameters_m", "gflop"),
    # Of the published networks, without what normalisation folds into convolutions.
    [
        ("InceptionV3", 23.8, 11.4),
        ("ResNet-18", 11.7, 3.6),
        ("MobileNet", 4.2, 1.14),
        ("SqueezeNet", 1.24, 0.70),
        ("Yolo v3", 61.9, 156),
        ("Transformers", 85.0, 22.4),
    ],
)
def test_networks_are_the_published_ones(name: str, parameters_m: float, gflop: float) -> None:
    graph = NETWORKS[name]()
    assert graph_problem(graph) == ""
    weights = sum(one.weight_bytes for one in graph.operators) / FLOAT_BYTES
    assert weights / 1e6 == pytest.approx(parameters_m, rel=0.02)
    assert sum(one.flop for one in graph.operators) / 1e9 == pytest.approx(gflop, rel=0.02)


def test_recurrent_networks_repeat_their_cells() -> None:
    assert len(lstm(3).operators) == 3 * len(lstm(1).operators) == 3 * 2 * 13
    assert len(gru(3, layers=4).operators) == 3 * 4 * 15
    assert graph_problem(lstm(3)) == graph_problem(gru(3)) == ""


def test_heads_change_neither_flop_of_dense_layers_nor_their_number() -> None:
    few, many = bert(1), bert(1, heads=192)
    for kind in ("dense", "batch_matmul"):
        flop = [sum(one.flop for one in graph.operators if one.kind == kind) for graph in (few, many)]
        assert flop[0] == flop[1] > 0


def test_shares_of_an_operator_add_up_and_weights_follow_channels_alone() -> None:
    graph = squeezenet()
    op = next(op for op, one in enumerate(graph.operators) if one.kind == "conv2d")
    whole = Shares(graph, op, 16)
    operator = graph.operators[op]
    made = prod(graph.tensors[operator.outputs[0]].shape)
    assert (whole.flop, whole.elements) == (16 * operator.flop, 16 * made)
    for axis, weights, given in ((Axis.BATCH, 1.0, 0.25), (Axis.CHANNELS, 0.25, 1.0), (Axis.ROWS, 1.0, 0.25)):
        part = replace(whole, axis=axis, share=0.25)
        read = graph.tensors[operator.inputs[0]].nbytes
        assert part.flop == whole.flop / 4
        assert part.moved_bytes == weights * operator.weight_bytes + 16 * (given * read + 0.25 * 4 * made)
    assert extents_of((1, 64, 28, 30), 16) == {Axis.BATCH: 16, Axis.CHANNELS: 64, Axis.ROWS: 28}


@pytest.mark.parametrize("make", [derived, of_tables])
def test_a_split_model_is_never_above_its_best_single_resource(make: object) -> None:
    assert callable(make)
    problem = make(squeezenet(), PAIR, 16)
    found = times_of(problem)
    assert found.split_s["eop"] <= min(found.cpu_s, found.gpu_s, *found.split_s.values()) + 1e-12
    assert found.gpu_s == pytest.approx(coupled_s(problem, [Whole(0)] * len(problem.operators)))


def test_patterns_predict_what_the_rooflines_say() -> None:
    problem = derived(squeezenet(), PAIR)
    fitted = with_patterns(problem)
    assert isinstance(fitted, SplitProblem)
    assert eop(fitted).seconds == pytest.approx(eop(problem).seconds, rel=0.05)


@pytest.mark.more
def test_the_search_is_timed_with_every_splitter_on_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.eop.search_time.BATCHES", (1,))
    report = Report("eop")
    measure_search(report, 1, lambda: squeezenet(64))
    assert {row["splitter"] for row in report.rows} == {"eop", "eop_paper", "equal", "fixed", "separate"}
    assert report.figures["search_operators"] == len(squeezenet().operators)


def test_table_5_as_printed_is_not_all_of_ratios() -> None:
    sums = {one.model: one.holds for one in table_5(PAIR) if one.claim == "alpha + beta = 1"}
    assert [name for name, holds in sums.items() if not holds] == ["tanh", "multiply"]


@pytest.mark.more
def test_three_times_the_layers_take_three_times_as_long() -> None:
    found = [one for one in figure_10(PAIR, (1, 3)) if "layers" in one.claim]
    assert [one.holds for one in found] == [False, False]
    assert [float(one.ours.split()[0]) for one in found] == pytest.approx([3.0, 3.0], abs=0.1)


def test_shapes_hold_within_a_quarter_and_ranges_within_a_tenth() -> None:
    assert near(1.2, 1.0) and near(0.81, 1.0) and not near(1.3, 1.0) and not near(0.7, 1.0)
    assert within([1.4, 3.1], 1.5, 2.9) and not within([1.3, 2.0], 1.5, 2.9)
    assert not within([1.5, 3.3], 1.5, 2.9)


def test_lines_are_medians_of_a_class_and_a_worse_pattern_is_not_met() -> None:
    rows = [
        {"executor": "onnx", "class": "dense", "error": error, "line_error": line}
        for error, line in ((0.01, 0.2), (0.2, 0.1), (0.3, 0.1))
    ]
    lines = judged(rows)
    assert [line["measured"] for line in lines] == [0.2, 2.0]
    assert [line["met"] for line in lines] == [False, False]


def test_a_part_of_an_operator_makes_its_extent_s_share_of_the_outputs() -> None:
    sizes: list[int] = []

    def noting(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Run:
        run = OPENERS["onnx"](model, feeds)
        sizes.append(run()[0].size)  # type: ignore[index]
        return run

    for case in cases():
        times_s = measured_s(case, [1, case.extent], noting, 1)
        assert all(seconds > 0 for seconds in times_s.values())
        assert sizes[-1] == case.extent * sizes[-2], case


def test_a_model_of_images_is_named_with_their_side() -> None:
    image, tokens = np.zeros((16, 3, 112, 112)), np.zeros((16, 128, 256))
    assert Subject("squeezenet", 16, None, {"x": image}).label == "squeezenet x16 at 112 pixels"  # type: ignore[arg-type]
    assert Subject("bert", 16, None, {"x": tokens}).label == "bert x16"  # type: ignore[arg-type]
