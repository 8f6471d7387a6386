"""`torch_cuda`: programs as CUDA graphs, launched on the lanes' streams by the thread that issues a step."""

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from stageloom.edge_agent.executor.base import StepFeeds, bucket_of, one_line
from stageloom.edge_agent.executor.cuda.device import PROFILING, GraphDevice, Pool, Stream, streams_from
from stageloom.edge_agent.executor.cuda.executor import CudaExecutor, IssuedStep
from stageloom.edge_agent.executor.cuda.recipe import BoundProgram, BufferRole, issue_program
from stageloom.edge_agent.executor.cuda.streams import MAX_GROUP_STREAMS, streams_per_lane
from stageloom.edge_agent.executor.torch.builder import BuiltProgram, Effort, ProgramBuilder
from stageloom.edge_agent.executor.torch.cuda import CudaGraphDevice
from stageloom.edge_agent.executor.torch.kernels import Lap
from stageloom.edge_agent.executor.torch.plans import LoadedPlan, TorchPlans, not_loaded
from stageloom.edge_agent.lowering.dtypes import TORCH_OF_NAME, Precision
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import MoveInstance, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.errors import BackendUnavailable, ExecutorError
from stageloom.shared.ids import Digest, TensorId
from stageloom.shared.plan import IssueOrder, Member

log = logging.getLogger(__name__)

GRAPH_BYTES = 1 << 30
"""What pools of captured graphs may take together before the longest unused are given up."""

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class GraphCache(Generic[K]):
    """Graphs by key and the sizes of their pools, in order of use; it holds no graph itself. Thread-safe.

    Graphs of one pool share its memory, which is free once the last of them is gone. So it counts until then,
    and a pool is given up as a whole.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.RLock()  # one thread builds, others run
        self._keys: OrderedDict[Pool, set[K]] = OrderedDict()
        self._sizes: Counter[Pool] = Counter()

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        with self._lock:
            return self._sizes.total()

    def put(self, pool: Pool, key: K, grown: int, *, wanted: bool = True) -> dict[K, int]:
        """Keep a graph by which its pool has grown; those to give up for it, with the bytes of their pools.

        The pool of one that is wanted now counts as the last used and stays even if it is larger than the
        limit; those that were unused longest go. Another one goes itself where there is no room, and its pool
        is the first to go.
        """
        with self._lock:
            if wanted or pool not in self._keys:
                self._keys.setdefault(pool, set())
                self._keys.move_to_end(pool, last=wanted)
            self._keys[pool].add(key)
            self._sizes[pool] += grown
            given_up: dict[K, int] = {}
            if not wanted and self.nbytes > self.limit_bytes:
                given_up[key] = self._sizes[pool]
                self.drop(pool, key)
            while wanted and self.nbytes > self.limit_bytes and len(self._keys) > 1:
                oldest, keys = self._keys.popitem(last=False)
                given_up |= dict.fromkeys(keys, self._sizes.pop(oldest))
        return given_up

    def has_room(self, pool: Pool, nbytes: int) -> bool:
        """Nothing has to be given up for the pool to have so many bytes."""
        with self._lock:
            more = max(0, nbytes - self._sizes[pool])
            return self._sizes.total() + more <= self.limit_bytes

    def touch(self, pool: Pool) -> None:
        with self._lock:
            if pool in self._keys:
                self._keys.move_to_end(pool)

    def drop(self, pool: Pool, key: K) -> None:
        with self._lock:
            keys = self._keys.get(pool, set())
            keys.discard(key)
            if not keys:
                self._keys.pop(pool, None)
                self._sizes.pop(pool, None)


class TorchCudaExecutor(TorchPlans, CudaExecutor[LoadedPlan]):
    """Runs on any `GraphDevice`, by default on the current CUDA device."""

    name = "torch_cuda"
    precisions = (Precision.FP32, Precision.TF32, Precision.FP16)
    issues = tuple(IssueOrder)

    def __init__(
        self,
        device: GraphDevice | None = None,
        *,
        channels_last: bool = True,
        effort: Effort | None = None,
        graph_bytes: int = GRAPH_BYTES,
    ) -> None:
        """
        Raises:
            ExecutorError: this process has no CUDA device.
        """
        device = device or CudaGraphDevice()
        CudaExecutor.__init__(self, device)
        TorchPlans.__init__(self, device.torch_device, channels_last=channels_last)
        self._graphs_on = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="programs")
        effort = effort or Effort()
        self.builds_ahead = effort.alone
        self._builder = ProgramBuilder(device, self.choices, effort)
        self._cache: GraphCache[ProgramKey] = GraphCache(graph_bytes)
        self._built: dict[ProgramKey, BuiltProgram] = {}
        # Whose graph is to be captured again, once, where its pool may have so many bytes.
        self._given_up: dict[ProgramKey, int] = {}
        self._pools: dict[tuple[PlanKey, int], Pool] = {}
        self._ahead: dict[PlanKey, deque[ProgramKey]] = {}  # still to be built, that nobody has asked for
        self._building: dict[PlanKey, Future[None]] = {}  # the latest of those
        self._ahead_lock = threading.Lock()  # around both: a build is known before it can begin
        self._used: set[PlanKey] = set()  # plans that have run a step
        self._first_use = threading.Lock()
        self._graphs = threading.Lock()  # between taking a graph to replay it and giving one up
        self._tf32: bool | None = None  # as the loaded plans want it

    # Plans and programs

    def _check_options(self, bound: BoundPlan) -> None:
        self._check_device_options(bound)
        self._check_room(bound)
        tf32 = self._precision(bound) is Precision.TF32
        if self._plans and tf32 != self._tf32:
            raise BackendUnavailable(
                "plans with and without tf32 cannot be loaded at once: the setting is the process's",
                remedy="unload the other plan first",
            )
        self._tf32 = tf32
        self._graphs_on.use_tf32(tf32)

    def _free_bytes(self) -> int:
        """Without what graphs hold: torch has it reserved and unallocated, but only for their own pools."""
        return max(0, super()._free_bytes() - self._cache.nbytes)

    def _streams_per_lane(self, bound: BoundPlan) -> int:
        if self._options(bound).issue is IssueOrder.DEVICE:
            return streams_per_lane(bound.plan.lanes)
        return streams_per_lane(bound.plan.lanes, self._graphs_on.most_streams)

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        """As the base; host memory for inputs and outputs is pinned here, too."""
        with torch.inference_mode():
            super().load(key, bound, artifacts)
        try:
            self._graphs_on.settle()
            self._host.reserve(bound)
        except BaseException as error:
            self.unload(key)
            if isinstance(error, RuntimeError):  # torch's own, as in the base
                raise not_loaded(error) from error
            raise
        for model in bound.models:
            log.info("model %s is lowered for %s", model.plan.name, self._device)
        if self.builds_ahead:
            programs = deque(
                ProgramKey(key, combined, 1 << position, (bucket,))
                for combined, position, bucket in self._plans[key].alone_places
            )
            with self._ahead_lock:
                self._ahead[key] = programs

    def _build_ahead(self, key: PlanKey) -> None:
        """Build what runs single members one by one, behind whatever the engine asks for meanwhile.

        Until the program of a step is ready, its members run one after another. Issued kernel by kernel, that
        takes several times as long as their graphs, and a plan with many masks does it often. It begins with
        the first such step that serves: plans that are only profiled or compared build nothing.
        """
        with self._ahead_lock:
            if self._ahead.get(key):
                self._building[key] = self._thread.submit(self._build_next, key)

    def _capture_again(self, step: Step, program: ProgramKey) -> None:
        """Where a graph was given up and there is room for it now, build it behind what is built ahead.

        The engine has prepared the program and does not do so again: other plans' graphs, of one that was
        profiled for a while, must not slow down one that serves for as long as it is loaded.
        """
        needed = self._given_up.get(program)
        if needed is None or not self._serves(step):
            return
        if not self._cache.has_room(self._pools.get(self._place(program)), needed):
            return
        with self._ahead_lock:
            programs = self._ahead.setdefault(program.plan, deque())
            if program not in programs:
                programs.append(program)
            building = self._building.get(program.plan)
            if building is None or building.done():
                self._building[program.plan] = self._thread.submit(self._build_next, program.plan)

    def _build_next(self, key: PlanKey) -> None:
        with self._ahead_lock:
            programs = self._ahead.get(key)
            if not programs:  # the plan is unloaded
                return
            program = programs.popleft()
        self._given_up.pop(program, None)
        try:
            with self._graphs_on.preparing():
                self._prepare(program, wanted=False)
        except ExecutorError as error:
            log.warning("combined block %d, mask %d: %s", program.combined, program.mask, error)
        except Exception:  # a library's: that member runs launch by launch, and the next one is built
            log.exception("combined block %d, mask %d, is not built", program.combined, program.mask)
        built = self._built.get(program)
        if built is not None and built.given_up:  # there is no room for what nobody has asked for
            with self._ahead_lock:
                self._ahead.pop(key, None)
        self._build_ahead(key)

    def _leave_off(self, key: PlanKey) -> None:
        """Build nothing more of a plan ahead, and wait for what is being built."""
        with self._ahead_lock:
            self._ahead.pop(key, None)
            building = self._building.pop(key, None)
        if building is not None and not building.cancel():
            wait([building])

    def prepare(self, program: ProgramKey) -> None:
        """Build and capture the program on the building thread; one that was given up is captured again.

        Raises:
            ExecutorError: it cannot be built.
        """
        self._on_thread(partial(self._prepare, program))

    def _on_thread(self, work: Callable[[], T]) -> T:
        def alone() -> T:
            with self._graphs_on.preparing():
                return work()

        return self._thread.submit(alone).result()

    def _prepare(self, key: ProgramKey, *, wanted: bool = True) -> None:
        plan = self._plans[key.plan]
        built = self._built.get(key)
        try:
            if built is None or built.given_up:
                built = self._builder.build(plan, key, self._pool(key))
                self._rehearse(key.plan, built)
                self._keep(key, built, wanted=wanted)
            traceable = built.graph is not None and self._graphs_on.events_in_graphs
            if built.trace_wanted and built.traced is None and traceable:
                self._builder.trace(built, self._pool(key))
        except RuntimeError as error:  # torch's own
            self._pools.pop(self._place(key), None)  # a capture that failed may have left it unusable
            raise ExecutorError(f"a program cannot be built: {one_line(error)}") from error

    def _rehearse(self, plan: PlanKey, built: BuiltProgram) -> None:
        with self._first_use:
            if plan not in self._used:
                self._builder.rehearse(built)

    def _keep(self, key: ProgramKey, built: BuiltProgram, *, wanted: bool) -> None:
        self._built[key] = built
        if built.graph is None:
            return
        for other, pool_bytes in self._cache.put(built.pool, key, built.nbytes, wanted=wanted).items():
            found = self._built.get(other)
            if found is None:  # its plan is being unloaded, on another thread
                continue
            self._give_up(found)
            self._given_up[other] = pool_bytes
            self._forget_empty_pool(found.pool)
            log.warning("the graph of combined block %d, mask %d, is given up", other.combined, other.mask)

    def _give_up(self, built: BuiltProgram) -> None:
        """Free a graph after its last run; its launches are issued one by one from now on."""
        with self._graphs:
            graphs = (built.graph, built.traced)
            built.graph = built.traced = None
        if built.last is not None:
            self._on.synchronize(built.last)
        del graphs

    def _place(self, key: ProgramKey) -> tuple[PlanKey, int]:
        """Graphs share memory only where they never run at once: one lane, or one combined block (P2)."""
        one_lane = self._plans[key.plan].bound.plan.lanes == 1
        return key.plan, 0 if one_lane else key.combined

    def _pool(self, key: ProgramKey) -> Pool:
        place = self._place(key)
        if place not in self._pools:
            self._pools[place] = self._graphs_on.new_pool()
        return self._pools[place]

    def _forget_empty_pool(self, pool: Pool) -> None:
        """torch captures into a pool that it knows only while one of the pool's graphs lives."""
        if any(built.graph is not None and built.pool == pool for built in list(self._built.values())):
            return
        for place in [place for place, known in list(self._pools.items()) if known == pool]:
            self._pools.pop(place, None)

    @property
    def held_bytes(self) -> int:
        """Weights, buffers and graphs as they are on the device."""
        return super().held_bytes + self._cache.nbytes

    def unload(self, key: PlanKey) -> None:
        """As the base, with the plan's graphs, once nothing on the device uses them."""
        self._leave_off(key)
        self._await_moves()
        for program in [program for program in list(self._built) if program.plan == key]:
            built = self._built.pop(program)
            self._cache.drop(built.pool, program)
            self._give_up(built)
            self._given_up.pop(program, None)
        for place in [place for place in list(self._pools) if place[0] == key]:
            self._pools.pop(place, None)
        self._used.discard(key)
        super().unload(key)

    def drop_idle(self) -> None:
        """Give the device back what torch keeps of plans that are not loaded; it waits for that (P14)."""
        with self._graphs_on.preparing():
            self._graphs_on.give_back()

    def close(self) -> None:
        """Free everything and end the building thread."""
        for key in list(self._ahead):
            self._leave_off(key)
        super().close()
        self._thread.shutdown()
        self.drop_idle()  # nobody could ask for it any more

    # What a step runs

    def _serves(self, step: Step) -> bool:
        """Whether it runs in a lane of its plan, and not beside, to be measured."""
        return step.lane < self._plans[step.program.plan].bound.plan.lanes

    def _streams(self, step: Step) -> Sequence[Stream]:
        plan = self._plans[step.program.plan]
        if self._serves(step):
            return streams_from(self._on, step.lane * plan.streams, plan.streams)
        beside = streams_from(self._on, PROFILING, min(plan.streams, MAX_GROUP_STREAMS))
        return [beside[number % len(beside)] for number in range(plan.streams)]  # those behind prepare

    def _program(self, key: ProgramKey) -> BoundProgram:
        return self._built[key].program

    def _alone(self, step: Step, member: StepMember) -> BoundProgram:
        built = self._built.get(_alone_key(step, member))
        if built is not None and built.graph is not None:
            return built.program
        return self._plans[step.program.plan].alone(step, member)

    def _launch(self, step: Step, feeds: StepFeeds) -> IssuedStep:
        self._use(step.program.plan)
        with torch.inference_mode():
            return super()._launch(step, feeds)

    def _use(self, key: PlanKey) -> None:
        """From now on steps use the plan's buffers."""
        if key not in self._used:
            with self._first_use:
                self._used.add(key)

    def _run(self, issued: IssuedStep, program: BoundProgram, streams: Sequence[Stream]) -> None:
        if issued.step.fallback:
            self._run_alone(issued, program, streams)
            return
        built = self._built[issued.step.program]
        self._cache.touch(built.pool)
        if built.given_up:
            self._capture_again(issued.step, issued.step.program)
        if self.tracing:
            built.trace_wanted = True
        if self.pause is not None:  # built where programs are, so that cudnn finds the kernels of the graph
            self._on_thread(partial(self._run_paused, issued, program, streams))
        elif self._replay(issued, built, streams[0], self.tracing):
            if self.tracing:
                issued.program = built.program
        else:
            super()._run(issued, program, streams)

    def _run_alone(self, issued: IssuedStep, program: BoundProgram, streams: Sequence[Stream]) -> None:
        """One member by itself: by its graph where that is built, else launch by launch."""
        ((position, part),) = program.recipe.parts.items()
        plan = issued.step.program.plan
        key = ProgramKey(plan, program.recipe.combined, 1 << position, (part.batch,))
        if plan not in self._building and self._serves(issued.step):
            self._build_ahead(plan)
        built = self._built.get(key)
        if built is not None and built.given_up:
            self._capture_again(issued.step, key)
        if built is None or built.program is not program:
            issue_program(program, self._on, streams)
            return
        self._cache.touch(built.pool)
        if not self._replay(issued, built, streams[0], tracing=False):
            issue_program(program, self._on, streams)

    def _run_paused(self, issued: IssuedStep, program: BoundProgram, streams: Sequence[Stream]) -> None:
        with torch.inference_mode(), self._graphs_on.searching():
            super()._run(issued, program, streams)

    def _replay(self, issued: IssuedStep, built: BuiltProgram, stream: Stream, tracing: bool) -> bool:
        """Replay the graph that fits, if there is one; the traced one's events serve one run at a time."""
        with self._graphs:
            graph = built.graph
            if tracing:
                graph = None
                if built.traced is not None and not built.tracing:
                    graph, issued.marks = built.traced
                    built.tracing, issued.release = True, built.end_trace
            if graph is None:
                return False
            self._graphs_on.replay(stream, graph)
            built.last = self._on.record(stream)
            return True

    # Tensors in and out

    def _array(self, piece: Tensor) -> np.ndarray:
        return piece.numpy()

    def _copy_in(
        self, stream: Stream, plan: LoadedPlan, member: Member, tensor: TensorId, rows: int, piece: Tensor
    ) -> None:
        buffer = plan.buffers.at(BufferRole.LANDING, member, tensor, rows)
        self._on.launch(stream, partial(_copy, buffer, _shaped(piece, buffer.shape, buffer.dtype)))

    def _copy_out(
        self,
        stream: Stream,
        plan: LoadedPlan,
        program: BoundProgram,
        member: StepMember,
        tensor: TensorId,
        piece: Tensor,
    ) -> None:
        source = self._crossing(plan, member, tensor, len(member.tasks))
        described = plan.bound.models[member.member.model].graph.tensors[tensor]
        host = _shaped(piece, source.shape, TORCH_OF_NAME[described.dtype])
        self._on.launch(stream, partial(_copy_out, host, source))

    def _copy_slot(self, stream: Stream, action: MoveInstance, tensor: TensorId, rows: int) -> None:
        self._on.launch(stream, partial(_copy, *self._slots_of(action, tensor, rows)))

    def _move(self, action: MoveInstance) -> None:
        self._use(action.new[0])  # before the copy: a rehearsal would write over what it brings
        with torch.inference_mode():
            super()._move(action)

    def _lap(self) -> Lap:
        def lap(launch: Callable[[], object], capturable: bool) -> float:
            return self._on_thread(partial(self._lap_in_float32, launch, capturable))

        return lap

    def _lap_in_float32(self, launch: Callable[[], object], capturable: bool) -> float:
        """One run without TF32, after which the process has the setting of the plans that are loaded then.

        Timing a model takes minutes, with pauses in which a plan serves and programs are built, often by
        another executor than this one.
        """
        with self._graphs_on.without_tf32():
            return self._builder.lap(launch, capturable)


def _alone_key(step: Step, member: StepMember) -> ProgramKey:
    bucket = bucket_of(step, member)
    return ProgramKey(step.program.plan, step.program.combined, 1 << member.position, (bucket,))


def _shaped(piece: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The first bytes of a piece as a tensor of another type."""
    count = int(np.prod(shape, dtype=np.int64))
    return piece[: count * dtype.itemsize].view(dtype).view(tuple(shape))


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _copy_out(host: Tensor, source: Tensor) -> None:
    """To the host, converted on the device first: only a plain copy runs without the host."""
    host.copy_(source.to(host.dtype).contiguous(memory_format=torch.contiguous_format), non_blocking=True)
