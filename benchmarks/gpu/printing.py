"""The rows as a table that people can read: a heading per part, columns as wide as they need be."""

from collections.abc import Mapping, Sequence
from typing import Any


def readable(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """All rows, by part in order of appearance; rows of a part with the same columns share a heading."""
    lines = [f"{key}: {value}" for key, value in about.items()]
    parts: dict[str, dict[tuple[str, ...], list[Mapping[str, Any]]]] = {}
    for row in rows:
        columns = tuple(key for key in row if key != "part")
        parts.setdefault(str(row.get("part", "")), {}).setdefault(columns, []).append(row)
    for part, tables in parts.items():
        lines += ["", f"== {part} =="]
        for columns, own in tables.items():
            lines += _table(columns, own)
    return "\n".join(lines)


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [list(columns), *[[text(row[column]) for column in columns] for row in rows]]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def text(value: Any) -> str:
    """One cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
