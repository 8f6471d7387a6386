"""The plans of the contract, and how they are compared with the whole models.

Every kind of schedule, several models at once, masks, batches, replicas; run on an executor step by step
as an engine would. Models have weights that say something, two inputs, and what onnxruntime makes of
them.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx.backend.test

from benchmarks import zoo
from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.verify.pairs import Differences, Pair, find_pair, seed_model
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.blocks import CombinedGraph, split
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, PlanKey
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits
from stageloom.shared.launch_list import Barrier
from stageloom.shared.plan import ExecutorOptions, Member
from stageloom.shared.schedule import Schedule, StageSchedule
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.costs import CostTable, StageCosts
from stageloom.shared.search.interface import TOP_LIMITS, Budget
from stageloom.shared.search.registry import scheduler
from tests.executor.contract.schedules import (
    StepMaker,
    bound_of,
    graph_of,
    merged,
    plan_of,
    random_stages,
    random_streams,
)

LIGHT = Path(onnx.backend.test.__file__).parent / "data" / "light"
LARGE = ("light_bvlc_alexnet", "light_vgg19", "light_zfnet512")
"""Light models of 230 to 550 MB once their weights are folded."""

_SEED = 17


@dataclass(frozen=True)
class Subject:
    """One model; `pair.expected` has every tensor that crosses one of its base cuts, and its outputs."""

    name: str
    artifact: Artifact
    pair: Pair

    @property
    def cuts(self) -> tuple[int, ...]:
        """The cuts of the papers where the file has them, else all base cuts."""
        offered = dict(self.artifact.graph.partitions)
        return offered.get("paper", self.artifact.graph.base_cuts)

    @property
    def half(self) -> tuple[int, ...]:
        """One cut in the middle; none where there is none."""
        return self.cuts[len(self.cuts) // 2 :][:1]


def zoo_subject(name: str, folder: Path, *, width: float = 1.0, side: int | None = None) -> Subject:
    """A zoo model; `folder` keeps its files for as long as it is used."""
    folder.mkdir(parents=True, exist_ok=True)
    zoo.write(name, folder / "model.onnx", width=width, size=side)
    return onnx_subject(name, folder / "model.onnx", folder)


def onnx_subject(name: str, path: Path, folder: Path) -> Subject:
    """A model from a file, imported in this process."""
    folder.mkdir(parents=True, exist_ok=True)
    import_here(path, {}, folder, ImportLimits(), lambda line: None)
    return artifact_subject(name, open_artifact(folder / ARTIFACT_NAME), folder)


def artifact_subject(name: str, artifact: Artifact, folder: Path) -> Subject:
    """A model that was imported; `folder` is as for `zoo_subject`."""
    rng = np.random.default_rng(_SEED)
    seeded = seed_model(artifact, {}, rng, folder)
    graph = seeded.artifact.graph
    crossing = {t for cut in graph.base_cuts for t in graph.live_at(cut)} | set(graph.outputs)
    pair = find_pair(seeded, [graph.tensors[t].name for t in sorted(crossing)], {}, rng, folder)
    return Subject(name, seeded.artifact, pair)


if TYPE_CHECKING:
    import numpy as np

_LONGEST_DELAY_S = 1e-3
_keys = itertools.count(1)


@dataclass(slots=True)
class Outcome:
    """What many runs of one plan came to."""

    stable: bool = True  # equal bits for equal inputs
    tensors: int = 0  # compared, repeats included
    differences: "Differences[tuple[object, ...]]" = field(default_factory=Differences, repr=False)
    _first: dict[tuple[object, ...], bytes] = field(default_factory=dict, repr=False)

    @property
    def difference(self) -> float:
        return max((difference for _, _, difference, _ in self.differences.over_inputs()), default=0.0)

    @property
    def worst(self) -> str:
        """Where the first tensor lies that does not agree; empty if all do."""
        return next(
            (
                str(place)
                for place, _, difference, standard in self.differences.over_inputs()
                if difference > standard.tolerance
            ),
            "",
        )

    @property
    def agrees(self) -> bool:
        """All is as it should be."""
        return self.stable and self.tensors > 0 and not self.worst

    def add(self, pair: Pair, place: tuple[object, ...], name: str, which: int, got: "np.ndarray") -> None:
        """Compare one tensor of one task; `which` is the input it comes from."""
        self.tensors += 1
        bits = got.tobytes()
        if self._first.get((*place, which)) == bits:
            return
        self.stable = self.stable and (*place, which) not in self._first
        self._first.setdefault((*place, which), bits)
        self.differences.add(pair, place, name, which, got)


class Delays:
    """A random pause before every group; called from several threads."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Sleep for up to a millisecond."""
        with self._lock:
            seconds = self._rng.random() * _LONGEST_DELAY_S
        time.sleep(seconds)


@contextmanager
def loaded(executor: Executor, bound: BoundPlan, subjects: Sequence[Subject]) -> Iterator[PlanKey]:
    """The plan is on the executor, and so is what other plans share with it: weights, lowered models."""
    key = PlanKey(next(_keys))
    executor.load(key, bound, {subject.artifact.digest: subject.artifact for subject in subjects})
    try:
        yield key
    finally:
        executor.unload(key)


def compare(
    executor: Executor,
    bound: BoundPlan,
    subjects: Sequence[Subject],
    *,
    repeats: int,
    seed: int = 0,
    tasks: int = 1,
    fallback: bool = False,
    models: Sequence[int] | None = None,
) -> Outcome:
    """Run one instance of every replica through the plan, `repeats` times, with delays but for the first.

    Inputs alternate from repeat to repeat and from task to task, so that what an earlier instance left shows.
    Only `models` get instances, by default all; with fewer, steps run under smaller masks. `fallback`:
    members run one after another, as before their program is ready.

    Raises:
        ExecutorError: a step failed.
    """
    outcome = Outcome()
    with loaded(executor, bound, subjects) as key:
        wave = Wave(executor, StepMaker(key, bound), bound, subjects, tasks, fallback)
        try:
            for repeat in range(repeats):
                executor.pause = Delays(random.Random(seed + repeat)) if repeat else None
                wave.run(repeat, models if models is not None else range(len(subjects)), outcome)
        finally:
            executor.tap = executor.pause = None
    return outcome


class Wave:
    """One instance per replica, from its first block to its last."""

    def __init__(
        self,
        executor: Executor,
        steps: StepMaker,
        bound: BoundPlan,
        subjects: Sequence[Subject],
        tasks: int,
        fallback: bool,
    ) -> None:
        self._executor = executor
        self._steps = steps
        self._bound = bound
        self._subjects = subjects
        self._tasks = tasks
        self._fallback = fallback
        self._numbers = itertools.count(1)

    def run(self, repeat: int, models: Sequence[int], outcome: Outcome) -> None:
        """Issue steps until every instance is through; each takes all members that are ready."""
        at: dict[tuple[int, int], int] = {  # per replica the next block
            (model, replica): 0
            for model in models
            for replica in range(self._bound.models[model].plan.replicas)
        }
        instance = {replica: InstanceId(next(self._numbers)) for replica in at}

        def tap(number: InstanceId, member: Member, tensors: "Mapping[str, np.ndarray]") -> None:
            self.check(repeat, member, tensors, outcome)

        self._executor.tap = tap
        while at:
            ready = {
                index: {
                    position: member
                    for position, member in enumerate(combined.members)
                    if at.get((member.model, member.replica)) == member.block
                }
                for index, combined in enumerate(self._bound.combined)
            }
            index = max(ready, key=lambda one: len(ready[one]))
            self._step(index, ready[index], instance, repeat)
            for member in ready[index].values():
                replica = (member.model, member.replica)
                at[replica] += 1
                if at[replica] == len(self._bound.models[member.model].blocks):
                    del at[replica]

    def _step(
        self,
        index: int,
        active: Mapping[int, Member],
        instance: Mapping[tuple[int, int], InstanceId],
        repeat: int,
    ) -> None:
        named = {position: (instance[m.model, m.replica], self._tasks) for position, m in active.items()}
        step = self._steps.step(index, named, fallback=self._fallback)
        feeds = {
            instance[m.model, m.replica]: [
                self._subjects[m.model].pair.feeds[self._which(repeat, m, row)] for row in range(self._tasks)
            ]
            for m in active.values()
            if m.block == 0
        }
        if not self._fallback:
            self._executor.prepare(step.program)
        self._executor.issue(step, feeds)
        self._executor.wait(step.id)

    def _which(self, repeat: int, member: Member, row: int) -> int:
        inputs = len(self._subjects[member.model].pair.feeds)
        return (repeat + member.model + member.replica + row) % inputs

    def check(
        self, repeat: int, member: Member, tensors: "Mapping[str, np.ndarray]", outcome: Outcome
    ) -> None:
        """Compare what an instance left behind a block with what the whole model has there."""
        subject = self._subjects[member.model]
        rows = self._bound.models[member.model].plan.batch > 1
        for row in range(self._tasks):
            which = self._which(repeat, member, row)
            for name, array in tensors.items():
                got = array[row : row + 1] if rows else array
                place = (subject.name, member.replica, member.block, name, row)
                outcome.add(subject.pair, place, name, which, got)


RATES = DeviceRates(launch_s=1e-3, contention=0.3, barrier_s=1e-5)
"""Launches are dear and overlap well, so that searches both merge and put side by side all that they may."""

_BUDGET = Budget(expansions=4_000)
_SEARCHED = ("sequential", "greedy", "ios", "ios_parallel", "ios_merge", "opara", "nimble")
_DRAWN: Mapping[str, Callable[[CombinedGraph, random.Random], Schedule]] = {
    "random_stages": random_stages,
    "random_streams": random_streams,
}

SCHEDULES = (*_SEARCHED, "merged", *_DRAWN)
"""Schedulers by name; `merged` merges whatever is ready and may, the last two are drawn."""


@dataclass(frozen=True)
class Case:
    """One plan, searched for when it is first asked for, and how it is run."""

    name: str
    subjects: tuple[Subject, ...]
    plan: Callable[[], BoundPlan] = field(repr=False)
    tasks: int = 1
    fallback: bool = False
    models: tuple[int, ...] = ()  # that get instances; empty: all

    @cached_property
    def bound(self) -> BoundPlan:
        return self.plan()

    def run(self, executor: Executor, *, repeats: int) -> Outcome:
        """Compare every tensor behind every block with the whole models'.

        Raises:
            ExecutorError: a step failed.
        """
        return compare(
            executor,
            self.bound,
            self.subjects,
            repeats=repeats,
            tasks=self.tasks,
            fallback=self.fallback,
            models=self.models or None,
        )

    @property
    def merges(self) -> int:
        """Merge stages of all combined blocks."""
        schedules = [block.schedule for block in self.bound.plan.combined]
        return sum(stage.merge for one in schedules if isinstance(one, StageSchedule) for stage in one.stages)


def schedule_of(
    name: str, subjects: Sequence[Subject], cuts: Sequence[tuple[int, ...]], members: Sequence[Member]
) -> Schedule:
    """The schedule of some blocks together; drawn ones are the same whenever they are asked for."""
    graph = graph_of([one.artifact for one in subjects], cuts, members)
    if name == "merged":
        return merged(graph)
    if name in _DRAWN:
        return _DRAWN[name](graph, random.Random(f"{name} {members} {graph.size}"))
    return scheduler(name)(graph, _costs(subjects, cuts, members), TOP_LIMITS, _BUDGET)


def _costs(
    subjects: Sequence[Subject], cuts: Sequence[tuple[int, ...]], members: Sequence[Member]
) -> StageCosts:
    parts = []
    for member in members:
        artifact = subjects[member.model].artifact
        block = split(artifact.graph, cuts[member.model])[member.block]
        parts.append((artifact.digest, artifact.graph, block))
    return CostTable(rates=RATES).for_members(parts)


def planned(
    name: str,
    subjects: Sequence[Subject],
    cuts: Sequence[tuple[int, ...]],
    groups: Sequence[Sequence[Member]],
    *,
    executor: str,
    batch: int = 1,
    replicas: int = 1,
    barrier: Barrier = Barrier.FULL,
) -> BoundPlan:
    """A plan whose combined blocks all have the schedule of that name."""
    artifacts = [one.artifact for one in subjects]
    schedules = [schedule_of(name, subjects, cuts, members) for members in groups]
    plan = plan_of(artifacts, cuts, groups, schedules, batch=batch, replicas=replicas, barrier=barrier)
    return bound_of(replace(plan, executor=ExecutorOptions(name=executor)), artifacts)


def alone(subject: Subject, schedule: str, executor: str) -> Case:
    """One model in its blocks, each by itself."""
    groups = [[Member(0, 0, block)] for block in range(len(subject.cuts) + 1)]

    def plan() -> BoundPlan:
        return planned(schedule, [subject], [subject.cuts], groups, executor=executor)

    return Case(f"{subject.name} {schedule}", (subject,), plan)


def together(subjects: Sequence[Subject], schedule: str, executor: str, barrier: Barrier) -> Case:
    """Several models, each in two blocks, the first ones combined and the second ones combined."""
    cuts = [one.half for one in subjects]
    groups = [
        [Member(model, 0, block) for model in range(len(subjects)) if block <= len(cuts[model])]
        for block in range(2)
    ]

    def plan() -> BoundPlan:
        return planned(schedule, subjects, cuts, groups, executor=executor, barrier=barrier)

    names = "+".join(one.name for one in subjects)
    return Case(f"{names} {schedule} barrier={barrier.value}", tuple(subjects), plan)


def masks(subjects: Sequence[Subject], schedule: str, executor: str) -> Iterator[Case]:
    """One combined block of whole models, under every mask, prepared and as a fallback."""
    cuts: list[tuple[int, ...]] = [()] * len(subjects)
    members = [Member(model, 0, 0) for model in range(len(subjects))]
    plan = cache(lambda: planned(schedule, subjects, cuts, [members], executor=executor))
    for size in range(1, len(subjects) + 1):
        for models in itertools.combinations(range(len(subjects)), size):
            for fallback in (False, True):
                name = f"{schedule} mask={''.join(map(str, models))}{' fallback' * fallback}"
                yield Case(name, tuple(subjects), plan, fallback=fallback, models=models)


def batches(subject: Subject, schedule: str, executor: str, batch: int = 4) -> Iterator[Case]:
    """Every number of tasks of a padded batch, prepared and as a fallback."""
    groups = [[Member(0, 0, block)] for block in range(len(subject.half) + 1)]
    plan = cache(lambda: planned(schedule, [subject], [subject.half], groups, executor=executor, batch=batch))
    for tasks in range(1, batch + 1):
        for fallback in (False, True):
            name = f"{subject.name} {schedule} tasks={tasks}/{batch}{' fallback' * fallback}"
            yield Case(name, (subject,), plan, tasks=tasks, fallback=fallback)


def replicas(subject: Subject, schedule: str, executor: str) -> Case:
    """Two replicas of one model in one combined block: same weights, different instances."""
    groups = [[Member(0, 0, block), Member(0, 1, block)] for block in range(len(subject.half) + 1)]

    def plan() -> BoundPlan:
        return planned(schedule, [subject], [subject.half], groups, executor=executor, replicas=2)

    return Case(f"{subject.name} {schedule} replicas=2", (subject,), plan)
