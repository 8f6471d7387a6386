"""The onnxruntime executor on the CPU.

A step runs inside `wait`, on the lane's own thread; the groups beside its first one run on a pool. Tensors
belong to the instance and pass from block to block by reference, so a slot of the design is a dictionary
here, and nothing is copied or overwritten: staging and moves between plans cost nothing.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stageloom.edge_agent.executor.base import (
    BlockTap,
    GroupTime,
    OperatorTime,
    Rows,
    StepResult,
    TimingRequest,
    bucket_of,
    one_line,
    require_artifacts,
    require_precision,
    split_rows,
)
from stageloom.edge_agent.executor.onnx_program import CombinedPrograms, SessionProgram
from stageloom.edge_agent.executor.onnx_sessions import (
    SessionCache,
    SessionKey,
    Values,
    activation_bytes,
    weight_bytes,
)
from stageloom.edge_agent.executor.onnx_timing import time_operators
from stageloom.edge_agent.executor.threads import MAX_THREADS, StepOrder, StreamPool
from stageloom.shared.artifact import Artifact
from stageloom.shared.bitmask import bits
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, MoveInstance, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import Digest, StepId
from stageloom.shared.plan import Member


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A plan with what its programs are made from."""

    bound: BoundPlan
    combined: tuple[CombinedPrograms, ...]
    artifacts: Mapping[Digest, Artifact]


class OnnxExecutor:
    """Runs plans on onnxruntime's CPU kernels."""

    name = "onnx"

    def __init__(self) -> None:
        self.tracing = False
        self.tap: BlockTap | None = None
        self.pause: Callable[[], None] | None = None
        self._order = StepOrder()
        self._pool = StreamPool()
        self._cache = SessionCache()
        self._plans: dict[PlanKey, _Loaded] = {}
        self._programs: dict[ProgramKey, SessionProgram] = {}
        self._issued: dict[StepId, tuple[Step, Mapping[InstanceId, Rows]]] = {}
        self._values: dict[InstanceId, Values] = {}

    @property
    def sessions(self) -> int:
        """Sessions that loaded plans hold."""
        return len(self._cache)

    def stated_bytes(self, bound: BoundPlan, *, alone: bool = False) -> int:
        """Weights of the sessions that are not there yet, and activations beyond what loaded plans need."""
        weights = _session_bytes(bound)
        missing = sum(size for key, size in weights.items() if alone or self._cache.get(key) is None)
        present = 0 if alone else self._held_activation_bytes
        return missing + max(0, _activation_bytes(bound) - present)

    @property
    def held_bytes(self) -> int:
        """Weights of every session that is kept or that a loaded plan may want, and the most activations."""
        weights: dict[SessionKey, int] = {}
        for loaded in list(self._plans.values()):
            weights |= _session_bytes(loaded.bound)
        weights |= self._cache.idle()
        return sum(weights.values()) + self._held_activation_bytes

    @property
    def _held_activation_bytes(self) -> int:
        return max((_activation_bytes(loaded.bound) for loaded in list(self._plans.values())), default=0)

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        """Make the sessions of every atom at batch 1: with them any mask can run as a fallback.

        Raises:
            ExecutorError: an option is unknown, an artifact is missing, or a session cannot be made.
        """
        require_precision(bound, "onnx", ["fp32"], "use fp32, which keeps the model's own types")
        require_artifacts(bound, artifacts)
        combined = tuple(CombinedPrograms(bound, block) for block in bound.combined)
        singles = {
            session
            for block, programs in zip(bound.combined, combined, strict=True)
            for session in programs.keys(dict.fromkeys(range(len(block.members)), 1))
        }
        try:
            self._cache.hold(key, singles, artifacts)
        except ExecutorError:
            self._cache.release(key)
            raise
        self._plans[key] = _Loaded(bound, combined, dict(artifacts))

    def prepare(self, program: ProgramKey) -> None:
        """Make the sessions for the program's buckets and have a thread for each of its streams.

        Raises:
            ExecutorError: a session cannot be made.
        """
        if program in self._programs:
            return
        loaded = self._plans[program.plan]
        built = self._build(program, loaded)
        self._cache.hold(program.plan, {key for keys in built.sessions for key in keys}, loaded.artifacts)
        self._pool.grow(loaded.bound.plan.lanes * min(built.threading.threads - 1, MAX_THREADS))
        self._programs[program] = built

    def _build(self, program: ProgramKey, loaded: _Loaded) -> SessionProgram:
        bucket_of = dict(zip(bits(program.mask), program.buckets, strict=True))
        return loaded.combined[program.combined].program(program.mask, bucket_of)

    def issue(self, step: Step, feeds: Mapping[InstanceId, Rows]) -> None:
        """Take the step in; it runs in `wait`."""
        self._order.issue(step)
        self._issued[step.id] = (step, feeds)

    def wait(self, step: StepId) -> StepResult:
        """Run the step on this thread.

        Raises:
            ExecutorError: a session failed, or an instance lacks a tensor because an earlier step failed.
        """
        issued, feeds = self._issued.pop(step)
        self._order.begin(issued)
        self._pool.begin()
        started_s = time.monotonic()
        try:
            values = {m.position: self._gather(issued, m, feeds) for m in issued.members}
            groups: list[GroupTime] = []
            for part, position in self._parts(issued):
                self._run(issued, part, position, values, groups)
            outputs = {
                m.instance: self._leave(issued, m, values[m.position]) for m in issued.members if m.last
            }
        finally:
            self._pool.end()
            self._order.end(issued)
        return StepResult(started_s, time.monotonic(), outputs, tuple(groups))

    def _parts(self, step: Step) -> Iterable[tuple[ProgramKey, int | None]]:
        """The programs a step runs, and of which member alone: all at once, or one after another."""
        if not step.fallback:
            return [(step.program, None)]
        plan, combined = step.program.plan, step.program.combined
        return [
            (ProgramKey(plan, combined, 1 << m.position, (bucket_of(step, m),)), m.position)
            for m in step.members
        ]

    def _gather(self, step: Step, member: StepMember, feeds: Mapping[InstanceId, Rows]) -> Values:
        """The tensors in the member's slot."""
        if member.member.block:
            try:
                return self._values[member.instance]
            except KeyError:
                raise ExecutorError(f"instance {member.instance} lost its tensors in a failed step") from None
        graph = self._plans[step.program.plan].bound.models[member.member.model].graph
        rows = feeds[member.instance]
        bucket = bucket_of(step, member)
        return {t: _stack([row[graph.tensors[t].name] for row in rows], bucket) for t in graph.inputs}

    def _run(
        self,
        step: Step,
        key: ProgramKey,
        alone: int | None,
        values: Mapping[int, Values],
        groups: list[GroupTime],
    ) -> None:
        program = self._programs.get(key)
        if program is None:  # not prepared: only a fallback gets here, and runs on this thread
            program = self._build(key, self._plans[key.plan])
        tracing, pause = self.tracing, self.pause

        def item(index: int) -> None:
            if pause is not None:
                pause()
            position = program.items[index].member
            started_s = time.monotonic() if tracing else 0.0
            for session in program.sessions[index]:
                self._run_session(session, values[position])
            for tensor in program.dead[index]:
                values[position].pop(tensor, None)
            if tracing:
                stream = program.items[index].stream if alone is None else 0
                groups.append(GroupTime(index, stream, started_s, time.monotonic()))

        try:
            if alone is not None or program.threading.threads == 1:
                for index in range(len(program.items)):
                    item(index)
            else:
                self._pool.run(program.threading, item)
        except ExecutorError:
            raise
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise ExecutorError(f"step {step.id} failed: {one_line(error)}") from error
        for member in step.members:
            if alone is None or member.position == alone:
                self._settle(step, member, values[member.position])

    def _run_session(self, key: SessionKey, values: Values) -> None:
        session = self._cache.get(key)
        if session is not None:
            session.run(values)
            return
        single = self._cache.get(replace(key, batch=1))
        if single is None:
            raise ExecutorError(f"no session for {len(key.ops)} operators of {key.artifact[:12]} is loaded")
        single.run_rows(values)

    def _settle(self, step: Step, member: StepMember, values: Values) -> None:
        """Keep what crosses the border behind the block, by reference, and forget the rest."""
        model = self._plans[step.program.plan].bound.models[member.member.model]
        live = model.blocks[member.member.block].live_out
        crossing = {tensor: values[tensor] for tensor in live}
        if self.tap is not None:
            names = [model.graph.tensors[tensor].name for tensor in live]
            rows = [_rows(array, len(member.tasks), model.plan.batch) for array in crossing.values()]
            self.tap(member.instance, member.member, dict(zip(names, rows, strict=True)))
        values.clear()
        values.update(crossing)
        if not member.last:
            self._values[member.instance] = values

    def _leave(self, step: Step, member: StepMember, values: Values) -> Rows:
        """The outputs of an instance that ends, per task; it holds nothing from here on."""
        self._values.pop(member.instance, None)
        model = self._plans[step.program.plan].bound.models[member.member.model]
        outputs = {model.graph.tensors[t].name: values[t] for t in model.graph.outputs}
        return split_rows(model, len(member.tasks), outputs)

    def move(self, action: MoveInstance) -> None:
        """Nothing to do: tensors are kept by instance, and the cut is the same in both plans."""

    def drop(self, instance: InstanceId) -> None:
        """Let go of the instance's tensors."""
        self._values.pop(instance, None)

    def time_operators(
        self, artifact: Artifact, request: TimingRequest, idle: Callable[[], bool]
    ) -> tuple[OperatorTime, ...]:
        """Run the model operator by operator; see `onnx_timing`."""
        return time_operators(artifact, request, idle)

    def unload(self, key: PlanKey) -> None:
        """Let go of the plan's programs and sessions; some are kept in case that it comes back."""
        self._plans.pop(key, None)
        for program in [program for program in list(self._programs) if program.plan == key]:
            del self._programs[program]
        self._cache.release(key)

    def drop_idle(self) -> None:
        """Free the sessions that no loaded plan holds."""
        self._cache.drop_idle()

    def close(self) -> None:
        """Let go of everything and end the pool."""
        for key in list(self._plans):
            self.unload(key)
        self._cache.drop_idle()
        self._values.clear()
        self._pool.close()


def _session_bytes(bound: BoundPlan) -> dict[SessionKey, int]:
    """Every session that the plan may want, with the bytes of its weights."""
    graphs = {model.plan.artifact: model.graph for model in bound.models}
    return {
        key: weight_bytes(key, graphs[key.artifact])
        for combined in bound.combined
        for bucket_of in _every_bucket(bound, combined.members)
        for key in CombinedPrograms(bound, combined).keys(bucket_of)
    }


def _activation_bytes(bound: BoundPlan) -> int:
    """What the plan's steps need at once: one run per lane, of its most demanding model."""
    largest = max(activation_bytes(model.graph, model.plan.batch) for model in bound.models)
    return bound.plan.lanes * largest


def _stack(rows: Sequence[np.ndarray], bucket: int) -> np.ndarray:
    """The tasks' rows as one batch; what is missing to the bucket repeats the first row. [bucket, ...]

    A single row passes by reference. Padding repeats real data, since zeros can be slow (denormals) or
    outside what a model accepts.
    """
    if bucket == 1:
        return rows[0]
    return np.concatenate([*rows, *[rows[0]] * (bucket - len(rows))])


def _rows(array: np.ndarray, tasks: int, batch: int) -> np.ndarray:
    """The rows that belong to tasks; a model without batches may have tensors without a leading axis."""
    return array if batch == 1 else array[:tasks]


def _every_bucket(bound: BoundPlan, members: Sequence[Member]) -> Iterator[dict[int, int]]:
    """Per bucket size the members that have it; together they name every session a plan may want."""
    buckets = {position: bound.models[m.model].buckets for position, m in enumerate(members)}
    for size in sorted({size for sizes in buckets.values() for size in sizes}):
        yield {position: size for position, sizes in buckets.items() if size in sizes}
