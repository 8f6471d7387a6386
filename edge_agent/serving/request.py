"""An inference request, whatever form it came in, and its answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from stageloom.edge_agent.ingest.client_memory import Array, TaskInput
from stageloom.edge_agent.ingest.messages import LONGEST_S
from stageloom.edge_agent.serving.datatypes import numpy_type
from stageloom.edge_agent.serving.failures import unsupported
from stageloom.edge_agent.serving.regions import MemoryRegion, RegionInput
from stageloom.shared.errors import InputError

_HIGHEST: Final = 2**31
_LONGEST_SHAPE: Final = 32
_LONGEST_DIM: Final = 2**40
_MICRO: Final = 1e-6
_REGION: Final = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")

FindRegion = Callable[[str], MemoryRegion]
"""The region of that name; raises if the one who asks may not use it."""


@dataclass(frozen=True, slots=True)
class GivenInput:
    """One input: the protocol's name of its type, its shape, and where its elements are."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    elements: TaskInput


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """One output, as bytes, as numbers in JSON, or written to a region."""

    name: str
    binary: bool = True
    region: MemoryRegion | None = None
    offset: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class InferenceCall:
    """One request. `outputs`: None for all of them."""

    model: str
    version: str
    id: str
    inputs: tuple[GivenInput, ...]
    outputs: tuple[WantedOutput, ...] | None
    binary: bool  # outputs that say nothing else
    deadline_s: float | None
    priority: int


@dataclass(frozen=True, slots=True)
class MadeOutput:
    """One output of an answer; `elements` is None where they were written to a region."""

    wanted: WantedOutput
    datatype: str
    shape: tuple[int, ...]
    elements: list[bytes] | None


@dataclass(frozen=True, slots=True)
class InferenceAnswer:
    """One answer, of a version of its model."""

    call: InferenceCall
    version: int
    outputs: list[MadeOutput]


def as_shape(name: str, shape: Any) -> tuple[int, ...]:
    """A shape as the protocol allows it.

    Raises:
        InputError: too many dimensions, or one that is negative or absurd.
    """
    if len(shape) > _LONGEST_SHAPE or any(not 0 <= dim <= _LONGEST_DIM for dim in shape):
        raise InputError(f"input {name[:64]!r} has an impossible shape {list(shape)[:8]}")
    return tuple(shape)


def count_of(shape: tuple[int, ...]) -> int:
    """Elements of a tensor; Python's integers do not overflow."""
    count = 1
    for dim in shape:
        count *= dim
    return count


def check_integers(name: str, datatype: str, numbers: Sequence[int]) -> None:
    """Refuse whole numbers that the type does not hold: numpy before version 2 would wrap them.

    Raises:
        InputError: there is one, of the input of this name.
    """
    dtype = numpy_type(datatype)
    if dtype.kind not in "iu" or not len(numbers):
        return
    holds = np.iinfo(dtype)
    if min(numbers) < holds.min or max(numbers) > holds.max:
        raise InputError(
            f"input {name[:64]!r} goes beyond {datatype}, which holds {holds.min} to {holds.max}"
        )


def from_bytes(name: str, datatype: str, shape: tuple[int, ...], body: "memoryview | bytes") -> Array:
    """A tensor whose elements lie one after the other in `body`.

    Raises:
        InputError: it has another number of bytes than type and shape say.
    """
    dtype = numpy_type(datatype)
    expected = count_of(shape) * dtype.itemsize
    if len(body) != expected:
        raise InputError(
            f"input {name[:64]!r} has {len(body)} bytes, {expected} expected for {datatype} {list(shape)}"
        )
    flat: Array = np.frombuffer(body, dtype)
    return flat.reshape(shape)


def from_region(
    name: str, datatype: str, shape: tuple[int, ...], parameters: Mapping[str, Any], find: FindRegion
) -> RegionInput:
    """A tensor in the region that its parameters name.

    Raises:
        InputError, NotFoundError: there is no such region, or the tensor does not lie in it.
    """
    dtype = numpy_type(datatype)
    region, offset, nbytes = _region_part(parameters, find)
    expected = count_of(shape) * dtype.itemsize
    if nbytes != expected:
        raise InputError(
            f"input {name[:64]!r} has {nbytes} bytes in shared memory, {expected} expected for "
            f"{datatype} {list(shape)}"
        )
    return RegionInput(dtype, shape, region, region.place(offset, nbytes))


def names_region(parameters: Mapping[str, Any]) -> bool:
    """Whether a tensor's elements are in shared memory."""
    return _REGION[0] in parameters


def wanted_output(name: str, parameters: Mapping[str, Any], binary: bool, find: FindRegion) -> WantedOutput:
    """An output as its parameters want it; `binary` where they do not say.

    Raises:
        InputError, NotFoundError: its region does not exist, or is too small.
        InferenceFailure: it asks for a classification.
    """
    if parameters.get("classification"):
        raise unsupported("the classification extension is not supported", "take the output and sort it")
    if names_region(parameters):
        region, offset, nbytes = _region_part(parameters, find)
        region.place(offset, nbytes)
        return WantedOutput(name, True, region, offset, nbytes)
    chosen = parameters.get("binary_data", binary)
    if type(chosen) is not bool:
        raise InputError(f"binary_data of output {name[:64]!r} is no boolean")
    return WantedOutput(name, chosen)


def _region_part(parameters: Mapping[str, Any], find: FindRegion) -> tuple[MemoryRegion, int, int]:
    name, nbytes, offset = (parameters.get(word, 0) for word in _REGION)
    if type(name) is not str or type(nbytes) is not int or type(offset) is not int:
        raise InputError("parameters of shared memory are a name and two whole numbers")
    return find(name), offset, nbytes


def deadline_and_priority(parameters: Mapping[str, Any]) -> tuple[float | None, int]:
    """`timeout`, in microseconds, and `priority`, of which 1 is the highest, as this agent has them.

    A request without a priority, or with 0, comes after all that have one.

    Raises:
        InputError: one of them is no whole number, or negative.
        InferenceFailure: the request belongs to a sequence.
    """
    if parameters.get("sequence_id"):
        raise unsupported("sequences of requests are not supported")
    numbers = {name: parameters.get(name, 0) for name in ("timeout", "priority")}
    for name, number in numbers.items():
        if type(number) is not int or number < 0:
            raise InputError(f"parameter {name!r} is no whole number of 0 or more")
    timeout, priority = numbers["timeout"], numbers["priority"]
    deadline_s = min(timeout * _MICRO, LONGEST_S) if timeout else None
    return deadline_s, max(_HIGHEST - priority, 0) if priority else 0
