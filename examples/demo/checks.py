"""Checks that the demo's report follows docs/report.schema.json and that its figures agree."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

OUTCOMES = ("completed", "expired", "refused", "lost")
MAX_DIFFERENCE = 1e-3  # of another executor; of the same one it is below 1e-5
MIN_SENSITIVITY = 1e-2
SCHEMA = Path(__file__).parents[2] / "docs" / "report.schema.json"


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
    if tasks["lost"]:
        problems.append(f"{tasks['lost']} tasks were lost")
    if telemetry["produced"] != telemetry["stored"] + telemetry["dropped"]:
        problems.append(f"telemetry does not add up: {telemetry}")
    for entry in report["served"]:
        problems += [
            f"{entry['who']} at {entry['load']}: {name} {entry[name][0]} lies outside its interval"
            for name in ("in_time_per_s", "p99_ms", "p50_ms", "latency_ms")
            if entry[name] is not None
            and None not in entry[name]
            and not entry[name][1] <= entry[name][0] <= entry[name][2]
        ]
        if entry["in_time"] > entry["tasks"]:
            problems.append(f"{entry['who']} served more tasks in time than there were")
    problems += [problem for entry in report["replans"] if (problem := _unsound(entry))]
    problems += [problem for problem in (_outside(report["paper"], "act three"),) if problem]
    if report["difference"] > MAX_DIFFERENCE:
        problems.append(f"results differ from onnxruntime by {report['difference']:.1e}")
    if report["sensitivity"] <= MIN_SENSITIVITY:
        problems.append(f"outputs hardly depend on inputs ({report['sensitivity']:.1e}): nothing was shown")
    return problems


def _unsound(replan: Mapping[str, Any]) -> str:
    """What a re-plan's entry says that cannot be; empty when it is sound."""
    what = f"the re-plan {replan['at_s']:.1f} s into the load"
    if replan["outcome"] in ("rejected", "no_gain") and replan["trigger_to_active_ms"] is not None:
        return f"{what} is {replan['outcome']} and yet its plan became active"
    if replan["outcome"] == "committed" and replan["trigger_to_active_ms"] is None:
        return f"{what} committed a plan that never became active"
    return _outside(replan, what)


def _outside(tried: Mapping[str, Any], what: str) -> str:
    if tried["interval"] is None or tried["interval"][0] <= tried["ratio"] <= tried["interval"][1]:
        return ""
    return f"{what} states the ratio {tried['ratio']:g} outside its interval {tried['interval']}"
