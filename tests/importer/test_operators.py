"""Which nodes form one operator, rule by rule, and what holds for every graph."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageloom.shared.importer.operators import (
    Group,
    NodeView,
    UnitView,
    critical_path,
    form_operators,
    fused_units,
)


def _kinds(
    nodes: Sequence[NodeView], outputs: Sequence[str], unfit: dict[str, str] | None = None
) -> list[str]:
    """The operators as joined node kinds."""
    groups = form_operators(nodes, outputs=outputs, unfit=unfit or {})
    return ["+".join(nodes[i].kind for i in group.nodes) for group in groups]


def _node(kind: str, reads: str, makes: str, opaque: str = "") -> NodeView:
    return NodeView(kind, tuple(reads.split()), tuple(makes.split()), opaque)


def test_a_convolution_carries_its_activation() -> None:
    assert _kinds([_node("Conv", "x", "c"), _node("Relu", "c", "r")], ["r"]) == ["Conv+Relu"]


def test_a_residual_add_and_its_relu_are_two_operators() -> None:
    nodes = [
        _node("Conv", "x", "c"),
        _node("Add", "c x", "a"),
        _node("Relu", "a", "r"),
    ]
    assert _kinds(nodes, ["r"]) == ["Conv", "Add", "Relu"]


def test_a_matrix_product_carries_its_bias_and_its_gate() -> None:
    nodes = [
        _node("MatMul", "x", "m"),
        _node("Add", "m", "b"),  # the other operand is a weight
        _node("Sigmoid", "b", "s"),
        _node("Mul", "b s", "y"),
        _node("Softmax", "y", "z"),
    ]
    assert _kinds(nodes, ["z"]) == ["MatMul+Add+Sigmoid+Mul", "Softmax"]


def test_an_activation_is_its_own_operator_where_something_else_reads_what_lies_between() -> None:
    nodes = [
        _node("Conv", "x", "c"),
        _node("Relu", "c", "r"),
        _node("Add", "c r", "a"),
        _node("Exp", "a", "e"),
    ]
    assert _kinds(nodes[:2], ["r", "c"]) == ["Conv", "Relu"]
    assert _kinds(nodes, ["e"]) == ["Conv+Relu+Add+Exp"]
    read_twice = [*nodes[:2], _node("MaxPool", "c", "p")]
    assert _kinds(read_twice, ["r", "p"]) == ["Conv", "Relu", "MaxPool"]


def test_a_tail_with_two_exits_keeps_the_chain_before_the_fork() -> None:
    nodes = [
        _node("Conv", "x", "c"),
        _node("Relu", "c", "r"),
        _node("Tanh", "r", "t"),
        _node("Neg", "r", "n"),
    ]
    assert _kinds(nodes, ["t", "n"]) == ["Conv+Relu", "Tanh", "Neg"]


def test_shape_only_nodes_belong_to_their_producer() -> None:
    nodes = [
        _node("GlobalAveragePool", "x", "p"),
        _node("Flatten", "p", "f"),
        _node("Gemm", "f", "y"),
        _node("Reshape", "f", "g"),
    ]
    assert _kinds(nodes, ["y", "g"]) == ["GlobalAveragePool+Flatten+Reshape", "Gemm"]


def test_a_shape_only_node_behind_a_graph_input_belongs_to_its_only_reader() -> None:
    nodes = [_node("Reshape", "x", "a"), _node("Unsqueeze", "a", "b"), _node("Conv", "b", "c")]
    assert _kinds(nodes, ["c"]) == ["Reshape+Unsqueeze+Conv"]
    assert _kinds(nodes, ["c", "a"]) == ["Reshape+Unsqueeze", "Conv"]


def test_values_that_cannot_cross_make_one_opaque_operator_with_the_reason() -> None:
    nodes = [
        _node("Conv", "x", "c"),
        _node("SplitToSequence", "c", "s"),
        _node("SequenceAt", "s", "a"),
        _node("Relu", "a", "r"),
    ]
    groups = form_operators(nodes, outputs=["r"], unfit={"s": "sequence values cannot be cut"})
    assert [g.nodes for g in groups] == [(0,), (1, 2), (3,)]
    assert groups[1].opaque == "sequence values cannot be cut"


def test_operators_that_would_wait_for_each_other_are_merged() -> None:
    # SplitToSequence and SequenceAt are one; Relu lies on a path that leaves and comes back.
    nodes = [
        _node("SplitToSequence", "x", "s n"),
        _node("Relu", "n", "r"),
        _node("SequenceAt", "s r", "a"),
    ]
    groups = form_operators(nodes, outputs=["a"], unfit={"s": "sequence"})
    assert [g.nodes for g in groups] == [(0, 1, 2)]


def test_an_opaque_node_stays_alone_and_leads_its_operator() -> None:
    nodes = [_node("Conv", "x", "c"), _node("If", "c", "i", "control flow: If"), _node("Relu", "i", "r")]
    groups = form_operators(nodes, outputs=["r"], unfit={})
    assert [(g.nodes, g.opaque) for g in groups] == [((0,), ""), ((1,), "control flow: If"), ((2,), "")]


@pytest.mark.parametrize("kind", ["Gelu", "QuantizeLinear", "DequantizeLinear", "Add", "Identity"])
def test_a_custom_operator_that_shares_its_name_with_a_standard_one_stays_alone(kind: str) -> None:
    why = f"custom operator: com.microsoft.{kind}"
    nodes = [_node("Conv", "x", "c"), _node(kind, "c", "g", why), _node("Relu", "g", "r")]
    groups = form_operators(nodes, outputs=["r"], unfit={})
    assert [(g.nodes, g.opaque) for g in groups] == [((0,), ""), ((1,), why), ((2,), "")]


def test_convolution_add_and_relu_are_one_fused_unit() -> None:
    operators = [
        UnitView("Conv", (), 2, False, False),
        UnitView("Conv", (0,), 1, False, False),
        UnitView("Add", (0, 1), 1, False, False),
        UnitView("Relu", (2,), 1, True, False),
    ]
    units = fused_units(operators)
    assert units == [0, 1, 1, 1]
    assert critical_path(operators, units) == 2


def test_an_add_fuses_with_the_convolution_at_the_end_of_the_longer_branch() -> None:
    branch = UnitView("Conv", (), 3, False, False)
    short, long = UnitView("Conv", (0,), 1, False, False), UnitView("Conv", (1,), 1, False, False)
    one = UnitView("Conv", (0,), 1, False, False)
    add = UnitView("Add", (2, 3), 0, True, False)
    assert fused_units([branch, one, long, short, add]) == [0, 1, 2, 3, 2]


_KINDS = ["Conv", "Relu", "Add", "Mul", "Reshape", "Concat", "MaxPool", "Sigmoid", "If", "Constant"]


@st.composite
def _random_nodes(draw: st.DrawFn) -> tuple[list[NodeView], list[str], dict[str, str]]:
    nodes: list[NodeView] = []
    names = ["x", "y"]
    for index in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(_KINDS))
        count = 0 if kind == "Constant" else draw(st.integers(1, 3))
        reads = draw(st.lists(st.sampled_from(names), min_size=count, max_size=count, unique=False))
        makes = tuple(f"v{index}_{k}" for k in range(draw(st.integers(1, 2))))
        nodes.append(NodeView(kind, tuple(dict.fromkeys(reads)), makes, "why" if kind == "If" else ""))
        names.extend(makes)
    made = [name for node in nodes for name in node.makes]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    unfit = draw(st.lists(st.sampled_from(made), max_size=2, unique=True))
    return nodes, outputs, {name: "unfit" for name in unfit if name not in outputs}


@settings(deadline=None)
@given(_random_nodes())
def test_operators_partition_the_nodes_in_a_runnable_order(
    case: tuple[list[NodeView], list[str], dict[str, str]],
) -> None:
    nodes, outputs, unfit = case
    groups = form_operators(nodes, outputs=outputs, unfit=unfit)
    assert sorted(i for group in groups for i in group.nodes) == list(range(len(nodes)))
    available = {"x", "y"}
    for group in groups:  # a group runs as a unit: all it reads from outside is there, so its set is convex
        own = {name for i in group.nodes for name in nodes[i].makes}
        assert {r for i in group.nodes for r in nodes[i].reads} - own <= available
        available |= own
    owner = {name: g for g, group in enumerate(groups) for i in group.nodes for name in nodes[i].makes}
    for g, group in enumerate(groups):
        for i in group.nodes:
            assert all(owner[r] == g for r in nodes[i].reads if r in unfit)


@settings(deadline=None)
@given(_random_nodes())
def test_fused_units_can_run_as_units(case: tuple[list[NodeView], list[str], dict[str, str]]) -> None:
    nodes, outputs, unfit = case
    groups = form_operators(nodes, outputs=outputs, unfit=unfit)
    operators = _unit_views(groups, nodes, outputs)
    units = fused_units(operators)
    before: dict[int, set[int]] = {u: set() for u in units}
    for operator, own in zip(operators, units, strict=True):
        before[own] |= {units[p] for p in operator.before if units[p] != own}
    done: set[int] = set()
    while ready := {u for u in before if u not in done and before[u] <= done}:
        done |= ready
    assert done == set(before), "the units wait for each other"
    assert 1 <= critical_path(operators, units) <= len(before)


def _unit_views(groups: list[Group], nodes: Sequence[NodeView], outputs: Sequence[str]) -> list[UnitView]:
    owner = {name: g for g, group in enumerate(groups) for i in group.nodes for name in nodes[i].makes}
    before = [
        sorted({owner[r] for i in group.nodes for r in nodes[i].reads if r in owner} - {g})
        for g, group in enumerate(groups)
    ]
    return [
        UnitView(
            kind=nodes[group.lead].kind,
            before=tuple(before[g]),
            readers=sum(g in b for b in before),
            is_output=any(name in outputs for i in group.nodes for name in nodes[i].makes),
            opaque=bool(group.opaque),
        )
        for g, group in enumerate(groups)
    ]
