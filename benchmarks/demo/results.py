"""From one run's raw material to the report."""

import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.demo.compare import compare, read_samples
from benchmarks.demo.page import render
from benchmarks.demo.processes import DemoFailed
from benchmarks.demo.report import check, model_entry, total_tasks
from benchmarks.demo.timeline import timeline
from benchmarks.report import machine, versions
from shared.plan import Plan, decode_plan
from shared.stage_string import to_string

PACKAGES = ("stageloom", "onnxruntime", "onnx", "numpy", "pyzmq", "msgpack", "msgspec", "sqlalchemy")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the story left behind. Times ending in `_s` are on the monotonic clock."""

    out: Path
    started_at: datetime
    began_s: float
    wall_minus_monotonic_s: float
    plans: Sequence[Mapping[str, Any]]  # as `stageloom plan create --json` printed them
    active_at_s: Mapping[str, float]  # plan digest -> when it was seen active
    models: Mapping[str, Mapping[str, Any]]  # as `stageloom model list --json`
    history: Sequence[Mapping[str, Any]]  # as `stageloom plan history --json`
    telemetry: Mapping[str, int]
    rows: Sequence[Mapping[str, Any]]  # as `stageloom telemetry --json`
    client_files: Mapping[str, Path]
    model_files: Mapping[str, Path]


def assemble(run: Run) -> dict[str, Any]:
    """The report.

    Raises:
        DemoFailed: it does not hold what it promises.
    """
    loads = {name: json.loads(path.read_text()) for name, path in run.client_files.items()}
    last = run.plans[-1]
    plan = decode_plan(b64decode(last["wire"]), last["digest"])
    blocks = {model.name: model.num_blocks for model in plan.models}
    models = [model_entry(loads[name], run.models[name], blocks[name]) for name in loads]
    differences, sensitivities, samples = [], [], 0
    for name, path in run.client_files.items():
        pairs = read_samples(path.with_suffix(".npz"))
        difference, sensitivity = compare(run.model_files[name], pairs)
        differences.append(difference)
        sensitivities.append(sensitivity)
        samples += len(pairs)
    report = {
        "version": 1,
        "started_at": run.started_at.isoformat(timespec="seconds"),
        "duration_s": max(load["seconds"] for load in loads.values()),
        "machine": machine(),
        "versions": versions(PACKAGES),
        "models": models,
        "tasks": total_tasks(models),
        "first_valid_plan_s": run.plans[0]["search_s"],
        "plan_bytes": {"text": last["text_bytes"], "wire": last["wire_bytes"]},
        "generations": _generations(run),
        "telemetry": dict(run.telemetry),
        "difference": max(differences),
        "sensitivity": min(sensitivities),
        "samples": samples,
        "queues": _queues(run, list(loads)),
        "timeline": timeline(run.rows, last["digest"], plan, run.models, run.out),
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
    entries = [entry for entry in reversed(run.history) if entry["digest"] in scheduler]
    latest = {entry["generation"]: entry for entry in entries}
    return [
        {
            "generation": generation,
            "plan": entry["digest"],
            "scheduler": scheduler[entry["digest"]],
            "decided_by": entry["decided_by"],
            "state": entry["state"],
            "active_at_s": round(run.active_at_s[entry["digest"]] - run.began_s, 3),
        }
        for generation, entry in latest.items()
    ]


def _queues(run: Run, names: Sequence[str]) -> dict[str, Any]:
    """Queue lengths over the load, on the common moments at which the agent sampled all queues."""
    began_us = (run.began_s + run.wall_minus_monotonic_s) * 1e6
    moments: dict[int, dict[str, int]] = {}
    for row in run.rows:
        if row["kind"] == "queue_sample" and row["at_us"] >= began_us:
            moments.setdefault(row["at_us"], {})[row["model"]] = row["tasks"]
    full = {at: tasks for at, tasks in sorted(moments.items()) if set(names) <= set(tasks)}
    return {
        "at_s": [round((at - began_us) / 1e6, 3) for at in full],
        "tasks": {name: [tasks[name] for tasks in full.values()] for name in names},
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
