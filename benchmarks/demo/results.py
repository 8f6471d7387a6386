"""From one run's raw material to the report."""

import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.demo.comparison import LEARNED, PLAIN, compare
from benchmarks.demo.differences import differences, read_samples
from benchmarks.demo.page import render
from benchmarks.demo.predicted import measured_costs, predicted
from benchmarks.demo.processes import DemoFailed
from benchmarks.demo.report import check, merged, model_entry, total_tasks
from benchmarks.demo.timeline import artifact_graphs, last_active, timeline
from benchmarks.report import machine, versions
from stageloom.planner.replan.policy import How
from stageloom.planner.store.predictions import KeptConsidered
from stageloom.shared.bound import bind
from stageloom.shared.plan import Plan, decode_plan
from stageloom.shared.policy.queues import variance, variance_threshold_s2
from stageloom.shared.stage_string import to_string

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
    considered: Mapping[int, Sequence[KeptConsidered]]  # per re-plan what was looked at
    telemetry: Mapping[str, int]
    rows: Sequence[Mapping[str, Any]]  # as `stageloom telemetry --json`
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
    last = next(plan for plan in run.plans if plan["digest"] == last_active(run.rows))
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
        "predicted": predicted(run.rows, bound, measured_costs(run.rows)),
        "timeline": timeline(json.loads(run.trace.read_text())),
        "schedules": _schedules(plan),
    }
    if problems := check(report):
        raise DemoFailed("; ".join(problems))
    return report


def write(report: Mapping[str, Any], out: Path) -> None:
    """report.json and report.html."""
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "report.html").write_text(render(report))


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
    return round((looked_at[0].at_us - int(entry["at_us"])) / 1e3, 3)


def _policy(run: Run) -> dict[str, Any]:
    """The policy that was adopted, and whether it had its say."""
    learned = run.answers.get(LEARNED)
    had_say = learned is not None and any(
        one.considered.how == How.LEARNED.value for one in run.considered[learned]
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
        {
            "members": " + ".join(
                f"{plan.models[m.model].name}#{m.replica}.{m.block}" for m in block.members
            ),
            "stage_string": to_string(block.schedule),
        }
        for block in plan.combined
    ]
