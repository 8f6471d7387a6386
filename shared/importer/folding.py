"""Constant folding by onnxruntime, which leaves the model's signature and its types as they were."""

import errno
from collections.abc import Container, Sequence
from pathlib import Path

import onnx
import onnx.inliner
import onnxruntime
from google.protobuf.message import DecodeError as ProtobufDecodeError  # type: ignore[import-untyped]
from onnx import TensorProto

from stageloom.shared.errors import ModelError
from stageloom.shared.importer.nodes import all_graphs, nodes_within
from stageloom.shared.importer.normalise import Inputs, clamp_ir_version, rename_reads
from stageloom.shared.importer.session import one_line, quiet_options

_INSERTED_CAST = "InsertedPrecisionFreeCast_"


def optimise(model: onnx.ModelProto, inputs: Inputs, folder: Path) -> onnx.ModelProto:
    """onnxruntime's basic level: constants folded, BatchNorm fused where that is exact; consumes `model`.

    Where onnxruntime infers a contradiction from the pinned shapes in a branch that never runs, the inputs
    are left as the file describes them.

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
        if not _leave_open(model, inputs):
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
    """Give weights that onnxruntime added names of ours, in place.

    It would add weights of the same names when it loads the folded file, and then refuses it.
    """
    names = {w.name: f"folded/{w.name}" for w in graph.initializer if w.name not in own}
    for weight in graph.initializer:
        weight.name = names.get(weight.name, weight.name)
    rename_reads(graph, names)


def _leave_open(model: onnx.ModelProto, inputs: Inputs) -> bool:
    """Describe the inputs as the file did; whether that changes anything."""
    pinned = [value.SerializeToString() for value in model.graph.input]
    del model.graph.input[:]
    model.graph.input.extend(inputs.claimed)
    return pinned != [value.SerializeToString() for value in model.graph.input]


def _with_constants_of(folded: onnx.ModelProto, source: Path) -> onnx.ModelProto:
    """The source model with the constants that folding found, and with its own types.

    For processors without float16 kernels onnxruntime casts every such operator to float32 and takes apart
    those that it has no kernel for; that is its way to run the model, and no part of the model.
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
    kept = onnx.GraphProto()
    kept.node.extend(computed)
    del graph.node[:]
    graph.node.extend(kept.node)
    for name in sorted(made & constants.keys()):
        graph.initializer.add().CopyFrom(constants[name])
        graph.initializer[-1].name = name
    return model


def signature(model: onnx.ModelProto) -> list[tuple[str, str]]:
    """Names and element types of inputs, then outputs; a type that the file does not tell is empty."""
    return [(info.name, _type_text(info.type)) for info in (*model.graph.input, *model.graph.output)]


def _type_text(found: onnx.TypeProto) -> str:
    kind = found.WhichOneof("value") or ""
    if kind != "tensor_type":
        return kind.removesuffix("_type")
    code = found.tensor_type.elem_type
    return TensorProto.DataType.Name(code).lower() if code in TensorProto.DataType.values() and code else ""


def _signature_text(of: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name[:40]!r} {kind}".strip() for name, kind in of[:20])
