"""What the refinement of a tournament gains, at equal evaluations: everything is simulated.

    python -m benchmarks.refined [--quick] [--json] [--device NAME]... [--seeds N] [--neighbours N]
                                 [--state DIR]

Per device file and seed: of the paper's models arrive `OVERLOAD` times as many tasks as the best listed plan
served when it was flooded, so that no plan serves all. A tournament evaluates what
`stageloom plan create --budget` lists, then --neighbours neighbours of the best so far. Beside it, without
refinement, the same list is evaluated by the same arrivals, and as many evaluations as the neighbours had go
to further arrivals of its `FINALISTS` best plans, the best of which is the answer: there is nothing else that
a list can be given. Both answers are evaluated on arrivals that chose neither, the same for both.

`refined_over_listed`: the ratio of throughput, or of p99 where that is level within its spread (above 1: the
refinement is better), with a 95 % interval over seeds. An evaluation is three times 6 simulated seconds.
--state keeps what was done, and the same command of the same code goes on behind it. --quick: the Nano, one
seed, 8 neighbours, four listed policies.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any, Final, TypeVar

from benchmarks.learning.attribution_run import score_in
from benchmarks.learning.margin import margin
from benchmarks.learning.pair import JITTER, MIX, QUEUE, Workload, columns, whole_s, workloads
from benchmarks.paper.code_digest import digest_of_code
from benchmarks.runner import Report, progress, run
from benchmarks.zoo import graph_of
from stageloom.planner.cluster.interface import SearchFuture
from stageloom.planner.tournament.candidates import PlanCandidate, plan_candidates
from stageloom.planner.tournament.evaluator import EvaluationSettings, Scenario, evaluate_candidate
from stageloom.planner.tournament.refinement import Refinement
from stageloom.planner.tournament.runner import TournamentResult, TournamentRun
from stageloom.planner.tournament.score import Score, best_first
from stageloom.planner.twin.arrivals import Periodic
from stageloom.planner.twin.device_file import load_device
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.clock import ManualClock
from stageloom.shared.digest import digest_of
from stageloom.shared.plan import Plan
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.job import run_search

T = TypeVar("T")

DEVICES: Final = ("nano", "xavier_nx", "a100", "i7_7700")
OVERLOAD: Final = 1.2
_FLOOD: Final = 6.0
"""Of the load that the device serves one operator after another: more than any plan serves."""

_FLOODED: Final = EvaluationSettings(seeds=(1,), windows=3)
QUICK_LISTED: Final = ("sequential", "instances", "abreast", "instances-abreast")
FINALISTS: Final = 4
_CHOICE_FIRST: Final = 4_000_000_000
_RECHECK_FIRST: Final = 5_000_000_000
_FRESH_FIRST: Final = 6_000_000_000
"""Arrivals that choose, those of a tournament's last evaluation, and those that judge; of each seed."""


def _arrivals(first: int, seed: int, count: int, windows: int = 5) -> EvaluationSettings:
    seeds = tuple(first + 100_000 * seed + at for at in range(count))
    return EvaluationSettings(seeds=seeds, windows=windows)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A device under its load, and what is listed for it, with plans."""

    device: str
    scenario: Scenario
    flooded_per_s: float  # the most tasks that a listed plan served of a flood
    candidates: tuple[PlanCandidate, ...]
    costs: CostTable


class CountingPool:
    """Runs everything at once; its clock counts evaluations in seconds."""

    workers, where = 1, "here"

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        future: SearchFuture[T] = SearchFuture()
        future.settle(function(*arguments))
        if function is evaluate_candidate:
            self._clock.advance(1.0)
        return future

    def close(self) -> None:
        """Nothing runs."""


def listed_for(name: str, policies: Sequence[str]) -> Listed:
    """Search every listed plan once: it does not depend on arrivals."""
    device = load_device(name)
    costs = CostTable(rates=device.rates())
    models = [  # nothing is run, so a name stands for a model's contents
        ModelChoice(name=model, artifact=digest_of(model), graph=graph_of(model), queue=QUEUE)
        for model, _ in MIX
    ]
    times = StepTimes(device, costs)
    known = workloads(device, times, models)["capacity_1.1"]
    rates = {model: process.mean_per_s for model, process in known.items()}
    scenario = Scenario(
        times=times,
        arrivals=_scaled(rates, _FLOOD / 1.1),
        graphs={model.artifact: model.graph for model in models},
        service_s=tuple(whole_s(times, model) for model in models),
    )
    candidates = []
    for candidate in plan_candidates(models, costs, policy_names=policies, searches=True):
        began_s = time.process_time()
        candidates.append(replace(candidate, ready=run_search(candidate.job, time.monotonic)))
        progress(f"{name}: {candidate.name} searched in {time.process_time() - began_s:.1f} s")
    most = max(scenario.evaluate(one.ready, _FLOODED).throughput_per_s for one in candidates if one.ready)
    progress(f"{name}: {most:.1f} tasks/s when flooded")
    return Listed(
        device=name,
        scenario=replace(scenario, arrivals=_scaled(rates, OVERLOAD * most / fsum(rates.values()))),
        flooded_per_s=most,
        candidates=tuple(candidates),
        costs=costs,
    )


def _scaled(rates: Mapping[str, float], share: float) -> Workload:
    """So many times these rates, each with the jitter of the paper's load."""
    return {
        model: Periodic(rate_per_s=share * rate, jitter_s=JITTER / (share * rate))
        for model, rate in rates.items()
    }


def tournament(listed: Listed, seed: int, neighbours: int) -> TournamentResult:
    """The product's, with a budget of evaluations; without neighbours there is no refinement."""
    clock, first = ManualClock(), listed.candidates[0]
    wanted = len(listed.candidates) + neighbours
    limits, ready = first.job.limits, first.ready
    assert ready is not None
    refinement = Refinement(listed.scenario.graphs, listed.costs, limits, seed=seed)
    return TournamentRun(
        listed.candidates,
        ready,
        listed.scenario,
        CountingPool(clock),
        clock,
        budget_s=min(wanted + 5.0, wanted / 0.75),  # kept back: three plans, five seeds for three; a quarter
        refinement=refinement if neighbours else None,
        choice=_arrivals(_CHOICE_FIRST, seed, 3),
        fresh=_arrivals(_RECHECK_FIRST, seed, 5),
    ).to_end()


def best_of_list(listed: Listed, found: Mapping[int, Score], seed: int, evaluations: int) -> int:
    """The best of the finalists, when further evaluations are spent on these."""
    finalists = _ranked(found)[:FINALISTS]
    if not evaluations:
        return finalists[0]
    settings = _arrivals(_CHOICE_FIRST, seed, 3 + 3 * evaluations // len(finalists))
    scores = {number: _evaluated(listed, listed.candidates[number].ready, settings) for number in finalists}
    return _ranked(scores)[0]


def _ranked(scores: Mapping[int, Score]) -> list[int]:
    """The best first."""
    numbers = list(scores)
    return [numbers[place] for place in best_first(list(scores.values()))]


def _evaluated(listed: Listed, plan: Plan | None, settings: EvaluationSettings) -> Score:
    assert plan is not None
    return listed.scenario.evaluate(plan, settings)


def compared(listed: Listed, seed: int, neighbours: int) -> list[dict[str, Any]]:
    """The rows of one seed: what was answered without refinement, and with it."""
    began_s = time.process_time()
    refined = tournament(listed, seed, neighbours)
    size, winner = len(listed.candidates), refined.outcome.candidate
    evaluated = refined.tournament.evaluated
    found = {number: score for number, (_, score) in evaluated.items() if number < size}
    beside = best_of_list(listed, found, seed, refined.tournament.neighbours)
    fresh = _arrivals(_FRESH_FIRST, seed, 5, windows=10)
    about = {"device": listed.device, "seed": seed, "listed": size}
    about |= {"flooded_per_s": round(listed.flooded_per_s, 3)}
    about |= {"neighbours": refined.tournament.neighbours, "cpu_s": round(time.process_time() - began_s, 1)}
    led = [one.candidate for one in refined.tournament.curve if one.candidate >= size]
    moves = [move.value for one in led if (move := refined.candidates[one].move) is not None]
    alone = listed.candidates[beside]
    return [
        {**about, "answer": "listed", "of": alone.name, "moves": "", **_row(listed, alone.ready, fresh)},
        {
            **about,
            "answer": "refined",
            "of": refined.candidates[winner].name,
            "moves": " ".join(moves),
            **_row(listed, refined.plans[winner], fresh),
        },
    ]


def _row(listed: Listed, plan: Plan | None, settings: EvaluationSettings) -> dict[str, Any]:
    return columns(_evaluated(listed, plan, settings))


def device_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the rows of one device say together."""
    by_answer = {
        answer: [score_in(row) for row in rows if row["answer"] == answer] for answer in ("refined", "listed")
    }
    found = margin(by_answer["refined"], by_answer["listed"])
    taken = sum(row["of"].startswith("refined") for row in rows)
    ratios = {"": found.ratio, "_low": found.low, "_high": found.high}
    return {
        "device": rows[0]["device"],
        "seeds": len(by_answer["refined"]),
        "evaluations": rows[0]["listed"] + rows[0]["neighbours"],
        **{f"refined_over_listed{end}": round(value, 4) for end, value in ratios.items()},
        "by": found.by,
        "neighbour_was_the_answer": taken,
        "pays": found.low > 1.0 and len(by_answer["refined"]) > 1,  # one seed has no interval
    }


def _version(quick: bool) -> str:
    """The folder of rows that may stand beside each other."""
    code = digest_of_code("benchmarks.refined", ["planner/twin/devices"])
    return f"{code}-quick" if quick else code


def measure(report: Report, options: argparse.Namespace) -> None:
    """Device by device, then what they say together."""
    seeds = 1 if options.quick else options.seeds
    neighbours = 8 if options.quick else options.neighbours
    state = None if options.state is None else options.state / _version(options.quick)
    report.about = {"twin": True, "overload": OVERLOAD, "neighbours": neighbours, "seeds": seeds}
    for name in options.device or (DEVICES[:1] if options.quick else DEVICES):
        rows: list[dict[str, Any]] = []
        listed: Listed | None = None
        for seed in range(1, seeds + 1):
            file = None if state is None else state / f"{name}-{neighbours}-{seed}.json"
            if options.kept and (file is None or not file.exists()):
                continue
            if file is None or not file.exists():
                listed = listed or listed_for(name, QUICK_LISTED if options.quick else ())
                made = compared(listed, seed, neighbours)
                for row in made:
                    told = f"{row['throughput_per_s']} tasks/s, p99 {row['p99_ms']} ms"
                    progress(f"{name}, {seed}: {row['answer']} {row['of']}: {told}")
                if file is not None:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(json.dumps(made), "utf-8")
            else:
                made = json.loads(file.read_text("utf-8"))
            rows += made
        if not rows:
            continue
        together = device_row(rows)
        figures = {f"{name}.{key}": value for key, value in together.items() if isinstance(value, float)}
        report.add(figures, [{"part": "devices", **together}, *({"part": "answers", **row} for row in rows)])
    pays = sum(row["pays"] for row in report.rows if row["part"] == "devices")
    report.add({"devices_where_refinement_pays": pays})


if __name__ == "__main__":
    own: dict[str, dict[str, Any]] = {
        "--device": {"action": "append", "choices": DEVICES, "help": "default: all"},
        "--seeds": {"type": int, "default": 3, "help": "of arrivals and draws"},
        "--neighbours": {"type": int, "default": 48, "help": "evaluated after what is listed"},
        "--kept": {"action": "store_true", "help": "report what --state has, and do nothing else"},
        "--state": {"type": Path, "help": "keep what was done here, and go on from it"},
    }
    sys.exit(run(measure, ("numba",), options=own))
