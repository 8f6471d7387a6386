"""Reading ONNX nodes: attributes, sub-graphs and the values they capture, what makes a node opaque."""

from collections.abc import Container, Iterable, Iterator, Sequence

import onnx
from onnx import AttributeProto, TensorProto

_MAX_FUNCTION_DEPTH = 1 << 12  # the checker refuses functions that call themselves
_STANDARD_DOMAINS = {"", "ai.onnx", "ai.onnx.ml"}
RANDOM = frozenset({
    "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli",
})  # fmt: skip
_SIZED_BY_CONTENT = {"NonZero", "Unique", "Compress", "NonMaxSuppression", "StringSplit"}
"""Operators whose output size depends on the contents of an input."""
_SIZED_BY_INPUT: dict[str, tuple[int, ...]] = {
    "Reshape": (1,), "Expand": (1,), "Tile": (1,), "ConstantOfShape": (0,), "Range": (0, 1, 2),
    "Slice": (1, 2, 3, 4), "Resize": (1, 2, 3), "Upsample": (1,), "Pad": (1, 3), "TopK": (1,), "OneHot": (1,),
    "CenterCropPad": (1,), "Split": (1,), "AffineGrid": (1,), "Squeeze": (1,), "Unsqueeze": (1,),
    "Col2Im": (1, 2), "MaxUnpool": (2,), "STFT": (1, 3), "DFT": (1, 2), "HannWindow": (0,),
    "HammingWindow": (0,), "BlackmanWindow": (0,), "MelWeightMatrix": (0, 1), "ReduceSum": (1,),
    "ReduceMean": (1,), "ReduceMax": (1,), "ReduceMin": (1,), "ReduceProd": (1,), "ReduceL1": (1,),
    "ReduceL2": (1,), "ReduceLogSum": (1,), "ReduceLogSumExp": (1,), "ReduceSumSquare": (1,),
}  # fmt: skip
"""Input indices of sizes, positions and axes, by operator type."""


def sub_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that a control-flow node holds, without those nested deeper."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def tensors_in(attribute: AttributeProto) -> Iterator[TensorProto]:
    """Yield the tensors that an attribute holds, the parts of sparse ones among them."""
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    sparse = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
    for tensor in (*sparse, *attribute.sparse_tensors):
        yield from (tensor.values, tensor.indices)


def nodes_within(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes of a graph and of the graphs nested in it."""
    waiting = list(graph.node)
    while waiting:
        node = waiting.pop()
        yield node
        for inner in sub_graphs(node):
            waiting.extend(inner.node)


def all_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Yield the main graph and all graphs nested in it, without those of functions."""
    yield model.graph
    for node in nodes_within(model.graph):
        yield from sub_graphs(node)


def captured_names(node: onnx.NodeProto) -> list[str]:
    """Return the outer values that the node's sub-graphs read, without repeats, in a stable order."""
    captured: dict[str, None] = {}
    for graph in sub_graphs(node):
        _capture(graph, frozenset(), captured)
    return list(captured)


def _capture(graph: onnx.GraphProto, outer: frozenset[str], captured: dict[str, None]) -> None:
    # Recursion is bounded: protobuf refuses messages nested deeper than 100.
    known = {*outer, *(value.name for value in graph.input), *(value.name for value in graph.initializer)}
    for node in graph.node:
        for name in node.input:
            if name and name not in known:
                captured.setdefault(name)
        for inner in sub_graphs(node):
            _capture(inner, frozenset(known), captured)
        known.update(node.output)
    for output in graph.output:
        if output.name not in known:
            captured.setdefault(output.name)


def live_nodes(graph: onnx.GraphProto) -> list[int]:
    """Return the indices of nodes that some graph output needs, ascending."""
    maker = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    live: set[int] = set()
    waiting = [maker[output.name] for output in graph.output if output.name in maker]
    while waiting:
        index = waiting.pop()
        if index not in live:
            live.add(index)
            node = graph.node[index]
            waiting.extend(maker[n] for n in (*node.input, *captured_names(node)) if n in maker)
    return sorted(live)


def opaque_reason(node: onnx.NodeProto) -> str:
    """Return why the node is opaque; empty for an ordinary one."""
    if next(sub_graphs(node), None) is not None:
        return f"control flow: {node.op_type}"
    if node.domain not in _STANDARD_DOMAINS:
        return f"custom operator: {node.domain}.{node.op_type}"
    return ""


def sized_while_running(node: onnx.NodeProto, constants: Container[str]) -> bool:
    """Return whether the output sizes of a standard operator depend on the contents of its inputs.

    `constants` names the values that are known beforehand. False for control flow and custom operators.
    """
    if node.domain not in _STANDARD_DOMAINS:
        return False
    if node.op_type in _SIZED_BY_CONTENT:
        return True
    read = [node.input[i] for i in _SIZED_BY_INPUT.get(node.op_type, ()) if i < len(node.input)]
    return any(name and name not in constants for name in read)


def count_nodes(model: onnx.ModelProto, most: int) -> int:
    """Count the nodes of the graph, of nested graphs and of called functions; stop beyond `most`.

    A function counts as often as it is called: 30 functions that each call the next one twice make 2^30
    nodes.
    """
    functions = {(f.domain, f.name): f for f in model.functions}
    waiting = [(model.graph.node, 0)]
    count = 0
    while waiting and count <= most:
        nodes, depth = waiting.pop()
        for node in nodes:
            count += 1
            waiting.extend((inner.node, depth) for inner in sub_graphs(node))
            called = functions.get((node.domain, node.op_type))
            if called is not None and depth < _MAX_FUNCTION_DEPTH:
                waiting.append((called.node, depth + 1))
            if count > most:
                break
    return count


def int_attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    """Return an integer attribute, or `default` where it is absent."""
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), default)


def ints_attribute(node: onnx.NodeProto, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
    """Return a list attribute, or `default` where it is absent."""
    values = next((attribute.ints for attribute in node.attribute if attribute.name == name), default)
    return tuple(int(value) for value in values)


def set_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Replace the nodes of `graph` by copies of `nodes`, which may be its own."""
    copies = onnx.GraphProto()
    copies.node.extend(nodes)
    del graph.node[:]
    graph.node.extend(copies.node)


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of the standard operators; 1 where the model names none."""
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
