"""`stageloom-agent verify`: the arguments as text, the report, the exit code."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from edge_agent.verify.check import DEFAULT_REPEATS, verify
from edge_agent.verify.inputs import ValueRange
from edge_agent.verify.report import VerifyReport
from shared.errors import ExitCode, SettingError

_MAX_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyArgs:
    """What the command line gives."""

    model: Path
    schedule: str
    shapes: tuple[str, ...] = ()  # NAME=1x3x224x224
    ranges: tuple[str, ...] = ()  # NAME=LO:HI
    partition: str | None = None
    executor: str = "onnx"
    seed: int = 0
    repeats: int = DEFAULT_REPEATS


def run_verify(
    args: VerifyArgs, progress: Callable[[str], None] = lambda line: None
) -> tuple[VerifyReport, ExitCode]:
    """Carry out the command; `progress` is told the phases, one short line each.

    Raises:
        StageloomError: nothing could be compared; the error carries the exit code.
    """
    report = verify(
        args.model,
        args.schedule,
        shapes=parse_shapes(args.shapes),
        ranges=parse_ranges(args.ranges),
        partition=args.partition,
        executor=args.executor,
        seed=args.seed,
        repeats=args.repeats,
        progress=progress,
    )
    return report, report.exit_code


def parse_shapes(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """`NAME=1x3x224x224` each; an input named twice, or a dimension that is no positive number, is refused.

    Raises:
        SettingError: the text is no shape.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, found = _split("--shape", text, shapes, "images=1x3x640x640")
        if not re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*", found) or found.count("x") >= _MAX_RANK:
            raise SettingError(
                f"{found[:40]!r} is no shape", remedy="write dimensions like 1x3x640x640, each 1 or more"
            )
        shapes[name] = tuple(int(size) for size in found.split("x"))
    return shapes


def parse_ranges(texts: Iterable[str]) -> dict[str, ValueRange]:
    """`NAME=LO:HI` each, both ends included.

    Raises:
        SettingError: the text is no range. InputError: the range is empty.
    """
    ranges: dict[str, ValueRange] = {}
    for text in texts:
        name, found = _split("--range", text, ranges, "input_ids=0:30521")
        low, colon, high = found.partition(":")
        try:
            if not colon:
                raise ValueError
            ranges[name] = ValueRange(float(low), float(high))
        except ValueError:
            raise SettingError(f"{found[:40]!r} is no range", remedy="write LO:HI, for example 0:1") from None
    return ranges


def _split(option: str, text: str, known: Iterable[str], example: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")  # names of tensors may hold any character
    if not equals or not name:
        raise SettingError(f"{option} {text[:60]!r} names no input", remedy=f"write {option} {example}")
    if name in known:
        raise SettingError(f"{option} names {name[:60]!r} twice", remedy="name every input once")
    return name, value
