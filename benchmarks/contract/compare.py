"""Runs plans on an executor, step by step as an engine would, and compares all that crosses a border."""

import itertools
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.contract.schedules import StepMaker
from benchmarks.contract.subjects import Subject
from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.verify.pairs import Differences, Pair
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, PlanKey
from stageloom.shared.plan import Member

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
        """The largest relative difference."""
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
