"""Whether re-planning pays, with a real planner, agent and client under Poisson arrivals.

    python -m benchmarks.pays [--json] [--quick] [--only dynamics|gain] [--mix NAME]... [--scenario NAME]...

The trigger, the trial and everything else are as they are by default. Capacity is what the plan made at the
start carries saturated, in tasks a second at the mix; deadlines are five times a model's best time on one
thread, at least 20 ms. A task without a result counts as twice its deadline.

*Dynamics*: loads that change and stay, each with re-planning off and then on, on the same seeded arrivals.
`night_and_day`: 0.25 and 0.9 of capacity in turns; `turning_mix`: the models' weights in reverse order;
`core_taken`: 0.6 of capacity while a foreign process computes on one core. By mix and scenario: `commits`;
`decided_s`, the longest from a first change to its first decision; `again_active_s`, the longest from a
second visit's change to its first plan; `in_time_on_over_off`, tasks in time in all phases but the one that
leads in, of repetitions that ran both ways. `lost` counts tasks that ended in no way that was promised.

*Gain*: the plans that were committed beside the others and beside `naive`, a default onnxruntime session and
a thread per model, in turns of 2.5 s. `night_p50_over_day_plan` and the like are ratios with 95 % intervals
by bootstrap in the rows. Where nothing was committed the fixed plans stand: `day` is the one made at the
start, `night` the same on one lane of all cores, `whole` the same without cuts where it has any; rows of part
`plan` tell. A mix whose packages cannot be downloaded is left out, and a row says so; `zoo` needs none.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.pays.device import DAY_PLAN, PaysDevice, lanes_of, one_wide_lane
from benchmarks.pays.dynamics import Dynamics, Effort, Found
from benchmarks.pays.gain import WINDOW_S, measure_gain
from benchmarks.pays.scenarios import SCENARIOS
from benchmarks.real_models.fetching import CACHE, NoRegistryError
from benchmarks.runner import Report, progress, run
from benchmarks.slo.mixes import MIXES, load_mix
from stageloom.edge_agent.bench.contest import ContestLoad
from stageloom.edge_agent.bench.load import deadlines_s
from stageloom.edge_agent.bench.model_files import ModelUnderTest
from stageloom.edge_agent.bench.stageloom_contestant import own_plan
from stageloom.edge_agent.bench.termination import ended_politely
from stageloom.shared.plan import decode_plan

FULL = Effort(phase_s=120.0)
QUICK = Effort(phase_s=40.0, saturated_s=2.0)
_SCENARIOS_OF: dict[str, tuple[str, ...]] = {
    "ocr": tuple(SCENARIOS),
    "small": ("night_and_day",),
    "zoo": ("turning_mix",),
    "urgent": (),
}
"""The mixes, and what is done with each by default."""

_OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"choices": ("dynamics", "gain"), "help": "one of the two parts"},
    "--mix": {"action": "append", "choices": list(MIXES), "help": "repeat for more; default all, quick ocr"},
    "--scenario": {"action": "append", "choices": list(SCENARIOS), "help": "repeat for more; default by mix"},
    "--phase": {"type": float, "metavar": "S", "help": "seconds that a load stays; default 120, quick 40"},
    "--pairs": {"type": int, "metavar": "N", "help": "windows of each plan; default 20, quick 6"},
    "--repetitions": {"type": int, "default": 1, "metavar": "N", "help": "of each scenario; default 1"},
    "--cache": {"type": Path, "default": CACHE, "metavar": "DIR", "help": "downloads; default %(default)s"},
}


def measure(report: Report, options: argparse.Namespace) -> None:
    """Every mix; packages that cannot be downloaded are said to be missing, and the zoo stands for them."""
    try:
        with ended_politely():
            for mix in options.mix or list(_SCENARIOS_OF)[: 1 if options.quick else None]:
                _measure_mix(mix, report, options)
    finally:
        report.add(figures_of(report.rows))


def _measure_mix(mix: str, report: Report, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="stageloom-pays-") as folder:
        try:
            options.cache.mkdir(parents=True, exist_ok=True)
            models = load_mix(mix, Path(folder, "models"), options.cache)
        except NoRegistryError as error:
            report.add({}, [{"part": "absent", "mix": mix, "reason": str(error)}])
            progress(f"{mix} is left out, its packages are not here: {error}")
            return
        _Mix(mix, models, Path(folder), report, options).run()


class _Mix:
    """One mix through all that is asked for."""

    def __init__(
        self,
        name: str,
        models: Sequence[ModelUnderTest],
        folder: Path,
        report: Report,
        options: argparse.Namespace,
    ) -> None:
        self._name, self._models, self._folder = name, models, folder
        self._report, self._options = report, options
        self._effort = QUICK if options.quick else FULL
        if options.phase:
            self._effort = replace(self._effort, phase_s=options.phase)
        self._weights = [entry.weight for entry in MIXES[name]]
        self._deadlines: list[float] = []
        self._capacity_per_s = 0.0
        self._plans: dict[str, bytes] = {}

    def run(self) -> None:
        """Dynamics, then the gain of what came of them."""
        scenarios = self._options.scenario or _SCENARIOS_OF[self._name]
        if self._options.only == "gain" or not scenarios:
            with self._device("gain") as device:
                self._prepared(device).capacity_per_s(self._weights)
        else:
            for scenario in scenarios:
                for number in range(self._options.repetitions):
                    self._scenario(scenario, number)
        if self._options.only != "dynamics":
            self._gain()

    def _device(self, name: str) -> PaysDevice:
        progress(f"{self._name}, {name}: a planner, an agent, profiles")
        return PaysDevice(self._folder / name, self._models, self._effort.profile_s)

    def _prepared(self, device: PaysDevice) -> Dynamics:
        """The device under its first plan; the first one says what deadlines and fixed plans are."""
        device.prepare()
        if not self._deadlines:
            found = deadlines_s({model.name: device.alone_s(model.name) for model in self._models})
            self._deadlines = [found[model.name] for model in self._models]
            day = device.plan(DAY_PLAN)
            self._plans = {"day": day.wire, "night": one_wide_lane(day).wire}
            if any(model.cuts for model in day.models):
                times = {model.name: device.times(model.name) for model in self._models}
                self._plans["whole"] = own_plan(self._models, times, whole=True).wire
        dynamics = Dynamics(device, self._weights, self._deadlines, self._effort)
        self._capacity_per_s = self._capacity_per_s or dynamics.capacity_per_s(self._weights)
        return dynamics

    def _scenario(self, scenario: str, number: int) -> None:
        found: dict[bool, Found] = {}
        with self._device(f"{scenario}-{number}") as device:
            dynamics = self._prepared(device)
            for replanning in (True,) if number else (False, True):  # without, once is enough
                progress(f" {scenario}, re-planning {'on' if replanning else 'off'}")
                seed = 100 * number
                found[replanning] = dynamics.run(scenario, SCENARIOS[scenario], seed, replanning=replanning)
        for phase, plan in (("night", "night"), ("day", "day"), ("core taken", "taken")):
            if phase in found[True].plans:
                self._plans[plan] = found[True].plans[phase]
        about = {"mix": self._name, "repetition": number}
        for one in found.values():
            self._report.add({}, [{"part": row["part"], **about, **row} for row in one.rows])

    def _gain(self) -> None:
        pairs = self._options.pairs or (6 if self._options.quick else 20)
        for name, wire in self._plans.items():
            plan = decode_plan(wire)
            row = {"mix": self._name, "name": name, "plan": plan.digest[:12], "lanes": lanes_of(plan)}
            self._report.add({}, [{"part": "plan", **row}])
        load = ContestLoad(weights=self._weights, deadlines_s=self._deadlines, window_s=WINDOW_S, seed=1000)
        self._report.add(
            *measure_gain(self._name, self._models, load, self._plans, self._capacity_per_s, pairs)
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
        figures[f"commits.{name}"] = float(sum(row["commits"] for row in on))
        figures[f"lost.{name}"] = float(sum(row["lost"] for row in own))
        for figure, column, visit in (("decided_s", "decided_s", 1), ("again_active_s", "active_s", 2)):
            taken = [row[column] for row in on if row["visit"] == visit and row[column] is not None]
            if taken:
                figures[f"{figure}.{name}"] = max(taken)
        off = {row["repetition"] for row in seen if not row["replanning"]}  # as a rule only the first has it
        paired = [row for row in seen if row["repetition"] in off]
        tasks = [
            sum(row["in_time_share"] * row["tasks"] for row in paired if row["replanning"] is replanning)
            for replanning in (True, False)
        ]
        if all(tasks):
            figures[f"in_time_on_over_off.{name}"] = tasks[0] / tasks[1]
    return figures


if __name__ == "__main__":
    sys.exit(run(measure, ("onnxruntime", "openvino", "numpy", "onnx"), options=_OPTIONS))
