"""Puts the demo's measurements together as docs/report.schema.json says, and checks that they agree."""

import json
from base64 import b64decode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import DemoFailed
from benchmarks.runner import machine, versions
from examples.demo.checks import OUTCOMES, check
from examples.demo.compare import LEARNED, PLAIN, compare
from stageloom.edge_agent.trace.chrome import MEASURED, PLANNED
from stageloom.edge_agent.trace.command import measured
from stageloom.planner.replan.policy import How
from stageloom.planner.store.predictions import LookedAt
from stageloom.shared.artifact import open_artifact
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Member, Plan, decode_plan
from stageloom.shared.policy.queues import variance, variance_threshold_s2
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.costs import CostTable
from stageloom.shared.stage_string import to_string

Arrays = Mapping[str, "np.ndarray[Any, Any]"]


def relative(value: "np.ndarray[Any, Any]", reference: "np.ndarray[Any, Any]") -> float:
    """Norm of the difference over norm of the reference; infinite where either is not finite."""
    wide = reference.astype(np.float64)
    difference = float(np.linalg.norm(value.astype(np.float64) - wide))
    norm = float(np.linalg.norm(wide))
    if not np.isfinite(difference) or not norm > 0.0:
        return float("inf")
    return difference / norm


def read_samples(path: Path) -> list[tuple[Arrays, Arrays]]:
    """The (inputs, outputs) pairs that a client process kept."""
    samples: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            index, side, name = key.split("|", 2)
            pair = samples.setdefault(int(index), ({}, {}))
            pair[0 if side == "in" else 1][name] = arrays[key]
    return [samples[index] for index in sorted(samples)]


def differences(model_path: Path, samples: list[tuple[Arrays, Arrays]]) -> tuple[float, float]:
    """(largest difference to onnxruntime, smallest relative change of an output over the best input pair)."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model_path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    difference = 0.0
    references: list[dict[str, Any]] = []
    for inputs, outputs in samples:
        reference = dict(zip(names, session.run(names, dict(inputs)), strict=True))
        difference = max([difference, *(relative(outputs[name], reference[name]) for name in names)])
        references.append(reference)
    changes = [
        min(relative(one[name], other[name]) for name in names)
        for index, one in enumerate(references)
        for other in references[:index]
    ]
    return difference, max(changes, default=0.0)


def predicted(
    rows: Sequence[Mapping[str, Any]], plans: Mapping[str, BoundPlan], costs: CostTable
) -> list[dict[str, Any]]:
    """One entry per combined block of `plans` (by digest) that ran stages with all its members active.

    Predicted is the schedule's cost from operators timed alone; measured is the mean of its steps under load,
    beside whatever the other lanes ran.
    """
    ran: Counter[tuple[str, int]] = Counter()
    sums_us: Counter[tuple[str, int]] = Counter()
    for row in rows:
        if row["kind"] != "step_timings":
            continue
        digest = next((known for known in plans if known.startswith(row["plan"])), None)
        if digest is not None and row["mask"] == plans[digest].combined[row["combined_block"]].full_mask:
            ran[digest, row["combined_block"]] += row["count"]
            sums_us[digest, row["combined_block"]] += row["sum_us"]
    entries = []
    for (digest, combined), steps in sorted(ran.items()):
        bound = plans[digest]
        block = bound.combined[combined]
        if not steps or not isinstance(block.plan.schedule, StageSchedule):
            continue
        models = [bound.models[member.model] for member in block.members]
        parts = [
            (model.plan.artifact, model.graph, model.blocks[member.block])
            for model, member in zip(models, block.members, strict=True)
        ]
        known = costs.for_members(parts, batches=[model.plan.batch for model in models])
        entries.append(
            {
                "plan": digest,
                "block": _members(bound.plan, block.members),
                "steps": steps,
                "predicted_ms": 1000 * known.schedule_s(block.plan.schedule),
                "measured_ms": sums_us[digest, combined] / steps / 1000,
            }
        )
    return entries


def _members(plan: Plan, members: Sequence[Member]) -> str:
    return " + ".join(f"{plan.models[m.model].name}#{m.replica}.{m.block}" for m in members)


WINDOW_US = 120_000


def artifact_graphs(models: Mapping[str, Mapping[str, Any]], out: Path) -> dict[Digest, Graph]:
    """Graphs of the planner's artifacts, by digest."""
    return {
        Digest(model["digest"]): open_artifact(
            next(out.glob(f"planner/**/{model['digest']}*")), model["digest"]
        ).graph
        for model in models.values()
    }


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


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value that `fraction` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, ceil(fraction * len(ordered)) - 1)]


def merged(loads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One model's clients as one: the first serves all the time, the others were its bursts."""
    outcomes: Counter[str] = Counter()
    for load in loads:
        outcomes.update(load["outcomes"])
    return {
        **loads[0],
        "submitted": sum(load["submitted"] for load in loads),
        "outcomes": dict(outcomes),
        "latencies_ms": [value for load in loads for value in load["latencies_ms"]],
    }


def model_entry(load: Mapping[str, Any], model: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    """One model's part of the report: what its client process saw."""
    latencies = load["latencies_ms"]
    if not latencies:
        raise DemoFailed(f"no task of {load['model']} completed")
    return {
        "name": load["model"],
        "artifact": model["digest"],
        "operators": model["operators"],
        "blocks": blocks,
        "rate_per_s": load["rate_per_s"],
        "throughput_per_s": len(latencies) / load["seconds"],
        "latency_p50_ms": percentile(latencies, 0.50),
        "latency_p99_ms": percentile(latencies, 0.99),
        "latencies_ms": latencies,
        "tasks": _tasks(load["submitted"], load["outcomes"]),
    }


def _tasks(submitted: int, outcomes: Mapping[str, int]) -> dict[str, int]:
    return {"submitted": submitted, **{word: outcomes.get(word, 0) for word in OUTCOMES}}


def total_tasks(models: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The sums over all models."""
    sums: Counter[str] = Counter()
    for model in models:
        sums.update(model["tasks"])
    return _tasks(sums["submitted"], sums)


PACKAGES = ("stageloom", "onnxruntime", "onnx", "numpy", "pyzmq", "msgpack", "msgspec", "sqlalchemy")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the story left behind. Times ending in `_s` are on the monotonic clock."""

    out: Path
    started_at: datetime
    began_s: float
    wall_minus_monotonic_s: float
    plans: Sequence[Mapping[str, Any]]  # every plan that was desired, as `stageloom plan show --json`
    first_plan_s: float  # seconds that composing the first one took
    models: Mapping[str, Mapping[str, Any]]  # as `stageloom model list --json`
    history: Sequence[Mapping[str, Any]]  # as `stageloom plan history --json`
    replans: Sequence[Mapping[str, Any]]  # as `stageloom replan list --json`
    policy: Mapping[str, Any]  # as `stageloom policy import --json`, with the reason where there is none
    answers: Mapping[str, int]  # per proposer the re-plan that it was asked for
    considered: Mapping[int, Sequence[LookedAt]]  # per re-plan what was looked at
    telemetry: Mapping[str, int]
    rows: Sequence[Mapping[str, Any]]  # of `stageloom device telemetry --json`, values beside the rest
    trace: Path  # as `stageloom-agent trace` wrote it
    client_files: Mapping[str, Sequence[Path]]  # per model, that of the burst's clients after the first
    model_files: Mapping[str, Path]
    deadline_s: float  # of every task, from its submission

    def second(self, at_us: float) -> float:
        """Seconds after the load began, from microseconds of the wall clock."""
        return round(at_us / 1e6 - self.began_s - self.wall_minus_monotonic_s, 3)


def assemble(run: Run) -> dict[str, Any]:
    """The report.

    Raises:
        DemoFailed: it does not hold what it promises.
    """
    loads = {
        name: merged([json.loads(path.read_text()) for path in paths])
        for name, paths in run.client_files.items()
    }
    plans = {plan["digest"]: decode_plan(b64decode(plan["wire"]), plan["digest"]) for plan in run.plans}
    activated = max(
        (row for row in run.rows if row["kind"] == "plan_activated"), key=lambda row: row["at_us"]
    )
    last = next(plan for plan in run.plans if plan["digest"] == activated["plan"])
    plan = plans[last["digest"]]
    graphs = artifact_graphs(run.models, run.out)
    bound = {digest: bind(one, graphs) for digest, one in plans.items()}
    blocks = {model.name: model.num_blocks for model in plan.models}
    models = [model_entry(loads[name], run.models[name], blocks[name]) for name in loads]
    worst, sensitivities, samples = [], [], 0
    for name, paths in run.client_files.items():
        pairs = [pair for path in paths for pair in read_samples(path.with_suffix(".npz"))]
        difference, sensitivity = differences(run.model_files[name], pairs)
        worst.append(difference)
        sensitivities.append(sensitivity)
        samples += len(pairs)
    replans = _replans(run, plans)
    report = {
        "version": 2,
        "started_at": run.started_at.isoformat(timespec="seconds"),
        "duration_s": max(load["seconds"] for load in loads.values()),
        "machine": machine(),
        "versions": versions(PACKAGES),
        "models": models,
        "tasks": total_tasks(models),
        "first_valid_plan_s": run.first_plan_s,
        "plan_bytes": {"text": last["text_bytes"], "wire": last["wire_bytes"]},
        "generations": _generations(run),
        "replans": replans,
        "policy": _policy(run),
        "comparison": _comparison(run, replans),
        "telemetry": dict(run.telemetry),
        "difference": max(worst),
        "sensitivity": min(sensitivities),
        "samples": samples,
        "queues": _queues(run, list(loads)),
        "predicted": predicted(run.rows, bound, measured(run.rows)),
        "timeline": timeline(json.loads(run.trace.read_text())),
        "schedules": _schedules(plan),
    }
    if problems := check(report):
        raise DemoFailed("; ".join(problems))
    return report


def _generations(run: Run) -> list[dict[str, Any]]:
    scheduler = {plan["digest"]: plan["scheduler"] for plan in run.plans}
    latest = {entry["generation"]: entry for entry in reversed(run.history) if entry["digest"] in scheduler}
    active_us = {
        row["generation"]: row["at_us"] for row in reversed(run.rows) if row["kind"] == "plan_activated"
    }
    return [
        {
            "generation": generation,
            "plan": entry["digest"],
            "scheduler": scheduler[entry["digest"]],
            "decided_by": entry["decided_by"],
            "state": entry["state"],
            "active_at_s": run.second(active_us[generation]) if generation in active_us else None,
        }
        for generation, entry in sorted(latest.items())
    ]


def _replans(run: Run, plans: Mapping[str, Plan]) -> list[dict[str, Any]]:
    proposer = {number: name for name, number in run.answers.items()}
    scheduler = {plan["digest"]: plan["scheduler"] for plan in run.plans}
    return [
        {
            "at_s": run.second(entry["at_us"]),
            "trigger": entry["cause"],
            "value": entry["value"],
            "threshold": entry["threshold"],
            "proposer": proposer.get(entry["replan"], ""),
            "plan": entry["digest"],
            "scheduler": scheduler.get(entry["digest"], ""),
            "blocks": None if entry["digest"] is None else len(plans[entry["digest"]].combined),
            "same_structure": _structure(plans, entry["digest"]) == _structure(plans, entry["control"]),
            "looked_at": len(run.considered[entry["replan"]]),
            "predicted": entry["predicted"],
            "outcome": entry["outcome"],
            "ratio": entry["ratio"],
            "interval": None if entry["ratio_low"] is None else [entry["ratio_low"], entry["ratio_high"]],
            "pairs": entry["pairs"],
            "trigger_to_plan_ms": _proposed_ms(run, entry),
            "trigger_to_decision_ms": entry["trigger_to_decision_ms"],
            "trigger_to_active_ms": entry["trigger_to_active_ms"],
            "reason": entry["reason"],
        }
        for entry in sorted(run.replans, key=lambda entry: entry["at_us"])
    ]


def _structure(plans: Mapping[str, Plan], digest: str | None) -> str | None:
    return plans[digest].structure if digest is not None and digest in plans else None


def _proposed_ms(run: Run, entry: Mapping[str, Any]) -> float | None:
    """From the device's trigger to the planner's choice; both have this machine's clock."""
    looked_at = run.considered[entry["replan"]]
    if entry["digest"] is None or not looked_at:
        return None
    return round((looked_at[0][1].at_us - int(entry["at_us"])) / 1e3, 3)


def _policy(run: Run) -> dict[str, Any]:
    """The policy that was adopted, and whether it had its say."""
    learned = run.answers.get(LEARNED)
    had_say = learned is not None and any(
        evaluation.how == How.LEARNED.value for evaluation, _ in run.considered[learned]
    )
    reason = run.policy["reason"]
    if learned is not None and not had_say:
        reason = next(entry["reason"] for entry in run.replans if entry["replan"] == learned)
    return {
        "digest": run.policy["policy"],
        "trained_for": run.policy.get("trained_for"),
        "device_class": run.policy.get("device_class"),
        "had_say": had_say,
        "reason": reason,
    }


def _comparison(run: Run, replans: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """None where the policy had no say."""
    answers = {entry["proposer"]: entry for entry in replans}
    if not _policy(run)["had_say"]:
        return None
    return compare(answers[LEARNED], answers[PLAIN])


def _queues(run: Run, names: Sequence[str]) -> dict[str, Any]:
    """Queues over the load, on the common moments at which the agent sampled all of them."""
    moments: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in run.rows:
        if row["kind"] == "queue_sample" and run.second(row["at_us"]) >= 0.0:
            moments.setdefault(row["at_us"], {})[row["model"]] = row
    full = {at: rows for at, rows in sorted(moments.items()) if set(names) <= set(rows)}
    work_s = {name: [rows[name]["queued_work_us"] / 1e6 for rows in full.values()] for name in names}
    return {
        "at_s": [run.second(at) for at in full],
        "tasks": {name: [rows[name]["tasks"] for rows in full.values()] for name in names},
        "work_s": work_s,
        "variance_s2": [variance(instant) for instant in zip(*work_s.values(), strict=True)],
        "threshold_s2": next(
            (entry["threshold"] for entry in run.replans if entry["cause"] == "variance"),
            variance_threshold_s2([run.deadline_s]),
        ),
    }


def _schedules(plan: Plan) -> list[dict[str, str]]:
    return [
        {"members": _members(plan, block.members), "stage_string": to_string(block.schedule)}
        for block in plan.combined
    ]
