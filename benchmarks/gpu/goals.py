"""The goals that were set for a Hopper in fp16 at batch 1, and whether this run reached them.

They are hypotheses until measured. A ratio counts by its median; its 16th and 84th percentile over the rounds
and the spread of the baseline against itself stand beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.gpu.rounds import Ratio


@dataclass(frozen=True)
class Goal:
    """At least `least` times faster than `than` on a subject; `never_slower`: or within its spread."""

    name: str
    subject: str
    than: str
    variant: str  # "ours, best" is the plan that the quick selection chose
    least: float
    never_slower: bool = False


@dataclass(frozen=True)
class Verdict:
    """`reached` None: not measured, and `text` says why."""

    goal: Goal
    reached: bool | None
    text: str


OURS_BEST: Final = "ours, best"
BEST_SEQUENTIAL: Final = "best sequential graph"
"""Ours or torch's, whichever is faster: the harder one to beat."""

BEST_STREAMS: Final = "best of N streams"

GOALS: Final = (
    Goal("graph_over_eager.inception_v3", "inception_v3", "torch eager", BEST_SEQUENTIAL, 3.0),
    Goal("graph_over_eager.resnet50", "resnet50", "torch eager", BEST_SEQUENTIAL, 3.0),
    Goal("graph_over_eager.squeezenet", "squeezenet", "torch eager", BEST_SEQUENTIAL, 3.0),
    Goal("ours_over_sequential.inception_v3", "inception_v3", BEST_SEQUENTIAL, OURS_BEST, 1.3),
    Goal("ours_over_sequential.squeezenet", "squeezenet", BEST_SEQUENTIAL, OURS_BEST, 1.2),
    Goal("ours_over_sequential.resnet50", "resnet50", BEST_SEQUENTIAL, OURS_BEST, 1.0, never_slower=True),
    Goal("ours_over_sequential.mix", "mix", BEST_SEQUENTIAL, OURS_BEST, 1.6),
    Goal("ours_over_streams.mix", "mix", BEST_STREAMS, OURS_BEST, 1.1),
)
SWITCH_P99_MS: Final = 50.0


def judge(goal: Goal, ratio: Ratio | None, itself: Ratio | None) -> Verdict:
    """`itself` is the baseline against its own second copy."""
    if ratio is None:
        return Verdict(goal, None, "not measured")
    least = goal.least
    noise = "" if itself is None else f"; the baseline against itself {itself.text}"
    if goal.never_slower and itself is not None:
        least = min(least, itself.low)
    return Verdict(
        goal, ratio.value >= least, f"{ratio.text} in {ratio.rounds} rounds, asked {goal.least}{noise}"
    )


def judge_switch(p99_ms: float | None, lost: int | None) -> tuple[bool | None, str]:
    """A plan switch: its p99 and the tasks lost in all switches."""
    if p99_ms is None or lost is None:
        return None, "not measured"
    return (
        p99_ms < SWITCH_P99_MS and lost == 0,
        f"p99 {p99_ms:.2f} ms, asked {SWITCH_P99_MS:.0f}; {lost} lost",
    )


def lines(verdicts: Sequence[Verdict]) -> list[str]:
    """For people."""
    words = {True: "reached", False: "NOT reached", None: "unknown"}
    return [f"{words[one.reached]:12} {one.goal.name:36} {one.text}" for one in verdicts]
