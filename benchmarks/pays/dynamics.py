"""One mix through a scenario, with re-planning and without: what each change led to, and how soon."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from benchmarks.pays.device import COMMITTED, DAY_PLAN, PaysDevice, QueueMoment, lanes_of
from benchmarks.pays.intervals import Tasks, in_time, p50_s, p99_s
from benchmarks.pays.load import Application, core_taken
from benchmarks.pays.scenarios import Phase, visits
from benchmarks.runner import progress
from stageloom import Client
from stageloom.edge_agent.bench.load import WindowResult
from stageloom.planner.schema.replan import ReplanInfo
from stageloom.planner.store.replans import BEING_TRIED, NEWER_DESIRED, TOLD_ONCE
from stageloom.shared.ids import Digest

_SERIES_S: Final = 2.0
_SETTLE_S: Final = 90.0  # for a trial that is under way when a scenario ends
_FLUSH_S: Final = 2.5  # until telemetry of the last seconds is stored
_UNDECIDED: Final = (BEING_TRIED, NEWER_DESIRED, "overtaken by", "the re-planner failed", *TOLD_ONCE.values())


@dataclass(frozen=True)
class Effort:
    """How long is measured; seconds, and windows of each plan."""

    phase_s: float
    pairs: int
    saturated_s: float = 4.0
    profile_s: float = 30.0  # at most, for each executor and number of threads


@dataclass
class PhaseSeen:
    """One phase as the application saw it, from `began_us` to `ended_us` of the wall clock."""

    phase: Phase
    visit: int
    rate_per_s: float
    began_us: int
    ended_us: int
    result: WindowResult
    lost: int
    plan: Digest | None  # that ran when it ended


@dataclass
class Found:
    """Rows for the report, and plans by the phase in which they were committed."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    plans: dict[str, bytes] = field(default_factory=dict)


class Dynamics:
    """A prepared device under scenarios; one client for all of them."""

    def __init__(
        self, device: PaysDevice, weights: Sequence[float], deadlines_s: Sequence[float], effort: Effort
    ) -> None:
        self._device, self._weights, self._effort = device, weights, effort
        self._deadlines_s = deadlines_s
        self._capacity_per_s: dict[tuple[float, ...], float] = {}

    def capacity_per_s(self, weights: Sequence[float]) -> float:
        """Tasks a second of saturated lanes at a mix, under the plan that runs when it is first asked."""
        key = tuple(weights)
        if key not in self._capacity_per_s:
            with Client(self._device.socket) as client:
                load = Application(client, self._device.models, self._deadlines_s)
                self._capacity_per_s[key] = load.saturated_per_s(key, self._effort.saturated_s)
            progress(f"  capacity {self._capacity_per_s[key]:.1f}/s at {key}")
        return self._capacity_per_s[key]

    def run(self, scenario: str, phases: Sequence[Phase], seed: int, *, replanning: bool) -> Found:
        """From the day plan through all phases, one after the other."""
        device, found = self._device, Found()
        device.replanning(False)
        device.run_plan(DAY_PLAN)
        for phase in phases:
            self.capacity_per_s(phase.weights(self._weights))
        device.replanning(replanning)
        seen = []
        with Client(device.socket) as client:
            load = Application(client, device.models, self._deadlines_s)
            for number, (phase, visit) in enumerate(zip(phases, visits(phases), strict=True)):
                seen.append(self._phase(load, phase, visit, seed + number))
        deadline_s = time.monotonic() + _SETTLE_S
        while not device.settled() and time.monotonic() < deadline_s:
            time.sleep(0.5)
        time.sleep(_FLUSH_S)
        about = {"scenario": scenario, "replanning": replanning, "seed": seed}
        for one in seen:
            self._tell(found, about, one)
        return found

    def _phase(self, load: Application, phase: Phase, visit: int, seed: int) -> PhaseSeen:
        weights = phase.weights(self._weights)
        rate_per_s = phase.share * self._capacity_per_s[tuple(weights)]
        seconds = self._effort.phase_s * (0.5 if phase.lead else 1.0)
        with core_taken(phase.core_taken):
            began_us = time.time_ns() // 1000
            result = load.phase(weights, rate_per_s, seconds, seed)
            ended_us = time.time_ns() // 1000
        lost, load.outcomes["lost"] = load.outcomes["lost"], 0
        plan = self._device.active()
        progress(f"  {phase.name}: {np.mean(result.in_time):.3f} in time, plan {str(plan)[:12]}")
        return PhaseSeen(phase, visit, rate_per_s, began_us, ended_us, result, lost, plan)

    def _tell(self, found: Found, about: dict[str, Any], seen: PhaseSeen) -> None:
        device, tasks = self._device, Tasks.of(seen.result, self._deadlines_s)
        name, seconds = seen.phase.name, (seen.ended_us - seen.began_us) / 1e6
        known = [one for one in device.replans(0) if one.at_us < seen.ended_us]
        replans = [one for one in known if one.at_us >= seen.began_us]
        queues = [one for one in device.queues(seen.began_us) if one.at_us < seen.ended_us]
        about = {**about, "phase": name, "visit": seen.visit}
        told = [_replan_row(about, one, seen.began_us) for one in known]
        plan = device.plan(seen.plan) if seen.plan is not None else None
        found.rows.append(
            {
                "part": "phase",
                **about,
                "seconds": seconds,
                "rate_per_s": seen.rate_per_s,
                "tasks": len(tasks.in_time),
                "in_time_per_s": in_time(tasks) / seconds,
                "in_time_share": float(np.mean(tasks.in_time)),
                "given_up": float(np.mean(~tasks.answered)),
                "p50_ms": 1e3 * p50_s(tasks),
                "p99_ms": 1e3 * p99_s(tasks),
                "variance_s2": float(np.mean([one.variance_s2 for one in queues] or [0.0])),
                "variance_most_s2": max((one.variance_s2 for one in queues), default=0.0),
                "lost": seen.lost,
                "alarms": device.alarms(seen.began_us, seen.ended_us),
                "replans": len(replans),
                "commits": sum(one.outcome == COMMITTED for one in replans),
                **soonest(told, lambda s: device.alarms(seen.began_us, seen.began_us + round(1e6 * s))),
                "plan": (seen.plan or "")[:12],
                "lanes": lanes_of(plan) if plan else "",
            }
        )
        found.rows += [row for row in told if row["at_s"] >= 0.0]
        found.rows.append({"part": "series", **about, **_series(queues, seen.began_us)})
        for one in replans:
            if one.outcome == COMMITTED and one.digest is not None:
                found.plans[name] = device.plan(one.digest).wire


def _series(queues: Sequence[QueueMoment], changed_us: int) -> dict[str, list[float]]:
    """Every two seconds since the change the means of the queues' variance and of the oldest age."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for one in queues:
        place = int((one.at_us - changed_us) / 1e6 / _SERIES_S)
        bins.setdefault(place, []).append((one.variance_s2, one.oldest_age_s))
    rows = [(place * _SERIES_S, *np.mean(values, axis=0)) for place, values in sorted(bins.items())]
    names = ("at_s", "variance_s2", "oldest_age_s")
    return {name: [float(f"{row[n]:.4g}") for row in rows] for n, name in enumerate(names)}


def soonest(replans: Sequence[Mapping[str, Any]], alarms: Callable[[float], int]) -> dict[str, float | None]:
    """Seconds from a change to the first decision and to the first active plan, from rows of part `replan`.

    A re-plan that leaves the decision to another one decides nothing. Where none that began since decides,
    one that was under way does, if there were `alarms` until its decision: they were left to it.
    """
    answers = [row for row in replans if not row["reason"].startswith(_UNDECIDED)]
    own = [row for row in answers if row["at_s"] >= 0.0]
    if all(row["decided_s"] is None for row in own):
        own += [row for row in answers if row["at_s"] < 0.0 and alarms(row["decided_s"] or 0.0)]
    return {
        key: min((row[key] for row in own if row[key] is not None and row[key] >= 0.0), default=None)
        for key in ("decided_s", "active_s")
    }


def _after_s(replan: ReplanInfo, after_trigger_ms: float | None, changed_us: int) -> float | None:
    return None if after_trigger_ms is None else (replan.at_us - changed_us) / 1e6 + after_trigger_ms / 1e3


def _replan_row(about: dict[str, Any], replan: ReplanInfo, changed_us: int) -> dict[str, Any]:
    return {
        "part": "replan",
        **about,
        "at_s": (replan.at_us - changed_us) / 1e6,
        "cause": replan.cause,
        "how": replan.how,
        "plan": (replan.digest or "")[:12],
        "predicted": replan.predicted,
        "outcome": replan.outcome,
        "ratio": replan.ratio,
        "low": replan.ratio_low,
        "high": replan.ratio_high,
        "pairs": replan.pairs,
        "decided_s": _after_s(replan, replan.trigger_to_decision_ms, changed_us),
        "active_s": _after_s(replan, replan.trigger_to_active_ms, changed_us),
        "trigger_to_active_ms": replan.trigger_to_active_ms,
        "reason": replan.reason,
        "remark": replan.remark,
    }
