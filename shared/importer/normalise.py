"""From any ONNX file to the normalised one: pinned, folded, in a stable order, equal bytes on every run."""

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx.inliner
from onnx import TensorProto, helper, numpy_helper

from stageloom.shared.errors import ModelError
from stageloom.shared.importer.limits import ImportLimits
from stageloom.shared.importer.nodes import (
    all_graphs,
    captured_names,
    count_nodes,
    int_attribute,
    live_nodes,
    nodes_within,
    sub_graphs,
)
from stageloom.shared.importer.pinning import pin_inputs
from stageloom.shared.importer.session import one_line
from stageloom.shared.importer.values import (
    ELEMENT_TYPES,
    Value,
    constant_names,
    infer_values,
    require_affordable,
)

_MIN_IR_VERSION = 8
_MAX_IR_VERSION = 10
"""What a newer version adds are annotations; onnxruntime refuses files one version ahead of its own."""
_MAX_NAME_CHARS = 64


@dataclass(frozen=True)
class Inputs:
    """The pinned inputs by name, and how the file described them."""

    pinned: Mapping[str, Value]
    claimed: Sequence[onnx.ValueInfoProto]


def prepare(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]], limits: ImportLimits) -> Inputs:
    """Check the model and pin its input shapes, in place; nothing is executed.

    Initializers leave the inputs and the IR version becomes >= 8 first: in older files a folded constant
    would otherwise stay behind as a required input. Dead nodes go before anything that costs.

    Raises:
        ModelError: invalid, unsupported or too large. UnpinnedShape: a dimension has no number.
    """
    weights = {weight.name for weight in model.graph.initializer}
    kept = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    clamp_ir_version(model)
    if model.graph.sparse_initializer:
        raise ModelError("unsupported: sparse weights", remedy="store the weights dense")
    _drop_repeated_outputs(model.graph)
    _keep_live_nodes(model.graph)
    if count_nodes(model, limits.nodes) > limits.nodes:
        raise ModelError(
            f"the model has more than {limits.nodes} nodes",
            remedy="raise the limit nodes if you trust the file",
        )
    claimed = [copy_of(value) for value in model.graph.input]
    pinned = pin_inputs(model, shapes)
    _check(model)
    require_affordable(infer_values(model, pinned), constant_names(model), limits)
    return Inputs(pinned, claimed)


def _check(model: onnx.ModelProto) -> None:
    """The ONNX checker; it comes before anything that walks functions, of which 3,000 chained ones crash
    onnxruntime. What it misses and onnxruntime does not is filled in: a graph's name, a value's type or rank.
    """
    graphs = list(all_graphs(model))
    described = [v for graph in graphs for v in (*graph.input, *graph.output, *graph.value_info)]
    untyped = [value for value in described if value.type.WhichOneof("value") is None]
    lacking = [
        value.type.tensor_type
        for value in described
        if value.type.WhichOneof("value") == "tensor_type" and not value.type.tensor_type.HasField("shape")
    ]
    for graph in graphs:
        graph.name = graph.name or "graph"
    for tensor in lacking:
        tensor.shape.SetInParent()
    for value in untyped:
        value.type.tensor_type.elem_type = TensorProto.FLOAT
        value.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"the ONNX checker refuses the model: {one_line(error)}", remedy="export the model again"
        ) from error
    finally:
        for tensor in lacking:
            tensor.ClearField("shape")
        for value in untyped:
            value.ClearField("type")


def clamp_ir_version(model: onnx.ModelProto) -> None:
    """The version that the artifact has, in place."""
    model.ir_version = min(max(model.ir_version, _MIN_IR_VERSION), _MAX_IR_VERSION)


def copy_of(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """A description that stays when its model is changed."""
    copied = onnx.ValueInfoProto()
    copied.CopyFrom(value)
    return copied


def _drop_repeated_outputs(graph: onnx.GraphProto) -> None:
    """A file may list an output twice; results are told apart by name, so once is enough."""
    outputs = {value.name: copy_of(value) for value in graph.output}
    if len(outputs) < len(graph.output):
        del graph.output[:]
        graph.output.extend(outputs.values())


def _keep_live_nodes(graph: onnx.GraphProto) -> None:
    """Remove what no output needs and sort the rest, which onnxruntime does not ask of a file, in place."""
    made = [name for node in graph.node for name in node.output if name]
    if len(set(made)) < len(made):
        return  # a value with two makers is for the checker to refuse
    order = stable_order(graph, {})
    if order != list(range(len(graph.node))):
        kept = onnx.GraphProto()
        kept.node.extend(graph.node[index] for index in order)
        del graph.node[:]
        graph.node.extend(kept.node)


def graph_name(model: onnx.ModelProto) -> str:
    """The graph's own name, reduced to what is safe in a path and on a terminal."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", model.graph.name).strip("_.-")[:_MAX_NAME_CHARS] or "model"


def canonicalise(
    folded: onnx.ModelProto, source_order: Mapping[str, int], values: Mapping[str, Value]
) -> None:
    """Give the folded model one form, in place, whatever order onnxruntime chose.

    Nodes come in a topological order that follows the source file (`source_order`: output name to position),
    dead nodes and unused weights go, weights are sorted by name, outputs carry their inferred shapes.
    """
    graph = folded.graph
    _detach_constant_outputs(graph)
    _free_leading_dimension(graph, values)
    nodes = [graph.node[index] for index in stable_order(graph, source_order)]
    used = {name for node in nodes for name in (*node.input, *captured_names(node))}
    for index, node in enumerate(nodes):
        node.ClearField("doc_string")
        node.name = node.name or f"node{index}"
    copies = onnx.GraphProto()
    copies.node.extend(nodes)
    del graph.node[:]
    graph.node.extend(copies.node)
    # In place: the weights may be most of what the process is allowed to hold.
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in used:
            del graph.initializer[index]
    graph.initializer.sort(key=lambda weight: weight.name)
    for weight in graph.initializer:
        _store_raw(weight)
    pin_outputs(graph, values)
    del graph.value_info[:]
    graph.ClearField("doc_string")
    graph.name = graph_name(folded)
    _keep_used_domains(folded)
    for field in ("producer_name", "producer_version", "domain", "doc_string", "model_version"):
        folded.ClearField(field)
    del folded.metadata_props[:]


def pin_outputs(graph: onnx.GraphProto, values: Mapping[str, Value]) -> None:
    """Describe the outputs by what is known of them, in place."""
    for output in graph.output:
        value = values.get(output.name)
        if value is not None and not value.unfit:
            pinned = helper.make_tensor_value_info(output.name, ELEMENT_TYPES[value.dtype], value.shape)
            output.CopyFrom(pinned)


def _detach_constant_outputs(graph: onnx.GraphProto) -> None:
    """A graph output that is a weight or an input gets a node of its own, so that some operator makes it."""
    weights = {weight.name: weight for weight in graph.initializer}
    for output in graph.output:
        if output.name in weights:
            stored = f"{output.name}/constant"
            rename_reads(graph, {output.name: stored})
            weights[output.name].name = stored
            graph.node.append(helper.make_node("Identity", [stored], [output.name], name=stored))


def _free_leading_dimension(graph: onnx.GraphProto, values: Mapping[str, Value]) -> None:
    """Let a Reshape to a constant [1, ...] copy a leading 1 instead, so that a batch passes it."""
    weights = {weight.name: weight for weight in graph.initializer}
    for node in graph.node:
        if node.op_type != "Reshape" or node.domain or int_attribute(node, "allowzero", 0):
            continue
        if len(node.input) < 2:  # opset 4 and before: the target is an attribute
            continue
        target = weights.get(node.input[1])
        source = values.get(node.input[0])
        if target is None or source is None or source.shape[:1] != (1,):
            continue
        dims = numpy_helper.to_array(target).tolist()
        if dims[:1] == [1]:
            copied = f"{node.output[0]}/shape"
            graph.initializer.append(
                helper.make_tensor(copied, TensorProto.INT64, [len(dims)], [0, *dims[1:]])
            )
            node.input[1] = copied


def _store_raw(weight: TensorProto) -> None:
    """One way to store a weight, whichever of ONNX's the file chose."""
    if not weight.HasField("raw_data") and weight.data_type != TensorProto.STRING:
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight), weight.name))
    weight.ClearField("data_location")
    weight.ClearField("doc_string")


def rename_reads(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Let the nodes, those of nested graphs included, read values by other names, in place."""
    for node in nodes_within(graph):
        for index, name in enumerate(node.input):
            if name in names:
                node.input[index] = names[name]
        for inner in sub_graphs(node):
            for output in inner.output:
                output.name = names.get(output.name, output.name)


def stable_order(graph: onnx.GraphProto, source_order: Mapping[str, int]) -> list[int]:
    """Indices of the live nodes, topological, by position in the source file where there is a choice.

    Without `source_order` the graph is the source.
    """
    maker = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    reads = [{maker[n] for n in (*node.input, *captured_names(node)) if n in maker} for node in graph.node]
    live = live_nodes(graph)

    def key(index: int) -> tuple[int, str, int]:
        outputs = [name for name in graph.node[index].output if name]
        known = [source_order[name] for name in outputs if name in source_order]
        if not source_order:
            return (index, "", index)
        return (min(known, default=len(source_order)), outputs[0] if outputs else "", index)

    readers: dict[int, list[int]] = {i: [] for i in live}
    missing = {i: len(reads[i]) for i in live}
    for i in live:
        for made_by in reads[i]:
            readers[made_by].append(i)
    ready = [key(i) for i in live if missing[i] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        index = heapq.heappop(ready)[2]
        order.append(index)
        for reader in readers[index]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, key(reader))
    return order


def _keep_used_domains(model: onnx.ModelProto) -> None:
    used = {node.domain.replace("ai.onnx", "", 1) if node.domain == "ai.onnx" else node.domain
            for node in nodes_within(model.graph)} | {""}  # fmt: skip
    kept = sorted((o.domain, o.version) for o in model.opset_import if o.domain in used)
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in kept)


def source_positions(model: onnx.ModelProto) -> dict[str, int]:
    """Position of the node that makes each value, in file order."""
    return {name: i for i, node in enumerate(model.graph.node) for name in node.output if name}
