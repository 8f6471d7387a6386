"""A trained policy as bytes: plain numbers in msgpack, nothing that could run.

A list: format, "maddpg", the space that it belongs to, its provenance (what it was trained on and how, as
JSON text), its arrays as name, shape and little-endian float32, and the schedules that it was trained with as
combined block's digest, batch and tokens. Equal policies have equal bytes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

import msgpack

from stageloom.shared.digest import canonical, digest_from_raw, digest_to_raw
from stageloom.shared.errors import DecodeError, StageloomError
from stageloom.shared.plan import MAX_MODELS
from stageloom.shared.policy.gpg.checkpoint import arrays_from_list, arrays_to_list
from stageloom.shared.policy.maddpg.decide import BlockKey, Book
from stageloom.shared.policy.maddpg.network import MaddpgNetwork, problem_of
from stageloom.shared.policy.maddpg.space import IntervalMap, ModelSpace, Space
from stageloom.shared.schedule import Schedule
from stageloom.shared.stage_string import from_tokens, to_tokens

FORMAT: Final = 1
KIND: Final = "maddpg"
MAX_BYTES: Final = 64 << 20
_MAX_SCHEDULES: Final = 1 << 16
_MAX_WIDTH: Final = 1 << 14  # of a state or an action row
_BROKEN: Final = (
    TypeError,
    ValueError,
    OverflowError,  # a number in hexadecimal that no float holds
    RecursionError,
    msgpack.UnpackException,
    StageloomError,
)
"""What reading bytes that are no checkpoint raises."""


@dataclass(frozen=True)
class MaddpgCheckpoint:
    """A policy, whom it belongs to, the schedules that it takes along, and where it comes from."""

    space: Space
    network: MaddpgNetwork
    book: Book = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)


def encode(found: MaddpgCheckpoint) -> bytes:
    """The bytes of a checkpoint."""
    schedules = [[digest_to_raw(key), batch, to_tokens(one)] for (key, batch), one in _by_key(found.book)]
    about = json.dumps(found.provenance, sort_keys=True)
    return canonical(
        [FORMAT, KIND, _space_to_list(found.space), about, arrays_to_list(found.network.arrays), schedules]
    )


def decode(raw: bytes) -> MaddpgCheckpoint:
    """Read a checkpoint.

    Raises:
        DecodeError: it is none, has another format, or its arrays do not fit its space.
    """
    if len(raw) > MAX_BYTES:
        raise _refusal(f"{len(raw)} bytes")
    try:
        found = msgpack.unpackb(raw, max_array_len=_MAX_SCHEDULES, max_map_len=0, max_str_len=1 << 20)
        form, kind, *rest = found  # as many as the kind has
        if form != FORMAT or kind != KIND:
            raise ValueError(f"format {form} of kind {kind}")
        belongs, provenance, named, scheduled = rest
        space = _space_from_list(belongs)
        arrays = arrays_from_list(named)
        book = dict(_schedule(*row) for row in scheduled)
        about = json.loads(provenance)
        if not isinstance(about, dict):
            raise ValueError("its provenance is no table")
        problem = problem_of(space, arrays)
    except _BROKEN as error:
        raise _refusal(str(error)[:200].rstrip(".")) from error
    if problem:
        raise _refusal(problem)
    return MaddpgCheckpoint(space, MaddpgNetwork(arrays, space.agents), book, about)


def _space_to_list(space: Space) -> list[Any]:
    models = [
        [digest_to_raw(model.artifact), list(model.cuts), model.replicas, model.batch]
        for model in space.models
    ]
    scale = space.deviation_scale.hex()
    return [
        space.device_class,
        models,
        space.members_max,
        space.samples,
        space.interval_map.value,
        scale,
    ]


def _space_from_list(row: Any) -> Space:
    device_class, models, members_max, samples, interval_map, scale = row
    if len(models) > MAX_MODELS:
        raise ValueError(f"{len(models)} models")
    space = Space(
        device_class=_text(device_class),
        models=tuple(_model(*model) for model in models),
        members_max=_count(members_max),
        samples=_count(samples),
        interval_map=IntervalMap(interval_map),
        deviation_scale=float.fromhex(scale),
    )
    if not isfinite(space.deviation_scale) or space.state_width + space.action_width > _MAX_WIDTH:
        raise ValueError(f"states of {space.state_width} numbers")
    return space


def _model(artifact: bytes, cuts: Sequence[int], replicas: int, batch: int) -> ModelSpace:
    if _count(replicas) * (len(cuts) + 1) > _MAX_WIDTH:
        raise ValueError(f"{replicas} replicas of {len(cuts) + 1} blocks")
    return ModelSpace(
        artifact=digest_from_raw(artifact),
        cuts=tuple(_count(cut) for cut in cuts),
        replicas=_count(replicas),
        batch=_count(batch),
    )


def _by_key(book: Book) -> list[tuple[BlockKey, Schedule]]:
    """In the order of the keys, so that equal books have equal bytes."""
    return sorted(book.items(), key=lambda item: item[0])


def _schedule(key: bytes, batch: int, tokens: Sequence[int]) -> tuple[BlockKey, Schedule]:
    return (digest_from_raw(key), _count(batch)), from_tokens(tokens)


def _count(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1 << 12:
        raise ValueError("the device class is no text")
    return value


def _refusal(problem: str) -> DecodeError:
    return DecodeError(
        f"not a checkpoint of maddpg: {problem}", remedy="train it again: stageloom policy train maddpg"
    )
