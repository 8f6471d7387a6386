"""Whether re-planning pays, with a real planner, agent and client under Poisson arrivals.

    python -m benchmarks.pays [--json] [--quick] [--minutes M] [--only dynamics|gain] [--mix NAME]...

It takes an hour; with `--quick`, the first mix alone, 20 minutes. What `--minutes` leave no time for is left
out, and a row of part `left_out` says so.

The trigger, the trial and everything else are as they are by default. Capacity is what the plan made at the
start carries saturated, in tasks a second at the mix; deadlines are five times a model's best time on one
thread, at least 20 ms. `latency` takes a task without a result for twice its deadline; of such tasks, which
`given_up` is the share of, there is no percentile, and no ratio of two.

*Dynamics*: loads that change and stay, each with re-planning off and then on, on the same seeded arrivals.
`night_and_day`: 0.25 and 0.9 of capacity in turns; `turning_mix`: the models' weights in reverse order;
`core_taken`: 0.6 of capacity while a foreign process computes on one core. By mix and scenario: `commits`;
`first_changes_committed`, the first changes that led to one; `decided_s`, the longest from a first change to
its first decision, missing where `undecided` of them had none; `again_active_s`, the longest from a second
visit's change to its first plan, missing where `never_active_again` of them had none; `in_time_on_over_off`,
tasks in time in all phases but the one that leads in, of repetitions that ran both ways. `lost` counts tasks
that ended in no way that was promised.

*Gain*: the plans that were committed beside the others and beside `naive`, a default onnxruntime session and
a thread per model, in turns of 2.5 s. `night_p50_over_day_plan` and the like are ratios with 95 % intervals
by bootstrap in the rows. Where nothing was committed the fixed plans stand: `day` is the one made at the
start, `night` the same on one lane of all cores, `whole` the same without cuts where it has any; `before` is
the one made at the start where a core was taken. Rows of part `plan` tell where others were committed.

A mix that fails, or whose packages cannot be downloaded, is left out, a row says so, and the exit code is 1;
`zoo` needs no packages.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.pays.device import DAY_PLAN, PaysDevice, lanes_of, one_wide_lane
from benchmarks.pays.dynamics import Dynamics, Effort
from benchmarks.pays.gain import WINDOW_S, measure_gain
from benchmarks.pays.scenarios import SCENARIOS
from benchmarks.processes import DemoFailed
from benchmarks.real_models.fetching import CACHE, NoRegistryError
from benchmarks.runner import Report, progress, run
from benchmarks.slo.mixes import MIXES, load_mix
from stageloom.edge_agent.bench.capacity import LEAST_WINDOWS
from stageloom.edge_agent.bench.contest import ContestLoad
from stageloom.edge_agent.bench.load import deadlines_s
from stageloom.edge_agent.bench.model_files import ModelUnderTest
from stageloom.edge_agent.bench.stageloom_contestant import own_plan
from stageloom.shared.errors import StageloomError
from stageloom.shared.plan import decode_plan

FULL = Effort(phase_s=60.0, pairs=8)
QUICK = Effort(phase_s=40.0, pairs=6, saturated_s=2.0)
GAIN: Final = "gain"
_SCENARIOS_OF: dict[str, tuple[str, ...]] = {
    "ocr": ("night_and_day", "core_taken"),
    "small": ("night_and_day",),
    "zoo": ("turning_mix",),
    "urgent": (),
}
"""The mixes, and what is done with each by default."""
_PLAN_OF: Final = {"night": "night", "day": "day", "core taken": "taken"}  # by phase
SETUP_S: Final = 130.0  # profiles and whatever else is the same however long loads stay; of each part
_PAIR_S: Final = 27.0  # three loads, three contestants, windows of 2.5 s with their ends


def _pairs(text: str) -> int:
    """As many as an interval needs."""
    if not text.isdecimal() or int(text) < LEAST_WINDOWS:
        least = f"give {LEAST_WINDOWS} or more"
        raise argparse.ArgumentTypeError(f"{text!r} pairs have no interval to judge a ratio by; {least}")
    return int(text)


_OPTIONS: dict[str, dict[str, Any]] = {
    "--minutes": {"type": float, "metavar": "M", "help": "for all of it; default 60, quick 20"},
    "--only": {"choices": ("dynamics", GAIN), "help": "one of the two parts"},
    "--mix": {"action": "append", "choices": list(MIXES), "help": "repeat for more; default all, quick ocr"},
    "--scenario": {"action": "append", "choices": list(SCENARIOS), "help": "repeat for more; default by mix"},
    "--phase": {"type": float, "metavar": "S", "help": "seconds that a load stays; default 60, quick 40"},
    "--pairs": {"type": _pairs, "metavar": "N", "help": "windows of each plan, from 4; default 8, quick 6"},
    "--repetitions": {"type": int, "default": 1, "metavar": "N", "help": "of each scenario; default 1"},
    "--cache": {"type": Path, "default": CACHE, "metavar": "DIR", "help": "downloads; default %(default)s"},
}


def measure(report: Report, options: argparse.Namespace) -> int:
    """Every mix; the exit code is 1 where one had to be left out."""
    until_s = time.monotonic() + 60.0 * (options.minutes or (20.0 if options.quick else 60.0))
    effort = QUICK if options.quick else FULL
    effort = replace(effort, phase_s=options.phase or effort.phase_s, pairs=options.pairs or effort.pairs)
    options.cache.mkdir(parents=True, exist_ok=True)
    code = 0
    try:
        for mix, parts in parts_of(options, effort).items():
            try:
                with tempfile.TemporaryDirectory(prefix="stageloom-pays-") as folder:
                    models = load_mix(mix, Path(folder, "models"), options.cache)
                    _Mix(mix, models, Path(folder), report, effort).run(parts, until_s)
            except (NoRegistryError, DemoFailed, StageloomError) as error:  # noqa: PERF203
                code = 1
                report.add({}, [{"part": "absent", "mix": mix, "reason": str(error)}])
                progress(f"{mix} is left out from here on: {error}")
    finally:
        report.add(figures_of(report.rows))
    return code


def parts_of(options: argparse.Namespace, effort: Effort) -> dict[str, dict[tuple[str, int], float]]:
    """By mix what is asked for: seconds of load by scenario or `GAIN`, and repetition."""
    found: dict[str, dict[tuple[str, int], float]] = {}
    for mix in options.mix or list(_SCENARIOS_OF)[: 1 if options.quick else None]:
        scenarios = () if options.only == GAIN else options.scenario or _SCENARIOS_OF[mix]
        own = found.setdefault(mix, {})
        for scenario, number in product(scenarios, range(options.repetitions)):
            phases = sum(0.5 if phase.lead else 1.0 for phase in SCENARIOS[scenario])
            own[scenario, number] = phases * effort.phase_s * (1 if number else 2)
        if options.only != "dynamics":
            own[GAIN, 0] = effort.pairs * _PAIR_S
    return found


class _Mix:
    """One mix; what is measured goes into the report as it becomes known."""

    def __init__(
        self, name: str, models: Sequence[ModelUnderTest], folder: Path, report: Report, effort: Effort
    ) -> None:
        self._name, self._models, self._folder = name, models, folder
        self._report, self._effort = report, effort
        self._weights = [entry.weight for entry in MIXES[name]]
        self._deadlines: list[float] = []
        self._capacity_per_s = 0.0
        self._plans: dict[str, tuple[bytes, dict[str, Any]]] = {}  # and where it was found

    def run(self, parts: Mapping[tuple[str, int], float], until_s: float) -> None:
        """What is asked for, as long as there is time for it."""
        for (part, number), seconds in parts.items():
            if time.monotonic() + SETUP_S + seconds > until_s:
                row = {"part": "left_out", "mix": self._name, "of": part, "repetition": number}
                self._report.add({}, [row])
            elif part == GAIN:
                self._gain()
            else:
                self._scenario(part, number)

    def _device(self, name: str) -> PaysDevice:
        progress(f"{self._name}, {name}: a planner, an agent, profiles")
        return PaysDevice(self._folder / name, self._models, self._effort.profile_s)

    def _prepared(self, device: PaysDevice) -> Dynamics:
        """The device under its first plan; the first one says what deadlines and fixed plans are."""
        device.prepare()
        if not self._plans:
            found = deadlines_s({model.name: device.alone_s(model.name) for model in self._models})
            self._deadlines = [found[model.name] for model in self._models]
            day = device.plan(DAY_PLAN)
            self._plans = {"day": (day.wire, {}), "night": (one_wide_lane(day).wire, {})}
            if any(model.cuts for model in day.models):
                times = {model.name: device.times(model.name) for model in self._models}
                self._plans["whole"] = (own_plan(self._models, times, whole=True).wire, {})
        dynamics = Dynamics(device, self._weights, self._deadlines, self._effort)
        self._capacity_per_s = self._capacity_per_s or dynamics.capacity_per_s(self._weights)
        return dynamics

    def _scenario(self, scenario: str, number: int) -> None:
        about = {"mix": self._name, "repetition": number}
        with self._device(f"{scenario}-{number}") as device:
            dynamics = self._prepared(device)
            for replanning in (True,) if number else (False, True):  # without, once is enough
                progress(f" {scenario}, re-planning {'on' if replanning else 'off'}")
                found = dynamics.run(scenario, SCENARIOS[scenario], 100 * number, replanning=replanning)
                self._report.add({}, [{"part": row["part"], **about, **row} for row in found.rows])
                plans = {_PLAN_OF[phase]: wire for phase, wire in found.plans.items() if phase in _PLAN_OF}
                if "taken" in plans:
                    plans["before"] = device.plan(DAY_PLAN).wire
                found_in = {"scenario": scenario, "repetition": number}
                self._plans |= {name: (wire, found_in) for name, wire in plans.items()}

    def _gain(self) -> None:
        if not self._plans:
            with self._device(GAIN) as device:
                self._prepared(device)
        for name, (wire, found_in) in self._plans.items():
            plan = decode_plan(wire)
            row = {"mix": self._name, "name": name, "plan": plan.digest[:12], "lanes": lanes_of(plan)}
            self._report.add({}, [{"part": "plan", **row, **found_in}])
        load = ContestLoad(weights=self._weights, deadlines_s=self._deadlines, window_s=WINDOW_S, seed=1000)
        plans = {name: wire for name, (wire, _) in self._plans.items()}
        measure_gain(
            self._report, self._name, self._models, load, plans, self._capacity_per_s, self._effort.pairs
        )


def figures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the phases say together; see the module's text."""
    figures: dict[str, float] = {}
    phases = [row for row in rows if row["part"] == "phase"]
    for key in dict.fromkeys((row["mix"], row["scenario"]) for row in phases):
        own = [row for row in phases if (row["mix"], row["scenario"]) == key]
        seen = [row for row in own if row["visit"]]
        on = [row for row in seen if row["replanning"]]
        name = f"{key[0]}.{key[1]}"
        figures[f"lost.{name}"] = float(sum(row["lost"] for row in own))
        if not on:
            continue
        first, second = ([row for row in on if row["visit"] == visit] for visit in (1, 2))
        figures[f"commits.{name}"] = float(sum(row["commits"] for row in on))
        figures[f"first_changes_committed.{name}"] = float(sum(row["commits"] > 0 for row in first))
        for figure, without, taken in (
            ("decided_s", "undecided", [row["decided_s"] for row in first]),
            ("again_active_s", "never_active_again", [row["active_s"] for row in second]),
        ):
            if taken:
                figures[f"{without}.{name}"] = float(taken.count(None))
            if taken and None not in taken:
                figures[f"{figure}.{name}"] = max(taken)
        paired = [row for row in seen if not row["repetition"]]  # the only one that ran both ways
        tasks = [
            sum(row["in_time_share"] * row["tasks"] for row in paired if row["replanning"] is replanning)
            for replanning in (True, False)
        ]
        if all(tasks):
            figures[f"in_time_on_over_off.{name}"] = tasks[0] / tasks[1]
    return figures


if __name__ == "__main__":
    sys.exit(run(measure, ("onnxruntime", "openvino", "numpy", "onnx"), options=_OPTIONS))
