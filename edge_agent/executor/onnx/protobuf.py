"""The fields of an encoded protobuf message, located and not parsed."""

from collections.abc import Iterator

from stageloom.shared.errors import ModelError

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
