"""What a contest of rivals on the twin found."""

from typing import Annotated

from msgspec import Meta, Struct

from stageloom.shared.messages.base import Line, Seconds, ShortText, SmallCount


class ContestFigures(Struct, frozen=True, kw_only=True):
    """What an entrant's plan was worth on the twin, `at_s` after the start; `led`: the best so far then."""

    name: ShortText
    at_s: Seconds
    throughput_per_s: Seconds
    p99_s: Seconds
    utilisation: Seconds
    met: Seconds
    led: bool = False


class ContestFailure(Struct, frozen=True, kw_only=True):
    """An entrant without a plan, or whose plan could not be judged."""

    name: ShortText
    reason: Line


class ContestInfo(Struct, frozen=True, kw_only=True):
    """How a plan came out of a contest.

    `twin` and `arrivals` say what it was judged by. Entrants that time did not suffice for are `left`.
    `fresh` has the best so far and the first valid plan on arrivals that did not choose; it is empty where
    `unchecked` says why, and the first valid plan is the `winner` then.
    """

    winner: ShortText
    twin: Line
    arrivals: Line
    judged: Annotated[tuple[ContestFigures, ...], Meta(max_length=256)]
    failed: Annotated[tuple[ContestFailure, ...], Meta(max_length=256)]
    left: SmallCount
    fresh: Annotated[tuple[ContestFigures, ...], Meta(max_length=2)]
    unchecked: Line = ""
