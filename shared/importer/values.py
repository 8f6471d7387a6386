"""Types, shapes and bytes of every value of a model, before anything runs.

Shape inference works on a skeleton: weights beyond a few kilobytes become typed inputs, so that a 500 MB
model is not copied and a hostile one is not executed.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import onnx
from onnx import TensorProto

from stageloom.shared.errors import ModelError
from stageloom.shared.graph import ITEM_BYTES
from stageloom.shared.importer.nodes import captured_names, sub_graphs, tensors_in
from stageloom.shared.importer.process import ImportLimits, how_to_raise

_log = logging.getLogger(__name__)
_SMALL_WEIGHT_BYTES = 1 << 12  # shapes, axes, scales: what shape inference wants to know by value
_MOST_SETTINGS = (
    64  # numbers of a list that says how to compute, as pads and axes do; a longer one is weights
)

DTYPES: dict[int, str] = {
    TensorProto.DOUBLE: "float64", TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16", TensorProto.INT64: "int64", TensorProto.INT32: "int32",
    TensorProto.INT16: "int16", TensorProto.INT8: "int8", TensorProto.UINT64: "uint64",
    TensorProto.UINT32: "uint32", TensorProto.UINT16: "uint16", TensorProto.UINT8: "uint8",
    TensorProto.BOOL: "bool",
}  # fmt: skip
ELEMENT_TYPES = {name: code for code, name in DTYPES.items()}


@dataclass(frozen=True)
class Value:
    """A tensor with a pinned shape, or the reason why a value is none (`unfit`)."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    unfit: str = ""
    opaque: bool = False  # unfit, and no tensor of numbers at all: a sequence, a map, strings

    @property
    def nbytes(self) -> int:
        """Bytes of one instance; 0 for an unfit value."""
        return 0 if self.unfit else ITEM_BYTES[self.dtype] * prod(self.shape)

    @property
    def size(self) -> int:
        """Elements; 0 for an unfit value."""
        return 0 if self.unfit else prod(self.shape)


UNKNOWN = Value(unfit="its shape is known only while running")
VARIES = Value(unfit="its shape differs from run to run")


def value_of(type_proto: Any) -> Value:
    """Return the value that an ONNX type describes."""
    kind = type_proto.WhichOneof("value")
    if kind is None:
        return UNKNOWN
    if kind != "tensor_type":
        return Value(
            unfit=f"{kind.removesuffix('_type').replace('_', ' ')} values cannot be cut", opaque=True
        )
    tensor = type_proto.tensor_type
    if tensor.elem_type == TensorProto.STRING:
        return Value(unfit="string tensors cannot be cut", opaque=True)
    if tensor.elem_type == TensorProto.UNDEFINED:
        return UNKNOWN
    if tensor.elem_type not in DTYPES:
        return _odd_tensor(tensor.elem_type)
    if not tensor.HasField("shape"):
        return UNKNOWN
    dims = tensor.shape.dim
    if any(not d.HasField("dim_value") or d.dim_value < 0 for d in dims):
        return UNKNOWN
    return Value(DTYPES[tensor.elem_type], tuple(int(d.dim_value) for d in dims))


def _odd_tensor(code: int) -> Value:
    """Return the value of a tensor whose element type slots do not hold."""
    return Value(unfit=f"{_type_name(code)} tensors cannot be cut")


def _type_name(code: int) -> str:
    known = code in TensorProto.DataType.values()
    return TensorProto.DataType.Name(code).lower() if known else f"type {code}"


def weight_value(tensor: TensorProto) -> Value:
    """Return the value of an initializer."""
    if tensor.data_type not in DTYPES:
        return _odd_tensor(tensor.data_type)
    return Value(DTYPES[tensor.data_type], tuple(int(d) for d in tensor.dims))


def stored_size(tensor: TensorProto) -> tuple[int, int]:
    """Numbers and bytes of a stored tensor of any element type; two int4 take a byte."""
    if tensor.data_type == TensorProto.STRING:
        return 0, sum(map(len, tensor.string_data))
    numbers = prod(tensor.dims)
    if tensor.data_type in DTYPES:
        return numbers, numbers * ITEM_BYTES[DTYPES[tensor.data_type]]
    bits = re.search(r"\d+", _type_name(tensor.data_type))  # as in int4, float8e4m3fn and complex64
    return numbers, -(-numbers * int(bits[0]) // 8) if bits else 0


def own_size(node: onnx.NodeProto) -> tuple[int, int]:
    """Numbers and bytes that a node itself stores: in nested graphs, tensors and long lists of attributes."""
    sizes: list[tuple[int, int]] = []
    waiting = [node]
    while waiting:
        holder = waiting.pop()
        for attribute in holder.attribute:
            sizes += map(stored_size, tensors_in(attribute))
            sizes += (
                (len(numbers), len(numbers) * nbytes)
                for numbers, nbytes in ((attribute.floats, 4), (attribute.ints, 8))
                if len(numbers) > _MOST_SETTINGS
            )
        for graph in sub_graphs(holder):
            sizes += map(stored_size, graph.initializer)
            for tensor in graph.sparse_initializer:
                sizes += map(stored_size, (tensor.values, tensor.indices))
            waiting += graph.node
    return sum(numbers for numbers, _ in sizes), sum(nbytes for _, nbytes in sizes)


def skeleton(model: onnx.ModelProto, settled: Mapping[str, Value]) -> onnx.ModelProto:
    """Copy the model with its large weights as typed inputs and without the shapes that the file claims.

    Values of `settled` become typed inputs as well; their nodes make values of other names.
    """
    bare = onnx.ModelProto()
    bare.ir_version = model.ir_version
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    bare.graph.name = model.graph.name
    bare.graph.node.extend(model.graph.node)
    for node in bare.graph.node:
        for index, name in enumerate(node.output):
            if name in settled:
                node.output[index] = f"{name}/made"
    bare.graph.input.extend(value for value in model.graph.input if value.name not in settled)
    bare.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, ELEMENT_TYPES[value.dtype], value.shape)
        for name, value in settled.items()
        if not value.unfit
    )
    for output in model.graph.output:
        claimed = bare.graph.output.add()
        claimed.CopyFrom(output)
        if claimed.type.WhichOneof("value") == "tensor_type":
            claimed.type.tensor_type.ClearField("shape")
    for weight in model.graph.initializer:
        if len(weight.raw_data) <= _SMALL_WEIGHT_BYTES and prod(weight.dims) <= _SMALL_WEIGHT_BYTES:
            bare.graph.initializer.append(weight)
        else:
            typed = onnx.helper.make_tensor_value_info(weight.name, weight.data_type, list(weight.dims))
            bare.graph.input.append(typed)
    return bare


def infer_values(model: onnx.ModelProto, settled: Mapping[str, Value] | None = None) -> dict[str, Value]:
    """Infer every named value of the main graph: inputs, weights, node outputs. Unknown names are absent.

    `settled` values are known otherwise and returned as they are. Where the operators contradict each other's
    types or shapes, only weights, inputs and settled values are known; onnxruntime decides on such a model.
    """
    settled = settled or {}
    values = {weight.name: weight_value(weight) for weight in model.graph.initializer}
    weights = set(values)
    for info in _inferred(model, settled):
        if info.name not in weights:
            values[info.name] = value_of(info.type)
    return {**values, **settled}


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """The element type (`TensorProto`) of every value, also of those whose shape is known only while running.

    Weights are left out, and what cannot be inferred.
    """
    found = {info.name: info.type.tensor_type.elem_type for info in _inferred(model, {})}
    return {name: kind for name, kind in found.items() if kind != TensorProto.UNDEFINED}


def _inferred(model: onnx.ModelProto, settled: Mapping[str, Value]) -> list[onnx.ValueInfoProto]:
    """Types and shapes of values as far as they can be inferred, those of the inputs among them."""
    inferred = bare = skeleton(model, settled)
    for check_type in (True, False):
        try:
            inferred = onnx.shape_inference.infer_shapes(bare, check_type=check_type, data_prop=True)
            break
        except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
            _log.info("shape inference fails: %s", " ".join(str(error).split())[:300])
    return [*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output]


def claimed_values(model: onnx.ModelProto) -> dict[str, Value]:
    """Return the full types and shapes that the file claims for its values; a run may refute them."""
    claims = {v.name: value_of(v.type) for v in (*model.graph.value_info, *model.graph.output)}
    return {name: value for name, value in claims.items() if not value.unfit}


def with_claims(values: Mapping[str, Value], claims: Mapping[str, Value]) -> dict[str, Value]:
    """Complete `values` by the file's claims where inference knows nothing."""
    unknown = {name: c for name, c in claims.items() if values.get(name, UNKNOWN) == UNKNOWN}
    return {**values, **unknown}


def require_affordable(values: Mapping[str, Value], constants: Iterable[str], limits: ImportLimits) -> None:
    """Refuse a model whose values would not fit, before they are allocated.

    `constants` names the values that do not depend on an input: onnxruntime computes them at load.

    Raises:
        ModelError: one value, or all constants together, exceed the limits.
    """
    for name, value in values.items():
        if value.nbytes > limits.tensor_bytes:
            raise ModelError(
                f"value {name[:80]!r} of shape {list(value.shape)} would take {value.nbytes} bytes,"
                f" the limit is {limits.tensor_bytes}",
                remedy=f"pin smaller shapes, or {how_to_raise('tensor_bytes', limits, value.nbytes)}",
            )
    total = sum(values[name].nbytes for name in constants if name in values)
    if total > limits.constant_bytes:
        raise ModelError(
            f"unsupported: weights and folded constants take {total} bytes,"
            f" a protobuf holds at most {limits.constant_bytes}",
            remedy="split the model, or store its weights in float16",
        )


def constant_names(model: onnx.ModelProto) -> list[str]:
    """Return weights and values that no graph input reaches, whether or not onnxruntime folds them."""
    constant = {weight.name for weight in model.graph.initializer}
    for node in model.graph.node:
        if all(name in constant for name in (*filter(None, node.input), *captured_names(node))):
            constant.update(filter(None, node.output))
    return sorted(constant)
