"""Measures the stages of a plan: each combined block run alone, all members active, beside what serves.

An instance has to get to a block before that block can run, so the blocks before it run first, one by one;
only the run with all members counts. Rounds over all combined blocks, so that a time limit leaves fewer runs
of each rather than none of the last ones; the first round warms up. Runs during which a task came are left
out.

What a stage's time is: see `shared.stage_times`.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from edge_agent.executor.base import Executor, OperatorTime, StepResult
from edge_agent.executor.idle import IdleTime
from shared.artifact import Artifact
from shared.bound import BoundCombined, BoundModel, BoundPlan
from shared.engine.steps import InstanceId, PlanKey, ProgramKey, Step, StepMember
from shared.errors import ExecutorError
from shared.ids import Digest, StepId, TaskId
from shared.launch_list import lower
from shared.plan import MAX_LANES, Member
from shared.stage_times import stage_spans

if TYPE_CHECKING:
    import numpy

_FIRST: Final = 1 << 48
"""Keys, steps and instances from here on are ours; the engine counts its own from 0."""

_SEED: Final = 11
_numbers = itertools.count(_FIRST)


class Beside(Protocol):
    """An executor that may be serving; its owner says when a step may be handed to it."""

    def issue(self, step: Step, feeds: "Mapping[InstanceId, Sequence[Mapping[str, numpy.ndarray]]]") -> None:
        """Between the engine's own steps."""

    def drop(self, instance: InstanceId) -> None:
        """As above."""

    def set_tracing(self, on: bool) -> None:
        """Have the executor fill in the times of groups, for a step of ours."""


@dataclass(slots=True)
class BlockTimes:
    """What was measured of one combined block, in seconds."""

    step_s: list[float] = field(default_factory=list)
    stage_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def summary(self, of: Sequence[float]) -> OperatorTime:
        """Median and spread in microseconds."""
        import numpy

        low, middle, high = (float(at) * 1e6 for at in numpy.percentile(of, (16, 50, 84)))
        return OperatorTime(middle, (high - low) / 2, len(of))


def profile_stages(
    bound: BoundPlan,
    artifacts: Mapping[Digest, Artifact],
    executor: Executor,
    beside: Beside,
    moments: IdleTime,
    repeats: int,
) -> list[BlockTimes]:
    """Times of every combined block, `repeats` of each at most; none where the time was up. [num_combined]

    The plan is loaded for it and freed again.

    Raises:
        ExecutorError: the plan cannot be loaded, or a step fails.
    """
    times = [BlockTimes() for _ in bound.combined]
    if not moments.wait():
        return times
    key = PlanKey(next(_numbers))
    profile = _Profile(key, bound, executor, beside, moments)
    try:
        with moments.spend():
            executor.load(key, bound, artifacts)
        for round_, index in itertools.product(range(repeats + 1), range(len(bound.combined))):
            result = profile.sample(index)
            if result is None:
                break
            if round_:
                profile.note(index, result, times[index])
    finally:
        executor.unload(key)
    return times


class _Profile:
    """Runs combined blocks of one loaded plan."""

    def __init__(
        self, key: PlanKey, bound: BoundPlan, executor: Executor, beside: Beside, moments: IdleTime
    ) -> None:
        self._key = key
        self._bound = bound
        self._executor = executor
        self._beside = beside
        self._moments = moments
        self._inputs = [_seeded_inputs(model) for model in bound.models]
        self._items = [
            lower(c.plan.schedule, c.graph, c.full_mask, barrier=bound.plan.barrier) for c in bound.combined
        ]

    def sample(self, index: int) -> StepResult | None:
        """One run of a combined block that nothing disturbed; None when the time was up."""
        combined = self._bound.combined[index]
        while True:
            held: dict[Member, InstanceId] = {}
            try:
                # The deepest first: an instance that follows on the same replica needs the slots behind it.
                for member in sorted(combined.members, key=lambda m: -m.block):
                    held[member] = InstanceId(next(_numbers))
                    if not all(self._pass(member, block, held[member]) for block in range(member.block)):
                        return None
                result = self._run(index, combined.full_mask, held, traced=True)
                if result is None or self._moments.undisturbed:
                    return result
            finally:
                for instance in held.values():
                    self._beside.drop(instance)

    def note(self, index: int, result: StepResult, times: BlockTimes) -> None:
        """Keep one sample."""
        spans = stage_spans(self._items[index], [(g.item, g.started_s, g.ended_s) for g in result.groups])
        if spans is None:
            raise ExecutorError("a traced step lacks the times of some groups")
        times.step_s.append(result.ended_s - result.started_s)
        for stage, (began_s, ended_s) in spans.items():
            times.stage_s[stage].append(ended_s - began_s)

    def _pass(self, member: Member, block: int, instance: InstanceId) -> bool:
        """Run an earlier block of a member's replica alone; False when the time was up."""
        before = Member(member.model, member.replica, block)
        index, position = self._bound.home[before]
        return self._run(index, 1 << position, {before: instance}) is not None

    def _run(
        self, index: int, mask: int, held: Mapping[Member, InstanceId], *, traced: bool = False
    ) -> StepResult | None:
        if not self._moments.wait():
            return None
        combined = self._bound.combined[index]
        active = [member for at, member in enumerate(combined.members) if mask >> at & 1]
        buckets = tuple(self._batch(member) for member in active)
        program = ProgramKey(self._key, index, mask, buckets)
        step = Step(
            id=StepId(next(_numbers)),
            lane=MAX_LANES,  # the one behind all that plans have
            program=program,
            members=self._members(combined, active, held),
            after=(),
        )
        feeds = {
            held[member]: [self._inputs[member.model]] * self._batch(member)
            for member in active
            if member.block == 0
        }
        with self._moments.spend():
            self._executor.prepare(program)
            if not traced:
                self._beside.issue(step, feeds)
                return self._executor.wait(step.id)
            self._beside.set_tracing(True)
            try:
                self._beside.issue(step, feeds)
                return self._executor.wait(step.id)
            finally:
                self._beside.set_tracing(False)

    def _members(
        self, combined: BoundCombined, active: Sequence[Member], held: Mapping[Member, InstanceId]
    ) -> tuple[StepMember, ...]:
        return tuple(
            StepMember(
                position=combined.members.index(member),
                member=member,
                instance=held[member],
                tasks=(TaskId(0),) * self._batch(member),
                last=member.block + 1 == self._bound.models[member.model].plan.num_blocks,
                staged=Member(member.model, member.replica, member.block + 1) in active,
            )
            for member in sorted(active, key=lambda m: -m.block)
        )

    def _batch(self, member: Member) -> int:
        return self._bound.models[member.model].buckets[-1]


def _seeded_inputs(model: BoundModel) -> "Mapping[str, numpy.ndarray]":
    """One task's inputs of the graph's types."""
    import numpy

    rng = numpy.random.default_rng(_SEED)
    made = {}
    for tensor in (model.graph.tensors[t] for t in model.graph.inputs):
        dtype = numpy.dtype(tensor.dtype)
        if dtype.kind == "f":
            made[tensor.name] = rng.standard_normal(tensor.shape).astype(dtype)
        else:
            made[tensor.name] = rng.integers(0, 2, tensor.shape).astype(dtype)
    return made


class Alone:
    """An executor that nobody else uses."""

    def __init__(self, executor: Executor) -> None:
        self.issue: Callable[..., None] = executor.issue
        self.drop: Callable[[InstanceId], None] = executor.drop
        self._executor = executor

    def set_tracing(self, on: bool) -> None:
        """Nobody else wants anything of it."""
        self._executor.tracing = on
