"""Reading ONNX nodes: what their sub-graphs capture, which domains they use, what makes them opaque."""

from collections.abc import Iterator

import onnx
from onnx import AttributeProto

_STANDARD_DOMAINS = {"", "ai.onnx", "ai.onnx.ml"}
_RANDOM = {
    "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli",
}  # fmt: skip


def sub_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that a control-flow node holds, not those nested deeper."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def nodes_within(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes of a graph, those of nested graphs included, without recursion."""
    waiting = list(graph.node)
    while waiting:
        node = waiting.pop()
        yield node
        for inner in sub_graphs(node):
            waiting.extend(inner.node)


def captured_names(node: onnx.NodeProto) -> list[str]:
    """Values of outer graphs that the node's sub-graphs read, without repeats, in a stable order."""
    found: dict[str, None] = {}
    for graph in sub_graphs(node):
        _capture(graph, frozenset(), found)
    return list(found)


def _capture(graph: onnx.GraphProto, outer: frozenset[str], found: dict[str, None]) -> None:
    # Recursion is bounded: protobuf refuses messages nested deeper than 100.
    known = {*outer, *(value.name for value in graph.input), *(value.name for value in graph.initializer)}
    for node in graph.node:
        for name in node.input:
            if name and name not in known:
                found.setdefault(name)
        for inner in sub_graphs(node):
            _capture(inner, frozenset(known), found)
        known.update(node.output)
    for output in graph.output:
        if output.name not in known:
            found.setdefault(output.name)


def opaque_reason(node: onnx.NodeProto) -> str:
    """Why this node cannot be cut further or treated like an ordinary one; empty if it can."""
    if next(sub_graphs(node), None) is not None:
        return f"control flow: {node.op_type}"
    if node.domain not in _STANDARD_DOMAINS:
        return f"custom operator: {node.domain}.{node.op_type}"
    if node.op_type in _RANDOM:
        return f"random: {node.op_type} differs from run to run"
    return ""


def int_attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    """An integer attribute, or its default."""
    for attribute in node.attribute:
        if attribute.name == name:
            return int(attribute.i)
    return default
