"""A trained GPG as bytes: plain numbers in msgpack, nothing that could run.

A list: format, "gpg", the widths of the rows that it reads (so that a policy trained on other features is
refused), its provenance (what it was trained on and how, as JSON text), and its arrays as name, shape and
little-endian float32. Equal policies have equal bytes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import msgpack

from stageloom.shared.digest import canonical
from stageloom.shared.errors import DecodeError
from stageloom.shared.policy.gpg.network import OPERATOR_FEATURES, STATE_FEATURES, Floats, GpgNetwork

FORMAT: Final = 1
KIND: Final = "gpg"
MAX_BYTES: Final = 16 << 20
_INPUTS: Final = [OPERATOR_FEATURES, STATE_FEATURES]
_PARTS: Final = {"raw": 1, "g1": 2, "h1": 2, "g2": 2, "h2": 2, "actor": 3, "value": 3}  # layers


@dataclass(frozen=True)
class GpgCheckpoint:
    """A policy and where it comes from."""

    network: GpgNetwork
    provenance: Mapping[str, Any]


def encode(found: GpgCheckpoint) -> bytes:
    """The bytes of a checkpoint."""
    about = json.dumps(found.provenance, sort_keys=True)
    return canonical([FORMAT, KIND, _INPUTS, about, arrays_to_list(found.network.arrays)])


def decode(raw: bytes) -> GpgCheckpoint:
    """Read a checkpoint.

    Raises:
        DecodeError: it is none, has another format, or was trained on other features.
    """
    if len(raw) > MAX_BYTES:
        raise _refusal(f"{len(raw)} bytes")
    try:
        found = msgpack.unpackb(raw, max_array_len=64, max_map_len=0, max_str_len=1 << 16)
        form, kind, inputs, provenance, named = found
        if form != FORMAT or kind != KIND:
            raise ValueError(f"format {form} of kind {kind}")
        if inputs != _INPUTS:
            raise ValueError(f"it reads {inputs} features, not {_INPUTS}")
        arrays = arrays_from_list(named)
        about = json.loads(provenance)
    except (TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
        raise _refusal(str(error)[:200]) from error
    if problem := _problem(arrays):
        raise _refusal(problem)
    return GpgCheckpoint(GpgNetwork(arrays), about)


def arrays_to_list(arrays: Mapping[str, Floats]) -> list[list[Any]]:
    """Name, shape and little-endian float32 of every array, by name."""
    import numpy as np

    return [
        [name, list(values.shape), np.ascontiguousarray(values, "<f4").tobytes()]
        for name, values in sorted(arrays.items())
    ]


def arrays_from_list(rows: Any) -> dict[str, Floats]:
    """What `arrays_to_list` gave.

    Raises:
        TypeError, ValueError: it is no such list, or a number is not finite.
    """
    return {str(name): _array(shape, data) for name, shape, data in rows}


def _array(shape: Sequence[int], data: bytes) -> Floats:
    import numpy as np

    if not 1 <= len(shape) <= 2 or min(shape) < 1 or prod(shape) * 4 != len(data):
        raise ValueError("an array's shape and bytes differ")
    values = np.frombuffer(data, "<f4").reshape(shape).astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("a number is not finite")
    return values


def _problem(arrays: Mapping[str, Floats]) -> str:
    """Why these layers do not fit each other; empty where they do."""
    widths = {"raw": OPERATOR_FEATURES}
    for part, layers in _PARTS.items():
        width = widths.get(part)
        for number in range(0, 2 * layers, 2):
            weight = arrays.get(f"{part}.{number}.weight")
            bias = arrays.get(f"{part}.{number}.bias")
            if weight is None or bias is None or weight.ndim != 2 or bias.shape != weight.shape[:1]:
                return f"layer {part}.{number} is missing or broken"
            if width is not None and weight.shape[1] != width:
                return f"layer {part}.{number} takes {weight.shape[1]} numbers, not {width}"
            width = weight.shape[0]
        if part == "raw":
            widths |= dict.fromkeys(("g1", "h1", "g2", "h2"), width or 0)
        elif part in ("actor", "value"):
            if width != 1:
                return f"{part} gives {width} numbers"
        elif width != widths[part]:
            return f"{part} gives {width} numbers"
        widths |= dict.fromkeys(("actor", "value"), widths.get("h2", 0) + STATE_FEATURES)
    if len(arrays) != 2 * sum(_PARTS.values()):
        return "layers that GPG has not"
    return ""


def _refusal(problem: str) -> DecodeError:
    return DecodeError(
        f"not a checkpoint of gpg: {problem}", remedy="train it again: stageloom policy train gpg"
    )
