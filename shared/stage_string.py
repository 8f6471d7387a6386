"""The text and the wire form of a schedule: one list of tokens, written as a string or as integers.

Grammar (docs/stage_string.md has it with examples)::

    schedule = stages | streams
    stages   = stage *( "/" stage )
    stage    = chain | splits | [ "*" ] group *( "|" group )
    chain    = op ".." op [ "@" resource ]    ; three or more stages of one operator each, ascending by one
    splits   = op ".." op "@" resource "|" resource   ; two or more times: two groups of one, then one alone
    group    = run *( "," run ) [ "@" resource ]
    run      = op | op "-" op      ; two or more operators of one group, ascending by one
    streams  = "~" segment *( ";" segment )
    segment  = stream ":" run *( "," run )    ; launches in order; consecutive segments change the stream
    op, stream, resource = "0" | nonzero *digit

There is exactly one way to write a schedule: ranges are used wherever they apply, groups are ordered by
their first operator. `parse` refuses every other spelling, so equal schedules have equal strings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from stageloom.shared.errors import PlanError
from stageloom.shared.graph import MAX_OPERATORS as MAX_OPERATORS
from stageloom.shared.schedule import (
    OWN_RESOURCE,
    Launch,
    Schedule,
    Stage,
    StageSchedule,
    StreamSchedule,
    stage_of,
)

MAX_STREAMS = 1 << 10
MAX_RESOURCES = 16
MAX_TOKENS = 4 * MAX_OPERATORS  # the longest: every operator in a segment of its own
MAX_CHARACTERS = len("1023:65535;") * MAX_OPERATORS

# Tokens below zero are separators; msgpack writes each, and every operator below 128, in one byte.
_STAGE, _GROUP, _RUN, _CHAIN, _MERGE, _STREAMS, _SEGMENT, _OF, _NEXT, _ON = range(-1, -11, -1)
_TEXT = {
    _STAGE: "/",
    _GROUP: "|",
    _RUN: "-",
    _CHAIN: "..",
    _MERGE: "*",
    _STREAMS: "~",
    _SEGMENT: ";",
    _OF: ":",
    _NEXT: ",",
    _ON: "@",
}
_TOKEN = {text: token for token, text in _TEXT.items()}


def to_string(schedule: Schedule) -> str:
    """The stage string.

    Raises:
        PlanError: as `to_tokens`.
    """
    return "".join(_TEXT[token] if token < 0 else str(token) for token in to_tokens(schedule))


def parse(text: str) -> Schedule:
    """The schedule of a stage string.

    Raises:
        PlanError: the string breaks the grammar, is not canonical, or is larger than the limits.
    """
    if len(text) > MAX_CHARACTERS:
        raise PlanError(f"a stage string of {len(text)} characters is too long")
    return from_tokens(list(_scan(text)))


def to_tokens(schedule: Schedule) -> list[int]:
    """The wire form: the string's tokens as integers.

    Raises:
        PlanError: the schedule cannot be written: it is empty, has an empty or unordered group, or a number
            beyond the limits. What can be written reads back as the same value.
    """
    if problem := _unwritable(schedule):
        raise PlanError(f"not a schedule: {problem}")
    if isinstance(schedule, StreamSchedule):
        return _stream_tokens(schedule)
    tokens: list[int] = []
    for index, part in enumerate(_chains(schedule.stages)):
        if index:
            tokens.append(_STAGE)
        if isinstance(part, _Chain):
            tokens += [part.first, _CHAIN, part.last]
            for position, resource in enumerate(part.resources):
                tokens += [_GROUP if position else _ON, resource]
            continue
        if part.merge:
            tokens.append(_MERGE)
        for position, group in enumerate(part.groups):
            if position:
                tokens.append(_GROUP)
            tokens += _run_tokens(group)
            if part.resource(position) != OWN_RESOURCE:
                tokens += [_ON, part.resource(position)]
    return tokens


def _unwritable(schedule: Schedule) -> str:
    if isinstance(schedule, StreamSchedule):
        ops = [launch.op for launch in schedule.launches]
        if any(not 0 <= launch.stream < MAX_STREAMS for launch in schedule.launches):
            return f"a stream is outside 0..{MAX_STREAMS - 1}"
    else:
        if not all(stage.groups and all(stage.groups) for stage in schedule.stages):
            return "a stage has no operator, or an empty group"
        if any(list(stage.groups) != sorted(stage.groups) for stage in schedule.stages):
            return "the groups of a stage are not ordered by their first operator"
        if problem := next(filter(None, map(_odd_resources, schedule.stages)), ""):
            return problem
        ops = [op for stage in schedule.stages for op in stage.operators]
    if not 0 < len(ops) <= MAX_OPERATORS:
        return f"it has {len(ops)} operators, not 1..{MAX_OPERATORS}"
    if any(not 0 <= op < MAX_OPERATORS for op in ops):
        return f"an operator is outside 0..{MAX_OPERATORS - 1}"
    return ""


def _odd_resources(stage: Stage) -> str:
    if not stage.resources:
        return ""
    if stage.merge or len(stage.resources) != len(stage.groups):
        return "a merge stage names resources, or not one for each of its groups"
    if not all(OWN_RESOURCE <= resource < MAX_RESOURCES for resource in stage.resources):
        return f"a resource is outside 0..{MAX_RESOURCES - 1}"
    return "" if set(stage.resources) != {OWN_RESOURCE} else "its resources are all its own"


@dataclass(frozen=True, slots=True)
class _Chain:
    """Stages of the operators `first` to `last`.

    With fewer than two resources each is a stage of its own, on that one. With two they come in threes: one
    stage of two groups, on the one and on the other, and one stage of one operator, as a split is run.
    """

    first: int
    last: int
    resources: tuple[int, ...] = ()

    def stages(self) -> list[Stage]:
        ops = range(self.first, self.last + 1)
        if len(self.resources) < 2:
            return [Stage(((op,),), resources=self.resources) for op in ops]
        return [
            stage
            for op in ops[::3]
            for stage in (Stage(((op,), (op + 1,)), resources=self.resources), Stage(((op + 2,),)))
        ]


def _chains(stages: Sequence[Stage]) -> Iterator[Stage | _Chain]:
    """Replace runs of stages by chains: three or more of one operator, ascending by one and on one resource,
    and two or more splits that follow each other."""
    position = 0
    while position < len(stages):
        splits = _splits_from(stages, position)
        singles = 0 if splits > 1 else _singles_from(stages, position)
        first = stages[position].groups[0][0]
        if splits > 1:
            yield _Chain(first, first + 3 * splits - 1, stages[position].resources)
            position += 2 * splits
        elif singles > 2:
            yield _Chain(first, first + singles - 1, stages[position].resources)
            position += singles
        else:
            yield stages[position]
            position += 1


def _singles_from(stages: Sequence[Stage], position: int) -> int:
    """How many stages of one operator ascend by one from a position on, on the resource of the first."""
    first = stages[position]
    count = 0
    while position + count < len(stages):
        if stages[position + count] != Stage(((first.groups[0][0] + count,),), resources=first.resources):
            break
        count += 1
    return count


def _splits_from(stages: Sequence[Stage], position: int) -> int:
    """How many splits follow each other from a position on, each of them as `_Chain` has it."""
    first = stages[position]
    if len(first.resources) != 2 or OWN_RESOURCE in first.resources:
        return 0
    count = 0
    while True:
        op, at = first.groups[0][0] + 3 * count, position + 2 * count
        expected = _Chain(op, op + 2, first.resources).stages()
        if list(stages[at : at + 2]) != expected:
            return count
        count += 1


def _run_tokens(ops: Sequence[int]) -> list[int]:
    tokens: list[int] = []
    for _, members in groupby(enumerate(ops), key=lambda item: item[1] - item[0]):
        run = [op for _, op in members]
        if tokens:
            tokens.append(_NEXT)
        tokens += [run[0]] if len(run) == 1 else [run[0], _RUN, run[-1]]
    return tokens


def _stream_tokens(schedule: StreamSchedule) -> list[int]:
    tokens = [_STREAMS]
    for stream, launches in groupby(schedule.launches, key=lambda launch: launch.stream):
        if len(tokens) > 1:
            tokens.append(_SEGMENT)
        tokens += [stream, _OF, *_run_tokens([launch.op for launch in launches])]
    return tokens


def _scan(text: str) -> Iterator[int]:
    position = 0
    while position < len(text):
        character = text[position]
        if character in "0123456789":
            end = position
            while end < len(text) and text[end] in "0123456789":
                end += 1
            digits = text[position:end]
            if len(digits) > 6 or (len(digits) > 1 and digits[0] == "0"):
                raise PlanError(f"number {digits[:12]!r} at {position} in a stage string")
            yield int(digits)
            position = end
            continue
        symbol = ".." if text.startswith("..", position) else character
        if symbol not in _TOKEN:
            raise PlanError(f"character {character!r} at {position} in a stage string")
        yield _TOKEN[symbol]
        position += len(symbol)


def from_tokens(tokens: Any) -> Schedule:
    """The schedule of a token list.

    Raises:
        PlanError: the tokens break the grammar, are not canonical, or are larger than the limits.
    """
    if not isinstance(tokens, list | tuple) or len(tokens) > MAX_TOKENS:
        raise PlanError(f"a schedule is a list of at most {MAX_TOKENS} integers")
    if not all(type(token) is int and _ON <= token < MAX_OPERATORS for token in tokens):
        raise PlanError("a schedule holds something that is no token")
    reader = _Reader(list(tokens))
    schedule = reader.streams() if tokens and tokens[0] == _STREAMS else reader.stages()
    if to_tokens(schedule) != list(tokens):
        raise PlanError(
            "the schedule is not written in its canonical form", remedy="write it with `to_string`"
        )
    return schedule


class _Reader:
    """Recursive descent over tokens; expansion is bounded by MAX_OPERATORS."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.position = 0
        self.expanded = 0

    def peek(self) -> int | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self, token: int) -> bool:
        if self.peek() == token:
            self.position += 1
            return True
        return False

    def number(self) -> int:
        token = self.peek()
        if token is None or token < 0:
            raise PlanError(f"a number is missing at token {self.position} of a schedule")
        self.position += 1
        return token

    def span(self, first: int, last: int) -> range:
        if last <= first:
            raise PlanError(f"the range {first} to {last} in a schedule does not ascend")
        self.count(last + 1 - first)
        return range(first, last + 1)

    def count(self, ops: int) -> None:
        self.expanded += ops
        if self.expanded > MAX_OPERATORS:
            raise PlanError(f"a schedule expands to more than {MAX_OPERATORS} operators")

    def resource(self) -> int:
        number = self.number()
        if number >= MAX_RESOURCES:
            raise PlanError(f"resource {number} of a schedule is outside 0..{MAX_RESOURCES - 1}")
        return number

    def chain(self) -> list[Stage]:
        first = self.number()
        self.take(_CHAIN)
        ops = self.span(first, self.number())
        resources: tuple[int, ...] = ()
        if self.take(_ON):
            resources = (self.resource(),)
            if self.take(_GROUP):
                resources = (*resources, self.resource())
        if len(resources) == 2 and len(ops) % 3:
            raise PlanError(f"the splits {ops[0]} to {ops[-1]} in a schedule are not of three operators each")
        return _Chain(ops[0], ops[-1], resources).stages()

    def run(self) -> list[int]:
        ops: list[int] = []
        while True:
            first = self.number()
            if self.take(_RUN):
                ops += self.span(first, self.number())
            else:
                self.count(1)
                ops.append(first)
            if not self.take(_NEXT):
                return ops

    def finish(self) -> None:
        if self.peek() is not None:
            raise PlanError(f"unexpected token at {self.position} of a schedule")

    def stages(self) -> StageSchedule:
        stages: list[Stage] = []
        while True:
            merge = self.take(_MERGE)
            if not merge and self.tokens[self.position + 1 : self.position + 2] == [_CHAIN]:
                stages += self.chain()
            else:
                groups = [tuple(self.run())]
                resources = [self.resource() if self.take(_ON) else OWN_RESOURCE]
                while self.take(_GROUP):
                    groups.append(tuple(self.run()))
                    resources.append(self.resource() if self.take(_ON) else OWN_RESOURCE)
                stages.append(stage_of(groups, merge, resources))
            if not self.take(_STAGE):
                break
        self.finish()
        return StageSchedule(tuple(stages))

    def streams(self) -> StreamSchedule:
        self.take(_STREAMS)
        launches: list[Launch] = []
        while True:
            stream = self.number()
            if not self.take(_OF):
                raise PlanError(f"a segment of a stream schedule is broken at token {self.position}")
            launches += [Launch(op, stream) for op in self.run()]
            if not self.take(_SEGMENT):
                break
        self.finish()
        return StreamSchedule(tuple(launches))
