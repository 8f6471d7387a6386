"""An encoded ONNX model, taken apart without parsing its weights.

Parsing a protobuf of 100 MB holds the interpreter lock for a tenth of a second; weights are only located.
"""

from collections.abc import Iterator

import onnx

from stageloom.shared.errors import ModelError

# Field numbers of onnx.proto.
MODEL_GRAPH = 7
GRAPH_INITIALIZER = 5
_TENSOR_DESCRIPTION = (1, 2, 8)  # dims, data_type, name
_TENSOR_NAME = 8

SMALL_WEIGHT_BYTES = 1 << 14
"""Encoded weights up to here are read with their contents: shapes, axes, sizes."""

_VARINT, _FIXED64, LENGTH, _FIXED32 = 0, 1, 2, 5


def encoded_fields(message: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Per field of a message its number, all its bytes, and for a length-delimited one its content."""
    position = 0
    while position < len(message):
        start = position
        tag, position = varint(message, position)
        kind = tag & 7
        begin = position
        if kind == LENGTH:
            length, begin = varint(message, position)
            position = begin + length
        elif kind == _VARINT:
            _, position = varint(message, position)
        elif kind in (_FIXED32, _FIXED64):
            position += 4 if kind == _FIXED32 else 8
        else:
            raise ModelError(f"a field of kind {kind} in an ONNX file", remedy="import the model again")
        if position > len(message):
            raise ModelError("an ONNX file ends inside a field", remedy="import the model again")
        yield tag >> 3, message[start:position], message[begin:position]


def varint(message: memoryview, position: int) -> tuple[int, int]:
    """The number at a position, and the position behind it.

    Raises:
        ModelError: the message ends inside it.
    """
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            break
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ModelError("an ONNX file ends inside a number", remedy="import the model again")


def take_apart(model: memoryview) -> tuple[bytes, dict[str, memoryview]]:
    """The model without its weights, and every weight's encoded tensor by name.

    Raises:
        ModelError: the bytes are no protobuf.
    """
    kept: list[bytes] = []
    weights: dict[str, memoryview] = {}
    for number, whole, value in encoded_fields(model):
        if number != MODEL_GRAPH:
            kept.append(bytes(whole))
            continue
        graph = []
        for part, part_whole, content in encoded_fields(value):
            if part == GRAPH_INITIALIZER:
                weights[_name(content)] = content
            else:
                graph.append(bytes(part_whole))
        skeleton = b"".join(graph)
        kept += [encoded_head(MODEL_GRAPH, len(skeleton)), skeleton]
    return b"".join(kept), weights


def _name(tensor: memoryview) -> str:
    return next(
        (bytes(value).decode() for number, _, value in encoded_fields(tensor) if number == _TENSOR_NAME), ""
    )


def encoded_head(number: int, length: int) -> bytes:
    """Tag and length of a length-delimited field."""
    head = bytearray([number << 3 | LENGTH])
    while length >= 0x80:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head)


def described_weight(encoded: memoryview) -> onnx.TensorProto:
    """A weight; a large one with its type and shape, and without its contents."""
    if len(encoded) > SMALL_WEIGHT_BYTES:
        fields = encoded_fields(encoded)
        encoded = memoryview(b"".join(whole for number, whole, _ in fields if number in _TENSOR_DESCRIPTION))
    return onnx.TensorProto.FromString(bytes(encoded))
