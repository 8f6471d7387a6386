"""What several parts of the page are made of."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    """A table of cells that are already HTML; numbers are aligned to the right, `text` to the left."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return figure(f'<table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>')


def figure(content: str) -> str:
    """A framed chart or table."""
    return f'<div class="figure">{content}</div>'


def ratio_text(replan: Mapping[str, Any]) -> str:
    """A trial's ratio with its interval."""
    if replan["ratio"] is None or replan["interval"] is None:
        return "-"
    low, high = replan["interval"]
    return f"{replan['ratio']:.3f} ({low:.3f} to {high:.3f})"
