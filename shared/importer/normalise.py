"""From any ONNX file to the normalised one: pinned, folded, in a stable order, equal bytes on every run."""

import errno
import heapq
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnxruntime
from google.protobuf.message import DecodeError as ProtobufDecodeError  # type: ignore[import-untyped]
from onnx import TensorProto, helper, numpy_helper

from shared.errors import ModelError, UnpinnedShape
from shared.graph import ITEM_BYTES
from shared.importer.inputs import declared_inputs
from shared.importer.limits import ImportLimits
from shared.importer.nodes import captured_names, int_attribute, nodes_within, sub_graphs
from shared.importer.values import (
    ELEMENT_TYPES,
    UNKNOWN,
    Value,
    constant_names,
    infer_values,
    require_affordable,
    value_of,
)

_MIN_IR_VERSION = 8
_MAX_NAME_CHARS = 64
_ERROR_CHARS = 300
_RUNTIME_TYPES = {"tensor(float)": "float32", "tensor(double)": "float64"} | {
    f"tensor({name})": name for name in ITEM_BYTES if name not in ("float32", "float64")
}
"""onnxruntime's names of element types."""

Signature = tuple[tuple[str, Value], ...]


def one_line(error: Exception, scratch: Path | None = None) -> str:
    """A library's message on one line of bounded length, without our scratch folder's name."""
    text = " ".join(str(error).split())
    return (text if scratch is None else text.replace(f"{scratch}/", ""))[:_ERROR_CHARS]


def prepare(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]], limits: ImportLimits) -> None:
    """Check the model and pin its input shapes, in place; nothing is executed.

    Initializers leave the inputs and the IR version becomes >= 8 first: in older files a folded constant
    would otherwise stay behind as a required input.

    Raises:
        ModelError: invalid, unsupported or too large. UnpinnedShape: a dimension has no number.
    """
    weights = {weight.name for weight in model.graph.initializer}
    kept = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.ir_version = max(model.ir_version, _MIN_IR_VERSION)
    if model.graph.sparse_initializer:
        raise ModelError("unsupported: sparse weights", remedy="store the weights dense")
    _pin(model, shapes)
    # The checker comes before anything that walks functions: onnxruntime crashes on 3,000 chained ones.
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"the ONNX checker refuses the model: {one_line(error)}", remedy="export the model again"
        ) from error
    values = infer_values(model)
    require_affordable(values, constant_names(model), limits)


def _pin(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> None:
    inputs = {value.name: value for value in model.graph.input}
    for name in shapes:
        if name not in inputs:
            raise ModelError(
                f"the model has no input {name!r}", remedy=f"its inputs are {declared_inputs(model)}"
            )
    for value in model.graph.input:
        kind = value.type.WhichOneof("value")
        element = value.type.tensor_type.elem_type
        if kind != "tensor_type" or element not in ELEMENT_TYPES.values():
            why = value_of(value.type).unfit or "its type is unknown"
            raise ModelError(
                f"unsupported: input {value.name!r}: {why}",
                remedy="export the model with plain tensor inputs",
            )
        _pin_input(value, shapes.get(value.name))


def _pin_input(value: onnx.ValueInfoProto, wanted: Sequence[int] | None) -> None:
    tensor = value.type.tensor_type
    if wanted is None:
        claimed = [
            d.dim_param or (str(d.dim_value) if d.HasField("dim_value") else "?") for d in tensor.shape.dim
        ]
        text = "x".join(claimed) or "no shape"
        if not tensor.HasField("shape"):
            raise UnpinnedShape(value.name, "all", text)
        for index, dim in enumerate(tensor.shape.dim):
            if not dim.HasField("dim_value") or dim.dim_value < 1:
                raise UnpinnedShape(value.name, dim.dim_param or str(index), text)
        return
    if any(size < 1 for size in wanted):
        raise ModelError(
            f"shape {'x'.join(map(str, wanted))} of input {value.name!r} is not positive",
            remedy="every dimension is at least 1",
        )
    if tensor.HasField("shape") and len(tensor.shape.dim) != len(wanted):
        raise ModelError(
            f"input {value.name!r} has {len(tensor.shape.dim)} dimensions, not {len(wanted)}",
            remedy="give one number per dimension",
        )
    for index, dim in enumerate(tensor.shape.dim):
        if dim.HasField("dim_value") and dim.dim_value > 0 and dim.dim_value != wanted[index]:
            raise ModelError(
                f"dimension {index} of input {value.name!r} is {dim.dim_value} in the file,"
                f" not {wanted[index]}",
                remedy="leave fixed dimensions as they are, or export the model with a dynamic one",
            )
    tensor.ClearField("shape")
    for size in wanted:
        tensor.shape.dim.add().dim_value = size


def optimise(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """onnxruntime's basic level: constants folded, BatchNorm fused where that is exact.

    Raises:
        ModelError: onnxruntime cannot load the model, or the result has another signature.
    """
    before = signature(model)
    source, target = folder / "pinned.onnx", folder / "folded.onnx"
    source.write_bytes(model.SerializeToString())
    model.Clear()
    options = quiet_options(onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC)
    options.optimized_model_filepath = str(target)
    try:
        onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ModelError(
            f"unsupported: onnxruntime cannot load the model: {one_line(error, folder)}",
            remedy="export it with standard operators of opset 7 or later",
        ) from error
    source.unlink()
    folded = onnx.ModelProto()
    try:
        folded.ParseFromString(target.read_bytes())
    except ProtobufDecodeError as error:  # onnxruntime does not report a short write
        raise OSError(errno.EIO, "onnxruntime could not write the folded model") from error
    target.unlink()
    after = signature(folded)
    if [(n, v.dtype) for n, v in before] != [(n, v.dtype) for n, v in after]:
        raise ModelError(
            f"constant folding changed the signature from {_names(before)} to {_names(after)}",
            remedy="export the model again with IR version 8 or later",
        )
    return folded


def ask_onnxruntime(model: onnx.ModelProto, values: Mapping[str, Value], folder: Path) -> dict[str, Value]:
    """Types and shapes that only onnxruntime knows: those behind its own operators. Nothing runs."""
    made = [name for node in model.graph.node for name in node.output if name]
    unknown = [name for name in made if values.get(name, UNKNOWN) == UNKNOWN]
    if not unknown:
        return {}
    path = folder / "asked.onnx"
    count = len(model.graph.output)
    known = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in unknown if name not in known)
    path.write_bytes(model.SerializeToString())
    del model.graph.output[count:]
    options = quiet_options(onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception:  # then the values stay unknown and their operators opaque
        return {}
    finally:
        path.unlink()
    found = {}
    for output in session.get_outputs():
        kind = _RUNTIME_TYPES.get(output.type)
        pinned = all(isinstance(size, int) for size in output.shape)
        if output.name in unknown and kind is not None and pinned:
            found[output.name] = Value(kind, tuple(output.shape))
    return found


def quiet_options(level: onnxruntime.GraphOptimizationLevel) -> onnxruntime.SessionOptions:
    """Options of a session that is built for a run or two: little memory, one thread."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def signature(model: onnx.ModelProto) -> Signature:
    """Names and types of inputs, then outputs."""
    return tuple((info.name, value_of(info.type)) for info in (*model.graph.input, *model.graph.output))


def _names(of: Signature) -> str:
    return ", ".join(repr(name[:40]) for name, _ in of[:20])


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
    for output in graph.output:
        value = values.get(output.name)
        if value is not None and not value.unfit:
            pinned = helper.make_tensor_value_info(output.name, ELEMENT_TYPES[value.dtype], value.shape)
            output.CopyFrom(pinned)
    del graph.value_info[:]
    graph.ClearField("doc_string")
    graph.name = graph_name(folded)
    _keep_used_domains(folded)
    for field in ("producer_name", "producer_version", "domain", "doc_string", "model_version"):
        folded.ClearField(field)
    del folded.metadata_props[:]


def _detach_constant_outputs(graph: onnx.GraphProto) -> None:
    """A graph output that is a weight or an input gets a node of its own, so that some operator makes it."""
    weights = {weight.name: weight for weight in graph.initializer}
    for output in graph.output:
        if output.name in weights:
            stored = f"{output.name}/constant"
            _rename_reads(graph, output.name, stored)
            weights[output.name].name = stored
            graph.node.append(helper.make_node("Identity", [stored], [output.name], name=stored))


def _free_leading_dimension(graph: onnx.GraphProto, values: Mapping[str, Value]) -> None:
    """Let a Reshape to a constant [1, ...] copy a leading 1 instead, so that a batch passes it."""
    weights = {weight.name: weight for weight in graph.initializer}
    for node in graph.node:
        if node.op_type != "Reshape" or node.domain or int_attribute(node, "allowzero", 0):
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


def _rename_reads(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in nodes_within(graph):
        for index, name in enumerate(node.input):
            if name == old:
                node.input[index] = new
        for inner in sub_graphs(node):
            for output in inner.output:
                if output.name == old:
                    output.name = new


def stable_order(graph: onnx.GraphProto, source_order: Mapping[str, int]) -> list[int]:
    """Indices of the live nodes, topological, by position in the source file where there is a choice."""
    maker = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    reads = [{maker[n] for n in (*node.input, *captured_names(node)) if n in maker} for node in graph.node]
    live: set[int] = set()
    waiting = [maker[o.name] for o in graph.output if o.name in maker]
    while waiting:
        node = waiting.pop()
        if node not in live:
            live.add(node)
            waiting.extend(reads[node])

    def key(index: int) -> tuple[int, str, int]:
        outputs = [name for name in graph.node[index].output if name]
        known = [source_order[name] for name in outputs if name in source_order]
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
