"""Our executor's programs as variants: a plan is loaded, prepared off the clock, and run step by step.

On CUDA the prepared graph runs on what lies in the plan's buffers, so inputs and outputs stay on the device,
as they do for every rival; unlike them it also converts the float32 image and the logits, which is part of
the program. Elsewhere each run is a whole step with its copies from and to the host.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from benchmarks.gpu.device import Device
from benchmarks.gpu.networks import Subject
from benchmarks.gpu.plans import Candidate
from benchmarks.gpu.resident import ResidentExecutor
from benchmarks.gpu.rounds import Variant
from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.executor.executors import make_executor
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.engine.steps import InstanceId, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.ids import StepId, TaskId
from stageloom.shared.plan import MAX_LANES

_LANE: Final = MAX_LANES  # the one behind all that plans have, and numbers that no engine counts to
_numbers = itertools.count(1 << 48)


class Loaded:
    """One candidate, loaded and prepared."""

    def __init__(self, executor: Executor, candidate: Candidate, subjects: Sequence[Subject]) -> None:
        """
        Raises:
            PlanError: the plan is not legal. ExecutorError: it cannot be loaded or prepared.
        """
        self.candidate = candidate
        self._executor = executor
        self._subjects = {one.artifact.digest: one for one in subjects}
        artifacts = {digest: one.artifact for digest, one in self._subjects.items()}
        self.bound: BoundPlan = bind(candidate.plan, {digest: one.graph for digest, one in artifacts.items()})
        self.key = PlanKey(next(_numbers))
        executor.load(self.key, self.bound, artifacts)
        (combined,) = self.bound.combined
        buckets = tuple(self.bound.models[member.model].buckets[-1] for member in combined.members)
        self.program = ProgramKey(self.key, 0, combined.full_mask, buckets)
        executor.prepare(self.program)

    def _step(self) -> tuple[Step, dict[InstanceId, list[dict[str, np.ndarray]]]]:
        (combined,) = self.bound.combined
        members = []
        feeds = {}
        for position, member in enumerate(combined.members):
            instance = InstanceId(next(_numbers))
            batch = self.bound.models[member.model].buckets[-1]
            members.append(
                StepMember(
                    position=position,
                    member=member,
                    instance=instance,
                    tasks=(TaskId(0),) * batch,
                    last=True,
                )
            )
            model = self.bound.models[member.model]
            image = self._subjects[model.plan.artifact].image
            feeds[instance] = [{model.graph.tensors[model.graph.inputs[0]].name: image}] * batch
        step = Step(
            id=StepId(next(_numbers)), lane=_LANE, program=self.program, members=tuple(members), after=()
        )
        return step, feeds

    def step(self) -> Mapping[str, list[np.ndarray]]:
        """One whole step from and to the host: logits by model, one per replica and row."""
        step, feeds = self._step()
        self._executor.issue(step, feeds)
        result = self._executor.wait(step.id)
        found: dict[str, list[np.ndarray]] = {}
        for member in step.members:
            model = self.bound.models[member.member.model]
            name = model.graph.tensors[model.graph.outputs[0]].name
            rows = result.outputs[member.instance]
            found.setdefault(model.plan.name, []).extend(row[name] for row in rows)
        return found

    def error(self, found: Mapping[str, list[np.ndarray]]) -> float:
        """The worst of a step's logits against the reference."""
        by_name = {one.name: one for one in self._subjects.values()}
        return max(by_name[name].error_of(row) for name, rows in found.items() for row in rows)

    def replay(self) -> Callable[[], None] | None:
        """The program on what lies in its buffers, on the device's current stream; None without one."""
        if not isinstance(self._executor, ResidentExecutor):
            return None
        return self._executor.replay(self.program)

    def unload(self) -> None:
        """Free it."""
        self._executor.unload(self.key)


class Ours:
    """One executor and the candidates that it has loaded."""

    def __init__(self, device: Device, executor: Executor, subjects: Sequence[Subject]) -> None:
        self.device = device
        self.executor = executor
        self.subjects = subjects
        self.loaded: dict[tuple[str, str], Loaded] = {}
        self.errors: dict[tuple[str, str], float] = {}

    def variant(self, candidate: Candidate) -> Variant:
        """Load a candidate and run it once from the host, so that its buffers hold the images.

        Raises:
            PlanError, ExecutorError: see Loaded.
        """
        loaded = Loaded(self.executor, candidate, self._subjects_of(candidate))
        key = (candidate.subject, candidate.name)
        self.loaded[key] = loaded
        self.errors[key] = loaded.error(loaded.step())
        replay = loaded.replay()
        run: Callable[[], Any] = replay if replay is not None else loaded.step
        run()
        precision = candidate.plan.executor.precision
        return Variant(candidate.subject, candidate.name, run, candidate.units, precision)

    def _subjects_of(self, candidate: Candidate) -> list[Subject]:
        wanted = {model.artifact for model in candidate.plan.models}
        return [one for one in self.subjects if one.artifact.digest in wanted]

    @property
    def resident(self) -> bool:
        """Whether tensors stay on the device between runs."""
        return isinstance(self.executor, ResidentExecutor)

    def stable(self, key: tuple[str, str], repeats: int, pause: Callable[[], None]) -> bool:
        """Whether repeats with pauses before groups give the same bits, and so does the prepared graph."""
        loaded = self.loaded[key]
        first = loaded.step()
        self.executor.pause = pause
        try:
            again = [loaded.step() for _ in range(repeats)]
        finally:
            self.executor.pause = None
        again += [loaded.step() for _ in range(repeats)]
        return all(_same(first, one) for one in again)

    def unload(self) -> None:
        """Free every candidate; the executor keeps what it knows of kernels."""
        for loaded in self.loaded.values():
            loaded.unload()
        self.loaded = {}


def executor_of(name: str) -> Executor:
    """One whose programs can be run on what lies on the device, where there is such.

    Raises:
        ExecutorError: the executor cannot be made here.
    """
    if name == ResidentExecutor.name:
        return ResidentExecutor()
    return make_executor(name)


def _same(left: Mapping[str, list[np.ndarray]], right: Mapping[str, list[np.ndarray]]) -> bool:
    return all(
        one.tobytes() == other.tobytes()
        for name in left
        for one, other in zip(left[name], right[name], strict=True)
    )
