"""Normalise a model: pinned inputs, folded constants, a stable order of nodes, equal bytes on every run.

onnxruntime folds the constants; the model's signature and types stay as they were.
"""

import errno
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import onnx
import onnx.inliner
import onnxruntime
from google.protobuf.message import DecodeError as ProtobufDecodeError
from onnx import TensorProto, helper, numpy_helper

from stageloom.shared.errors import ModelError
from stageloom.shared.importer.inputs import pin_inputs
from stageloom.shared.importer.nodes import (
    all_graphs,
    captured_names,
    count_nodes,
    int_attribute,
    live_nodes,
    nodes_within,
    set_nodes,
    sub_graphs,
)
from stageloom.shared.importer.operators import topological_order
from stageloom.shared.importer.process import ImportLimits, how_to_raise
from stageloom.shared.importer.session import one_line, quiet_options
from stageloom.shared.importer.values import (
    ELEMENT_TYPES,
    Value,
    constant_names,
    infer_values,
    require_affordable,
)

_MIN_IR_VERSION = 8
_MAX_IR_VERSION = 10
"""Newer versions add annotations only; onnxruntime refuses files one version ahead of its own."""
_MAX_NAME_CHARS = 64


def prepare(
    model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]], limits: ImportLimits
) -> tuple[dict[str, Value], list[onnx.ValueInfoProto]]:
    """Check the model and pin its input shapes, in place; return the pinned inputs, and those of the file.

    Dead nodes are removed before any costly step.

    Raises:
        ModelError: invalid, unsupported or too large. UnpinnedShape: a dimension has no number.
    """
    tidy(model, limits)
    claimed = [copy_of(value) for value in model.graph.input]
    pinned = pin_inputs(model, shapes)
    _check(model)
    require_affordable(infer_values(model, pinned), constant_names(model), limits)
    return pinned, claimed


def tidy(model: onnx.ModelProto, limits: ImportLimits) -> None:
    """Remove what is no input, no output and not needed, in place, and bound what is left.

    The initializers are removed from the inputs and the IR version becomes >= 8: in older files a folded
    constant would otherwise stay as a required input.

    Raises:
        ModelError: unsupported or too large.
    """
    _name_standard_operators_alike(model)
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
            remedy=how_to_raise("nodes", limits),
        )


def _name_standard_operators_alike(model: onnx.ModelProto) -> None:
    """Their set is "" or "ai.onnx" in files, at times one in the nodes and the other in the imports."""
    imports = [*model.opset_import, *(one for function in model.functions for one in function.opset_import)]
    nodes = [*nodes_within(model.graph), *(node for function in model.functions for node in function.node)]
    for named in (*imports, *nodes):
        if named.domain == "ai.onnx":
            named.domain = ""


def _check(model: onnx.ModelProto) -> None:
    """Run the ONNX checker, before onnxruntime: 3,000 chained functions crash onnxruntime.

    The checker asks for what onnxruntime does not need (a graph's name, a value's type or rank); it is filled
    in while the checker runs.
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
    """Set the IR version of artifacts, in place."""
    model.ir_version = min(max(model.ir_version, _MIN_IR_VERSION), _MAX_IR_VERSION)


def copy_of(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """Return a copy that stays when the model is changed."""
    copied = onnx.ValueInfoProto()
    copied.CopyFrom(value)
    return copied


def _drop_repeated_outputs(graph: onnx.GraphProto) -> None:
    """Keep one of the outputs that a file lists twice, in place."""
    outputs = {value.name: copy_of(value) for value in graph.output}
    if len(outputs) < len(graph.output):
        del graph.output[:]
        graph.output.extend(outputs.values())


def _keep_live_nodes(graph: onnx.GraphProto) -> None:
    """Remove the nodes that no output needs and sort the rest topologically, in place."""
    made = [name for node in graph.node for name in node.output if name]
    if len(set(made)) < len(made):
        return  # the checker refuses a value with two makers
    order = stable_order(graph, {})
    if order != list(range(len(graph.node))):
        set_nodes(graph, [graph.node[index] for index in order])


def graph_name(model: onnx.ModelProto) -> str:
    """Return the graph's name, reduced to characters that are safe in a path and on a terminal."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", model.graph.name).strip("_.-")[:_MAX_NAME_CHARS] or "model"


def canonicalise(
    folded: onnx.ModelProto, source_order: Mapping[str, int], values: Mapping[str, Value]
) -> None:
    """Bring the folded model into one form, in place, whatever order onnxruntime chose.

    Nodes are in a topological order that follows the source file (`source_order`: output name to position).
    Dead nodes and unused weights are removed, weights are sorted by name, outputs carry their inferred
    shapes.
    """
    graph = folded.graph
    _detach_constant_outputs(graph)
    _free_leading_dimension(graph, values)
    nodes = [graph.node[index] for index in stable_order(graph, source_order)]
    used = {name for node in nodes for name in (*node.input, *captured_names(node))}
    for index, node in enumerate(nodes):
        node.ClearField("doc_string")
        node.name = node.name or f"node{index}"
    set_nodes(graph, nodes)
    # In place: the weights may take most of the memory limit.
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in used:
            del graph.initializer[index]
    graph.initializer.sort(key=lambda weight: weight.name)
    for weight in graph.initializer:
        _store_raw(weight)
    pin_outputs(graph, values)
    del graph.value_info[:]
    forget_origin(folded)


def forget_origin(model: onnx.ModelProto) -> None:
    """Remove what says who exported the model and how, in place, and make its name a safe one."""
    model.graph.ClearField("doc_string")
    model.graph.name = graph_name(model)
    _keep_used_domains(model)
    for field in ("producer_name", "producer_version", "domain", "doc_string", "model_version"):
        model.ClearField(field)
    del model.metadata_props[:]


def pin_outputs(graph: onnx.GraphProto, values: Mapping[str, Value]) -> None:
    """Give the outputs their known types and shapes, in place."""
    for output in graph.output:
        value = values.get(output.name)
        if value is not None and not value.unfit:
            pinned = helper.make_tensor_value_info(output.name, ELEMENT_TYPES[value.dtype], value.shape)
            output.CopyFrom(pinned)


def _detach_constant_outputs(graph: onnx.GraphProto) -> None:
    """Give an output that is a weight a node of its own, so that an operator makes it."""
    weights = {weight.name: weight for weight in graph.initializer}
    for output in graph.output:
        if output.name in weights:
            stored = f"{output.name}/constant"
            rename_reads(graph, {output.name: stored})
            weights[output.name].name = stored
            graph.node.append(helper.make_node("Identity", [stored], [output.name], name=stored))


def _free_leading_dimension(graph: onnx.GraphProto, values: Mapping[str, Value]) -> None:
    """Let a Reshape to a constant [1, ...] copy the leading dimension instead, so that it takes a batch."""
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
    """Store a weight as raw data, whichever of ONNX's ways the file chose."""
    if not weight.HasField("raw_data") and weight.data_type != TensorProto.STRING:
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight), weight.name))
    weight.ClearField("data_location")
    weight.ClearField("doc_string")


def rename_reads(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename the values that nodes read, those of nested graphs included, in place."""
    for node in nodes_within(graph):
        for index, name in enumerate(node.input):
            if name in names:
                node.input[index] = names[name]
        for inner in sub_graphs(node):
            for output in inner.output:
                output.name = names.get(output.name, output.name)


def stable_order(graph: onnx.GraphProto, source_order: Mapping[str, int]) -> list[int]:
    """Return the live nodes in topological order, by position in the source file where there is a choice.

    With an empty `source_order` the graph is the source.
    """
    maker = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    readers: dict[int, set[int]] = {index: set() for index in live_nodes(graph)}
    for index in readers:
        node = graph.node[index]
        for name in (*node.input, *captured_names(node)):
            if name in maker:
                readers[maker[name]].add(index)

    def key(index: int) -> tuple[int, str]:
        if not source_order:
            return (index, "")
        outputs = [name for name in graph.node[index].output if name]
        known = [source_order[name] for name in outputs if name in source_order]
        return (min(known, default=len(source_order)), outputs[0] if outputs else "")

    return topological_order(readers, key)


def _keep_used_domains(model: onnx.ModelProto) -> None:
    used = {node.domain for node in nodes_within(model.graph)} | {""}
    kept = sorted({o.domain: o.version for o in model.opset_import if o.domain in used}.items())
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in kept)


def source_positions(model: onnx.ModelProto) -> dict[str, int]:
    """Return the position of the node that makes each value, in file order."""
    return {name: i for i, node in enumerate(model.graph.node) for name in node.output if name}


_INSERTED_CAST = "InsertedPrecisionFreeCast_"


def optimise(model: onnx.ModelProto, claimed: Sequence[onnx.ValueInfoProto], folder: Path) -> onnx.ModelProto:
    """Apply onnxruntime's basic optimisations: fold constants, fuse BatchNorm where exact; consumes `model`.

    If onnxruntime infers a contradiction from the pinned shapes, in a branch that never runs, the inputs keep
    the shapes of the file.

    Raises:
        ModelError: onnxruntime cannot load the model, or the result has another signature.
    """
    before = signature(model)
    own = {weight.name for graph in all_graphs(model) for weight in graph.initializer}
    own |= {name for node in nodes_within(model.graph) for name in node.output}
    source = folder / "pinned.onnx"
    source.write_bytes(model.SerializeToString())
    try:
        folded = _fold(source, folder)
    except ModelError:
        if not _leave_open(model, claimed):
            raise
        source.write_bytes(model.SerializeToString())
        folded = _fold(source, folder)
    model.Clear()
    if any(node.name.startswith(_INSERTED_CAST) for node in folded.graph.node):
        folded = _with_constants_of(folded, source)
    source.unlink()
    clamp_ir_version(folded)
    _rename_added_weights(folded.graph, own)
    after = signature(folded)
    if [name for name, _ in before] != [name for name, _ in after] or any(
        one and other and one != other for (_, one), (_, other) in zip(before, after, strict=True)
    ):
        raise ModelError(
            f"constant folding changed the signature from {_signature_text(before)}"
            f" to {_signature_text(after)}",
            remedy="export the model again with IR version 8 or later",
        )
    return folded


def _fold(source: Path, folder: Path) -> onnx.ModelProto:
    target = folder / "folded.onnx"
    options = quiet_options(onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC)
    options.optimized_model_filepath = str(target)
    try:
        onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ModelError(
            f"unsupported: onnxruntime cannot load the model: {one_line(error, folder)}",
            remedy="export it with standard operators of opset 7 or later",
        ) from error
    folded = onnx.ModelProto()
    try:
        folded.ParseFromString(target.read_bytes())
    except ProtobufDecodeError as error:  # onnxruntime does not report a short write
        raise OSError(errno.EIO, "onnxruntime could not write the folded model") from error
    target.unlink()
    return folded


def _rename_added_weights(graph: onnx.GraphProto, own: Container[str]) -> None:
    """Rename the weights that onnxruntime added, in place.

    onnxruntime would add weights of the same names when it loads the folded file, and then refuse it.
    """
    names = {w.name: f"folded/{w.name}" for w in graph.initializer if w.name not in own}
    for weight in graph.initializer:
        weight.name = names.get(weight.name, weight.name)
    rename_reads(graph, names)


def _leave_open(model: onnx.ModelProto, claimed: Sequence[onnx.ValueInfoProto]) -> bool:
    """Give the inputs the shapes of the file; return whether that changes any."""
    pinned = [value.SerializeToString() for value in model.graph.input]
    del model.graph.input[:]
    model.graph.input.extend(claimed)
    return pinned != [value.SerializeToString() for value in model.graph.input]


def _with_constants_of(folded: onnx.ModelProto, source: Path) -> onnx.ModelProto:
    """Return the source model with the constants that folding found, and with its own types.

    On processors without float16 kernels onnxruntime casts every such operator to float32 and decomposes
    those that it has no kernel for. The artifact must not depend on that.
    """
    model = onnx.ModelProto()
    model.ParseFromString(source.read_bytes())
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    graph = model.graph
    own = {weight.name for weight in graph.initializer}
    constants = {w.name: w for w in folded.graph.initializer if w.name not in own}
    for node in graph.node:
        value = next((a.t for a in node.attribute if a.name == "value"), None)
        if node.op_type == "Constant" and value is not None and node.output[0] not in constants:
            constants[node.output[0]] = value
    computed = [node for node in graph.node if not all(n in constants for n in node.output if n)]
    made = {name for node in graph.node for name in node.output} - {n for c in computed for n in c.output}
    set_nodes(graph, computed)
    for name in sorted(made & constants.keys()):
        graph.initializer.add().CopyFrom(constants[name])
        graph.initializer[-1].name = name
    return model


def signature(model: onnx.ModelProto) -> list[tuple[str, str]]:
    """Return names and element types of inputs, then outputs; an unknown type is empty."""
    return [(info.name, _type_text(info.type)) for info in (*model.graph.input, *model.graph.output)]


def _type_text(described: onnx.TypeProto) -> str:
    kind = described.WhichOneof("value") or ""
    if kind != "tensor_type":
        return kind.removesuffix("_type")
    code = described.tensor_type.elem_type
    return TensorProto.DataType.Name(code).lower() if code in TensorProto.DataType.values() and code else ""


def _signature_text(of: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name[:40]!r} {kind}".strip() for name, kind in of[:20])
