"""`stageloom-agent verify`: the arguments as text, the report, the exit code."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from stageloom.edge_agent.verify.check import DEFAULT_REPEATS, verify
from stageloom.edge_agent.verify.inputs import ValueRange
from stageloom.edge_agent.verify.report import VerifyReport
from stageloom.shared.errors import ExitCode, SettingError
from stageloom.shared.importer.model_argument import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyArgs:
    """What the command line gives."""

    model: Path
    schedule: str
    shapes: tuple[tuple[str, Shape], ...] = ()  # input and dimensions
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
        shapes=dict(args.shapes),
        ranges=parse_ranges(args.ranges),
        partition=args.partition,
        executor=args.executor,
        seed=args.seed,
        repeats=args.repeats,
        progress=progress,
    )
    return report, report.exit_code


def parse_ranges(texts: Iterable[str]) -> dict[str, ValueRange]:
    """`NAME=LO:HI` each, both ends included.

    Raises:
        SettingError: the text is no range. InputError: the range is empty.
    """
    ranges: dict[str, ValueRange] = {}
    for text in texts:
        name, equals, found = text.rpartition("=")  # names of tensors may hold any character
        if not equals or not name:
            raise SettingError(
                f"--range {text[:60]!r} names no input", remedy="write --range input_ids=0:30521"
            )
        if name in ranges:
            raise SettingError(f"--range names {name[:60]!r} twice", remedy="name every input once")
        low, colon, high = found.partition(":")
        try:
            if not colon:
                raise ValueError
            ranges[name] = ValueRange(float(low), float(high))
        except ValueError:
            raise SettingError(f"{found[:40]!r} is no range", remedy="write LO:HI, for example 0:1") from None
    return ranges
