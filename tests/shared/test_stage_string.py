"""Stage strings and tokens: closed forms, round trips, refusals, and the published page."""

import re
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared import legality, plan, stage_string
from stageloom.shared.errors import PlanError
from stageloom.shared.schedule import Launch, Schedule, Stage, StageSchedule, StreamSchedule, stage_schedule
from stageloom.shared.stage_string import from_tokens, parse, to_string, to_tokens
from tests.shared.randoms import all_stage_schedules, schedules, thorough

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/stage_string.md").read_text(encoding="utf-8")

EXAMPLES: dict[str, Schedule] = {
    "0": stage_schedule([[[0]]]),
    "0/1": stage_schedule([[[0]], [[1]]]),
    "0..2": stage_schedule([[[0]], [[1]], [[2]]]),
    "0-2": stage_schedule([[[0, 1, 2]]]),
    "0-1": stage_schedule([[[0, 1]]]),
    "0|1": stage_schedule([[[0], [1]]]),
    "0/1-2|3/4": stage_schedule([[[0]], [[1, 2], [3]], [[4]]]),
    "2/1/0": stage_schedule([[[2]], [[1]], [[0]]]),
    "0..2/4..6": stage_schedule([[[op]] for op in (0, 1, 2, 4, 5, 6)]),
    "0,2,4|1,3": stage_schedule([[[0, 2, 4], [1, 3]]]),
    "5,3-4,9": stage_schedule([[[5, 3, 4, 9]]]),
    "0/*1|2/3": StageSchedule((Stage(((0,),)), Stage(((1,), (2,)), True), Stage(((3,),)))),
    "0/*1/2": StageSchedule((Stage(((0,),)), Stage(((1,),), True), Stage(((2,),)))),
    "0..4/5@0|6@1/7": StageSchedule(
        (*(Stage(((op,),)) for op in range(5)), Stage(((5,), (6,)), resources=(0, 1)), Stage(((7,),)))
    ),
    "0|1@1/2": StageSchedule((Stage(((0,), (1,)), resources=(-1, 1)), Stage(((2,),)))),
    "0..2@1/3": StageSchedule((*(Stage(((op,),), resources=(1,)) for op in range(3)), Stage(((3,),)))),
    "0..5@1|0": StageSchedule(
        tuple(
            stage
            for op in (0, 3)
            for stage in (Stage(((op,), (op + 1,)), resources=(1, 0)), Stage(((op + 2,),)))
        )
    ),
    "~0:0-1;1:2;0:3": StreamSchedule((Launch(0, 0), Launch(1, 0), Launch(2, 1), Launch(3, 0))),
    "~7:2,1": StreamSchedule((Launch(2, 7), Launch(1, 7))),
    "~1023:65535": StreamSchedule((Launch(65535, 1023),)),
}


@pytest.mark.parametrize("text", EXAMPLES)
def test_a_string_and_its_schedule_are_one_and_the_same(text: str) -> None:
    assert parse(text) == EXAMPLES[text]
    assert to_string(EXAMPLES[text]) == text


@pytest.mark.promise("stage-strings-plans-survive")
@thorough
@given(schedules)
def test_every_schedule_survives_text_and_wire(schedule: Schedule) -> None:
    assert parse(to_string(schedule)) == schedule
    assert from_tokens(to_tokens(schedule)) == schedule
    assert from_tokens(msgpack.unpackb(msgpack.packb(to_tokens(schedule)))) == schedule


@pytest.mark.promise("stage-strings-plans-survive")
@thorough
@given(st.text("0123456789/|-.*~;:,@", max_size=24))
def test_a_text_is_either_refused_or_the_one_spelling_of_its_schedule(text: str) -> None:
    try:
        schedule = parse(text)
    except PlanError:
        return
    assert to_string(schedule) == text


@thorough
@given(st.lists(st.integers(-12, 12) | st.integers(-(1 << 70), 1 << 70), max_size=16))
def test_tokens_are_either_refused_or_the_one_spelling_of_their_schedule(tokens: list[int]) -> None:
    try:
        schedule = from_tokens(tokens)
    except PlanError:
        return
    assert to_tokens(schedule) == tokens


def test_different_schedules_of_four_operators_have_different_strings() -> None:
    every = list(all_stage_schedules(4))
    strings = {to_string(schedule) for schedule in every}
    assert len(strings) == len(every)
    assert all(to_string(parse(text)) == text for text in strings)


ANOTHER_SPELLING = {
    "1,2": "1-2",
    "0-1,2": "0-2",
    "0,1-2": "0-2",
    "0/1/2": "0..2",
    "0..2/3": "0..3",
    "0/1..3": "0..3",
    "0..2/3..5": "0..5",
    "0..1": "0/1",
    "1|0": "0|1",
    "~0:0;0:1": "~0:0-1",
    "~0:0,1": "~0:0-1",
}


@pytest.mark.parametrize("text", ANOTHER_SPELLING)
def test_another_spelling_is_refused(text: str) -> None:
    assert parse(ANOTHER_SPELLING[text])
    with pytest.raises(PlanError):
        parse(text)


REFUSED = [
    "", " ", "a", "/", "0/", "/0", "0//1", "|", "0|", "0||1", "-", "0-", "0-0", "1-0", "0..", "..1", "0...2",
    "0.1", "0.", "2..0", "0..0", "0..2|3", "*", "*0..2", "**0", "0|*1", "0*", "~", "~0", "~0:", "~0:0;",
    "~:0", "~0:0..2", "~0:0|1", "~~0:0", "~1024:0", "0~", "0;1", "0:1", ",", "0,", "0,,1", "00", "01", "+1",
    "-1", "9" * 5000,
    "65536", "1000000", "0 1", "0\n", "\N{ARABIC-INDIC DIGIT ONE}", "\N{SUPERSCRIPT TWO}", "0-65536",
]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_a_broken_string_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tokens",
    [None, 0, "0", b"0", {}, {0: 0}, [True], [0.0], [None], [[0]], ["0"], [-10], [-3, -4, 5], [1 << 16]],
)
def test_other_values_are_no_tokens(tokens: object) -> None:
    with pytest.raises(PlanError):
        from_tokens(tokens)


UNWRITABLE: list[Schedule] = [
    StageSchedule(()),
    StreamSchedule(()),
    StageSchedule((Stage(()),)),
    StageSchedule((Stage(((0,), ())),)),
    StageSchedule((Stage(((1,), (0,))),)),
    StageSchedule((Stage(((-1,),)),)),
    StageSchedule((Stage(((1 << 16,),)),)),
    StreamSchedule((Launch(-1, 0),)),
    StreamSchedule((Launch(0, -1),)),
    StreamSchedule((Launch(0, 1 << 10),)),
    StageSchedule((Stage((tuple([0] * ((1 << 16) + 1)),)),)),
]


@pytest.mark.parametrize("schedule", UNWRITABLE, ids=range(len(UNWRITABLE)))
def test_a_schedule_that_could_not_be_read_back_is_never_written(schedule: Schedule) -> None:
    with pytest.raises(PlanError):
        to_string(schedule)


def test_a_few_characters_cannot_expand_without_bound() -> None:
    assert to_string(parse("0..65535")) == "0..65535"
    for text in ["0..65535/0..65535", "0-65535,0-65535", "0-65535,7", "~0:0-65535;1:0"]:
        with pytest.raises(PlanError, match="expands to more than"):
            parse(text)


def test_the_longest_legal_string_is_within_the_bounds() -> None:
    launches = tuple(Launch(op, 1022 + op % 2) for op in range(stage_string.MAX_OPERATORS))
    schedule = StreamSchedule(launches)
    text = to_string(schedule)
    assert len(text) <= stage_string.MAX_CHARACTERS
    assert len(to_tokens(schedule)) <= stage_string.MAX_TOKENS
    assert parse(text) == schedule
    with pytest.raises(PlanError, match="too long"):
        parse("0" * (stage_string.MAX_CHARACTERS + 1))


def rows(heading: str) -> list[list[str]]:
    """The cells of a section's table, without its two heading rows."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines[2:]
    ]


def test_every_published_example_round_trips() -> None:
    examples = [row[0].strip("`") for row in rows("Examples")]
    assert len(examples) >= 10
    for text in examples:
        assert to_string(parse(text)) == text
    for text in re.findall(r"^```\n(.+)\n```$", PAGE, flags=re.MULTILINE):
        assert to_string(parse(text)) == text


def test_the_published_spellings_are_right_and_wrong_as_said() -> None:
    spellings = PAGE.split("## One spelling only\n")[1].split("\n## ")[0]
    pairs = re.findall(r"`([^`]+)`, not `([^`]+)`", spellings)
    assert len(pairs) == 2
    for right, wrong in pairs:
        assert to_string(parse(right)) == right
        with pytest.raises(PlanError):
            parse(wrong)


def test_the_published_tokens_are_those_on_the_wire() -> None:
    published: dict[str, int] = {}
    for row in rows("Wire form"):
        published |= {row[i].strip("`"): int(row[i + 1]) for i in range(0, len(row), 2)}
    assert published == stage_string._TOKEN
    text, tokens = re.findall(r"`([^`]+)` is `\[([-0-9, ]+)\]`: ten bytes", PAGE)[0]
    assert to_tokens(parse(text)) == [int(token) for token in tokens.split(",")]
    assert len(msgpack.packb(to_tokens(parse(text)))) == 10


def test_the_published_bounds_are_those_of_the_code() -> None:
    bounds = {row[0]: int(row[1].split("..")[-1].replace(",", "")) for row in rows("Bounds")}
    assert list(bounds.values()) == [
        stage_string.MAX_OPERATORS - 1,
        stage_string.MAX_OPERATORS,
        plan.MAX_PLAN_OPERATORS,
        stage_string.MAX_STREAMS - 1,
        stage_string.MAX_RESOURCES - 1,
        stage_string.MAX_TOKENS,
        stage_string.MAX_CHARACTERS,
        plan.MAX_PLAN_BYTES,
    ]


def test_the_published_rules_are_those_that_legality_names() -> None:
    source = Path(legality.__file__).read_text(encoding="utf-8")
    published = (*rows("Legal schedules"), *rows("Legal splits"))
    assert {row[0].strip("`") for row in published} == set(re.findall(r'Violation\("(\w+)"', source))


def test_the_published_grammar_is_the_one_in_the_module() -> None:
    """The same rules, in two notations."""

    def names(text: str) -> set[str]:
        return {
            name
            for line in re.findall(r"^ *([a-z, ]+?) += ", text, re.MULTILINE)
            for name in line.split(", ")
        }

    page = names(PAGE.split("```ebnf\n")[1].split("```")[0])
    assert page - {"number"} == names(stage_string.__doc__ or "")
