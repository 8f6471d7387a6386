"""The published pages say what the code does."""

import re
from pathlib import Path

import pytest

from stageloom.shared.messages import bulk, control, enrol, telemetry
from stageloom.shared.messages.base import Message

DOCS = Path(__file__).parents[2] / "docs"


def _rows(text: str, columns: int) -> list[tuple[str, ...]]:
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    return [row for row in rows if len(row) == columns]


def test_every_message_is_published() -> None:
    section = (DOCS / "protocol.md").read_text().split("## Messages")[1].split("### Levels")[0]
    published = re.findall(r"`([a-z_]+)`", " ".join(row[0] for row in _rows(section, 3)))
    assert sorted(published) == sorted(str(kind.__struct_config__.tag) for kind in Message.__subclasses__())


@pytest.mark.parametrize(
    ("label", "codecs"),
    [
        ("control, to planner", [control.TO_PLANNER]),
        ("control, to device", [control.TO_DEVICE]),
        ("telemetry, to planner", [telemetry.TO_PLANNER]),
        ("telemetry, to device", [telemetry.TO_DEVICE]),
        ("bulk, to planner", [bulk.TO_PLANNER]),
        ("bulk, to device", [bulk.TO_DEVICE]),
        ("enrol, to planner / to device", [enrol.TO_PLANNER, enrol.TO_DEVICE]),
    ],
)
def test_the_published_bounds_are_those_of_the_codecs(label: str, codecs: list[object]) -> None:
    cells = {row[0]: row[1] for row in _rows((DOCS / "protocol.md").read_text(), 2)}
    for codec, text in zip(codecs, cells[label].split("/"), strict=True):
        number = int(re.findall(r"[0-9,]+", text)[0].replace(",", ""))
        assert number == codec.limits.frame_bytes  # type: ignore[attr-defined]
