"""The plans of the comparison, and what a calibration needs of this machine's engine.

Some plans are there to calibrate on, others are drawn by a seeded sampler to compare on; all are measured
in turns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from random import Random
from statistics import fmean, median

from benchmarks.twin.engine_device import EngineDevice, StepSpan
from stageloom.edge_agent.executor.base import TimingRequest
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.planner.twin.arrivals import Bursty, Periodic, Poisson, Process
from stageloom.planner.twin.calibrate import DeviceMeasurements, Operators, OverlapSample, StepSample
from stageloom.planner.twin.window import Window
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.plan import Plan, QueuePlan, StepChoice
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.compose import Combination, ModelChoice, Rules, compose
from stageloom.shared.search.costs import CostTable

QUEUE = QueuePlan(max_tasks=24)
"""Short, so that an overloaded window shows a full queue and not a ramp."""


@dataclass(frozen=True)
class Trial:
    name: str
    bound: BoundPlan
    arrivals: Mapping[str, Process]


def choice(name: str, artifact: Artifact, partition: str | tuple[int, ...], replicas: int = 1) -> ModelChoice:
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


LOAD = 0.85
"""Of one lane. Not more: every task that is refused takes time from the steps."""

LOAD_BESIDE = 1.15
"""Of each of two lanes: both always have a step."""

LOW_LOAD = 0.15
LONGEST_GAP_S = 0.005
"""Between two steps of a lane that has work; what is longer waited for something else."""

_Program = tuple[int, int, tuple[int, ...]]


def operator_times(workload: Mapping[str, Artifact], repeats: int) -> dict[tuple[Digest, OpId], float]:
    """Seconds of every operator alone, as a device profiles them."""
    executor = OnnxExecutor()
    found: dict[tuple[Digest, OpId], float] = {}
    for artifact in workload.values():
        request = TimingRequest(repeats=repeats, limit_s=60.0)
        for op, time in enumerate(executor.time_operators(artifact, request, lambda: True)):
            if time.runs:
                found[artifact.digest, OpId(op)] = time.median_us * 1e-6
    executor.close()
    return found


def service_times(
    bound: BoundPlan, artifacts: Mapping[Digest, Artifact], tasks: int = 15
) -> dict[str, float]:
    """About what a task of each model takes of a lane: to set rates by."""
    with EngineDevice(artifacts, {}) as device:
        device.deploy(bound)
        device.warm_up(tasks)
        steps = device.steps
    return {
        model.plan.name: sum(
            (one.ended_s - one.began_s) * one.models.count(index) / len(one.models) for one in steps
        )
        / tasks
        for index, model in enumerate(bound.models)
    }


def rates(bound: BoundPlan, service_s: Mapping[str, float], load: float) -> dict[str, Process]:
    """Periodic arrivals that ask for `load` of a device, an equal part of it for each model."""
    share = load / len(bound.models)
    return {
        model.plan.name: Periodic(rate_per_s=share / service_s[model.plan.name], offset_s=0.003 * index)
        for index, model in enumerate(bound.models)
    }


@dataclass
class Collected:
    """What the calibration's plans did so far, over all rounds."""

    operators: Operators
    programs: dict[tuple[str, _Program], list[list[float]]] = field(default_factory=dict)  # steps by round
    bounds: dict[str, BoundPlan] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)  # a plan's mean in a round
    extra_s: list[float] = field(default_factory=list)  # of a task beyond its steps
    beside: dict[tuple[str, str, int], list[tuple[float, float]]] = field(default_factory=dict)
    """By plan, model and block: seconds, and those of the plan with one lane in the same round."""

    gap_s: dict[str, float] = field(default_factory=dict)  # the newest mean of a plan

    def round(
        self,
        plans: Sequence[tuple[str, BoundPlan]],
        artifacts: Mapping[Digest, Artifact],
        service_s: Mapping[str, Mapping[str, float]],
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        """Serve every plan of the calibration once, and the first one under a low load; times are by plan."""
        for name, bound in plans:
            say(f"calibration: {name}")
            self.bounds[name] = bound
            load = LOAD if bound.plan.lanes == 1 else LOAD_BESIDE * bound.plan.lanes
            with EngineDevice(artifacts, rates(bound, service_s[name], load)) as device:
                device.deploy(bound)
                device.warm_up()
                device.run(seconds)
                steps = device.steps
                device.drained()
            if bound.plan.lanes == 1:
                self._note_steps(name, steps)
            else:
                self._note_beside(name, steps)
        first, bound = plans[0]
        self._low_load(bound, artifacts, service_s[first], seconds)

    def _note_steps(self, name: str, steps: Sequence[StepSpan]) -> None:
        gap_s = self._gap_s(name, steps)
        if gap_s:
            self.gaps_s.append(gap_s)
        taken: dict[_Program, list[float]] = {}
        for step in steps:
            if step.mask > 0:
                program = (step.combined, step.mask, step.buckets)
                taken.setdefault(program, []).append(step.ended_s - step.began_s)
        for program, seconds in taken.items():
            self.programs.setdefault((name, program), []).append(seconds)

    def _gap_s(self, name: str, steps: Sequence[StepSpan]) -> float:
        """Mean seconds between two steps of a lane; 0 for whole models, before which a task is waited for."""
        inside = {
            index
            for index, combined in enumerate(self.bounds[name].combined)
            if all(member.block > 0 for member in combined.members)
        }
        gaps_s = [
            two.began_s - one.ended_s
            for lane in range(self.bounds[name].plan.lanes)
            for one, two in pairwise(one for one in steps if one.lane == lane)
            if two.combined in inside
        ]
        gaps_s = [gap_s for gap_s in gaps_s if 0.0 <= gap_s < LONGEST_GAP_S]
        self.gap_s[name] = fmean(gaps_s) if gaps_s else 0.0
        return self.gap_s[name]

    def _note_beside(self, name: str, steps: Sequence[StepSpan]) -> None:
        """Steps that another lane's covered from begin to end, or nearly, and how much longer their gaps are.

        Over the same blocks' steps in this round's plan with the same partition and one lane.
        """
        single = name.partition(",")[0]
        alone = {
            (model, block): rounds[-1]
            for (plan, (combined, _, _)), rounds in self.programs.items()
            if plan == single
            for model, block in [self._block(single, combined)]
        }
        later_s = max(self._gap_s(name, steps) - self.gap_s[single], 0.0)
        covered: dict[tuple[str, int], list[float]] = {}
        for step in _covered(steps):
            covered.setdefault(self._block(name, step.combined), []).append(step.ended_s - step.began_s)
        for key, taken in covered.items():
            if key in alone:
                found = fmean(taken) + later_s, fmean(alone[key])
                self.beside.setdefault((name, *key), []).append(found)

    def _block(self, name: str, combined: int) -> tuple[str, int]:
        """Model and number of the block that a combined block of a plan of single blocks is."""
        bound = self.bounds[name]
        member = bound.combined[combined].members[0]
        return bound.models[member.model].plan.name, member.block

    def _low_load(
        self,
        bound: BoundPlan,
        artifacts: Mapping[Digest, Artifact],
        service_s: Mapping[str, float],
        seconds: float,
    ) -> None:
        """Whole models, one step a task: what its latency has beyond that step."""
        with EngineDevice(artifacts, rates(bound, service_s, LOW_LOAD)) as device:
            device.deploy(bound)
            device.warm_up()
            window = device.run(seconds)
            steps = device.steps
        for model in window.models:
            index = bound.model_index[model.name]
            mine = [one.ended_s - one.began_s for one in steps if one.models == (index,)]
            if mine and model.latencies_s:
                self.extra_s.append(median(model.latencies_s) - median(mine))

    def measured(self, cores: int, source: str) -> DeviceMeasurements:
        """All of it: of what changed from round to round its median, since other work comes and goes."""
        samples = [
            StepSample(self.bounds[name], *program, median(fmean(taken) for taken in rounds))
            for (name, program), rounds in self.programs.items()
            if sum(map(len, rounds)) >= 5
        ]
        spreads = [
            one / fmean(taken)
            for rounds in self.programs.values()
            for taken in rounds
            if len(taken) >= 20
            for one in taken
        ]
        step_s = median(self.gaps_s) if self.gaps_s else 0.0
        task_s = max(median(self.extra_s) - step_s, 0.0) if self.extra_s else 0.0
        return DeviceMeasurements(
            operators=self.operators,
            steps=samples,
            beside=[
                OverlapSample(
                    median(taken for taken, _ in found), median(alone for _, alone in found), 1.0 / cores
                )
                for found in self.beside.values()
            ],
            spreads=spreads,
            step_s=step_s,
            task_s=task_s,
            source=source,
        )


def _covered(steps: Sequence[StepSpan]) -> Iterator[StepSpan]:
    """Steps of two lanes for at least nine tenths of which the other lane ran one, too."""
    lanes = [sorted((one for one in steps if one.lane == lane), key=attrgetter("began_s")) for lane in (0, 1)]
    for mine, others in (lanes, lanes[::-1]):
        first = 0
        for step in mine:
            while first < len(others) and others[first].ended_s <= step.began_s:
                first += 1
            beside_s, at = 0.0, first
            while at < len(others) and others[at].began_s < step.ended_s:
                beside_s += min(others[at].ended_s, step.ended_s) - max(others[at].began_s, step.began_s)
                at += 1
            if beside_s >= 0.9 * (step.ended_s - step.began_s):
                yield step


def busy_per_task_s(window: Window) -> float:
    """A trial's figure; 0 where nothing completed."""
    return window.busy_s_per_task if window.completed else 0.0
