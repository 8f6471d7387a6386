"""Puts the demo's measurements together as docs/report.schema.json says, and checks that they agree.

The learned policy and the plain replanner both answered while the same first plan ran, and each plan was
tried against that one, so the two can be compared through it: with ratios a and b over the first plan, a
/ b, and an interval whose logarithmic half width is the root of the sum of squares of theirs, since the
two trials are independent.
"""

import json
from base64 import b64decode
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import ceil, exp, hypot, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jsonschema import Draft202012Validator

from benchmarks.processes import DemoFailed
from benchmarks.runner import machine, versions
from stageloom.edge_agent.trace.chrome import MEASURED, PLANNED
from stageloom.planner.costs.measured import cost_table
from stageloom.planner.costs.records import OperatorCost
from stageloom.planner.replan.learned import SCHEDULER
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


def measured_costs(rows: Iterable[Mapping[str, Any]]) -> CostTable:
    """The operator times that the run's profiles brought."""
    operators: dict[Digest, dict[int, OperatorCost]] = {}
    measured_at: dict[Digest, int] = {}
    for row in rows:
        if row["kind"] == "profile_result":
            artifact = Digest(row["artifact"])
            measured_at[artifact] = row["batch"]
            operators.setdefault(artifact, {}).update(
                {one["operator"]: OperatorCost(**one, measured_at_us=0) for one in row["timings"]}
            )
    return cost_table(operators, measured_at)


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


def last_active(rows: Sequence[Mapping[str, Any]]) -> str:
    """Digest of the plan that was activated last."""
    return str(
        max((row for row in rows if row["kind"] == "plan_activated"), key=lambda r: r["at_us"])["plan"]
    )


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
    measured = sorted((event for event in groups if event["pid"] == MEASURED), key=lambda event: event["ts"])
    start_us = _busiest([event["ts"] for event in measured])
    steps = {e["args"]["step"] for e in measured if 0 <= e["ts"] - start_us <= WINDOW_US}
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


def _busiest(starts: Sequence[float]) -> float:
    """Start of the window in which most groups begin; `starts` ascend."""
    best, most, end = 0.0, 0, 0
    for index, start in enumerate(starts):
        while end < len(starts) and starts[end] - start <= WINDOW_US:
            end += 1
        if end - index > most:
            best, most = start, end - index
    return best


OUTCOMES = ("completed", "refused", "cancelled", "expired", "failed")
MAX_DIFFERENCE = 1e-4
MIN_SENSITIVITY = 1e-2
MIN_COMPLETED = 100
SCHEMA = Path(__file__).parents[2] / "docs" / "report.schema.json"


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


def _unsound(replan: Mapping[str, Any]) -> str:
    """What a re-plan's entry says that cannot be; empty when it is sound."""
    what = f"the re-plan {replan['at_s']:.1f} s into the load"
    if not replan["value"] > replan["threshold"]:
        return f"{what} was triggered by {replan['value']:g}, which is not above {replan['threshold']:g}"
    if replan["outcome"] in ("rejected", "no_gain") and replan["trigger_to_active_ms"] is not None:
        return f"{what} is {replan['outcome']} and yet its plan became active"
    if replan["outcome"] == "committed" and replan["trigger_to_active_ms"] is None:
        return f"{what} committed a plan that never became active"
    low_high = replan["interval"]
    if low_high is not None and not low_high[0] <= replan["ratio"] <= low_high[1]:
        return f"{what} states the ratio {replan['ratio']:g} outside its interval {low_high}"
    return ""


def _unfair(report: Mapping[str, Any]) -> list[str]:
    """What the comparison of the proposers claims and cannot."""
    found, policy = report["comparison"], report["policy"]
    if (found is not None) != policy["had_say"]:
        return [f"the policy {'had' if policy['had_say'] else 'had no'} say, and the comparison is {found}"]
    if found is None:
        return [] if policy["reason"] else ["the policy had no say, and nothing says why"]
    asked = {entry["proposer"]: entry for entry in report["replans"]}
    if missing := {LEARNED, PLAIN} - asked.keys():
        return [f"{missing.pop()} was compared and never asked"]
    learned, problems = asked[LEARNED], []
    if learned["plan"] is not None and learned["scheduler"] != SCHEDULER:
        problems.append(f"the learned policy's plan is by {learned['scheduler']}")
    if found != compare(learned, asked[PLAIN]):
        problems.append("the comparison is not what the re-plans say")
    return problems


def check(report: Mapping[str, Any]) -> list[str]:
    """What the report promises and does not hold, in words; empty when all is well."""
    problems = [
        f"{'/'.join(map(str, error.path)) or 'report'}: {error.message[:120]}"
        for error in Draft202012Validator(json.loads(SCHEMA.read_text())).iter_errors(dict(report))
    ]
    if problems:
        return problems
    tasks, telemetry = report["tasks"], report["telemetry"]
    if tasks["submitted"] != sum(tasks[word] for word in OUTCOMES):
        problems.append(f"{tasks['submitted']} tasks were submitted, but their ends do not add up: {tasks}")
    if tasks["failed"]:
        problems.append(f"{tasks['failed']} tasks failed")
    if tasks["completed"] <= MIN_COMPLETED:
        problems.append(f"only {tasks['completed']} tasks completed")
    if telemetry["produced"] != telemetry["stored"] + telemetry["dropped"]:
        problems.append(f"telemetry does not add up: {telemetry}")
    problems += [problem for entry in report["replans"] if (problem := _unsound(entry))]
    problems += _unfair(report)
    if report["first_valid_plan_s"] >= 1.0:
        problems.append(f"the first valid plan took {report['first_valid_plan_s']:.2f} s")
    if report["difference"] > MAX_DIFFERENCE:
        problems.append(f"results differ from onnxruntime by {report['difference']:.1e}")
    if report["sensitivity"] <= MIN_SENSITIVITY:
        problems.append(f"outputs hardly depend on inputs ({report['sensitivity']:.1e}): nothing was shown")
    return problems


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
    replans: Sequence[Mapping[str, Any]]  # as `stageloom replans --json`
    policy: Mapping[str, Any]  # as `stageloom policy import --json`, with the reason where there is none
    answers: Mapping[str, int]  # per proposer the re-plan that it was asked for
    considered: Mapping[int, Sequence[LookedAt]]  # per re-plan what was looked at
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
