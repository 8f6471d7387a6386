"""Device files: what the twin assumes of a device, each figure with its source.

A file is TOML. `derived` devices come from published ceilings (data sheets) and say where each figure is
from; `measured` ones were fitted to what a real device reported (`stageloom.planner.twin.calibrate`). The
schema is `DeviceFile`; a figure without a source, or a source without a figure, is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import tomllib

from stageloom.shared.errors import InputError
from stageloom.shared.search.analytic import DeviceRates


class Kind(Enum):
    """Where a device file's figures come from."""

    DERIVED = "derived"  # published ceilings
    MEASURED = "measured"  # a real device of this class


@dataclass(frozen=True, kw_only=True)
class DeviceFile:
    """One device as the twin sees it. `sources` cites every other figure."""

    name: str
    title: str
    kind: Kind
    fp32_flop_per_s: float
    fp16_flop_per_s: float
    bytes_per_s: float
    multiprocessors: int = 0  # of a GPU; 0: a CPU, or unknown
    threads_per_multiprocessor: int = 0
    cores: int = 0  # of a CPU that computes: an operator uses as many as it has threads; 0: a GPU
    launch_s: float  # fixed seconds of one operator
    barrier_s: float  # what ends a stage of more than one group
    step_s: float  # fixed seconds of one step, in which its lane does nothing else
    task_s: float = 0.0  # from an application's submit to the queue and from the result back, in all
    item_s: float = 0.0  # fixed seconds of one item of a launch list (a session, on onnx)
    border_s_per_byte: float = 0.0  # per byte that enters or leaves an item
    groups_interference: float  # between groups of a stage; see `stageloom.shared.search.costs`
    lanes_interference: float  # between steps of different lanes; see `stageloom.planner.twin.lanes`
    beside_s: float = 0.0  # what a step takes longer per step that already runs in another lane
    item_beside_s: float = 0.0  # what it takes longer per such step and item after its first
    noise: tuple[
        tuple[float, float], ...
    ] = ()  # quantiles of a step's seconds over their mean: (level, factor)
    sources: Mapping[str, str] = field(default_factory=dict)

    def rates(self, precision: str = "fp32") -> DeviceRates:
        """For the roofline estimate (`stageloom.shared.search.analytic`), which counts bytes at 32 bits.

        Raises:
            InputError: the device has no figures for this precision.
        """
        half = precision == "fp16"
        flop_per_s = self.fp16_flop_per_s if half else self.fp32_flop_per_s
        if precision not in ("fp32", "fp16") or flop_per_s <= 0.0:
            raise InputError(f"device file {self.name!r} has no figures for {precision}", remedy="use fp32")
        return DeviceRates(
            flop_per_s=flop_per_s,
            bytes_per_s=self.bytes_per_s * (2 if half else 1),
            launch_s=self.launch_s,
            barrier_s=self.barrier_s,
            contention=self.groups_interference,
            threads=self.multiprocessors * self.threads_per_multiprocessor,
        )

    def rates_beside(self, measured: bool, precision: str) -> DeviceRates:
        """As `rates`; where operators were measured, those for fp32 stand in for a precision without figures.

        There they scale batches and say what groups cost: neither is a reason to refuse what is known.

        Raises:
            InputError: nothing was measured, and the device has no figures for this precision.
        """
        try:
            return self.rates(precision)
        except InputError:
            if not measured:
                raise
            return self.rates()


_TEXTS: Final = frozenset({"name", "title", "kind", "sources"})
_WHOLE: Final = frozenset({"multiprocessors", "threads_per_multiprocessor", "cores"})
_ABOVE_0: Final = frozenset({"fp32_flop_per_s", "bytes_per_s"})
FIGURES: Final = tuple(field.name for field in fields(DeviceFile) if field.name not in _TEXTS)
"""The fields that need a source."""

_OPTIONAL: Final = frozenset(field.name for field in fields(DeviceFile) if field.default is not MISSING)


def device_names() -> tuple[str, ...]:
    """The devices that come with the twin."""
    folder = resources.files("stageloom.planner.twin") / "devices"
    return tuple(
        sorted(one.name.removesuffix(".toml") for one in folder.iterdir() if one.name.endswith("toml"))
    )


def load_device(name: str) -> DeviceFile:
    """A device that comes with the twin, by name, or a file, by path.

    Raises:
        InputError: there is none, or it cannot be used.
    """
    if name in device_names():
        text = (resources.files("stageloom.planner.twin") / "devices" / f"{name}.toml").read_text(
            encoding="utf-8"
        )
        return parse_device(text, f"device file {name!r}")
    path = Path(name)
    if path.suffix != ".toml":
        raise InputError(
            f"there is no device file {name!r}",
            remedy=f"use one of {', '.join(device_names())}, or a path that ends in .toml",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name} cannot be read: {error}") from error
    return parse_device(text, name)


def named_device(given: str) -> DeviceFile:
    """A device that comes with the twin, by name, or the one that a device file's text describes.

    Raises:
        InputError: there is none, or the text cannot be used.
    """
    if "=" in given:
        return parse_device(given, "the device file")
    if given not in device_names():
        raise InputError(
            f"there is no device file {given[:80]!r}",
            remedy=f"use one of {', '.join(device_names())}, or a path that ends in .toml",
        )
    return load_device(given)


def cpu_device(cores: int) -> DeviceFile:
    """A CPU of which nothing was measured: where a calibration begins.

    Its figures are those of `DeviceRates`, one core of a small machine, and what the engine took beside the
    operators where that was measured: telemetry does not tell it, and nothing would be further off.
    """
    rates = DeviceRates()
    assumed = "assumption: about one core of a small machine, until it is measured"
    device = DeviceFile(
        name="cpu",
        title=f"CPU, {cores} cores",
        kind=Kind.DERIVED,
        fp32_flop_per_s=rates.flop_per_s,
        fp16_flop_per_s=0.0,
        bytes_per_s=rates.bytes_per_s,
        cores=cores,
        launch_s=rates.launch_s,
        barrier_s=rates.barrier_s,
        step_s=70e-6,
        task_s=300e-6,
        groups_interference=0.0,
        lanes_interference=0.0,
        beside_s=70e-6,
        item_beside_s=45e-6,
    )
    elsewhere = "python -m benchmarks.twin on two cores of an AMD EPYC, rounded, until it is measured"
    of_the_engine = dict.fromkeys(("step_s", "task_s", "beside_s", "item_beside_s"), elsewhere)
    sources = dict.fromkeys(sorted(set(FIGURES) - _OPTIONAL), assumed)
    return replace(device, sources={**sources, **of_the_engine, "cores": "the system's"})


def parse_device(text: str, where: str) -> DeviceFile:
    """A device file from its text; `where` names it in errors.

    Raises:
        InputError: it is no TOML, a field is missing, unknown or of a wrong type, or lacks its source.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where} is no TOML: {error}") from error
    sources = found.get("sources", {})
    if not isinstance(sources, dict) or not all(
        isinstance(source, str) and source for source in sources.values()
    ):
        raise InputError(f"{where}: [sources] is no table of texts")
    figures = {name: value for name, value in found.items() if name not in _TEXTS}
    if unknown := sorted(figures.keys() - set(FIGURES)):
        raise InputError(f"{where}: unknown field {unknown[0]!r}")
    if missing := sorted(set(FIGURES) - _OPTIONAL - figures.keys()):
        raise InputError(f"{where}: {missing[0]} is missing")
    if odd := sorted(figures.keys() ^ sources.keys()):
        raise InputError(f"{where}: {odd[0]} has no source, or only a source", remedy="cite every figure")
    return DeviceFile(
        name=_text(found, "name", where),
        title=_text(found, "title", where),
        kind=_kind(found, where),
        sources=dict(sorted(sources.items())),
        **{name: _figure(name, value, where) for name, value in figures.items()},
    )


def device_toml(device: DeviceFile) -> str:
    """The file of a device; `parse_device` reads it back to an equal value."""
    lines = [f"{name} = {_quoted(str(getattr(device, name)))}" for name in ("name", "title")]
    lines.append(f"kind = {_quoted(device.kind.value)}")
    for name in FIGURES:
        if name in device.sources:
            value = getattr(device, name)
            lines.append(f"{name} = {[list(one) for one in value] if name == 'noise' else value!r}")
    lines += ["", "[sources]", *(f"{name} = {_quoted(text)}" for name, text in device.sources.items())]
    return "\n".join(lines) + "\n"


def _figure(name: str, value: Any, where: str) -> Any:
    if name == "noise":
        return _noise(value, where)
    if name in _WHOLE:
        if type(value) is not int or value < 0:
            raise InputError(f"{where}: {name} is no whole number")
        return value
    if type(value) not in (int, float) or not 0.0 <= value < math.inf:
        raise InputError(f"{where}: {name} is no number of 0 or more")
    if name in _ABOVE_0 and value == 0:
        raise InputError(f"{where}: {name} is 0")
    return float(value)


def _noise(value: Any, where: str) -> tuple[tuple[float, float], ...]:
    if not isinstance(value, list) or not all(map(_is_quantile, value)):
        raise InputError(f"{where}: noise is no list of pairs of a level in [0, 1] and a factor above 0")
    points = tuple((float(level), float(factor)) for level, factor in value)
    for (level, factor), (next_level, next_factor) in pairwise(points):
        if next_level <= level or next_factor < factor:
            raise InputError(f"{where}: noise is not ascending")
    if points and (points[0][0], points[-1][0]) != (0.0, 1.0):
        raise InputError(f"{where}: noise does not reach from level 0 to level 1")
    return points


def _is_quantile(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(one) in (int, float) for one in value)
        and 0.0 <= value[0] <= 1.0
        and 0.0 < value[1] < math.inf
    )


def _kind(found: Mapping[str, Any], where: str) -> Kind:
    try:
        return Kind(_text(found, "kind", where))
    except ValueError as error:
        raise InputError(f"{where}: kind is neither 'derived' nor 'measured'") from error


def _text(found: Mapping[str, Any], name: str, where: str) -> str:
    value = found.get(name)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise InputError(f"{where}: {name} is no text")
    return value


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
