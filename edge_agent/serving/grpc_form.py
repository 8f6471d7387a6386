"""Inference requests and answers over gRPC."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from stageloom.edge_agent.ingest.client_memory import TaskInput
from stageloom.edge_agent.serving.datatypes import BINARY_ONLY, numpy_type
from stageloom.edge_agent.serving.protocol import message
from stageloom.edge_agent.serving.request import (
    FindRegion,
    GivenInput,
    InferenceAnswer,
    InferenceCall,
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

_CONTENTS: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


def plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a map of parameters."""
    found = {}
    for name, value in parameters.items():
        choice = value.WhichOneof("parameter_choice")
        found[name] = None if choice is None else getattr(value, choice)
    return found


def parse_call(asked: Any, find: FindRegion) -> InferenceCall:
    """The request in a `ModelInferRequest`.

    Raises:
        InputError, NotFoundError, InferenceFailure: it is none that makes sense.
    """
    raw = iter(asked.raw_input_contents)
    given_raw = len(asked.raw_input_contents) > 0
    inputs = []
    for one in asked.inputs:
        shape, parameters = as_shape(one.name, one.shape), plain(one.parameters)
        elements: TaskInput
        if names_region(parameters):
            elements = from_region(one.name, one.datatype, shape, parameters, find)
        elif given_raw:
            body = next(raw, None)
            if body is None:
                raise InputError(f"input {one.name[:64]!r} has no raw_input_contents")
            elements = from_bytes(one.name, one.datatype, shape, body)
        else:
            elements = _from_contents(one, shape)
        inputs.append(GivenInput(one.name, one.datatype, shape, elements))
    if next(raw, None) is not None:
        raise InputError("there are more raw_input_contents than inputs")
    deadline_s, priority = deadline_and_priority(plain(asked.parameters))
    outputs = None
    if asked.outputs:
        outputs = tuple(
            wanted_output(one.name, plain(one.parameters) | {"binary_data": True}, True, find)
            for one in asked.outputs
        )
    return InferenceCall(
        asked.model_name, asked.model_version, asked.id, tuple(inputs), outputs, True, deadline_s, priority
    )


def _from_contents(one: Any, shape: tuple[int, ...]) -> TaskInput:
    if one.datatype in BINARY_ONLY:
        raise InputError(f"contents have no {one.datatype}; send input {one.name[:64]!r} raw")
    dtype = numpy_type(one.datatype)
    numbers = getattr(one.contents, _CONTENTS[one.datatype])
    if len(numbers) != count_of(shape):
        raise InputError(
            f"input {one.name[:64]!r} has {len(numbers)} elements, {count_of(shape)} expected for "
            f"{list(shape)}"
        )
    check_integers(one.name, one.datatype, numbers)
    return np.array(numbers, dtype).reshape(shape)


def answer_message(answer: InferenceAnswer) -> Any:
    """A `ModelInferResponse`."""
    call = answer.call
    made = message("ModelInferResponse")(model_name=call.model, model_version=str(answer.version), id=call.id)
    for one in answer.outputs:
        shown = made.outputs.add(name=one.wanted.name, datatype=one.datatype, shape=one.shape)
        if one.elements is None:
            region = one.wanted.region
            assert region is not None
            nbytes = count_of(one.shape) * numpy_type(one.datatype).itemsize
            shown.parameters["shared_memory_region"].string_param = region.name
            shown.parameters["shared_memory_byte_size"].int64_param = nbytes
            if one.wanted.offset:
                shown.parameters["shared_memory_offset"].int64_param = one.wanted.offset
            made.raw_output_contents.append(b"")
        else:
            made.raw_output_contents.append(
                one.elements[0] if len(one.elements) == 1 else b"".join(one.elements)
            )
    return made
