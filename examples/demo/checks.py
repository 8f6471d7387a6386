"""Checks that the demo's report follows docs/report.schema.json and that its figures agree."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from examples.demo.compare import LEARNED, PLAIN, compare
from stageloom.planner.replan.learned import SCHEDULER

OUTCOMES = ("completed", "refused", "cancelled", "expired", "failed")
MAX_DIFFERENCE = 1e-4
MIN_SENSITIVITY = 1e-2
MIN_COMPLETED = 100
SCHEMA = Path(__file__).parents[2] / "docs" / "report.schema.json"


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
