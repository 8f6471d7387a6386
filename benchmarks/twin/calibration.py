"""The plans of the comparison, and what a calibration needs of this machine's engine.

Some plans are there to calibrate on, others are drawn by a seeded sampler to compare on; all are measured
in turns.
"""

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from statistics import fmean, median

from benchmarks.runner import progress
from benchmarks.twin.engine_device import EngineDevice, StepSpan
from stageloom.edge_agent.executor.base import TimingRequest
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.planner.twin.arrivals import Bursty, Periodic, Poisson, Process
from stageloom.planner.twin.calibrate import DeviceMeasurements, Operators, OverlapSample, StepSample
from stageloom.planner.twin.device_file import cpu_device
from stageloom.planner.twin.times import StepTimes
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
    run whole models and every base cut, since long and short steps lose different shares to each other, and
    groups, since steps of many items lose more.
    """
    plans = []
    for partition, scheduler in (("whole", "sequential"), ("base", "sequential"), ("base", "greedy")):
        choices = [choice(name, artifact, partition) for name, artifact in workload.items()]
        plans.append((f"{partition} {scheduler}", bound_plan(choices, scheduler=scheduler)))
    for name, artifact in workload.items():
        plans.append((f"{name} alone", bound_plan([choice(name, artifact, "whole")])))
    for partition, scheduler in (("whole", "sequential"), ("base", "sequential"), ("base", "greedy")):
        beside = [choice(name, artifact, partition, 2) for name, artifact in workload.items()]
        plans.append((f"{partition} {scheduler}, 2 lanes", bound_plan(beside, lanes=2, scheduler=scheduler)))
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

GROUPS_BESIDE = "base greedy, 2 lanes"
"""The calibration's plan that runs groups in two lanes at once."""

Program = tuple[int, int, tuple[int, ...]]
"""Combined block, mask and buckets."""


def operator_times(workload: Mapping[str, Artifact], repeats: int) -> dict[tuple[Digest, OpId], float]:
    """Seconds of every operator alone, as a device profiles them."""
    executor = OnnxExecutor()
    request = TimingRequest(repeats=repeats, limit_s=60.0)
    times = {
        (artifact.digest, OpId(op)): time.median_us * 1e-6
        for artifact in workload.values()
        for op, time in enumerate(executor.time_operators(artifact, request, lambda: True))
        if time.runs
    }
    executor.close()
    return times


def service_times(
    bound: BoundPlan, artifacts: Mapping[Digest, Artifact], tasks: int = 15
) -> dict[str, float]:
    """About what a task of each model takes of a lane: to set rates by."""
    with EngineDevice(artifacts, {}) as device:
        device.deploy(bound)
        device.warm_up(tasks)
        return {
            model.plan.name: sum(step.share_s(index) for step in device.steps) / tasks
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
    """What the calibration's plans did so far: by plan, the steps of every round."""

    plans: Mapping[str, BoundPlan]
    artifacts: Mapping[Digest, Artifact]
    service_s: Mapping[str, Mapping[str, float]]  # of a task of each model, by plan
    rounds: dict[str, list[list[StepSpan]]] = field(default_factory=dict)
    extra_s: list[float] = field(default_factory=list)  # of a task beyond its steps

    def round(self, seconds: float) -> None:
        """Serve every plan of the calibration once, and the first one under a low load."""
        for name, bound in self.plans.items():
            progress(f"calibration: {name}")
            load = LOAD if bound.plan.lanes == 1 else LOAD_BESIDE * bound.plan.lanes
            self.rounds.setdefault(name, []).append(self._serve(name, load, seconds)[1])
        first, bound = next(iter(self.plans.items()))
        window, steps = self._serve(first, LOW_LOAD, seconds)
        for model in window.models:  # whole models, one step a task: what its latency has beyond that step
            index = bound.model_index[model.name]
            mine = [step.seconds for step in steps if step.models == (index,)]
            if mine and model.latencies_s:
                self.extra_s.append(median(model.latencies_s) - median(mine))

    def _serve(self, name: str, load: float, seconds: float) -> tuple[Window, list[StepSpan]]:
        bound = self.plans[name]
        with EngineDevice(self.artifacts, rates(bound, self.service_s[name], load)) as device:
            device.deploy(bound)
            device.warm_up()
            window = device.run(seconds)
            steps = device.steps
            device.drained()
        return window, steps

    def measured(self, operators: Operators, cores: int, source: str) -> DeviceMeasurements:
        """All of it: of what changed from round to round its median, since other work comes and goes."""
        alone = [name for name, bound in self.plans.items() if bound.plan.lanes == 1]
        samples, spreads = [], []
        for name in alone:
            for program, rounds in _programs(self.rounds[name]).items():
                if sum(map(len, rounds)) >= 5:
                    seconds = median(fmean(taken) for taken in rounds)
                    samples.append(StepSample(self.plans[name], *program, seconds))
                spreads += [one_s / fmean(taken) for taken in rounds if len(taken) >= 20 for one_s in taken]
        gaps_s = [
            gap_s for name in alone for steps in self.rounds[name] if (gap_s := self._gap_s(name, steps))
        ]
        step_s = median(gaps_s) if gaps_s else 0.0
        beside = [
            OverlapSample(
                median(taken for taken, _ in pairs), median(alone_s for _, alone_s in pairs), 1.0 / cores
            )
            for name in self.plans
            if name not in (*alone, GROUPS_BESIDE)
            for pairs in self._beside(name).values()
        ]
        return DeviceMeasurements(
            operators=operators,
            steps=samples,
            beside=beside,
            crowded=self._crowded() if GROUPS_BESIDE in self.plans else (),
            spreads=spreads,
            step_s=step_s,
            task_s=max(median(self.extra_s) - step_s, 0.0) if self.extra_s else 0.0,
            source=source,
        )

    def _gap_s(self, name: str, steps: Sequence[StepSpan]) -> float:
        """Mean seconds between two steps of a lane; 0 for whole models, before which a task is waited for."""
        bound = self.plans[name]
        inside = {
            index
            for index, combined in enumerate(bound.combined)
            if all(member.block > 0 for member in combined.members)
        }
        gaps_s = [
            after.began_s - before.ended_s
            for lane in range(bound.plan.lanes)
            for before, after in pairwise(step for step in steps if step.lane == lane)
            if after.combined in inside
        ]
        gaps_s = [gap_s for gap_s in gaps_s if 0.0 <= gap_s < LONGEST_GAP_S]
        return fmean(gaps_s) if gaps_s else 0.0

    def _beside(self, name: str) -> dict[tuple[str, int], list[tuple[float, float]]]:
        """By model and block, of each round: mean seconds of the steps that another lane's covered, with the
        longer gap behind them, and those of the same round's plan with the same partition and one lane."""
        single = name.partition(",")[0]
        pairs: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for steps, steps_alone in zip(self.rounds[name], self.rounds[single], strict=True):
            later_s = max(self._gap_s(name, steps) - self._gap_s(single, steps_alone), 0.0)
            alone = self._by_block(single, [step for step in steps_alone if step.mask > 0])
            for block, taken in self._by_block(name, _covered(steps)).items():
                if block in alone:
                    pairs.setdefault(block, []).append((fmean(taken) + later_s, fmean(alone[block])))
        return pairs

    def _crowded(self) -> list[StepSample]:
        """Steps of several items that another lane's covered, with the longer gap behind them."""
        name, bound = GROUPS_BESIDE, self.plans[GROUPS_BESIDE]
        blocks = StepTimes.derived(cpu_device(2)).of_plan(bound).blocks
        single = name.partition(",")[0]
        taken_s: dict[Program, list[float]] = {}
        for steps, steps_alone in zip(self.rounds[name], self.rounds[single], strict=True):
            later_s = max(self._gap_s(name, steps) - self._gap_s(single, steps_alone), 0.0)
            for program, rounds in _programs([list(_covered(steps))]).items():
                taken_s.setdefault(program, []).append(fmean(rounds[0]) + later_s)
        return [
            StepSample(bound, *program, median(seconds))
            for program, seconds in taken_s.items()
            if len(blocks[program[0]].items(program[1])) > 1
        ]

    def _by_block(self, name: str, steps: Iterable[StepSpan]) -> dict[tuple[str, int], list[float]]:
        """Seconds of steps by model and number of the block, in a plan of single blocks."""
        bound = self.plans[name]
        found: dict[tuple[str, int], list[float]] = {}
        for step in steps:
            member = bound.combined[step.combined].members[0]
            found.setdefault((bound.models[member.model].plan.name, member.block), []).append(step.seconds)
        return found


def _programs(rounds: Sequence[Sequence[StepSpan]]) -> dict[Program, list[list[float]]]:
    """Seconds of the steps of each program, by round."""
    programs: dict[Program, list[list[float]]] = {}
    for steps in rounds:
        taken: dict[Program, list[float]] = {}
        for step in steps:
            if step.mask > 0:
                taken.setdefault((step.combined, step.mask, step.buckets), []).append(step.seconds)
        for program, seconds in taken.items():
            programs.setdefault(program, []).append(seconds)
    return programs


def _covered(steps: Sequence[StepSpan]) -> Iterator[StepSpan]:
    """Steps of two lanes for at least nine tenths of which the other lane ran one, too."""
    lanes = [[step for step in steps if step.lane == lane] for lane in (0, 1)]
    for mine, others in (lanes, lanes[::-1]):
        begins_s = [other.began_s for other in others]
        for step in mine:
            first = max(bisect(begins_s, step.began_s) - 1, 0)
            overlapping = others[first : bisect(begins_s, step.ended_s)]
            beside_s = sum(
                max(min(other.ended_s, step.ended_s) - max(other.began_s, step.began_s), 0.0)
                for other in overlapping
            )
            if beside_s >= 0.9 * step.seconds:
                yield step
