"""A session per item of the launch list, tensors by reference: what executors on sessions' backends share.

Tensors belong to the instance and pass from block to block by reference (`slot_store`), so a slot of the
design is a dictionary here, and nothing is overwritten: staging and moves between plans cost nothing. A
backend says how a session is opened.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from stageloom.edge_agent.executor.base import (
    OperatorTime,
    Rows,
    TimingRequest,
    bucket_of,
    padded,
    require_artifacts,
    require_options,
)
from stageloom.edge_agent.executor.host import NO_SLOT, HostExecutor
from stageloom.edge_agent.executor.onnx.cache import (
    SessionCache,
    SessionKey,
    ValuesSession,
    WritesInto,
    activation_bytes,
    weight_bytes,
)
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.onnx.program import (
    CombinedPrograms,
    HalfRun,
    JoinRun,
    SessionProgram,
)
from stageloom.edge_agent.executor.onnx.split_timing import PartTime, PartTimingRequest, time_parts
from stageloom.edge_agent.executor.onnx.timing import time_operators
from stageloom.edge_agent.executor.slot_store import HOST, Values
from stageloom.shared.artifact import Artifact
from stageloom.shared.bitmask import bits
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import (
    InstanceId,
    MoveInstance,
    PlanKey,
    ProgramKey,
    Step,
    StepMember,
)
from stageloom.shared.errors import ExecutorError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, TensorId
from stageloom.shared.partition import AxisRange
from stageloom.shared.plan import Member


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """A plan with what its programs are made from."""

    bound: BoundPlan
    combined: Mapping[tuple[int, int], CombinedPrograms]  # by combined block and variant that it runs
    artifacts: Mapping[Digest, Artifact]
    weights: Mapping[SessionKey, int]  # bytes of every session that it may want


class SessionExecutor(HostExecutor[SessionPlan, SessionProgram, Values]):
    """Runs plans on sessions that are made once and shared."""

    precisions: ClassVar[tuple[str, ...]] = ("fp32",)
    passes_slots: ClassVar[bool] = True
    knows_nodes: ClassVar[bool] = True
    one_caller: ClassVar[bool] = False  # a session runs in one lane at a time

    def __init__(self) -> None:
        super().__init__()
        self._cache: SessionCache[ValuesSession] = SessionCache(self._open_any, self._weigh)

    @abstractmethod
    def _open(self, key: SessionKey, source: ModelParts) -> ValuesSession:
        """Make a session.

        Raises:
            ExecutorError: the backend cannot build it.
        """

    def _open_any(self, key: SessionKey, source: ModelParts) -> ValuesSession:
        session = self._open(key, source)
        if key.half is None:
            return session
        outputs = source.artifact.graph.operators[key.ops[-1]].outputs
        return HalfSession(session, source.half(key.ops, key.batch, key.half).reads, outputs)

    def _caches(self, keys: Iterable[SessionKey]) -> "dict[SessionCache[ValuesSession], set[SessionKey]]":
        """Sessions by the cache that has them: this executor's, or that of one that shares the plan."""
        found: dict[SessionCache[ValuesSession], set[SessionKey]] = {}
        for key in keys:
            found.setdefault(self._cache_of(key), set()).add(key)
        return found

    def _cache_of(self, key: SessionKey) -> "SessionCache[ValuesSession]":
        return self._runner_of(key)._cache

    def _runner_of(self, key: SessionKey) -> "SessionExecutor":
        if not key.executor:
            return self
        partner = self.partner(key.executor)
        if not isinstance(partner, SessionExecutor):
            raise ExecutorError(
                f"executor {key.executor!r} does not run groups of blocks that {self.name} runs",
                remedy="use executors on sessions: onnx or openvino",
            )
        return partner

    def _hold(
        self, holder: PlanKey, keys: Iterable[SessionKey], artifacts: Mapping[Digest, Artifact]
    ) -> None:
        graphs = {digest: artifact.graph for digest, artifact in artifacts.items()}
        for cache, own in self._caches(self._with_stand_ins(keys, graphs)).items():
            cache.hold_all(holder, own, artifacts)

    def _with_stand_ins(self, keys: Iterable[SessionKey], graphs: Mapping[Digest, Graph]) -> set[SessionKey]:
        wanted = set(keys)
        stand_ins = {self._runner_of(key)._stand_in(key, graphs[key.artifact]) for key in wanted}
        return wanted | {key for key in stand_ins if key is not None}

    def _stand_in(self, key: SessionKey, graph: Graph) -> SessionKey | None:
        """What is to be there beside a session, once for all of its copies."""
        return None

    @staticmethod
    def _weigh(key: SessionKey, graph: Graph) -> int:
        """Bytes that a session keeps for as long as it is there."""
        return weight_bytes(key, graph)

    # Plans and programs

    @property
    def sessions(self) -> int:
        """Sessions that loaded plans hold."""
        return len(self._cache)

    def stated_bytes(self, bound: BoundPlan, *, alone: bool = False) -> int:
        """Weights of the sessions that are not there yet, and activations beyond what loaded plans need."""
        weights = self._session_bytes(bound)
        missing = sum(size for key, size in weights.items() if alone or self._cache_of(key).get(key) is None)
        present = 0 if alone else self._held_activation_bytes
        return missing + max(0, _activation_bytes(bound, self.name) - present)

    @property
    def held_bytes(self) -> int:
        """Weights of every session that is kept or that a loaded plan may want, and the most activations."""
        weights: dict[SessionKey, int] = {}
        for loaded in list(self._plans.values()):
            weights |= loaded.weights
        weights |= self._cache.idle()
        return sum(weights.values()) + self._held_activation_bytes

    def _session_bytes(self, bound: BoundPlan) -> dict[SessionKey, int]:
        """Every session that the plan may want, with the bytes that it keeps."""
        graphs = {model.plan.artifact: model.source for model in bound.models}
        keys = {
            key
            for (index, _), programs in self._programs_of(bound).items()
            for bucket_of in _every_bucket(bound, bound.combined[index].members)
            for key in programs.keys(bucket_of)
        }
        return {
            key: self._runner_of(key)._weigh(key, graphs[key.artifact])
            for key in self._with_stand_ins(keys, graphs)
        }

    def _programs_of(self, bound: BoundPlan) -> dict[tuple[int, int], CombinedPrograms]:
        """By combined block and variant that this executor runs."""
        return {
            pair: CombinedPrograms(bound, *pair, one_caller=self.one_caller)
            for pair in bound.run_by(self.name)
        }

    @property
    def _held_activation_bytes(self) -> int:
        plans = list(self._plans.values())
        return max((_activation_bytes(loaded.bound, self.name) for loaded in plans), default=0)

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        """Make the sessions of every atom at batch 1: with them any mask can run as a fallback.

        Raises:
            ExecutorError: an option is unknown, an artifact is missing, or a session cannot be made.
        """
        require_options(bound, self.name, self.precisions, "use fp32, which keeps the model's own types")
        require_artifacts(bound, artifacts)
        combined = self._programs_of(bound)
        singles = {
            session
            for (index, _), programs in combined.items()
            for session in programs.keys(dict.fromkeys(range(len(bound.combined[index].members)), 1))
        }
        try:
            self._hold(key, singles, artifacts)
        except BaseException:
            for cache in {self._cache, *self._caches(singles)}:
                cache.release(key)
            raise
        self._plans[key] = SessionPlan(bound, combined, dict(artifacts), self._session_bytes(bound))

    def _build(self, key: ProgramKey) -> SessionProgram:
        loaded = self._plans[key.plan]
        program = self._lowered(key)
        keys = {session for sessions in program.sessions for session in sessions}
        self._hold(key.plan, keys, loaded.artifacts)
        return program

    def _lowered(self, key: ProgramKey) -> SessionProgram:
        bucket_of = dict(zip(bits(key.mask), key.buckets, strict=True))
        return self._plans[key.plan].combined[key.combined, key.variant].program(key.mask, bucket_of)

    def _alone(self, step: Step, member: StepMember) -> SessionProgram:
        whole, bucket = step.program, bucket_of(step, member)
        key = ProgramKey(whole.plan, whole.combined, 1 << member.position, (bucket,), whole.variant)
        return self._programs.get(key) or self._lowered(key)

    def unload(self, key: PlanKey) -> None:
        """Let go of the plan's programs and sessions; some are kept in case that it comes back."""
        super().unload(key)
        self._cache.release(key)

    def drop_idle(self) -> None:
        """Free the sessions that no loaded plan holds."""
        self._cache.drop_idle()

    def close(self) -> None:
        """Let go of everything and end the pool."""
        super().close()
        self._cache.drop_idle()

    # Steps

    def _arrive(self, step: Step, member: StepMember, rows: Rows) -> Values:
        graph = self._plans[step.program.plan].bound.models[member.member.model].graph
        bucket = bucket_of(step, member)
        filled = padded(rows, bucket)
        arrays = {tensor: [row[graph.tensors[tensor].name] for row in filled] for tensor in graph.inputs}
        # A single row passes by reference.
        values = {t: own[0] if bucket == 1 else np.concatenate(own) for t, own in arrays.items()}
        self.store.put(member.instance, HOST, values)
        node = self._node(step)
        return values if node == HOST else self.store.read(member.instance, node, graph.inputs)

    def _node(self, step: Step) -> int:
        """The memory node that a step works on."""
        return self._plans[step.program.plan].bound.plan.memory_of(step.lane)

    def _kept(self, step: Step, member: StepMember) -> object:
        """What the block reads; what is not on its memory node yet is copied now."""
        block = self._plans[step.program.plan].bound.models[member.member.model].blocks[member.member.block]
        try:
            return self.store.read(member.instance, self._node(step), block.reads)
        except KeyError:
            return NO_SLOT

    def _keep(self, instance: InstanceId, slot: Values) -> None:
        """Nothing to do: `_settle` has put it into the store."""

    def drop(self, instance: InstanceId) -> None:
        """Let go of the instance's tensors."""
        self.store.drop(instance)

    def _run_item(self, program: SessionProgram, index: int, slots: Mapping[int, Values]) -> None:
        values = slots[program.items[index].member]
        for run in program.runs[index]:
            if isinstance(run, JoinRun):
                join_halves(run, values)
            elif isinstance(run, HalfRun):
                self._run_half(run, values)
            else:
                self._run_session(run, values)
        for tensor in program.dead[index]:
            values.pop(tensor, None)

    def _run_session(self, key: SessionKey, values: Values) -> None:
        cache = self._cache_of(key)
        session = cache.get(key)
        if session is not None:
            session.run(values)
            return
        single = cache.get(replace(key, batch=1))
        if single is None:
            raise ExecutorError(f"no session for {len(key.ops)} operators of {key.artifact[:12]} is loaded")
        _run_rows(single, values)

    def _run_half(self, run: HalfRun, values: Values) -> None:
        """Run half of an operator: what it makes of the operator's tensors gets the numbers of the halves."""
        own = dict(values)
        for output in run.made:
            if output.in_place:  # both halves ask for the buffer, and get the same one
                buffer = values.setdefault(output.joined, np.empty(output.shape, output.dtype))
                own[output.joined] = part_of_array(buffer, output.place)
            else:
                own.pop(output.joined, None)
        self._run_session(run.key, own)
        values.update({output.half: own[output.joined] for output in run.made})

    def _settle(
        self, step: Step, member: StepMember, slot: Values, *, wanted: bool
    ) -> Mapping[str, np.ndarray]:
        """Keep what crosses the border by reference, and forget the rest.

        Outputs are handed out from the memory node on which they lie: who takes them copies them anyway.
        """
        model = self._plans[step.program.plan].bound.models[member.member.model]
        block, node, store = model.blocks[member.member.block], self._node(step), self.store
        store.put(member.instance, node, {tensor: slot[tensor] for tensor in block.makes})
        store.keep(member.instance, block.live_out)
        if not wanted:
            return {}
        crossing = store.peek(member.instance, block.live_out)
        tasks, batch = len(member.tasks), model.plan.batch
        return {
            # A model without batches may have tensors without a leading axis.
            model.graph.tensors[tensor].name: array if batch == 1 else array[:tasks]
            for tensor, array in crossing.items()
        }

    def move(self, action: MoveInstance) -> None:
        """Nothing to do: tensors are kept by instance, and the cut is the same in both plans."""

    def time_operators(
        self, artifact: Artifact, request: TimingRequest, idle: Callable[[], bool]
    ) -> tuple[OperatorTime, ...]:
        """Run the model operator by operator; see `timing`."""
        return time_operators(artifact, request, idle, self._open)

    def time_parts(
        self, artifact: Artifact, request: PartTimingRequest, idle: Callable[[], bool]
    ) -> tuple[PartTime, ...]:
        """Run parts of operators; see `split_timing`."""
        return time_parts(artifact, request, idle, self._open_any)


@dataclass(frozen=True, slots=True)
class HalfSession:
    """A session over half of operators that are split: it is fed parts of what they read."""

    session: ValuesSession
    reads: tuple[tuple[TensorId, AxisRange | None], ...]
    outputs: tuple[TensorId, ...]

    def run(self, values: Values) -> None:
        """Read parts of inputs, as views, and put outputs there under the operators' own tensors.

        Where there is an array under such a tensor, the output is written into it.
        """
        fed = {tensor: part_of_array(values[tensor], part) for tensor, part in self.reads}
        outs = {tensor: values[tensor] for tensor in self.outputs if tensor in values}
        if len(outs) == len(self.outputs) and isinstance(self.session, WritesInto):
            self.session.run_into(fed, outs)
            return
        self.session.run(fed)
        for tensor in self.outputs:
            if tensor in outs:
                outs[tensor][...] = fed[tensor]
            else:
                values[tensor] = fed[tensor]


def part_of_array(array: np.ndarray, part: AxisRange | None) -> np.ndarray:
    """A view of a part; the array itself where none is named."""
    if part is None:
        return array
    return array[(slice(None),) * part.dim + (slice(part.start, part.stop),)]


def join_halves(run: JoinRun, values: Values) -> None:
    """Put both halves of every output together; there is nothing to do where they were written into it."""
    for tensor, first, second in run.halves:
        joined = values.get(tensor)
        if joined is not None and values[first].base is joined and values[second].base is joined:
            continue
        values[tensor] = np.concatenate((values[first], values[second]), axis=run.dim)


def _run_rows(session: ValuesSession, values: Values) -> None:
    """Run a session of batch 1 row by row: for a batch whose own session is not there yet."""
    known = tuple(values)
    rows: list[Values] = []
    for row in range(len(values[known[0]])):
        rows.append({tensor: values[tensor][row : row + 1] for tensor in known})
        session.run(rows[-1])
    for tensor in rows[0].keys() - set(known):
        values[tensor] = np.concatenate([made[tensor] for made in rows])


def _activation_bytes(bound: BoundPlan, executor: str) -> int:
    """What the executor's steps need at once: one run per lane, of its most demanding model."""
    models = {m.model for index, _ in bound.run_by(executor) for m in bound.combined[index].members}
    needs = (activation_bytes(bound.models[one].graph, bound.models[one].plan.batch) for one in models)
    return bound.plan.lanes * max(needs, default=0)


def _every_bucket(bound: BoundPlan, members: Sequence[Member]) -> Iterator[dict[int, int]]:
    """Per bucket size the members that have it; together they name every session a plan may want."""
    buckets = {position: bound.models[m.model].buckets for position, m in enumerate(members)}
    for size in sorted({size for sizes in buckets.values() for size in sizes}):
        yield {position: size for position, sizes in buckets.items() if size in sizes}
