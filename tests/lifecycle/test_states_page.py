"""docs/states.md says what the table of transitions does."""

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
