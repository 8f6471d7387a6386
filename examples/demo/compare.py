"""Which of two re-plans was better: the learned policy's, or the plain replanner's.

Both answered while the same first plan ran, and each plan was tried against that one, so the two can be
compared through it: with ratios a and b over the first plan, a / b, and an interval whose logarithmic half
width is the root of the sum of squares of theirs, since the two trials are independent.
"""

from collections.abc import Mapping
from math import exp, hypot, log
from typing import Any, NamedTuple

LEARNED, PLAIN, NEITHER = "learned", "plain", "neither"
NAMES = {LEARNED: "the learned policy", PLAIN: "the plain replanner"}


class Ratio(NamedTuple):
    """Over the plan that ran, above 1: better; with its 95 % interval."""

    value: float
    low: float
    high: float

    def over(self, other: "Ratio") -> "Ratio":
        """This over another one that was measured independently."""
        middle = log(self.value / other.value)
        half = hypot(*(log(ratio.high / ratio.low) / 2 for ratio in (self, other)))
        return Ratio(exp(middle), exp(middle - half), exp(middle + half))

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def compare(learned: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Winner, learned over plain, and the same in words. Both are re-plans as the report has them."""
    ratios = {LEARNED: _ratio(learned), PLAIN: _ratio(plain)}
    kept = {name: _gained(one) for name, one in ((LEARNED, learned), (PLAIN, plain))}
    mine, its = ratios[LEARNED], ratios[PLAIN]
    over = mine.over(its) if mine is not None and its is not None else None
    winner = _winner(kept, over)
    said = f"{_verdict(winner, kept, over)} {_answer(LEARNED, learned)} {_answer(PLAIN, plain)}"
    return {
        "winner": winner,
        "ratio": None if over is None else over.value,
        "interval": None if over is None else [over.low, over.high],
        "text": said,
    }


def _ratio(replan: Mapping[str, Any]) -> Ratio | None:
    """None where a plan was tried and nothing was measured."""
    if replan["ratio"] is not None and replan["interval"] is not None:
        return Ratio(replan["ratio"], *replan["interval"])
    return Ratio(1.0, 1.0, 1.0) if replan["plan"] is None or replan["same_structure"] else None


def _gained(replan: Mapping[str, Any]) -> bool:
    """Whether the device took another plan for what it had measured of it; intervals are only guarded."""
    return replan["outcome"] == "committed" and replan["ratio"] is not None


def _winner(kept: Mapping[str, bool], over: Ratio | None) -> str:
    """Who alone convinced the device; of two that did, who is surely better; of two that did not, nobody."""
    if kept[LEARNED] != kept[PLAIN]:
        return LEARNED if kept[LEARNED] else PLAIN
    if not kept[LEARNED] or over is None or over.low <= 1.0 <= over.high:
        return NEITHER
    return LEARNED if over.low > 1.0 else PLAIN


def _answer(name: str, replan: Mapping[str, Any]) -> str:
    who = NAMES[name][0].upper() + NAMES[name][1:]
    if replan["plan"] is None:
        return f"{who} found nothing better than the plan that ran ({replan['reason']})."
    outcome = replan["outcome"].replace("_", " ")
    if replan["same_structure"]:
        return f"{who} changed launch intervals alone: {outcome}, and nothing that a trial compares."
    ratio = _ratio(replan)
    measured = "nothing was measured" if ratio is None else f"{ratio} times as good as the plan that ran"
    pairs = f" over {replan['pairs']} pairs of windows" if replan["pairs"] else ""
    reason = f": {replan['reason']}" if replan["reason"] else ""
    return f"{who}'s plan: {measured}{pairs}, {outcome}{reason}."


def _verdict(winner: str, kept: Mapping[str, bool], over: Ratio | None) -> str:
    by = "" if over is None else f" Learned over plain: {over}."
    if winner != NEITHER:
        return f"On this machine {NAMES[winner]} won.{by}"
    if kept[LEARNED] and kept[PLAIN]:
        return f"On this machine both gained, and which is better is not sure.{by}"
    return f"On this machine neither gained: the plan that ran runs on.{by}"
