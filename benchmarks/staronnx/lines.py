"""What is asked of two resources, line by line: each measures, and says whether it is met."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median
from typing import Any

from benchmarks.runner import progress
from benchmarks.staronnx.hand_loop import by_hand_per_s
from benchmarks.staronnx.models import Machine, Model, Parts, all_away, all_home
from benchmarks.staronnx.rig import (
    AT_ONCE,
    FAST,
    SLOW,
    Rig,
    Run,
    evenly,
    highest_share,
    median_s,
    saturated_per_s,
)
from stageloom.shared.engine.residency import Bus
from stageloom.shared.errors import PlanError
from stageloom.shared.plan import ExecutorOptions, Plan
from stageloom.shared.search.halves import PartTimes
from stageloom.shared.search.two_resources import REPLICAS, placed_rival, placed_rivals

CUT = ("staronnx", "staronnx_balanced")
RAN = ((0, FAST), (0, SLOW), (1, FAST), (1, SLOW))
TURNS = 3
"""What is compared takes so many turns, and the middle of each counts."""

SETTLE = 20
"""Batches after the slow resource has changed that do not count."""


@dataclass(frozen=True)
class Line:
    """One thing that is asked."""

    model: str
    slow: float
    line: str
    asked: str
    measured: float
    met: bool
    beside: dict[str, Any] = field(default_factory=dict)

    @property
    def row(self) -> dict[str, Any]:
        """As it is reported."""
        own = {"model": self.model, "slow": self.slow, "line": self.line, "asked": self.asked}
        return {"part": "lines", **own, "measured": self.measured, "met": self.met, **self.beside}


@dataclass(frozen=True)
class Rate:
    """What one plan carries: evenly spaced batches, and in a closed loop."""

    plan: Plan
    per_s: float
    closed_per_s: float
    parts: PartTimes | None


class Pair:
    """One model on the fast resource and one that is `slow` times slower."""

    def __init__(self, model: Model, machine: Machine, parts: Parts, slow: float, batches: int) -> None:
        self._model, self._machine, self._slow, self._batches = model, machine, slow, batches
        self._parts = parts.of(slow)
        self._whole_s = parts.whole_s()
        self.rows: list[dict[str, Any]] = []

    @contextmanager
    def _rig(self, plan: Plan, **how: Any) -> Iterator[Rig]:
        rig = Rig(
            self._model.artifact,
            plan,
            self._model.feeds,
            **{"slow": self._slow, "bus": self._machine.bus, "whole_s": self._whole_s, **how},
        )
        try:
            yield rig
        finally:
            rig.close()

    def _about(self) -> dict[str, Any]:
        return {"model": self._model.name, "slow": self._slow}

    def _rates(self) -> dict[str, Rate]:
        """What each plan carries; closed loops of all plans take turns, and of each the middle counts."""
        made = {name: self._planned(name) for name in placed_rivals()}
        plans = {name: plan for name, plan in made.items() if plan is not None}
        cuts = {name: plan.models[0].cuts for name, plan in plans.items()}
        parts = {name: self._parts(cut[0]) if cut else None for name, cut in cuts.items()}
        rates = {}
        with ExitStack() as stack:
            rigs = {
                name: stack.enter_context(self._rig(plan, known=parts[name])) for name, plan in plans.items()
            }
            carried: dict[str, list[float]] = {name: [] for name in rigs}
            for _ in range(TURNS + 1):
                for name, rig in rigs.items():
                    carried[name].append(saturated_per_s(rig, AT_ONCE, max(self._batches // 6, 30)))
            for name, rig in rigs.items():
                progress(f"{self._model.name}, {self._slow:g} times slower: {name}")
                share, run = highest_share(rig, self._batches)
                closed_per_s = median(carried[name])
                rates[name] = Rate(plans[name], share * closed_per_s, closed_per_s, parts[name])
                self._note_rate(name, rates[name], share, run)
        return rates

    def _planned(self, name: str) -> Plan | None:
        """The rival's plan; a row where the model has no such cut."""
        where = self._machine.fast_and_slow
        try:
            return placed_rival(name).plan([self._model.choice], where, lambda _: self._parts)
        except PlanError as error:
            self.rows.append({"part": "rates", **self._about(), "plan": name, "why_not": str(error)})
            return None

    def _note_rate(self, name: str, rate: Rate, share: float, run: Run) -> None:
        cuts, parts = rate.plan.models[0].cuts, rate.parts
        row = {"part": "rates", **self._about(), "plan": name, "per_s": rate.per_s, "of_closed_loop": share}
        row |= {"cut": cuts[0] if cuts else None, "mean_ms": 1e3 * run.mean_s, "p99_ms": 1e3 * run.p99_s}
        row |= {"away": run.away(), "most_waiting": run.most_waiting, "keeps_up": run.keeps_up}
        if parts is not None:
            row |= {f"{one}_ms": 1e3 * getattr(parts, f"{one}_s") for one in ("head", "tail", "transfer")}
        steps = {f"step_{block}_{lane}_ms": 1e3 * median_s(run, block, lane) for block, lane in RAN}
        self.rows.append(row | {key: taken for key, taken in steps.items() if taken})

    def _line(self, line: str, asked: str, measured: float, met: bool, **beside: Any) -> Line:
        progress(f"  {line} {asked}: {measured:.3g}")
        return Line(self._model.name, self._slow, line, asked, measured, met, beside)

    def lines(self) -> Iterator[Line]:
        """All of them."""
        rates = self._rates()
        fast = self.fast = rates["fast_only"]
        for name in CUT:
            if name in rates:
                yield self._of_formula(name, rates[name], fast)
        balanced = rates["staronnx_balanced"]
        if self._slow <= 3:
            yield from self._against_whole(balanced, rates["whole_both"], fast)
        yield from self._calm(balanced, fast)
        yield self._by_hand(balanced)
        yield from self._prefetch()
        yield from self._slower(balanced)

    def _of_formula(self, name: str, rate: Rate, fast: Rate) -> Line:
        parts = rate.parts
        assert parts is not None
        border = self._cost_of_cut(rate, fast)
        formula = parts.highest_rate_per_s() * (parts.head_s + parts.tail_s) / border
        gain = rate.per_s / fast.per_s
        beside = {
            "gain": gain,
            "formula": formula,
            "tail_share": parts.tail_share,
            "parts_over_whole": border,
        }
        return self._line(
            f"{name}: of the formula", ">= 0.93", gain / formula, gain / formula >= 0.93, **beside
        )

    def _cost_of_cut(self, rate: Rate, fast: Rate) -> float:
        """Head and tail over the whole model, all on the fast resource; the two take turns."""
        parts_s, whole_s = [], []
        with self._rig(all_home(rate.plan), whole_s=None) as cut, self._rig(fast.plan) as whole:
            for _ in range(TURNS):
                run = cut.closed_loop(1, 20)
                parts_s.append(median_s(run, 0, FAST) + median_s(run, 1, FAST))
                whole_s.append(median_s(whole.closed_loop(1, 20), 0, FAST))
        return median(parts_s) / median(whole_s)

    def _against_whole(self, balanced: Rate, whole: Rate, fast: Rate) -> Iterator[Line]:
        """The balanced cut's gain, and how long a batch's first item takes beside whole models on both."""
        p99_s: dict[str, list[float]] = {"staronnx_balanced": [], "whole_both": []}
        mean_s: dict[str, list[float]] = {"staronnx_balanced": [], "whole_both": []}
        with self._rig(balanced.plan, known=balanced.parts) as cut, self._rig(whole.plan) as both:
            for _ in range(TURNS):
                for (name, taken_s), rig, rate in zip(
                    p99_s.items(), (cut, both), (balanced, whole), strict=True
                ):
                    run = rig.open_loop(evenly(0.95 * rate.per_s, self._batches // 2))
                    taken_s.append(run.p99_s)
                    mean_s[name].append(run.mean_s)
            self._poisson("staronnx_balanced", cut, 0.8 * balanced.per_s)
            self._poisson("whole_both", both, 0.8 * whole.per_s)
        share = median(p99_s["staronnx_balanced"]) / median(p99_s["whole_both"])
        gain = balanced.per_s / fast.per_s
        yield self._line("staronnx_balanced over fast_only", ">= 1.2", gain, gain >= 1.2)
        beside = {f"{name}_p99_ms": 1e3 * median(values) for name, values in p99_s.items()}
        beside |= {f"{name}_mean_ms": 1e3 * median(values) for name, values in mean_s.items()}
        yield self._line("p99 at 0.95, over whole_both", "<= 0.7", share, share <= 0.7, **beside)

    def _poisson(self, name: str, rig: Rig, rate_per_s: float) -> None:
        random, at_s = Random(7), 0.0
        arrivals_s = [at_s := at_s + random.expovariate(rate_per_s) for _ in range(self._batches)]
        run = rig.open_loop(arrivals_s)
        row = {"part": "poisson", **self._about(), "plan": name}
        row |= {"per_s": rate_per_s, "mean_ms": 1e3 * run.mean_s, "p99_ms": 1e3 * run.p99_s}
        self.rows.append(row | {"away": run.away(), "most_waiting": run.most_waiting})

    def _calm(self, balanced: Rate, fast: Rate) -> Iterator[Line]:
        """At 0.7 of what the fast resource carries nothing goes away, and latency stays; runs take turns."""
        arrivals_s = evenly(0.7 * fast.per_s, max(self._batches // 3, 50))
        cut_s, whole_s, away = [], [], 0.0
        with self._rig(balanced.plan, known=balanced.parts) as cut, self._rig(fast.plan) as alone:
            for _ in range(TURNS):
                run = cut.open_loop(arrivals_s)
                away = max(away, run.away())
                cut_s.append(run.mean_s)
                whole_s.append(alone.open_loop(arrivals_s).mean_s)
        ratio = median(cut_s) / median(whole_s)
        yield self._line("latency at 0.7 of fast_only, over it", "<= 1.05", ratio, ratio <= 1.05)
        yield self._line("tails away at 0.7 of fast_only", "== 0", away, away == 0.0)

    def _by_hand(self, balanced: Rate) -> Line:
        """All tails away, as many batches in flight; the two take turns."""
        (cut,) = balanced.plan.models[0].cuts
        ours, theirs = [], []
        with self._rig(all_away(balanced.plan), known=balanced.parts) as rig:
            for _ in range(TURNS):
                ours.append(saturated_per_s(rig, AT_ONCE, self._batches // 3))
                by_hand = by_hand_per_s(
                    self._model, self._machine, cut, self._slow, AT_ONCE, self._batches // 3
                )
                theirs.append(by_hand)
        ratio = median(ours) / median(theirs)
        return self._line("over a loop written by hand", ">= 0.95", ratio, ratio >= 0.95)

    def _cut_of_long_tails(self) -> int:
        """The last cut whose tails take the slow resource as long as heads the fast one; else the first."""
        cuts = self._model.artifact.graph.base_cuts
        times = ((cut, self._parts(cut)) for cut in reversed(cuts))
        return next((cut for cut, one in times if one.slow_tail_s >= one.head_s), cuts[0])

    def _prefetch(self) -> Iterator[Line]:
        """All tails away, each behind a copy that takes 0.9 of a slow tail's time; the three take turns.

        Cut where tails keep the slow resource busy all the time: else a copy falls into its pauses.
        """
        graph = self._model.artifact.graph
        cut = self._cut_of_long_tails()
        parts = self._parts(cut)
        delay_s = 0.9 * parts.slow_tail_s
        plan = all_away(
            self._machine.fast_and_slow.plan([replace(self._model.choice, partition=(cut,))], heads=True)
        )
        border = sum(graph.tensors[tensor].nbytes for tensor in graph.live_at(cut))
        slow_bus = Bus(bytes_per_s=border / delay_s)  # outputs, which come back over it, are small
        taken_s: dict[str, list[float]] = {"none": [], "prefetched": [], "at_begin": []}
        with (
            self._rig(plan, known=parts, bus=Bus()) as none,
            self._rig(plan, known=parts, bus=slow_bus) as prefetched,
            self._rig(plan, known=parts, bus=slow_bus, prefetch=False) as at_begin,
        ):
            for _ in range(TURNS):
                for name, rig in (("none", none), ("prefetched", prefetched), ("at_begin", at_begin)):
                    taken_s[name].append(1 / saturated_per_s(rig, AT_ONCE, self._batches // 4))
        middle = {name: median(values) for name, values in taken_s.items()}
        cost = middle["prefetched"] / middle["none"] - 1
        shown = (middle["at_begin"] - middle["none"]) / delay_s
        yield self._line("rate lost to copies that are prefetched", "<= 0.03", cost, cost <= 0.03)
        yield self._line("of the copy seen without prefetch", ">= 0.5", shown, shown >= 0.5)

    def _slower(self, balanced: Rate) -> Iterator[Line]:
        """The slow resource becomes three times slower: with both resources always busy the share that goes
        away is f*, from what the parts take in that very run; a core beside a busy one is not as fast as
        alone. At 0.97 of the highest rate that follows, more than the fast core carries, batches must not
        pile up, and half of the tails must go away that it has no time for."""
        change = self._batches // 4
        count = change + SETTLE + self._batches // 2
        with self._rig(balanced.plan, known=balanced.parts) as rig:

            def slow_down(batch: int) -> None:
                rig.paced.slow = (3 if batch >= change else 1) * self._slow

            busy = rig.closed_loop(REPLICAS, count, slow_down)
            parts = _parts_of(busy.since(change + SETTLE), 3 * self._slow)
            rate_per_s = 0.97 * parts.highest_rate_per_s()
            near = rig.open_loop(evenly(rate_per_s, count), slow_down)
        share, wanted = busy.away(change + SETTLE), parts.share_away()
        parted = {"before": busy.away(0, change), "first": busy.away(change, change + SETTLE)}
        parted |= {f"{one}_ms": 1e3 * getattr(parts, f"{one}_s") for one in ("head", "tail", "slow_tail")}
        met = abs(share - wanted) <= 0.1 * wanted
        asked = f"within 10 % of {wanted:.3f}"
        yield self._line("tails away once the slow one is slower", asked, share, met, **parted)
        most, away = near.most_waiting, near.away(change + SETTLE)
        least = 0.5 * (parts.head_s + parts.tail_s - 1 / rate_per_s) / parts.tail_s
        met = most <= 8 and away > 0 and away >= least
        asked = f"<= 8, {least:.2f} of the tails away"
        yield self._line("most waiting meanwhile", asked, most, met, away=away)

    def beside(self, executor: str) -> None:
        """The balanced plan with another, unpaced executor on the second core, for comparison only: closed
        loops of both."""
        where = replace(self._machine.fast_and_slow, slow_executor=ExecutorOptions(name=executor))
        plan = placed_rival("staronnx_balanced").plan([self._model.choice], where, lambda _: self._parts)
        with self._rig(plan, whole_s=None) as rig:
            rig.closed_loop(AT_ONCE, 30)  # calibrates
            per_s = saturated_per_s(rig, AT_ONCE, self._batches // 2)
            away = rig.closed_loop(AT_ONCE, self._batches // 2).away()
        row = {"part": "unpaced", "model": self._model.name, "executor": executor, "away": away}
        self.rows.append(row | {"closed_over_fast_only": per_s / self.fast.closed_per_s})


def _parts_of(run: Run, slow: float) -> PartTimes:
    """What the parts took in a run; of tails that all stayed on the fast resource, `slow` times that away."""
    head_s, tail_s, slow_tail_s = (median_s(run, *ran) for ran in ((0, FAST), (1, FAST), (1, SLOW)))
    return PartTimes(head_s=head_s, tail_s=tail_s, slow_tail_s=slow_tail_s or slow * tail_s)
