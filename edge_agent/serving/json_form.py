"""Requests and answers over HTTP: JSON, with the elements of tensors in it or after it (binary data).

A request may also be the elements of a model's one input and nothing else.

A number in JSON is taken only where the tensor's type holds it: no fraction for an integer, nothing beyond
the type's range. JSON has no NaN and no infinity; outputs that hold one are given as binary data alone.
"""

from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct

from stageloom.edge_agent.ingest.client_memory import Array, TaskInput
from stageloom.edge_agent.ingest.messages import ModelSignature
from stageloom.edge_agent.ingest.signature import tensor_bytes
from stageloom.edge_agent.serving.datatypes import BINARY_ONLY, PROTOCOL_NAMES, numpy_type
from stageloom.edge_agent.serving.failures import FailureKind, InferenceFailure
from stageloom.edge_agent.serving.models import open_as_minus_1
from stageloom.edge_agent.serving.request import (
    FindRegion,
    GivenInput,
    InferenceAnswer,
    InferenceCall,
    MadeOutput,
    as_shape,
    check_integers,
    count_of,
    deadline_and_priority,
    from_bytes,
    from_region,
    names_region,
    wanted_output,
)
from stageloom.shared.errors import InputError

Parameters = dict[str, Any]
_DEEPEST: Final = 33  # nested lists of data: one more than a shape has dimensions


class _JsonInput(Struct, kw_only=True):
    """An input as JSON has it."""

    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters = {}
    data: msgspec.Raw = msgspec.Raw()  # empty: not given


class _JsonOutput(Struct, kw_only=True):
    """An output that is asked for."""

    name: str
    parameters: Parameters = {}


class _JsonRequest(Struct, kw_only=True):
    """The whole request."""

    id: str = ""
    parameters: Parameters = {}
    inputs: list[_JsonInput]
    outputs: list[_JsonOutput] | None = None


_decoder: Final = msgspec.json.Decoder(_JsonRequest)


def parse_request(
    model: str, version: str, body: memoryview, header_length: int | None, find: FindRegion
) -> InferenceCall:
    """The request in `body`, of which the JSON takes the first `header_length` bytes, or all (None).

    Raises:
        InputError, NotFoundError, InferenceFailure: it is none; the cause names what is wrong.
    """
    if header_length is not None and not 0 <= header_length <= len(body):
        raise InputError(
            f"Inference-Header-Content-Length is {header_length}, the body has {len(body)} bytes"
        )
    split = len(body) if header_length is None else header_length
    try:
        asked = _decoder.decode(body[:split])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InputError(f"failed to parse the request JSON: {str(error)[:200]}") from error
    binary_part = body[split:]
    inputs = []
    for one in asked.inputs:
        shape = as_shape(one.name, one.shape)
        elements, binary_part = _elements(one, shape, binary_part, find)
        inputs.append(GivenInput(one.name, one.datatype, shape, elements))
    if len(binary_part):
        raise InputError(f"{len(binary_part)} bytes follow that belong to no input")
    deadline_s, priority = deadline_and_priority(asked.parameters)
    binary = asked.parameters.get("binary_data_output", False)
    if type(binary) is not bool:
        raise InputError("binary_data_output is no boolean")
    outputs = None
    if asked.outputs:
        outputs = tuple(wanted_output(one.name, one.parameters, binary, find) for one in asked.outputs)
    return InferenceCall(model, version, asked.id, tuple(inputs), outputs, binary, deadline_s, priority)


def raw_call(model: ModelSignature, version: str, body: memoryview) -> InferenceCall:
    """The request of a body that is the elements of the model's one input, for all outputs as binary data.

    Raises:
        InputError: the model has several inputs, or a shape that does not follow from the number of bytes.
    """
    shapes = [open_as_minus_1(info) for info in model.inputs]
    if len(shapes) != 1 or shapes[0].count(-1) > 1 or {-1, 0} <= set(shapes[0]):
        raise InputError(
            "a body without JSON is for one input whose number of bytes says its shape; "
            f"model {model.name!r} takes {str(shapes)[:128]}",
            remedy="send JSON before the elements, and its length as Inference-Header-Content-Length",
        )
    (info,), (shape,) = model.inputs, shapes
    if -1 in shape:
        shape[shape.index(-1)] = len(body) // -tensor_bytes(info.dtype, shape)
    datatype = PROTOCOL_NAMES[info.dtype]
    elements = from_bytes(info.name, datatype, tuple(shape), body)
    given = GivenInput(info.name, datatype, tuple(shape), elements)
    return InferenceCall(model.name, version, "", (given,), None, True, None, 0)


def _elements(
    one: _JsonInput, shape: tuple[int, ...], binary_part: memoryview, find: FindRegion
) -> tuple[TaskInput, memoryview]:
    """An input's elements, and what is left of the bytes after the JSON."""
    size = one.parameters.get("binary_data_size")
    in_json = memoryview(one.data).nbytes > 0
    ways = in_json + (size is not None) + names_region(one.parameters)
    if ways != 1:
        raise InputError(
            f"input {one.name[:64]!r} has its elements in {ways} places",
            remedy="give data, binary_data_size or shared_memory_region",
        )
    if names_region(one.parameters):
        return from_region(one.name, one.datatype, shape, one.parameters, find), binary_part
    if in_json:
        return from_json(one.name, one.datatype, shape, one.data), binary_part
    if type(size) is not int or not 0 <= size <= len(binary_part):
        raise InputError(
            f"binary_data_size of input {one.name[:64]!r} is {str(size)[:32]}, "
            f"{len(binary_part)} bytes are left"
        )
    return from_bytes(one.name, one.datatype, shape, binary_part[:size]), binary_part[size:]


def from_json(name: str, datatype: str, shape: tuple[int, ...], raw: bytes | msgspec.Raw) -> Array:
    """A tensor from JSON's numbers, nested as its shape or flat.

    Raises:
        InputError: another number of elements, or one that is none of this type.
    """
    dtype = numpy_type(datatype)
    if datatype in BINARY_ONLY:
        raise InputError(f"JSON has no {datatype}; send input {name[:64]!r} as binary data")
    kind: Any = {"b": bool, "f": float}.get(dtype.kind, int)
    try:
        numbers = _flat_list(raw, kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"data of input {name[:64]!r} is no {datatype}: {str(error)[:120]}") from error
    if len(numbers) != count_of(shape):
        raise InputError(
            f"input {name[:64]!r} has {len(numbers)} elements, {count_of(shape)} expected for {list(shape)}"
        )
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # the largest, written shortest, may lie above itself: 3.4028235e38
            narrow: Array = np.array(numbers, np.float64).astype(dtype)
        if np.isinf(narrow).any():
            raise InputError(f"data of input {name[:64]!r} goes beyond {datatype}")
        return narrow.reshape(shape)
    check_integers(name, datatype, numbers)
    return np.array(numbers, dtype).reshape(shape)


def _flat_list(raw: bytes | msgspec.Raw, kind: Any) -> list[Any]:
    """The numbers in order. Flat lists, which clients send, are decoded with their type at once."""
    try:
        flat: list[Any] = msgspec.json.decode(raw, type=list[kind])
        return flat
    except msgspec.ValidationError:
        level = msgspec.json.decode(raw)
    depth = 0
    while isinstance(level, list) and level and all(isinstance(part, list) for part in level):
        level = [number for part in level for number in part]
        depth += 1
        if depth > _DEEPEST:
            raise msgspec.DecodeError("it is nested too deeply")
    found: list[Any] = msgspec.convert(level, list[kind])
    return found


def render_answer(answer: InferenceAnswer) -> tuple[list[bytes], int | None]:
    """The parts of a body, and the length of its JSON where elements follow.

    Raises:
        InferenceFailure: an output that JSON cannot hold.
    """
    outputs: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for made in answer.outputs:
        shown: dict[str, Any] = {
            "name": made.wanted.name,
            "datatype": made.datatype,
            "shape": made.shape,
        }
        if made.elements is None:
            region = made.wanted.region
            assert region is not None
            shown["parameters"] = {
                "shared_memory_region": region.name,
                "shared_memory_byte_size": _nbytes(made),
            } | ({"shared_memory_offset": made.wanted.offset} if made.wanted.offset else {})
        elif made.wanted.binary:
            shown["parameters"] = {"binary_data_size": sum(map(len, made.elements))}
            parts += made.elements
        else:
            shown["data"] = _numbers(made)
        outputs.append(shown)
    body: dict[str, Any] = {"model_name": answer.call.model, "model_version": str(answer.version)}
    if answer.call.id:
        body["id"] = answer.call.id
    header = msgspec.json.encode(body | {"outputs": outputs})
    return [header, *parts], len(header) if parts else None


def _nbytes(made: MadeOutput) -> int:
    return count_of(made.shape) * numpy_type(made.datatype).itemsize


def _numbers(made: MadeOutput) -> list[Any]:
    assert made.elements is not None
    if made.datatype in BINARY_ONLY:
        raise InferenceFailure(
            FailureKind.INVALID,
            f"JSON has no {made.datatype}",
            remedy=f"ask for output {made.wanted.name!r} with binary_data",
        )
    elements: Array = np.frombuffer(b"".join(made.elements), numpy_type(made.datatype))
    if elements.dtype.kind == "f" and not np.isfinite(elements).all():
        raise InferenceFailure(
            FailureKind.INTERNAL,
            f"output {made.wanted.name!r} holds NaN or infinity, which JSON cannot",
            remedy="ask for it with binary_data",
        )
    numbers: list[Any] = elements.tolist()
    return numbers
