"""Attributes of convolutions and pools, from ONNX nodes to the graph's wire form and back; work of nodes."""

from typing import Any

import pytest
from onnx import TensorProto, helper

from stageloom.shared.attributes import Attributes
from stageloom.shared.importer.attributes import attributes_of, node_flop

CONV = helper.make_node(
    "Conv", ["x", "w"], ["c"], kernel_shape=[3, 5], strides=[2, 1], pads=[1, 2, 1, 2], group=4
)
BARE = helper.make_node("Conv", ["x", "w"], ["c"])
WEIGHTS = {"w": helper.make_tensor("w", TensorProto.FLOAT, [1, 1, 7, 7], [0.0] * 49)}


def test_a_convolution_keeps_kernel_strides_padding_groups_and_activation() -> None:
    relu = helper.make_node("Relu", ["c"], ["y"])
    assert attributes_of([CONV, relu], CONV, {}) == Attributes((3, 5), (2, 1), (1, 2, 1, 2), 4, "relu")
    assert attributes_of([CONV], CONV, {}).activation == "identity"


def test_what_a_convolution_does_not_say_comes_from_its_weights_and_the_defaults() -> None:
    assert attributes_of([BARE], BARE, WEIGHTS) == Attributes((7, 7), (1, 1), (0, 0, 0, 0), 1)


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [
        ("MaxPool", "max"),
        ("AveragePool", "avg"),
        ("GlobalMaxPool", "global max"),
        ("GlobalAveragePool", "global avg"),
    ],
)
def test_pools_say_which_they_are(kind: str, pooling: str) -> None:
    pool = helper.make_node(kind, ["x"], ["y"])
    assert attributes_of([pool], pool, {}).pooling == pooling


@pytest.mark.parametrize(
    ("kind", "activation"), [("Sigmoid", "sigmoid"), ("Tanh", "tanh"), ("Gelu", "other"), ("Clip", "relu")]
)
def test_an_activation_alone_or_behind_a_convolution_is_named(kind: str, activation: str) -> None:
    alone = helper.make_node(kind, ["c"], ["y"])
    assert attributes_of([alone], alone, {}).activation == activation
    assert attributes_of([CONV, alone], CONV, {}).activation == activation


def test_numbers_that_no_graph_may_hold_count_as_absent() -> None:
    wild = helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3], pads=[-1, 0, 0, 0], group=-1)
    assert attributes_of([wild], wild, {}) == Attributes()


@pytest.mark.parametrize(
    ("equation", "shapes", "flop"),
    [
        ("ij,jk->ik", [(2, 3), (3, 5)], 2 * 2 * 3 * 5),
        ("bhid, bhjd -> bhij", [(1, 8, 16, 64), (1, 8, 32, 64)], 2 * 8 * 16 * 32 * 64),
        ("...ij,...jk->...ik", [(7, 4, 2, 3), (4, 3, 5)], 2 * 7 * 4 * 2 * 3 * 5),  # the ellipses broadcast
        ("...ij,jk", [(7, 2, 3), (3, 5)], 2 * 7 * 2 * 3 * 5),
        ("i,j,k->ijk", [(2,), (3,), (5,)], 2 * 2 * 3 * 5),
        ("bi,i->b", [(4, 3), (1,)], 2 * 4 * 3),
        ("ij->ji", [(2, 3)], 0),  # a transposition
        ("ij,jk->ik", [(2, 3), ()], 0),  # unknown
    ],
)
def test_an_einsum_counts_the_products_over_all_its_labels(
    equation: str, shapes: list[tuple[int, ...]], flop: int
) -> None:
    names = [f"x{index}" for index in range(len(shapes))]
    node = helper.make_node("Einsum", names, ["y"], equation=equation)
    assert node_flop(node, dict(zip(names, shapes, strict=True)).__getitem__) == flop


@pytest.mark.parametrize(
    ("shapes", "keys"),
    [
        ({"q": (2, 8, 16, 64), "k": (2, 8, 32, 64), "v": (2, 8, 32, 48), "y": (2, 8, 16, 48)}, 32),
        ({"q": (2, 16, 512), "k": (2, 32, 512), "v": (2, 32, 384), "y": (2, 16, 384)}, 32),
        ({"q": (2, 8, 16, 64), "k": (2, 4, 32, 64), "v": (2, 4, 32, 48), "y": (2, 8, 16, 48)}, 32),  # grouped
        ({"q": (2, 8, 16, 64), "k": (2, 8, 32, 64), "v": (2, 8, 32, 48), "y": (2, 8, 16, 48),
          "past_k": (2, 8, 100, 64), "past_v": (2, 8, 100, 48)}, 132),
    ],
    ids=["4 dimensions", "3 dimensions", "fewer heads of keys", "past"],
)  # fmt: skip
def test_attention_counts_its_two_products(shapes: dict[str, tuple[int, ...]], keys: int) -> None:
    inputs = ["q", "k", "v", *(["", "past_k", "past_v"] if "past_k" in shapes else [])]
    node = helper.make_node("Attention", inputs, ["y"])
    assert node_flop(node, lambda name: shapes.get(name, ())) == 2 * 2 * 8 * 16 * keys * (64 + 48)


def test_a_custom_attention_has_other_inputs_and_counts_nothing() -> None:
    node = helper.make_node("Attention", ["x", "w", "b"], ["y"], domain="com.microsoft")
    assert node_flop(node, lambda name: (2, 3, 4)) == 0


def test_attributes_round_trip_and_take_no_room_at_their_defaults() -> None:
    full = Attributes((3, 5), (2, 1), (1, 2, 1, 2), 4, "tanh", "avg")
    assert Attributes.from_wire(full.to_wire()) == full
    assert Attributes().to_wire() == [] and Attributes.from_wire([]) == Attributes()


@pytest.mark.parametrize(
    "wire",
    [
        None,
        [[3], [1]],
        [[3], [1], [0, 0], 1, 9, 0],
        [[3], [1], [0, 0], 1, 0, 9],
        [[3.0], [1], [0, 0], 1, 0, 0],
        [[-3], [1], [0, 0], 1, 0, 0],
        [[True], [1], [0, 0], 1, 0, 0],
        [[1] * 17, [1], [0, 0], 1, 0, 0],
        [[1 << 31], [1], [0, 0], 1, 0, 0],
        ["3", [1], [0, 0], 1, 0, 0],
    ],
)
def test_attributes_that_are_none_are_refused(wire: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Attributes.from_wire(wire)
