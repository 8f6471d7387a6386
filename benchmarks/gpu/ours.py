"""Our executor's programs as variants: a plan is loaded, prepared off the clock, and run step by step.

On CUDA the prepared graph runs on what lies in the plan's buffers, so inputs and outputs stay on the device,
as they do for every rival; unlike them it also converts the float32 image and the logits, which is part of
the program. Elsewhere each run is a whole step with its copies from and to the host.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from benchmarks.gpu.networks import Subject
from benchmarks.gpu.plans import Candidate
from benchmarks.gpu.rounds import Variant
from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.executor.cuda.streams import Nature
from stageloom.edge_agent.executor.executors import make_executor
from stageloom.edge_agent.executor.torch.builder import Effort
from stageloom.edge_agent.executor.torch.executor import TorchCudaExecutor
from stageloom.shared.bound import bind
from stageloom.shared.engine.steps import InstanceId, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.ids import OpId, StepId, TaskId
from stageloom.shared.plan import MAX_LANES

_GRAPH_BYTES: Final = 24 << 30
_LANE: Final = MAX_LANES  # the one behind all that plans have, and numbers that no engine counts to
_numbers = itertools.count(1 << 48)


class ResidentExecutor(TorchCudaExecutor):
    """Every schedule keeps its own form, so that a row measures what it names; no graph is given up."""

    def __init__(self) -> None:
        """
        Raises:
            ExecutorError: there is no CUDA device.
        """
        super().__init__(effort=Effort(form_rounds=0, alone=False), graph_bytes=_GRAPH_BYTES)

    def launcher(self, program: ProgramKey) -> Callable[[], None] | None:
        """What launches a prepared program's graph on torch's current stream; None if it was not captured."""
        graph: Any = self._built[program].graph  # torch's own
        if graph is None:
            return None
        launch: Callable[[], None] = graph.replay
        return launch

    def natures(self, plan: PlanKey) -> Mapping[OpId, Nature]:
        """What choosing kernels showed of the operators of a prepared plan of one model."""
        return self.choices.natures(self._plans[plan].lowering(0), 1)


class LoadedCandidate:
    """A plan of one combined block, loaded and prepared."""

    def __init__(self, executor: Executor, candidate: Candidate, subjects: Sequence[Subject]) -> None:
        """
        Raises:
            PlanError: the plan is not legal. ExecutorError: it cannot be loaded or prepared.
        """
        self._executor = executor
        wanted = {model.artifact for model in candidate.plan.models}
        self._subjects = {
            subject.artifact.digest: subject for subject in subjects if subject.artifact.digest in wanted
        }
        artifacts = {digest: subject.artifact for digest, subject in self._subjects.items()}
        bound = bind(candidate.plan, {digest: artifact.graph for digest, artifact in artifacts.items()})
        self.key = PlanKey(next(_numbers))
        executor.load(self.key, bound, artifacts)
        (combined,) = bound.combined
        self._members = [(member, bound.models[member.model]) for member in combined.members]
        buckets = tuple(model.buckets[-1] for _, model in self._members)
        self._program = ProgramKey(self.key, 0, combined.full_mask, buckets)
        executor.prepare(self._program)

    def step(self) -> list[tuple[Subject, np.ndarray]]:
        """One whole step from and to the host: the logits of every replica and row, with their subject."""
        members, subjects = [], []
        feeds: dict[InstanceId, list[dict[str, np.ndarray]]] = {}
        for position, (member, model) in enumerate(self._members):
            instance, batch = InstanceId(next(_numbers)), model.buckets[-1]
            members.append(StepMember(position, member, instance, (TaskId(0),) * batch, last=True))
            subjects.append(self._subjects[model.plan.artifact])
            feeds[instance] = [subjects[-1].feeds] * batch
        step = Step(StepId(next(_numbers)), _LANE, self._program, tuple(members), after=())
        self._executor.issue(step, feeds)
        outputs = self._executor.wait(step.id).outputs
        return [
            (subject, row[subject.logits])
            for member, subject in zip(members, subjects, strict=True)
            for row in outputs[member.instance]
        ]

    def run(self) -> Callable[[], Any]:
        """What a row measures: the graph on what lies in its buffers, or a whole step where there is none."""
        if isinstance(self._executor, ResidentExecutor):
            return self._executor.launcher(self._program) or self.step
        return self.step


class Ours:
    """One executor and the candidates that it has loaded."""

    def __init__(self, name: str, subjects: Sequence[Subject]) -> None:
        """
        Raises:
            ExecutorError: the executor cannot be made here.
        """
        self.executor = ResidentExecutor() if name == ResidentExecutor.name else make_executor(name)
        self._subjects = subjects
        self._loaded: dict[tuple[str, str], LoadedCandidate] = {}

    def variant(self, candidate: Candidate) -> Variant:
        """Load a candidate and run it once from the host, so that its buffers hold the images.

        Raises:
            PlanError, ExecutorError: see LoadedCandidate.
        """
        loaded = LoadedCandidate(self.executor, candidate, self._subjects)
        self._loaded[candidate.key] = loaded
        error = max(subject.error_of(logits) for subject, logits in loaded.step())
        run = loaded.run()
        run()
        precision = candidate.plan.executor.precision
        return Variant(*candidate.key, run, candidate.units, precision, error)

    def natures(self, candidate: Candidate) -> Mapping[OpId, Nature]:
        """What loading a candidate of one model showed of its operators; nothing where none is measured."""
        loaded = self._loaded.get(candidate.key)
        if loaded is None or not isinstance(self.executor, ResidentExecutor):
            return {}
        return self.executor.natures(loaded.key)
