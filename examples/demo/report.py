"""Puts the demo's measurements together as docs/report.schema.json says, and checks that they agree."""

import json
import math
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from benchmarks.pays.device import QueueMoment, lanes_of
from benchmarks.pays.intervals import Statistic, Tasks, in_time, interval, mean_log_s, p99_s, percentile_s
from benchmarks.processes import DemoFailed
from benchmarks.runner import machine, versions
from examples.demo.checks import check
from stageloom.edge_agent.bench.model_files import ModelUnderTest
from stageloom.edge_agent.trace.chrome import MEASURED, PLANNED
from stageloom.edge_agent.trace.command import measured
from stageloom.planner.schema.replan import ReplanInfo, TrialInfo
from stageloom.shared.artifact import open_artifact
from stageloom.shared.bound import bind
from stageloom.shared.plan import Plan, decode_plan
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.costs import CostTable
from stageloom.shared.stage_string import to_string

NAIVELY, FITTING = "default sessions", "planned for it"
BEFORE, AFTER = "before: planned for few", "after: planned anew"
BUSILY, STAYING = "many tasks", "many, and they stay"
WINDOW_US: Final = 120_000
_VERDICTS: Final = {"commit": "committed", "reject": "rejected"}
PACKAGES: Final = ("stageloom", "onnxruntime", "openvino", "onnx", "numpy", "pyzmq", "msgspec", "sqlalchemy")

Estimated: TypeAlias = tuple[float, float | None, float | None]
"""A value and the ends of its 95 % interval: None of fewer than four windows, and where what is drawn of them
may have no value."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """How somebody served a load, window by window."""

    who: str
    load: str
    rate_per_s: float
    window_s: float
    windows: Sequence[Tasks]

    @property
    def in_time_per_s(self) -> Estimated:
        """Tasks in time a second."""
        return self._of(in_time, 1.0 / (self.window_s * len(self.windows)))

    @property
    def p99_ms(self) -> Estimated | None:
        """What 99 of 100 tasks keep; None where that falls on tasks without a result."""
        found = self._of(p99_s)
        return None if math.isnan(found[0]) else found

    @property
    def p50_ms(self) -> Estimated:
        """What half of the tasks keep; one without a result took twice its deadline."""
        return self._of(lambda tasks: percentile_s(tasks.latency_s, 50))

    @property
    def sentence(self) -> str:
        """For the terminal."""
        return (
            f"{self.in_time_per_s[0]:.1f} of {self.rate_per_s:.1f}/s in time, median {self.p50_ms[0]:.0f} ms"
        )

    def entry(self) -> dict[str, Any]:
        """As the report has it."""
        tasks = Tasks.together(self.windows)
        return {
            "who": self.who,
            "load": self.load,
            "rate_per_s": self.rate_per_s,
            "windows": len(self.windows),
            "window_s": self.window_s,
            "tasks": len(tasks.in_time),
            "in_time": int(in_time(tasks)),
            "in_time_per_s": self.in_time_per_s,
            "given_up": float(np.mean(~tasks.answered)),
            "p50_ms": self.p50_ms,
            "p99_ms": self.p99_ms,
            "latency_ms": self._of(mean_log_s),
        }

    def _of(self, statistic: Statistic, unit: float = 1e3) -> Estimated:
        low, high = (None if math.isnan(end) else unit * end for end in interval(statistic, self.windows))
        return unit * statistic(Tasks.together(self.windows)), low, high


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the story left behind. Moments in `_us` are of the wall clock, which all processes share."""

    out: Path
    started_at: datetime
    models: Sequence[ModelUnderTest]
    deadlines_s: Sequence[float]  # by model
    weights: Sequence[float]
    capacity_per_s: float
    served: Sequence[Served]
    began_us: int  # when the load rose
    offered_per_s: float
    series: Sequence[Tasks]  # of that load, window by window
    series_s: float  # of one such window
    replans: Sequence[ReplanInfo]
    answer: ReplanInfo | None  # the one that was committed
    paper: TrialInfo
    comparison: Mapping[str, Any]  # of that trial, as `stageloom plan compare --json`
    plans: Sequence[Mapping[str, Any]]  # as `stageloom plan show --json`
    submitted: int  # tasks of the agent
    outcomes: Mapping[str, int]
    telemetry: Mapping[str, int]
    queues: Sequence[QueueMoment]
    trace: Path  # as `stageloom-agent trace` wrote it
    profiles: Sequence[Mapping[str, Any]]  # rows of operators, as `stageloom device telemetry --json`
    compared: Sequence[tuple[float, float, int]]  # by model: difference, change, samples

    def second(self, at_us: float) -> float:
        """Seconds after the load rose."""
        return round((at_us - self.began_us) / 1e6, 3)


def assemble(run: Run) -> dict[str, Any]:
    """The report.

    Raises:
        DemoFailed: it does not hold what it promises.
    """
    plans = {entry["digest"]: decode_plan(b64decode(entry["wire"]), entry["digest"]) for entry in run.plans}
    outcomes = {name: run.outcomes.get(name, 0) for name in ("completed", "expired", "refused", "lost")}
    report = {
        "version": 4,
        "started_at": run.started_at.isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(PACKAGES),
        "verdict": verdict(run.served, run.answer, run.replans, run.offered_per_s, run.began_us),
        "capacity_per_s": run.capacity_per_s,
        "models": [
            {
                "name": model.name,
                "artifact": model.digest,
                "operators": len(open_artifact(model.artifact).graph.operators),
                "weight": weight,
                "deadline_ms": 1e3 * deadline_s,
            }
            for model, weight, deadline_s in zip(run.models, run.weights, run.deadlines_s, strict=True)
        ],
        "tasks": {"submitted": run.submitted, **outcomes},
        "served": [one.entry() for one in run.served],
        "load": _load(run),
        "replans": [_replan(run, one) for one in run.replans if one.outcome != "pending"],
        "paper": _paper(run, plans),
        "plans": [
            {
                "plan": entry["plan"],
                "digest": entry["digest"],
                "scheduler": entry["scheduler"],
                "how": lanes_of(plans[entry["digest"]]),
                "wire_bytes": entry["wire_bytes"],
                "text": entry["text"],
                "stages": _stages(plans[entry["digest"]]),
            }
            for entry in run.plans
        ],
        "telemetry": dict(run.telemetry),
        "difference": max(one[0] for one in run.compared),
        "sensitivity": min(one[1] for one in run.compared),
        "samples": sum(one[2] for one in run.compared),
        "timeline": timeline(json.loads(run.trace.read_text())),
    }
    found: dict[str, Any] = json.loads(json.dumps(report))  # tuples become lists, as a reader has them
    if problems := check(found):
        raise DemoFailed("; ".join(problems))
    return found


def verdict(
    served: Sequence[Served],
    answer: ReplanInfo | None,
    replans: Sequence[ReplanInfo],
    rate: float,
    began_us: int,
) -> str:
    """What the demo came to, in one or two sentences."""
    by = {(one.who, one.load): one for one in served}
    naive, before, after = by[NAIVELY, BUSILY], by[BEFORE, BUSILY], by.get((AFTER, STAYING))
    beside = f"Default sessions serve {naive.in_time_per_s[0]:.1f}/s of such a load in time."
    if answer is None or after is None:
        return f"On this machine re-planning gained nothing: {_why(replans)} {beside}"
    active_s = (answer.at_us - began_us) / 1e6 + (answer.trigger_to_active_ms or 0.0) / 1e3
    tried = "" if answer.ratio is None else f", {answer.ratio:.2f} times as good in its trial"
    return (
        f"The load rose to {rate:.1f} tasks a second and stayed; {active_s:.0f} s later the device ran "
        f"another plan{tried}: {after.in_time_per_s[0]:.1f} instead of {before.in_time_per_s[0]:.1f} tasks a "
        f"second in time, a median of {after.p50_ms[0]:.0f} instead of {before.p50_ms[0]:.0f} ms. {beside}"
    )


def _why(replans: Sequence[ReplanInfo]) -> str:
    ended = [one for one in replans if one.outcome != "pending"]
    if not ended:
        return "the device raised no alarm, since its plan carried the load."
    last = ended[-1]
    how = f"{last.outcome.replace('_', ' ')}, {last.reason or 'no reason'}"
    return f"the last of {len(ended)} re-plans ended with {how}."


def _load(run: Run) -> dict[str, Any]:
    """The load that stayed, over time, and the moments that mattered."""
    windows = [one for one in run.series if len(one.in_time)]
    at_s = [run.series_s * number for number in range(len(windows))]
    moments = [(run.second(one.at_us), f"alarm: {one.cause.replace('_', ' ')}") for one in run.replans]
    if run.answer is not None and run.answer.trigger_to_active_ms is not None:
        active_us = run.answer.at_us + 1e3 * run.answer.trigger_to_active_ms
        moments.append((run.second(active_us), "new plan"))
    moments.append((run.second(run.paper.began_us), "act three"))
    return {
        "rate_per_s": run.offered_per_s,
        "at_s": at_s,
        "in_time_per_s": [in_time(one) / run.series_s for one in windows],
        "p99_ms": [None if math.isnan(p99 := p99_s(one)) else 1e3 * p99 for one in windows],
        "moments": [{"at_s": at, "text": text} for at, text in sorted(moments)],
        "variance": {
            "at_s": [run.second(one.at_us) for one in run.queues],
            "s2": [one.variance_s2 for one in run.queues],
        },
    }


def _replan(run: Run, replan: ReplanInfo) -> dict[str, Any]:
    return {
        "at_s": run.second(replan.at_us),
        "trigger": replan.cause,
        "value": replan.value,
        "threshold": replan.threshold,
        "plan": replan.plan if replan.digest else "",
        "how": replan.how,
        "predicted": replan.predicted,
        "outcome": replan.outcome,
        "ratio": replan.ratio,
        "interval": None if replan.ratio_low is None else [replan.ratio_low, replan.ratio_high],
        "pairs": replan.pairs,
        "trigger_to_decision_ms": replan.trigger_to_decision_ms,
        "trigger_to_active_ms": replan.trigger_to_active_ms,
        "reason": replan.reason,
    }


def _paper(run: Run, plans: Mapping[str, Plan]) -> dict[str, Any]:
    """The plan of act three: what its stages would take if nothing ever waited, and its trial."""
    trial = run.paper
    one_by_one_s, side_by_side_s = paper_times(plans[trial.candidate], run.models, measured(run.profiles))
    return {
        "plan": next(entry["plan"] for entry in run.plans if entry["digest"] == trial.candidate),
        "one_by_one_ms": 1e3 * one_by_one_s,
        "side_by_side_ms": 1e3 * side_by_side_s,
        "predicted": run.comparison["predicted_ratio"],
        "verdict": _VERDICTS.get(trial.verdict, trial.verdict),
        "ratio": trial.ratio,
        "interval": None if trial.ratio_low is None else [trial.ratio_low, trial.ratio_high],
        "pairs": trial.pairs,
        "seconds": (trial.decided_us - trial.began_us) / 1e6,
        "reason": trial.reason,
    }


def paper_times(plan: Plan, models: Sequence[ModelUnderTest], costs: CostTable) -> tuple[float, float]:
    """Seconds of one task of each model, its operators one by one; and as the plan's stages say, had groups
    that run side by side no memory, caches and cores to share."""
    graphs = {model.digest: open_artifact(model.artifact).graph for model in models}
    bound = bind(plan, graphs)
    alone_s = paper_s = 0.0
    for block in bound.combined:
        owners = [bound.models[member.model] for member in block.members]
        parts = [
            (owner.plan.artifact, owner.graph, owner.blocks[member.block])
            for owner, member in zip(owners, block.members, strict=True)
        ]
        known = costs.for_members(parts, batches=[owner.plan.batch for owner in owners])
        free = replace(known, contention=0.0, barrier_s=0.0, work_s=(), measured=(), interference=None)
        alone_s += sum(known.operators_s)
        assert isinstance(block.plan.schedule, StageSchedule)
        paper_s += free.schedule_s(block.plan.schedule)
    return alone_s, paper_s


def timeline(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of the busiest window of `WINDOW_US`, measured and planned; milliseconds from its start."""
    groups = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == "group"]
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    ran = sorted((event for event in groups if event["pid"] == MEASURED), key=lambda event: event["ts"])
    starts = np.array([event["ts"] for event in ran])
    begun = np.searchsorted(starts, starts + WINDOW_US, side="right") - np.arange(len(starts))  # [groups]
    start_us = starts[begun.argmax()] if ran else 0.0
    steps = {e["args"]["step"] for e in ran if 0 <= e["ts"] - start_us <= WINDOW_US}
    shown = [event for event in groups if event["args"]["step"] in steps]  # whole steps, also at the borders
    zero_us = min((event["ts"] for event in shown), default=0.0)
    return [
        {
            "track": tracks[event["pid"], event["tid"]],
            "planned": event["pid"] == PLANNED,
            **{key: event["args"][key] for key in ("model", "block", "operators")},
            "started_ms": round((event["ts"] - zero_us) / 1000, 6),
            "ended_ms": round((event["ts"] + event["dur"] - zero_us) / 1000, 6),
        }
        for event in shown
    ]


def _stages(plan: Plan) -> list[dict[str, str]]:
    return [
        {
            "members": " + ".join(
                f"{plan.models[m.model].name}#{m.replica}.{m.block}" for m in block.members
            ),
            "stage_string": to_string(block.schedule),
        }
        for block in plan.combined
    ]
