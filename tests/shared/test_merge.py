"""Which convolutions may merge, and as what: closed forms, each demand alone, and taps counted one by one."""

import itertools
from dataclasses import replace
from random import Random

import pytest

from stageloom.shared.blocks import combine, split
from stageloom.shared.convolution import Convolution
from stageloom.shared.graph import Graph, Operator, Tensor, graph_problem
from stageloom.shared.ids import OpId, TensorId
from stageloom.shared.merge import may_merge, merge_key, merged, padding

EXTENT = 12
CHANNELS = 3


def same(kernel: tuple[int, ...], stride: int = 1, dilation: int = 1, activation: str = "") -> Convolution:
    """A convolution whose output is as large as its input over the stride."""
    pads = tuple(dilation * (size // 2) for size in kernel)
    axes = len(kernel)
    return Convolution(kernel, (stride,) * axes, (dilation,) * axes, (*pads, *pads), activation)


def siblings(*found: Convolution | None, filters: int = 4) -> Graph:
    """Operators that read one tensor: the graph's input."""
    shapes = [(1, CHANNELS, *[EXTENT] * 2)]
    for index, one in enumerate(found):
        shapes.append((1, filters + index, *(one or same((1, 1))).extents(shapes[0][2:])))
    return Graph(
        name="siblings",
        tensors=tuple(Tensor(f"t{i}", "float32", shape) for i, shape in enumerate(shapes)),
        operators=tuple(
            Operator(
                "Conv", f"c{i}", (i,), (TensorId(0),), (TensorId(i + 1),), 100, 10, i, convolution=one
            )
            for i, one in enumerate(found)
        ),
        inputs=(TensorId(0),),
        outputs=tuple(TensorId(i + 1) for i in range(len(found))),
    )  # fmt: skip


def ops(graph: Graph) -> list[OpId]:
    return [OpId(op) for op in range(len(graph.operators))]


def test_smaller_kernels_come_to_the_middle_of_the_largest() -> None:
    graph = siblings(same((1, 1)), same((3, 3)), same((5, 1)))
    one = merged(graph, ops(graph))
    assert one.convolution == Convolution((5, 3), (1, 1), (1, 1), (2, 1, 2, 1))
    assert one.offsets == ((2, 1), (1, 0), (0, 1))
    assert (one.input, one.outputs, one.filters) == (0, (1, 2, 3), (4, 5, 6))
    pixels = EXTENT * EXTENT
    added = [(4, 15 - 1), (5, 15 - 9), (6, 15 - 5)]
    assert padding(graph, one) == (
        sum(2 * pixels * filters * CHANNELS * taps for filters, taps in added),
        sum(4 * filters * CHANNELS * taps for filters, taps in added),
    )


def test_equal_convolutions_are_stacked_without_padding() -> None:
    graph = siblings(
        same((3, 3), stride=2, activation="Relu(#0)"), same((3, 3), stride=2, activation="Relu(#0)")
    )
    one = merged(graph, ops(graph))
    assert one.convolution == graph.operators[0].convolution
    assert padding(graph, one) == (0, 0)


PLAIN = same((3, 3))
MISFITS: dict[str, Convolution | None] = {
    "strides": Convolution((3, 3), (1, 2), (1, 1), (1, 1, 1, 1)),
    "dilations": same((3, 3), dilation=2),
    "activation": same((3, 3), activation="Relu(#0)"),
    "extents": Convolution((3, 3), (1, 1), (1, 1), (0, 1, 0, 1)),
    "no such convolution": None,
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_each_demand_is_made_of_every_operator(name: str) -> None:
    graph = siblings(PLAIN, MISFITS[name], PLAIN)
    assert graph_problem(graph) == ""
    assert not may_merge(graph, ops(graph))
    assert may_merge(graph, [OpId(0), OpId(2)])
    with pytest.raises(ValueError, match="may not merge"):
        merged(graph, ops(graph))


def test_paddings_must_differ_by_whole_dilations() -> None:
    near = Convolution((3, 3), (1, 1), (2, 2), (2, 2, 2, 2))
    off = Convolution((3, 3), (1, 1), (2, 2), (1, 2, 3, 2))
    far = Convolution((5, 3), (1, 1), (2, 2), (4, 2, 4, 2))
    graph = siblings(near, off, far)
    assert {tuple(graph.tensors[t].shape[2:]) for t in graph.outputs} == {(EXTENT, EXTENT)}
    assert may_merge(graph, [OpId(0), OpId(2)])
    assert not may_merge(graph, [OpId(0), OpId(1)])


def test_operators_of_other_inputs_types_or_only_one_never_merge() -> None:
    graph = siblings(PLAIN, PLAIN)
    chain = replace(graph, operators=(graph.operators[0], replace(graph.operators[1], inputs=(TensorId(1),))))
    other = replace(graph, tensors=(*graph.tensors[:2], replace(graph.tensors[2], dtype="float16")))
    assert not may_merge(chain, ops(chain))
    assert not may_merge(other, ops(other))
    assert not may_merge(graph, [OpId(0)])
    assert not may_merge(graph, [OpId(0), OpId(0)])


def reads(one: Convolution, position: tuple[int, ...], tap: tuple[int, ...]) -> tuple[int, ...]:
    """The input element that a tap multiplies."""
    return tuple(
        p * stride - before + dilation * t
        for p, stride, before, dilation, t in zip(
            position, one.strides, one.before, one.dilations, tap, strict=True
        )
    )


@pytest.mark.parametrize("seed", range(40))
def test_every_tap_of_every_kernel_reads_what_it_read_before(seed: int) -> None:
    """Random kernels, even ones and uneven pads included: wherever the key agrees, the taps do."""
    random = Random(seed)
    stride, dilation = random.randint(1, 3), random.randint(1, 3)
    parts = []
    for _ in range(random.randint(2, 4)):
        kernel = (random.randint(1, 4), random.randint(1, 4))
        before = tuple(dilation * random.randint(0, 2) for _ in kernel)
        behind = tuple(
            max(0, dilation * (size - 1) - start + random.randint(0, 1))
            for size, start in zip(kernel, before, strict=True)
        )
        parts.append(Convolution(kernel, (stride,) * 2, (dilation,) * 2, (*before, *behind)))
    graph = siblings(*parts)
    for first, second in itertools.combinations(ops(graph), 2):
        equal = graph.tensors[first + 1].shape[2:] == graph.tensors[second + 1].shape[2:]
        assert may_merge(graph, [first, second]) == equal
        if not equal:
            continue
        one = merged(graph, [first, second])
        assert one.convolution.extents((EXTENT, EXTENT)) == graph.tensors[first + 1].shape[2:]
        for op, offset in zip(one.ops, one.offsets, strict=True):
            part = parts[op]
            for tap in itertools.product(*map(range, part.kernel)):
                inside = tuple(o + t for o, t in zip(offset, tap, strict=True))
                assert all(0 <= t < size for t, size in zip(inside, one.convolution.kernel, strict=True))
                for position in [(0, 0), (2, 1)]:
                    assert reads(one.convolution, position, inside) == reads(part, position, tap)


def test_a_combined_graph_keeps_the_classes_of_its_members_apart() -> None:
    graph = siblings(PLAIN, None, same((1, 1)))
    block = split(graph, ())[0]
    twice = combine([(graph, block), (graph, block)])
    assert twice.may_merge([0, 2]) and twice.may_merge([3, 5])
    assert not twice.may_merge([0, 3]), "replicas hold different instances"
    assert not twice.may_merge([0, 1]) and not twice.may_merge([1, 4])
    assert merge_key(graph, OpId(1)) is None
