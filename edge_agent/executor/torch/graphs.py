"""`torch_cuda`: programs as CUDA graphs, steps issued ahead of the device.

`issue` only puts work on the lane's stream: inputs to the device, the graph, outputs back, an event. Steps of
one lane follow each other there without the host (P13); steps of different lanes are ordered by the events
that `step.after` names. `wait` blocks on the step's own event.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from stageloom.edge_agent.executor.base import GroupTime, Rows, StepResult
from stageloom.edge_agent.executor.on_device.feeds import bucket_of, check_feeds
from stageloom.edge_agent.executor.on_device.host_memory import HostMemory, pieces_of
from stageloom.edge_agent.executor.torch.builder import Builder, Built, Effort
from stageloom.edge_agent.executor.torch.device import Device, Event, Pool, Stream
from stageloom.edge_agent.executor.torch.executor import TorchExecutor, landing_rows, one_line, split_rows
from stageloom.edge_agent.executor.torch.graph_cache import GraphCache
from stageloom.edge_agent.executor.torch.launching import Marks, issue_program
from stageloom.edge_agent.executor.torch.loaded import LoadedPlan
from stageloom.edge_agent.executor.torch.operator_times import Lap
from stageloom.edge_agent.executor.torch.program import Program
from stageloom.edge_agent.lowering.dtypes import TORCH_OF_NAME, Precision
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, MoveInstance, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import Digest, StepId

log = logging.getLogger(__name__)

GRAPH_BYTES = 1 << 30
"""What captured graphs may take together before the longest unused are given up."""

T = TypeVar("T")


@dataclass(slots=True)
class _Lane:
    """What was issued last on a lane, and which moves it has seen."""

    stream: Stream | None = None
    last: Event | None = None
    moves: int = 0


@dataclass(slots=True)
class _Issued:
    """A step in flight, and the host memory that it fills."""

    step: Step
    began: Event
    ended: Event
    built: Built | None = None
    program: Program | None = None
    marks: Marks = field(default_factory=dict)
    traced: bool = False  # `marks` are those of the traced graph
    outputs: dict[InstanceId, dict[str, np.ndarray]] = field(default_factory=dict)
    shown: list[tuple[StepMember, dict[str, np.ndarray]]] = field(default_factory=list)
    lent: list[Tensor] = field(default_factory=list)


class TorchGraphExecutor(TorchExecutor):
    """Runs on any `Device`; `TorchCudaExecutor` in `cuda_executor` is the one for service."""

    name = "torch_cuda"
    precisions = (Precision.FP32, Precision.TF32, Precision.FP16)

    def __init__(
        self,
        device: Device,
        *,
        channels_last: bool = True,
        effort: Effort | None = None,
        graph_bytes: int = GRAPH_BYTES,
    ) -> None:
        super().__init__(device.torch_device, channels_last=channels_last)
        self._on = device
        self._host = HostMemory(device.host_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="programs")
        self._builder = Builder(device, self.choices, effort or Effort())
        self._cache: GraphCache[ProgramKey] = GraphCache(graph_bytes)
        self._built: dict[ProgramKey, Built] = {}
        self._pools: dict[tuple[PlanKey, int], Pool] = {}
        self._lanes: dict[int, _Lane] = {}
        self._issued: dict[StepId, _Issued] = {}
        self._ended: dict[StepId, Event] = {}  # of the steps in flight
        self._moved: Event | None = None
        self._moves = 0
        self._broken: set[InstanceId] = set()  # lost in a step after which more were issued
        self._used: set[PlanKey] = set()  # plans that have run a step
        self._first_use = threading.Lock()
        self._graphs = threading.Lock()  # between taking a graph to replay it and giving one up
        self._tf32: bool | None = None

    # Plans and programs

    def _check_options(self, bound: BoundPlan) -> None:
        if bound.plan.executor.intra_op_threads != 1:
            raise ExecutorError(f"{self.name} has no threads inside an operator", remedy="use 1")
        needed, free = self.stated_bytes(bound), self._on.free_bytes()
        if needed > free:
            raise ExecutorError(
                f"the plan needs {needed >> 20} MiB of device memory, {free >> 20} MiB are free",
                remedy="unload another plan, or use fewer replicas or a smaller batch",
            )
        tf32 = self._precision(bound) is Precision.TF32
        if self._plans and tf32 != self._tf32:
            raise ExecutorError(
                "plans with and without tf32 cannot be loaded at once: the setting is the process's",
                remedy="unload the other plan first",
            )
        self._on.use_tf32(tf32)
        self._tf32 = tf32

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        """As the base; host memory for inputs and outputs is pinned here, too."""
        with torch.inference_mode():
            super().load(key, bound, artifacts)
        self._on.settle()
        for model in bound.models:
            log.info("model %s is lowered for %s", model.plan.name, self._device)
        for size, count in pieces_of(bound).items():
            self._host.reserve(size, count)

    def _host_sizes(self, plan: LoadedPlan, index: int) -> list[int]:
        graph, batch = plan.bound.models[index].graph, plan.bound.models[index].plan.batch
        return [batch * graph.tensors[t].nbytes for t in (*graph.inputs, *graph.outputs)]

    def prepare(self, program: ProgramKey) -> None:
        """Build and capture the program on the building thread; one that was given up is captured again.

        Raises:
            ExecutorError: it cannot be built.
        """
        self._on_thread(partial(self._prepare, program))

    def _on_thread(self, work: Callable[[], T]) -> T:
        def alone() -> T:
            with self._on.preparing():
                return work()

        return self._thread.submit(alone).result()

    def _prepare(self, key: ProgramKey) -> None:
        plan = self._plans[key.plan]
        built = self._built.get(key)
        try:
            if built is None or (built.graph is None and built.program.recipe.capturable):
                built = self._builder.build(plan, key, self._pool(key))
                self._rehearse(key.plan, built)
                self._keep(key, built)
            if built.trace_wanted and built.traced is None and built.graph is not None:
                self._builder.trace(built, self._pool(key))
        except RuntimeError as error:  # torch's own
            self._pools.pop(self._place(key), None)  # a capture that failed may have left it unusable
            raise ExecutorError(f"a program cannot be built: {one_line(error)}") from error

    def _rehearse(self, plan: PlanKey, built: Built) -> None:
        with self._first_use:
            if plan not in self._used:
                self._builder.rehearse(built)

    def _keep(self, key: ProgramKey, built: Built) -> None:
        self._built[key] = built
        if built.graph is None:
            return
        for other in self._cache.put(key, built.nbytes):
            self._give_up(self._built[other])
            self._forget_empty_pool(self._place(other))
            log.warning("the graph of combined block %d, mask %d, is given up", other.combined, other.mask)

    def _give_up(self, built: Built) -> None:
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
            self._pools[place] = self._on.new_pool()
        return self._pools[place]

    def _forget_empty_pool(self, place: tuple[PlanKey, int]) -> None:
        """torch captures into a pool that it knows only while one of the pool's graphs lives."""
        pool = self._pools.get(place)
        if not any(built.graph is not None and built.pool == pool for built in self._built.values()):
            self._pools.pop(place, None)

    @property
    def held_bytes(self) -> int:
        """Weights, buffers and graphs as they are on the device."""
        return super().held_bytes + self._cache.nbytes

    def unload(self, key: PlanKey) -> None:
        """As the base, with the plan's graphs, once nothing on the device uses them."""
        if self._moved is not None:
            self._on.synchronize(self._moved)
        for program in [program for program in list(self._built) if program.plan == key]:
            self._cache.drop(program)
            self._give_up(self._built.pop(program))
        for place in [place for place in self._pools if place[0] == key]:
            del self._pools[place]
        self._used.discard(key)
        super().unload(key)

    def close(self) -> None:
        """Free everything and end the building thread."""
        for issued in list(self._issued.values()):
            self._on.synchronize(issued.ended)
        super().close()
        self._thread.shutdown()

    # Steps

    def issue(self, step: Step, feeds: Mapping[InstanceId, Rows]) -> None:
        """Put the step on its lane's stream and return.

        Raises:
            ExecutorError: an input is wrong, an instance lost its tensors, or a launch failed.
        """
        check_feeds(self._plans[step.program.plan].bound, step, feeds)
        self._check_members(step)
        plan = self._plans[step.program.plan]
        streams = self._streams(plan, step.lane)
        if step.program.plan not in self._used:
            with self._first_use:
                self._used.add(step.program.plan)
        try:
            with torch.inference_mode():
                self._issue(plan, step, feeds, streams)
        except Exception as error:  # a launch's: torch raises many kinds
            self._lose(step)
            self._on.synchronize(self._on.record(streams[0]))
            if isinstance(error, ExecutorError):
                raise
            raise ExecutorError(f"step {step.id} failed: {one_line(error)}") from error
        self._advance(step)

    def _streams(self, plan: LoadedPlan, lane: int) -> Sequence[Stream]:
        if lane < plan.bound.plan.lanes:
            return self._on.lane_streams(lane * plan.streams, plan.streams)
        return self._on.profiling_streams(plan.streams)

    def _issue(
        self, plan: LoadedPlan, step: Step, feeds: Mapping[InstanceId, Rows], streams: Sequence[Stream]
    ) -> None:
        self._order_after(step, streams[0])
        began = self._on.record(streams[0], timed=True)
        issued = _Issued(step, began, began)
        for member in step.members:
            if member.member.block == 0:
                self._arrive(plan, step, member, feeds[member.instance], streams[0], issued)
        if step.fallback:
            for member in step.members:
                issue_program(plan.alone(step, member), self._on, streams)
        else:
            self._run(issued, streams)
        for member in step.members:
            self._depart(plan, step, member, streams[0], issued)
        issued.ended = self._on.record(streams[0], timed=True)
        lane = self._lanes[step.lane]
        lane.stream, lane.last = streams[0], issued.ended
        self._ended[step.id] = issued.ended
        self._issued[step.id] = issued

    def _order_after(self, step: Step, stream: Stream) -> None:
        """What must have ended: the steps in `after`, the lane's last step, and the moves since then."""
        for before in step.after:
            event = self._ended.get(before)
            if event is not None:
                self._on.wait(stream, event)
        lane = self._lanes.setdefault(step.lane, _Lane())
        if lane.last is not None and lane.stream is not stream:
            self._on.wait(stream, lane.last)
        if self._moved is not None and lane.moves != self._moves:
            self._on.wait(stream, self._moved)
            lane.moves = self._moves

    def _run(self, issued: _Issued, streams: Sequence[Stream]) -> None:
        built = issued.built = self._built[issued.step.program]
        self._cache.touch(issued.step.program)
        tracing, pause = self.tracing, self.pause
        if tracing:
            issued.program = built.program
            built.trace_wanted = True
        if pause is not None:
            marks = issued.marks if tracing else None
            self._on_thread(partial(self._run_paused, built.program, streams, pause, marks))
        elif not self._replay(issued, built, streams[0], tracing):
            issue_program(built.program, self._on, streams, marks=issued.marks if tracing else None)

    def _replay(self, issued: _Issued, built: Built, stream: Stream, tracing: bool) -> bool:
        """Replay the graph that fits, if there is one; the traced one's events serve one run at a time."""
        with self._graphs:
            graph = built.graph
            if tracing:
                graph = None
                if built.traced is not None and not built.tracing:
                    graph, issued.marks = built.traced
                    built.tracing = issued.traced = True
            if graph is None:
                return False
            self._on.replay(stream, graph)
            built.last = self._on.record(stream)
            return True

    def _run_paused(
        self, program: Program, streams: Sequence[Stream], pause: Callable[[], None], marks: Marks | None
    ) -> None:
        """Hold every group's stream up for as long as `pause` takes.

        It runs where programs are built, so that cudnn finds the same kernels as the graph has.
        """

        def before_group(stream: Stream) -> None:
            began_s = time.monotonic()
            pause()
            self._on.sleep(stream, time.monotonic() - began_s)

        with torch.inference_mode():
            issue_program(program, self._on, streams, before_group=before_group, marks=marks)

    def _arrive(
        self,
        plan: LoadedPlan,
        step: Step,
        member: StepMember,
        rows: Rows,
        stream: Stream,
        issued: _Issued,
    ) -> None:
        sizes = self._host_sizes(plan, member.member.model)
        landing = landing_rows(plan, member, bucket_of(step, member), rows)
        for size, (buffer, arrays) in zip(sizes, landing, strict=False):
            piece = self._host.take(size)
            issued.lent.append(piece)
            host = _shaped(piece, buffer.shape, buffer.dtype)
            if len(arrays) == 1:
                np.copyto(host.numpy(), arrays[0])
            else:
                np.concatenate(arrays, out=host.numpy())
            self._on.launch(stream, partial(_copy, buffer, host))

    def _depart(
        self, plan: LoadedPlan, step: Step, member: StepMember, stream: Stream, issued: _Issued
    ) -> None:
        if not member.last and self.tap is None:
            return
        graph = plan.bound.models[member.member.model].graph
        dtypes = {tensor.name: TORCH_OF_NAME[tensor.dtype] for tensor in graph.tensors}
        arrays = {}
        for name, source in self._crossing(plan, step, member).items():
            nbytes = source.numel() * dtypes[name].itemsize
            piece = self._host.take(self._whole_size(plan, member, nbytes))
            issued.lent.append(piece)
            host = _shaped(piece, source.shape, dtypes[name])
            self._on.launch(stream, partial(_copy_out, host, source))
            arrays[name] = host.numpy()
        if self.tap is not None:
            issued.shown.append((member, arrays))
        if member.last:
            issued.outputs[member.instance] = arrays

    @staticmethod
    def _whole_size(plan: LoadedPlan, member: StepMember, nbytes: int) -> int:
        """The size with all rows of the batch, so that pieces are few."""
        return nbytes * plan.bound.models[member.member.model].plan.batch // max(1, len(member.tasks))

    def wait(self, step: StepId) -> StepResult:
        """Block until the step's last event has come, then hand out what it brought to the host.

        Raises:
            ExecutorError: the device failed, or an earlier step of an instance did.
        """
        issued = self._issued.pop(step)
        try:
            self._on.synchronize(issued.ended)
            ended_s = time.monotonic()
            self._check_unbroken(issued.step)
            result = self._result(issued, ended_s)
        except Exception as error:  # the device's
            self._lose(issued.step)
            self._broken.update(member.instance for member in issued.step.members if not member.last)
            if isinstance(error, ExecutorError):
                raise
            raise ExecutorError(f"step {step} failed: {one_line(error)}") from error
        finally:
            self._ended.pop(step, None)
            if issued.built is not None and issued.traced:
                issued.built.tracing = False
            for piece in issued.lent:
                self._host.give(piece.numel(), piece)
        return result

    def _check_unbroken(self, step: Step) -> None:
        for member in step.members:
            if member.instance in self._broken:
                raise ExecutorError(f"instance {member.instance} lost its tensors in a failed step")

    def _result(self, issued: _Issued, ended_s: float) -> StepResult:
        """Times are the device's, laid so that the step's end is when the host saw it."""
        plan = self._plans[issued.step.program.plan]
        if self.tap is not None:
            for member, arrays in issued.shown:
                self.tap(member.instance, member.member, {name: a.copy() for name, a in arrays.items()})
        outputs = {}
        for member in issued.step.members:
            if member.last:
                own = {name: array.copy() for name, array in issued.outputs[member.instance].items()}
                outputs[member.instance] = split_rows(
                    plan.bound.models[member.member.model], len(member.tasks), own
                )
        started_s = ended_s - self._on.elapsed_s(issued.began, issued.ended)
        groups: tuple[GroupTime, ...] = ()
        if issued.program is not None:
            groups = tuple(self._group_times(issued, issued.program, started_s, ended_s))
        return StepResult(started_s, ended_s, outputs, groups)

    def _group_times(
        self, issued: _Issued, program: Program, started_s: float, ended_s: float
    ) -> list[GroupTime]:
        times = []
        for index, (begin, end) in sorted(issued.marks.items()):
            at = [min(ended_s, started_s + self._on.elapsed_s(issued.began, event)) for event in (begin, end)]
            times.append(GroupTime(index - 1, program.recipe.items[index].stream, at[0], at[1]))
        return times

    def drop(self, instance: InstanceId) -> None:
        """As the base; whether it was broken is forgotten, too."""
        super().drop(instance)
        self._broken.discard(instance)

    def move(self, action: MoveInstance) -> None:
        """Copy the instance's tensors over on a stream of its own; later steps on any lane wait for that."""
        stream = self._on.moving_stream()
        for before in action.after:
            event = self._ended.get(before)
            if event is not None:
                self._on.wait(stream, event)
        with torch.inference_mode():
            for target, source in self._copies_of(action):
                self._on.launch(stream, partial(_copy, target, source))
        self._moved = self._on.record(stream)
        self._moves += 1
        self._used.add(action.new[0])

    def _lap(self) -> Lap:
        def lap(launch: Callable[[], object], capturable: bool) -> float:
            return self._on_thread(partial(self._builder.lap, launch, capturable))

        return lap


def _shaped(piece: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The first bytes of a piece as a tensor of another type."""
    count = int(np.prod(shape, dtype=np.int64))
    return piece[: count * dtype.itemsize].view(dtype).view(tuple(shape))


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _copy_out(host: Tensor, source: Tensor) -> None:
    """To the host, converted on the device first: only a plain copy runs without the host."""
    host.copy_(source.to(host.dtype).contiguous(memory_format=torch.contiguous_format), non_blocking=True)
