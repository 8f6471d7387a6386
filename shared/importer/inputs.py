"""A model's inputs: the shapes that the file declares, and the numbers that the caller pins them to."""

from collections.abc import Mapping, Sequence

import onnx

from stageloom.shared.errors import ModelError, OpenInput, UnpinnedShape
from stageloom.shared.importer.values import DTYPES, ELEMENT_TYPES, Value, value_of

_NAME_CHARS = 80
_SHOWN_INPUTS = 32
_IMAGE_SIDE = 224
_LENGTH = 128
_CHANNELS = (1, 3, 4)


def pin_inputs(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> dict[str, Value]:
    """Pin every dimension of the inputs, in place; return the inputs by name.

    A pinned dimension's symbol (`batch`) is replaced by its number in all shapes that the file claims.

    Raises:
        ModelError: `shapes` names no input or contradicts the file, or an input is no tensor of numbers.
        UnpinnedShape: inputs keep open dimensions; it names all of them.
    """
    inputs = {value.name: value for value in model.graph.input}
    for name in shapes:
        if name not in inputs:
            raise ModelError(
                f"the model has no input {name[:_NAME_CHARS]!r}",
                remedy=f"its inputs are {declared_inputs(model)}",
            )
    for value in inputs.values():
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type" or value.type.tensor_type.elem_type not in ELEMENT_TYPES.values():
            why = value_of(value.type).unfit or "its type is unknown"
            raise ModelError(
                f"unsupported: input {value.name!r}: {why}",
                remedy="export the model with plain tensor inputs",
            )
    left_open = [
        _open_input(value) for value in inputs.values() if value.name not in shapes and _is_open(value)
    ]
    if left_open:
        raise UnpinnedShape(left_open)
    symbols: dict[str, set[int]] = {}
    for name, wanted in shapes.items():
        require_fitting(inputs[name], wanted)
        for dim, size in zip(inputs[name].type.tensor_type.shape.dim, wanted, strict=False):
            if dim.dim_param:
                symbols.setdefault(dim.dim_param, set()).add(size)
        set_shape(inputs[name], wanted)
    _bind(model, {symbol: sizes.pop() for symbol, sizes in symbols.items() if len(sizes) == 1})
    return {
        name: Value(
            DTYPES[value.type.tensor_type.elem_type],
            tuple(int(dim.dim_value) for dim in value.type.tensor_type.shape.dim),
        )
        for name, value in inputs.items()
    }


def set_shape(value: onnx.ValueInfoProto, shape: Sequence[int]) -> None:
    """Replace the shape of a tensor's description."""
    tensor = value.type.tensor_type
    tensor.ClearField("shape")
    tensor.shape.SetInParent()  # a scalar's shape has no dimension, but is there
    for size in shape:
        tensor.shape.dim.add().dim_value = size


def _is_open(value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    return not tensor.HasField("shape") or any(_size(dim) < 1 for dim in tensor.shape.dim)


def _size(dim: onnx.TensorShapeProto.Dimension) -> int:
    """Return the size of a dimension; 0 for an open one, which some exporters write as 0 or -1."""
    return max(int(dim.dim_value), 0) if dim.HasField("dim_value") else 0


def _open_input(value: onnx.ValueInfoProto) -> OpenInput:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return OpenInput(value.name[:_NAME_CHARS], "of any shape", f"1x{_LENGTH}")
    claimed = [
        dim.dim_param or (str(dim.dim_value) if dim.HasField("dim_value") else "?")
        for dim in tensor.shape.dim
    ]
    example = _example([_size(dim) for dim in tensor.shape.dim])
    return OpenInput(value.name[:_NAME_CHARS], "x".join(claimed)[:_NAME_CHARS], "x".join(map(str, example)))


def _example(sizes: Sequence[int]) -> list[int]:
    """Return numbers to try for the open (0) sizes: one image of usual size, or one sequence."""
    last = len(sizes) - 1
    image = len(sizes) == 4
    channels = last if image and sizes[last] in _CHANNELS else 1

    def guess(axis: int) -> int:
        if axis == 0:
            return 1
        if image:
            return _CHANNELS[1] if axis == channels else _IMAGE_SIDE
        return _LENGTH

    return [size or guess(axis) for axis, size in enumerate(sizes)]


def require_fitting(value: onnx.ValueInfoProto, wanted: Sequence[int]) -> None:
    """Raises:
    ModelError: the file does not allow the input this shape.
    """
    tensor = value.type.tensor_type
    name = value.name[:_NAME_CHARS]
    if any(size < 0 for size in wanted):
        raise ModelError(
            f"shape {'x'.join(map(str, wanted))} of input {name!r} has a negative dimension",
            remedy="every dimension is 0 or more",
        )
    if not tensor.HasField("shape"):
        return
    if len(tensor.shape.dim) != len(wanted):
        raise ModelError(
            f"input {name!r} has {len(tensor.shape.dim)} dimensions, not {len(wanted)}",
            remedy="give one number per dimension",
        )
    for index, dim in enumerate(tensor.shape.dim):
        if _size(dim) and _size(dim) != wanted[index]:
            raise ModelError(
                f"dimension {index} of input {name!r} is {dim.dim_value} in the file, not {wanted[index]}",
                remedy="leave fixed dimensions as they are, or export the model with a dynamic one",
            )


def _bind(model: onnx.ModelProto, symbols: Mapping[str, int]) -> None:
    """Replace pinned symbols in the shapes that the file claims, in place."""
    for claim in (*model.graph.value_info, *model.graph.output):
        if claim.type.WhichOneof("value") != "tensor_type":
            continue
        for dim in claim.type.tensor_type.shape.dim:
            if dim.dim_param in symbols:
                dim.dim_value = symbols[dim.dim_param]


def declared_inputs(model: onnx.ModelProto) -> str:
    """List a parsed model's inputs as text; weights that older files repeat as inputs are left out."""
    weights = {weight.name for weight in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    listed = [f"{value.name[:_NAME_CHARS]!r} ({_dims_text(value)})" for value in inputs[:_SHOWN_INPUTS]]
    more = len(inputs) - len(listed)
    return ", ".join([*listed, *([f"{more} more"] if more else [])]) or "none"


def _dims_text(value: onnx.ValueInfoProto) -> str:
    """Return dimensions like `nx3x?x?`: fixed sizes, names of open ones."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return "no shape"
    dims = [dim.dim_param or (str(dim.dim_value) if dim.dim_value > 0 else "?") for dim in tensor.shape.dim]
    return "x".join(dims) or "scalar"
