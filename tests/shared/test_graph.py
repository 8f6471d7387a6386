"""Graph: derived masks and live tensors against direct simulation; what a broken graph is refused for."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from stageloom.shared.bitmask import bits, mask_of
from stageloom.shared.convolution import Convolution
from stageloom.shared.digest import canonical
from stageloom.shared.errors import DecodeError
from stageloom.shared.graph import Graph, Operator, Tensor, graph_from_wire, graph_problem, graph_to_wire
from stageloom.shared.ids import TensorId
from tests.shared.randoms import random_graph

SEEDS = range(60)


CONVOLUTION = Convolution((3,), (1,), (1,), (1, 1), "Relu(#0)")


def chain(num_ops: int = 3) -> Graph:
    """input 0 -> op 0 -> tensor 1 -> op 1 -> ..."""
    return Graph(
        name="chain",
        tensors=tuple(Tensor(f"t{i}", "float32", (1, 2, 3)) for i in range(num_ops + 1)),
        operators=tuple(
            Operator(
                "Conv",
                f"op{i}",
                (i,),
                (TensorId(i),),
                (TensorId(i + 1),),
                10,
                20,
                i // 2,
                convolution=CONVOLUTION if i == 0 else None,
            )
            for i in range(num_ops)
        ),
        inputs=(TensorId(0),),
        outputs=(TensorId(num_ops),),
        base_cuts=tuple(range(1, num_ops)),
        partitions=(("whole", ()),),
    )


def test_a_mask_holds_its_members_in_ascending_order() -> None:
    assert list(bits(mask_of([9, 0, 64, 3]))) == [0, 3, 9, 64]
    assert list(bits(0)) == []


def test_a_chain_has_the_masks_and_sizes_of_a_chain() -> None:
    graph = chain(3)
    assert graph.producer == (-1, 0, 1, 2)
    assert graph.consumers == ((0,), (1,), (2,), ())
    assert graph.predecessors == (0b000, 0b001, 0b010)
    assert graph.successors == (0b010, 0b100, 0b000)
    assert graph.ancestors == (0b000, 0b001, 0b011)
    assert [graph.live_at(cut) for cut in range(3)] == [(0,), (1,), (2,)]
    assert graph.tensors[0].nbytes == 24
    assert Tensor("scalar", "float64", ()).nbytes == 8
    assert graph.fused_units == 2
    assert graph.partition("whole") == ()
    with pytest.raises(KeyError):
        graph.partition("paper")


@pytest.mark.parametrize("seed", SEEDS)
def test_ancestors_are_what_a_walk_over_the_tensors_reaches(seed: int) -> None:
    graph = random_graph(Random(seed), 12)
    for op in range(12):
        reached: set[int] = set()
        todo = [op]
        while todo:
            for tensor in graph.operators[todo.pop()].inputs:
                makers = [m for m, maker in enumerate(graph.operators) if tensor in maker.outputs]
                todo += [m for m in makers if m not in reached]
                reached |= set(makers)
        assert set(bits(graph.ancestors[op])) == reached
        assert all(graph.ancestors[after] >> op & 1 for after in bits(graph.successors[op]))


@pytest.mark.parametrize("seed", SEEDS)
def test_live_tensors_are_exactly_what_the_rest_of_a_run_touches_but_does_not_make(seed: int) -> None:
    graph = random_graph(Random(seed), 10)
    assert graph.live_at(0) == graph.inputs
    for cut in range(1, 10):
        touched: set[int] = set()
        made_later: set[int] = set()
        for operator in graph.operators[cut:]:
            touched |= set(operator.inputs)
            made_later |= set(operator.outputs)
        touched |= set(graph.outputs)
        assert graph.live_at(cut) == tuple(sorted(touched - made_later))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_graph_survives_its_wire_form_with_the_same_digest(seed: int) -> None:
    graph = random_graph(Random(seed), 9)
    assert graph_problem(graph) == ""
    again = graph_from_wire(graph_to_wire(graph))
    assert again == graph
    assert again.digest == graph.digest
    assert canonical(graph_to_wire(again)) == canonical(graph_to_wire(graph))


def test_the_digest_depends_on_every_field() -> None:
    graph = chain()
    op = graph.operators[0]
    changed = [
        replace(graph, name="other"),
        replace(graph, base_cuts=(1,)),
        replace(graph, partitions=()),
        replace(graph, batchable=True),
        replace(graph, outputs=(TensorId(2), TensorId(3))),
        replace(graph, tensors=(replace(graph.tensors[0], dtype="int8"), *graph.tensors[1:])),
        *(
            replace(graph, operators=(other, *graph.operators[1:]))
            for other in [
                replace(op, kind="Pool"),
                replace(op, nodes=(0, 7)),
                replace(op, flop=11),
                replace(op, weight_bytes=21),
                replace(op, fused_unit=5),
                replace(op, opaque="custom operator"),
                replace(op, convolution=None),
                *(
                    replace(op, convolution=other)
                    for other in [
                        replace(CONVOLUTION, kernel=(5,)),
                        replace(CONVOLUTION, strides=(2,)),
                        replace(CONVOLUTION, dilations=(2,)),
                        replace(CONVOLUTION, pads=(2, 0)),
                        replace(CONVOLUTION, activation=""),
                    ]
                ),
            ]
        ),
    ]
    assert len({graph.digest, *(g.digest for g in changed)}) == len(changed) + 1


BROKEN: dict[str, tuple[list[Any], Any, str]] = {
    "version": ([0], 3, "format"),
    "boolean version": ([0], True, "format"),
    "name": ([1], b"chain", "string"),
    "tensor type": ([2, 0, 1], "complex64", "type"),
    "negative dimension": ([2, 0, 2], [1, -2], "broken"),
    "float dimension": ([2, 0, 2], [1.0], "broken"),
    "boolean dimension": ([2, 0, 2], [True], "broken"),
    "infinite dimension": ([2, 0, 2], [float("inf")], "broken"),
    "a tensor beyond any memory": ([2, 0, 2], [1 << 40, 1 << 40], "shape"),
    "too many dimensions": ([2, 0, 2], [1] * 65, "shape"),
    "no operator": ([3], [], "operators"),
    "input from the future": ([3, 0, 3], [2], "before it is made"),
    "unknown input": ([3, 0, 3], [99], "before it is made"),
    "repeated operator input": ([3, 0, 3], [0, 0], "twice"),
    "unknown output": ([3, 2, 4], [99], "unknown"),
    "made twice": ([3, 1, 4], [1], "made twice"),
    "never made": ([3, 2, 4], [], "never made"),
    "text as a number": ([3, 0, 5], "10", "broken"),
    "negative flop": ([3, 0, 5], -1, "broken"),
    "number as a name": ([3, 0, 1], 7, "string"),
    "operator row": ([3, 0], [1, 2], "unpack"),
    "no list for a convolution": ([3, 0, 9], 0, "no list"),
    "convolution cut short": ([3, 0, 9], [[3], [1], [1], [1, 1]], "unpack"),
    "convolution of another length": ([3, 0, 9, 0], [3, 3], "differ in length"),
    "convolution of no axis": ([3, 0, 9], [[], [], [], [], ""], "differ in length"),
    "pads for one side": ([3, 0, 9, 3], [1], "differ in length"),
    "no stride": ([3, 0, 9, 1], [0], "out of range"),
    "negative pad": ([3, 0, 9, 3], [-1, 1], "broken"),
    "convolution of another rank": ([3, 0, 9], [[3, 3], [1, 1], [1, 1], [1] * 4, ""], "rank"),
    "convolution of another size": ([3, 0, 9, 0], [5], "another shape"),
    "activation as a number": ([3, 0, 9, 4], 7, "string"),
    "activation without end": ([3, 0, 9, 4], "x" * 257, "too long"),
    "opaque convolution": ([3, 0, 8], "why", "is none"),
    "convolution of two inputs": (
        [3, 2],
        ["Conv", "c", [2], [1, 2], [3], 0, 0, 0, "", [[3], [1], [1], [1, 1], ""], []],
        "is none",
    ),
    "unknown graph input": ([4], [0, 99], "inputs"),
    "repeated graph input": ([4], [0, 0], "inputs"),
    "unknown graph output": ([5], [99], "outputs"),
    "repeated graph output": ([5], [3, 3], "outputs"),
    "cut at the end": ([6], [1, 3], "base cuts"),
    "cut at the start": ([6], [0, 1], "base cuts"),
    "mapping for a list": ([6], {}, "broken"),
    "text for a list": ([4], "", "broken"),
    "descending cuts": ([6], [2, 1], "base cuts"),
    "partition off the cuts": ([7], [["x", [3]]], "partition"),
    "descending partition": ([7], [["x", [2, 1]]], "partition"),
    "two partitions of one name": ([7], [["x", [1]], ["x", [2]]], "share a name"),
    "batchable": ([8], 1, "boolean"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_graph_is_refused_by_name(name: str) -> None:
    path, value, message = BROKEN[name]
    wire: Any = graph_to_wire(chain())
    assert graph_from_wire(wire) == chain()
    place = wire
    for index in path[:-1]:
        place = place[index]
    place[path[-1]] = value
    with pytest.raises(DecodeError, match=message):
        graph_from_wire(wire)


@pytest.mark.parametrize("wire", [None, 7, "graph", b"", [], [1] * 9, {}, [1, [2]]])
def test_a_value_of_another_shape_is_no_graph(wire: Any) -> None:
    with pytest.raises(DecodeError):
        graph_from_wire(wire)
