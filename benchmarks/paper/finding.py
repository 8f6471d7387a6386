"""What a reproduction finds: claims that hold or not, the rows behind them, what to draw. Plain values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stageloom.shared.graph import Graph

Row = dict[str, Any]
"""Columns by name: texts, numbers, truths, None."""


@dataclass(frozen=True)
class PaperClaim:
    """One thing that a paper says, in our words. `holds` is None where it was not tried; `ours` says why."""

    claim: str
    ours: str
    holds: bool | None


@dataclass(frozen=True)
class Line:
    """A line of a panel, or with texts for x a group of bars."""

    label: str
    points: tuple[tuple[Any, float], ...]


@dataclass(frozen=True)
class Panel:
    """One pair of axes; a label says the unit."""

    title: str
    across: str
    up: str
    lines: tuple[Line, ...]
    logarithmic: bool = False


@dataclass(frozen=True)
class Finding:
    """All that one reproduction found. `note`: what is different from the paper's set-up."""

    claims: tuple[PaperClaim, ...]
    rows: tuple[Row, ...] = ()
    panels: tuple[Panel, ...] = ()
    note: str = ""

    @property
    def verdict(self) -> str:
        """What the claims that were tried come to."""
        tried = [one.holds for one in self.claims if one.holds is not None]
        held = sum(tried)
        if not tried:
            return "not run"
        if 0 < held < len(tried):
            return f"in part ({held} of {len(tried)})"
        text = "holds" if held else "does not hold"
        return text if len(tried) == len(self.claims) else f"{text}, as far as run"

    @property
    def plain(self) -> dict[str, Any]:
        """For JSON; `finding_of` reads it."""
        return asdict(self)


def finding_of(plain: Mapping[str, Any]) -> Finding:
    """The finding that `Finding.plain` wrote."""
    panels = [
        Panel(**{**panel, "lines": tuple(_line(line) for line in panel["lines"])})
        for panel in plain["panels"]
    ]
    return Finding(
        claims=tuple(PaperClaim(**claim) for claim in plain["claims"]),
        rows=tuple(plain["rows"]),
        panels=tuple(panels),
        note=plain["note"],
    )


def _line(plain: Mapping[str, Any]) -> Line:
    return Line(plain["label"], tuple((x, y) for x, y in plain["points"]))


@dataclass(frozen=True)
class Inputs:
    """What a reproduction reads. `small`: inputs that take seconds, of which only the code is of interest."""

    graph: Callable[[str], Graph]
    results: Path
    small: bool = False


Reproduce = Callable[[Inputs], Finding]


@dataclass(frozen=True)
class Reproduction:
    """One table or figure: what it says in a sentence of ours, and what tries it.

    `where`: what our figures are of. `files`: what is read, paths from the repository's root.
    """

    id: str
    paper: str
    title: str
    says: str
    where: str
    reproduce: Reproduce
    files: tuple[str, ...] = field(default=())

    @property
    def module(self) -> str:
        """The module whose code the result depends on."""
        return self.reproduce.__module__


def lines_of(rows: Sequence[Row], across: str, up: str, line: str) -> tuple[Line, ...]:
    """A line per value of one column."""
    names = list(dict.fromkeys(row[line] for row in rows))
    return tuple(
        Line(
            str(name),
            tuple((row[across], row[up]) for row in rows if row[line] == name and row[up] is not None),
        )
        for name in names
    )


def near(ours: float, claimed: float) -> bool:
    """Whether a factor is within a quarter of the one that is claimed."""
    return 0.8 * claimed <= ours <= 1.25 * claimed


def near_gain(ours: float, claimed: float) -> bool:
    """Whether what a factor is above 1 is between half and twice of what is claimed: 1.14 is 14 % more.

    A quarter of the whole factor would let a loss pass for a small gain.
    """
    return 1.0 + (claimed - 1.0) / 2.0 <= ours <= 1.0 + 2.0 * (claimed - 1.0)


def not_run(claim: str, why: str) -> PaperClaim:
    """A claim that nothing here can try, or could in the time."""
    return PaperClaim(claim, f"not run: {why}", None)
