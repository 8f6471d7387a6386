"""What a terminal shows of a training of maddpg: a bar, the best so far beside its rivals, curves."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from stageloom.planner.cli.output import progress

if TYPE_CHECKING:
    from stageloom.planner.learning.maddpg.course import TrainingCourse
    from stageloom.planner.tournament.score import Score

_BAR: Final = 20
_CURVE: Final = 40
_LEVELS: Final = "▁▂▃▄▅▆▇█"
_EVERY_S: Final = 0.2  # between two drawings


def sparkline(values: Sequence[float], width: int = _CURVE) -> str:
    """The newest `width` values as characters of eight heights, between their lowest and highest."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    step = (high - low) / (len(_LEVELS) - 1)
    return "".join(_LEVELS[round((value - low) / step) if step > 0.0 else 0] for value in shown)


def bar(share: float) -> str:
    """How far it is, `share` of 1."""
    done = round(_BAR * min(max(share, 0.0), 1.0))
    return f"[{'#' * done}{'.' * (_BAR - done)}] {100.0 * min(share, 1.0):3.0f} %"


def figures(worth: "Score") -> str:
    """What decides between plans, with its spread."""
    return (
        f"{worth.throughput_per_s:.1f} ±{worth.throughput_spread:.1f} tasks/s, "
        f"p99 {1000.0 * worth.p99_s:.3g} ±{1000.0 * worth.p99_spread:.2g} ms"
    )


def lines(course: "TrainingCourse", spent_s: float, budget_s: float, where: str) -> list[str]:
    """The lines to draw: progress, scores beside the rivals', and curves."""
    total = course.settings.transitions
    share = max(course.transitions / total, spent_s / budget_s)
    doing = "last look at the best" if course.stopped else f"{course.transitions} of {total} transitions"
    shown = [f"{bar(share)} {doing}, {_clock(spent_s)} of {_clock(budget_s)}, {where}"]
    rows = rivals_worth(course.seeds_worth)
    if course.policy_worth is not None:
        rows["policy"] = course.policy_worth
    if course.plan_worth is not None:
        rows["best plan"] = course.plan_worth
    shown += [f"  {name:<12} {figures(worth)}" for name, worth in rows.items()]
    if len(course.history) > 1:
        policy = [one.policy.throughput_per_s for one in course.history]
        tails = [1000.0 * one.policy.p99_s for one in course.history]
        best = [one.best.throughput_per_s for one in course.history]
        shown.append(f"  policy's tasks/s  {_curve(policy)}")
        shown.append(f"  policy's p99 ms   {_curve(tails)}")
        shown.append(f"  best tasks/s      {_curve(best)}")
    return shown


def rivals_worth(seeds_worth: "Mapping[str, Score]") -> "dict[str, Score]":
    """Of the rivals' plans that were evaluated: every block alone, and the best of all."""
    from stageloom.planner.tournament.score import better

    best: Score | None = None
    for worth in seeds_worth.values():
        best = worth if best is None or better(worth, best) else best
    named = {"sequential": seeds_worth.get("alone, fast"), "best rival": best}
    return {name: worth for name, worth in named.items() if worth is not None}


class TrainingView:
    """Redraws itself on a terminal; elsewhere a line per validation."""

    def __init__(self, budget_s: float, spent_s: float, where: str) -> None:
        self._budget_s, self._where = budget_s, where
        self._began_s = time.monotonic() - spent_s
        self._drawn_s = float("-inf")
        self._validated = -1
        self._live: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False)
            self._live.start()

    def __call__(self, course: "TrainingCourse") -> None:
        """Show the course; the trainer calls this after every piece of work."""
        now_s = time.monotonic()
        if self._live is None:
            if len(course.history) > max(self._validated, 0):
                self._validated = len(course.history)
                self._line(course)
            return
        if now_s - self._drawn_s >= _EVERY_S:
            self._drawn_s = now_s
            self.draw(course)

    def draw(self, course: "TrainingCourse") -> None:
        from rich.text import Text

        shown = lines(course, time.monotonic() - self._began_s, self._budget_s, self._where)
        self._live.update(Text("\n".join(shown)), refresh=True)

    def close(self) -> None:
        """Stop redrawing; the last picture stays."""
        if self._live is not None:
            self._live.stop()

    def _line(self, course: "TrainingCourse") -> None:
        newest = course.history[-1]
        progress(
            f"{newest.transitions} of {course.settings.transitions} transitions: "
            f"policy {figures(newest.policy)}; best plan {figures(newest.best)}"
        )


def _curve(values: Sequence[float]) -> str:
    return f"{sparkline(values)}  {values[0]:.4g} -> {values[-1]:.4g}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
