"""Pairs of devices on one machine, for operators and models that use both: what joins them, with its source.

A file is TOML and names two device files (`stageloom.planner.twin.device_file`), the fast one being resource
0. Without `bytes_per_s` both work on one memory, and a join is a barrier.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final

import tomllib

from stageloom.planner.twin.device_file import DeviceFile, load_device
from stageloom.shared.engine.residency import Bus
from stageloom.shared.errors import InputError

_TEXTS: Final = frozenset({"name", "title", "fast", "slow"})
_NEEDED: Final = frozenset({"latency_s", "barrier_s"})
_FIGURES: Final = _NEEDED | {"bytes_per_s"}


@dataclass(frozen=True, kw_only=True)
class DevicePair:
    """Two devices, the bus between their memories, and what it costs that one waits for the other."""

    name: str
    title: str
    fast: DeviceFile
    slow: DeviceFile
    bus: Bus
    barrier_s: float
    sources: Mapping[str, str] = field(default_factory=dict)


def pair_names() -> tuple[str, ...]:
    """The pairs that come with the twin."""
    folder = resources.files("stageloom.planner.twin") / "device_pairs"
    return tuple(sorted(one.name.removesuffix(".toml") for one in folder.iterdir()))


def load_pair(name: str) -> DevicePair:
    """A pair that comes with the twin.

    Raises:
        InputError: there is none of that name.
    """
    if name not in pair_names():
        raise InputError(
            f"there is no pair of devices {name!r}", remedy=f"use one of {', '.join(pair_names())}"
        )
    folder = resources.files("stageloom.planner.twin") / "device_pairs"
    return parse_pair((folder / f"{name}.toml").read_text(encoding="utf-8"), f"pair {name!r}")


def parse_pair(text: str, where: str) -> DevicePair:
    """A pair from its text; `where` names it in errors.

    Raises:
        InputError: it is no TOML, a field is missing or unknown, or a figure lacks its source.
    """
    try:
        found: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where} is no TOML: {error}") from error
    sources = found.pop("sources", {})
    figures = {name: value for name, value in found.items() if name not in _TEXTS}
    if odd := sorted((_TEXTS ^ (found.keys() - figures.keys())) | (figures.keys() - _FIGURES)):
        raise InputError(f"{where}: {odd[0]} is missing or unknown")
    if missing := sorted(_NEEDED - figures.keys()):
        raise InputError(f"{where}: {missing[0]} is missing")
    if not isinstance(sources, dict) or sources.keys() != figures.keys():
        raise InputError(f"{where}: a figure has no source, or only a source", remedy="cite every figure")
    for name, value in figures.items():
        if type(value) not in (int, float) or not 0.0 <= value < math.inf:
            raise InputError(f"{where}: {name} is no number of 0 or more")
    if not figures.get("bytes_per_s", 1.0):
        raise InputError(f"{where}: bytes_per_s is 0")
    return DevicePair(
        name=str(found["name"]),
        title=str(found["title"]),
        fast=load_device(str(found["fast"])),
        slow=load_device(str(found["slow"])),
        bus=Bus(latency_s=figures["latency_s"], bytes_per_s=figures.get("bytes_per_s", math.inf)),
        barrier_s=figures["barrier_s"],
        sources=dict(sources),
    )
