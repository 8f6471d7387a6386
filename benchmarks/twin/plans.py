"""The plans of the comparison: those to calibrate on, and a seeded sampler of others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from stageloom.planner.twin.arrivals import Bursty, Periodic, Poisson, Process
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.plan import Plan, QueuePlan, StepChoice
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.compose import Combination, ModelChoice, Rules, compose
from stageloom.shared.search.costs import CostTable

QUEUE = QueuePlan(max_tasks=24)
"""Short, so that an overloaded window shows a full queue and not a ramp."""


@dataclass(frozen=True)
class Trial:
    """A plan and its load."""

    name: str
    bound: BoundPlan
    arrivals: Mapping[str, Process]


def choice(name: str, artifact: Artifact, partition: str | tuple[int, ...], replicas: int = 1) -> ModelChoice:
    """One model of a plan."""
    return ModelChoice(
        name=name,
        artifact=artifact.digest,
        graph=artifact.graph,
        partition=partition,
        replicas=replicas,
        queue=QUEUE,
    )


def bound_plan(choices: Sequence[ModelChoice], **options: object) -> BoundPlan:
    """Compose and bind; schedulers are told that groups overlap well, so that some are parallel."""
    costs = CostTable(rates=DeviceRates(contention=0.2))
    plan: Plan = compose(choices, costs=costs, **options)  # type: ignore[arg-type]
    return bind(plan, {one.artifact: one.graph for one in choices})


def calibration(workload: Mapping[str, Artifact]) -> list[tuple[str, BoundPlan]]:
    """Whole models, every base cut, and greedy groups there; every model alone; two lanes.

    A model alone finds its weights in the caches, one among others less often: both are in the fit. Two lanes
    run whole models and every base cut, since long and short steps lose different shares to each other.
    """
    plans = []
    for partition, scheduler in (("whole", "sequential"), ("base", "sequential"), ("base", "greedy")):
        choices = [choice(name, artifact, partition) for name, artifact in workload.items()]
        plans.append((f"{partition} {scheduler}", bound_plan(choices, scheduler=scheduler)))
    for name, artifact in workload.items():
        plans.append((f"{name} alone", bound_plan([choice(name, artifact, "whole")])))
    for partition in ("whole", "base"):
        beside = [choice(name, artifact, partition, 2) for name, artifact in workload.items()]
        plans.append((f"{partition} sequential, 2 lanes", bound_plan(beside, lanes=2)))
    return plans


def sample(
    workload: Mapping[str, Artifact], alone_s: Mapping[str, float], count: int, seed: int
) -> list[Trial]:
    """So many plans, no two alike, none of the calibration's; `alone_s`: about what a task takes."""
    rng = Random(seed)
    known = {bound.plan.structure for _, bound in calibration(workload)}
    found: list[Trial] = []
    while len(found) < count:
        trial = _draw(rng, workload, alone_s, len(found))
        if trial.bound.plan.structure not in known:
            known.add(trial.bound.plan.structure)
            found.append(trial)
    return found


def _draw(rng: Random, workload: Mapping[str, Artifact], alone_s: Mapping[str, float], number: int) -> Trial:
    names = rng.sample(list(workload), rng.randint(1, len(workload)))
    lanes = rng.choice((1, 1, 2))
    choices = []
    for name in names:
        cuts = workload[name].graph.base_cuts
        chosen = tuple(sorted(rng.sample(cuts, rng.randint(0, min(5, len(cuts))))))
        choices.append(choice(name, workload[name], chosen, rng.choice((1, 1, 2))))
    combination = rng.choice(list(Combination))
    scheduler = rng.choice(("sequential", "sequential", "greedy", "wavefront"))
    load = rng.uniform(0.35, 1.25) * (1.6 if lanes == 2 else 1.0)
    arrivals: dict[str, Process] = {}
    for index, one in enumerate(choices):
        rate = load / len(choices) / (alone_s[one.name] * (1.1 + 0.03 * len(one.cuts())))
        interval = rng.choice((0, 0, round(0.8e6 / rate)))
        choices[index] = replace(one, launch_interval_us=interval, work_conserving=rng.random() < 0.5)
        arrivals[one.name] = _process(rng, rate)
    bound = bound_plan(
        choices,
        scheduler=scheduler,
        combination=combination,
        members_max=rng.choice((2, 3)),
        lanes=lanes,
        rules=Rules(
            run_ahead=rng.choice((1, 2)), step_choice=rng.choice((StepChoice.RATIO, StepChoice.ROUND_ROBIN))
        ),
    )
    text = f"{number}: {'+'.join(names)} {combination.value} {scheduler} {lanes} lanes, load {load:.2f}"
    return Trial(text, bound, arrivals)


def _process(rng: Random, rate_per_s: float) -> Process:
    kind = rng.randrange(3)
    if kind == 0:
        return Periodic(rate_per_s=rate_per_s, offset_s=rng.uniform(0.0, 1.0 / rate_per_s))
    if kind == 1:
        return Poisson(rate_per_s=rate_per_s)
    return Bursty(
        on_rate_per_s=1.6 * rate_per_s, off_rate_per_s=0.4 * rate_per_s, mean_on_s=0.3, mean_off_s=0.3
    )
