"""The published pages say what the code does."""

import re
from pathlib import Path

import pytest

from stageloom.edge_agent.lifecycle.states import (
    NEVER,
    OVER,
    TRANSITIONS,
    VERDICTS,
    TransitionCause,
    step,
)
from stageloom.shared.messages import admin, bulk, control, enrol, telemetry
from stageloom.shared.messages.base import Message
from stageloom.shared.messages.control import DeviceState

DOCS = Path(__file__).parents[2] / "docs"


def _rows(text: str, columns: int) -> list[tuple[str, ...]]:
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    return [row for row in rows if len(row) == columns]


def _spelled(after: DeviceState | bool | None) -> str:
    if after is NEVER:
        return "never"
    return f"`{after.value}`" if isinstance(after, DeviceState) else "over"


@pytest.mark.promise("step-local-attempt-published")
def test_the_published_transitions_are_those_of_the_code() -> None:
    section = (DOCS / "states.md").read_text().split("### Transitions")[1].split("| cause | meaning |")[0]
    published = [row for row in _rows(section, 4) if row[0] not in ("from", "---")]
    literal = [
        (
            f"`{before.value}`" if before else "nothing",
            f"`{cause.value}`",
            _spelled(desired),
            _spelled(local),
        )
        for (before, cause), (desired, local) in TRANSITIONS.items()
    ]
    assert published == literal


@pytest.mark.promise("step-local-attempt-published")
def test_every_way_for_a_local_attempt_to_end_says_what_it_leaves() -> None:
    section = (DOCS / "states.md").read_text().split("| how it ended |")[1]
    told = set(re.findall(r"`([a-z_]+)`", " ".join(row[0] for row in _rows(section, 3))))
    assert told == {cause.value for (_, cause), (_, local) in TRANSITIONS.items() if local is OVER}


def test_every_state_and_cause_is_explained() -> None:
    text = (DOCS / "states.md").read_text()
    for name in [*DeviceState, *TransitionCause]:
        assert re.search(rf"^\|[^|]*`{name.value}`[^|]*\|", text, re.MULTILINE), name


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
        ("admin, requests / replies", [admin.REQUESTS, admin.REPLIES]),
    ],
)
def test_the_published_bounds_are_those_of_the_codecs(label: str, codecs: list[object]) -> None:
    cells = {row[0]: row[1] for row in _rows((DOCS / "protocol.md").read_text(), 2)}
    for codec, text in zip(codecs, cells[label].split("/"), strict=True):
        number = int(re.findall(r"[0-9,]+", text)[0].replace(",", ""))
        assert number == codec.limits.frame_bytes  # type: ignore[attr-defined]


def test_every_state_can_be_superseded_and_survives_a_boot() -> None:
    for state in DeviceState:
        assert TRANSITIONS[state, TransitionCause.DESIRED][0] is DeviceState.RECEIVED
        assert TRANSITIONS[state, TransitionCause.BOOT][0] is not NEVER
    for verdict in VERDICTS:
        causes = {cause for state, cause in TRANSITIONS if state is verdict}
        assert causes == {
            TransitionCause.DESIRED,
            TransitionCause.MEASURE,
            TransitionCause.ENVIRONMENT,
            TransitionCause.BOOT,
        }, "a verdict is final"


def test_a_step_that_is_not_in_the_table_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no step from rejected by probation_passed"):
        step(DeviceState.REJECTED, TransitionCause.PROBATION_PASSED)
