"""Steps as launches on the streams of a CUDA device, issued ahead of it.

`issue` puts a step on streams: waits for what must have ended before, inputs to the device, its program,
outputs back, an event. Steps follow each other on the device by events and without the host; `wait` blocks on
the step's own last event. A subclass provides the kernels: how plans are loaded, how programs are built,
bound and captured, and where tensors lie.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from stageloom.edge_agent.executor.base import (
    BlockTap,
    ExecutorPlan,
    GroupTime,
    Rows,
    StepFeeds,
    StepResult,
    bucket_of,
    check_feeds,
    lost_tensors,
    one_line,
    padded,
    split_rows,
)
from stageloom.edge_agent.executor.cuda.device import MOVING, Event, Stream, StreamDevice
from stageloom.edge_agent.executor.cuda.recipe import BoundProgram, Marks, issue_program
from stageloom.shared.bound import BoundModel, BoundPlan
from stageloom.shared.engine.steps import InstanceId, MoveInstance, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.errors import BackendUnavailable, ExecutorError
from stageloom.shared.ids import StepId, TensorId
from stageloom.shared.plan import Member

log = logging.getLogger(__name__)

T = TypeVar("T")
Piece = TypeVar("Piece")


def pieces_of(bound: BoundPlan) -> Counter[int]:
    """How many pieces of host memory of each size a plan's steps in flight need for inputs and outputs.

    A block is in one lane at a time, so each replica takes part in `run_ahead` steps at most.
    """
    pieces: Counter[int] = Counter()
    for model in bound.models:
        for tensor in (*model.graph.inputs, *model.graph.outputs):
            size = model.plan.batch * model.graph.tensors[tensor].nbytes
            pieces[size] += model.plan.replicas * bound.plan.run_ahead
    return pieces


class HostMemory(Generic[Piece]):
    """Pieces by size that a device copies to and from; `make` makes one when none is free. Thread-safe.

    Making a piece is slow (it is pinned), so a plan's are made when it is loaded, and never given up.
    """

    def __init__(self, make: Callable[[int], Piece]) -> None:
        self._make = make
        self._free: dict[int, list[Piece]] = defaultdict(list)
        self._lock = threading.Lock()  # steps of other plans wait for it: no piece is made inside
        self._reserving = threading.Lock()  # or two plans would both make what is missing

    def reserve(self, bound: BoundPlan) -> None:
        """Have the pieces that a plan's steps need."""
        with self._reserving:
            for nbytes, count in pieces_of(bound).items():
                with self._lock:
                    missing = count - len(self._free[nbytes])
                for _ in range(missing):
                    self.give(nbytes, self._make(nbytes))

    def take(self, nbytes: int) -> Piece:
        """A piece that nobody else has."""
        with self._lock:
            pieces = self._free[nbytes]
            if pieces:
                return pieces.pop()
        return self._make(nbytes)

    def give(self, nbytes: int, piece: Piece) -> None:
        """The device has ended with it."""
        with self._lock:
            self._free[nbytes].append(piece)


PlanT = TypeVar("PlanT", bound=ExecutorPlan)


@dataclass(slots=True)
class IssuedStep:
    """A step in flight, and the host memory that it fills."""

    step: Step
    stream: Stream  # on which it begins and ends
    moves: int = 0  # that were issued before
    began: Event = None
    ended: Event = None
    program: BoundProgram | None = None  # while tracing is on
    marks: Marks = field(default_factory=dict)
    outputs: dict[InstanceId, dict[str, np.ndarray]] = field(default_factory=dict)
    shown: list[tuple[StepMember, dict[str, np.ndarray]]] = field(default_factory=list)
    lent: list[tuple[int, Any]] = field(default_factory=list)  # sizes and pieces of host memory
    release: Callable[[], None] | None = None  # called when the step has ended


class CudaExecutor(ABC, Generic[PlanT]):
    """Issues and ends steps on a `StreamDevice`. A step that fails loses the tensors of its members alone."""

    name: ClassVar[str]

    def __init__(self, device: StreamDevice, launcher: ThreadPoolExecutor | None = None) -> None:
        """Steps are launched on the launcher's only thread, or on the issuing one."""
        self.tracing = False
        self.tap: BlockTap | None = None
        self.pause: Callable[[], None] | None = None
        self._on = device
        self._host = HostMemory[Any](device.host_bytes)
        self._launcher = launcher
        self._plans: dict[PlanKey, PlanT] = {}
        self._launched: dict[StepId, Future[IssuedStep] | IssuedStep] = {}
        self._broken: set[InstanceId] = set()  # lost in a step after which more were issued
        # From here on only the launching thread writes, but for the end of a step.
        self._ended: dict[StepId, Event] = {}  # of the steps in flight
        self._lanes: dict[int, IssuedStep] = {}  # the last step of each
        self._moved: Event | None = None
        self._moves = 0
        self._live: set[InstanceId] = set()  # whose slots hold what the last step made

    # What a provider of kernels does

    @abstractmethod
    def stated_bytes(self, bound: BoundPlan, *, alone: bool = False) -> int: ...

    @abstractmethod
    def unload(self, key: PlanKey) -> None: ...

    @abstractmethod
    def _streams(self, step: Step) -> Sequence[Stream]:
        """The streams that a step may use; it begins and ends on the first."""

    @abstractmethod
    def _program(self, key: ProgramKey) -> BoundProgram:
        """A program that was prepared."""

    @abstractmethod
    def _alone(self, step: Step, member: StepMember) -> BoundProgram:
        """What runs one member of a step by itself."""

    @abstractmethod
    def _array(self, piece: Any) -> np.ndarray:
        """A piece of host memory as bytes. [nbytes], uint8"""

    @abstractmethod
    def _copy_in(
        self, stream: Stream, plan: PlanT, member: Member, tensor: TensorId, rows: int, piece: Any
    ) -> None:
        """Copy rows of an input from host memory to where a program reads it."""

    @abstractmethod
    def _copy_out(
        self,
        stream: Stream,
        plan: PlanT,
        program: BoundProgram,
        member: StepMember,
        tensor: TensorId,
        piece: Any,
    ) -> None:
        """Copy the tasks' rows of a tensor at the border behind a member's block to host memory."""

    @abstractmethod
    def _copy_slot(self, stream: Stream, action: MoveInstance, tensor: TensorId, rows: int) -> None:
        """Copy a tensor of an instance to the slot that it moves to."""

    def _as_modelled(
        self, plan: PlanT, member: Member, arrays: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Tensors at a border in the model's own types, where a provider keeps them in others."""
        return arrays

    # Plans

    def _check_device_options(self, bound: BoundPlan) -> None:
        """Raises:
        ExecutorError: the plan wants threads inside an operator.
        """
        if any(bound.executor_of(*pair).intra_op_threads != 1 for pair in bound.run_by(self.name)):
            raise ExecutorError(f"{self.name} has no threads inside an operator", remedy="use 1")

    def _free_bytes(self) -> int:
        """Bytes of the device that a plan may take."""
        return self._on.free_bytes()

    def _check_room(self, bound: BoundPlan) -> None:
        """Raises:
        BackendUnavailable: the device has too little memory.
        """
        needed, free = self.stated_bytes(bound), self._free_bytes()
        if needed > free:
            raise BackendUnavailable(
                f"the plan needs {needed >> 20} MiB of device memory, {free >> 20} MiB are free",
                remedy="unload another plan, or use fewer replicas or a smaller batch",
            )

    def lost(self) -> bool:
        """Whether the device refuses even an event: some errors end the process's CUDA context for good."""
        try:
            # No capture ever has that stream; to wait for the whole device during one is an error by itself.
            self._on.synchronize(self._on.record(self._on.stream(MOVING)))
        except Exception as error:  # the libraries raise many kinds
            log.error("the device of executor %s does not answer: %s", self.name, one_line(error))
            return True
        return False

    def _await_moves(self) -> None:
        """Block until the copies of all moves so far have ended."""
        moved = self._launching(lambda: self._moved)
        if moved is not None:
            self._on.synchronize(moved)

    def close(self) -> None:
        """Free everything and end the launching thread."""
        for launched in list(self._launched.values()):
            if isinstance(launched, IssuedStep) or launched.exception() is None:
                self._on.synchronize(launched_step(launched).ended)
        for key in list(self._plans):
            self.unload(key)
        self._live.clear()
        if self._launcher is not None:
            self._launcher.shutdown()

    def _launching(self, work: Callable[[], T]) -> T:
        """Do something on the thread that launches, and wait for it."""
        return work() if self._launcher is None else self._launcher.submit(work).result()

    # Issue

    def issue(self, step: Step, feeds: StepFeeds) -> None:
        """Launch the step and return.

        Raises:
            ExecutorError: an input is missing or has another shape or type than the graph's; where the
                issuing thread launches, an instance lost its tensors or a launch failed.
        """
        check_feeds(self._plans[step.program.plan].bound, step, feeds)
        launcher = self._launcher
        self._launched[step.id] = (
            self._launch(step, feeds) if launcher is None else launcher.submit(self._launch, step, feeds)
        )

    def _launch(self, step: Step, feeds: StepFeeds) -> IssuedStep:
        """Put everything of the step on its streams."""
        plan, streams = self._plans[step.program.plan], self._streams(step)
        issued = IssuedStep(step, streams[0], self._moves)
        try:
            self._check_members(step)
            self._order_after(step, streams[0])
            issued.began = self._on.record(streams[0], timed=True)
            for member in step.members:
                if member.member.block == 0:
                    self._arrive(
                        plan, member, bucket_of(step, member), feeds[member.instance], streams[0], issued
                    )
            for program, members in self._programs_of(step):
                self._run(issued, program, streams)
                for member in members:
                    self._depart(plan, program, member, streams[0], issued)
            issued.ended = self._on.record(streams[0], timed=True)
        except Exception as error:  # a launch's: the libraries raise many kinds
            self._lose(step)
            for ended in [self._on.record(stream) for stream in streams]:
                self._on.synchronize(ended)  # what was launched half-way: nothing else ever would
            self._end(issued)
            if isinstance(error, ExecutorError):
                raise
            raise ExecutorError(f"step {step.id} failed: {one_line(error)}") from error
        self._lanes[step.lane] = issued
        self._ended[step.id] = issued.ended
        for member in step.members:
            (self._live.discard if member.last else self._live.add)(member.instance)
        return issued

    def _programs_of(self, step: Step) -> list[tuple[BoundProgram, Sequence[StepMember]]]:
        """What the step runs, one after another, each with the members that it runs."""
        if step.fallback:
            return [(self._alone(step, member), [member]) for member in step.members]
        return [(self._program(step.program), step.members)]

    def _check_members(self, step: Step) -> None:
        for member in step.members:
            if member.member.block and member.instance not in self._live:
                raise lost_tensors(member.instance)

    def _lose(self, step: Step) -> None:
        """The step failed: its members' slots hold nothing useful."""
        self._live.difference_update(member.instance for member in step.members)

    def _order_after(self, step: Step, stream: Stream) -> None:
        """What must have ended: the steps in `after`, the lane's last step, and the moves since then."""
        for before in step.after:
            if (event := self._ended.get(before)) is not None:
                self._on.wait(stream, event)
        last = self._lanes.get(step.lane)
        if last is not None and last.stream is not stream:
            self._on.wait(stream, last.ended)
        if self._moved is not None and (last is None or last.moves != self._moves):
            self._on.wait(stream, self._moved)

    def _run(self, issued: IssuedStep, program: BoundProgram, streams: Sequence[Stream]) -> None:
        """Launch a program; while tracing is on, with marks around every group."""
        tracing = self.tracing and not issued.step.fallback
        if tracing:
            issued.program = program
        issue_program(
            program,
            self._on,
            streams,
            before_group=self._holding_up(),
            marks=issued.marks if tracing else None,
        )

    def _holding_up(self) -> Callable[[Stream], None] | None:
        """What holds a group's stream up for as long as `pause` takes; None where nothing does."""
        pause = self.pause
        if pause is None:
            return None

        def hold_up(stream: Stream) -> None:
            began_s = time.monotonic()
            pause()
            self._on.sleep(stream, time.monotonic() - began_s)

        return hold_up

    # Tensors in and out

    def _arrive(
        self, plan: PlanT, member: StepMember, bucket: int, rows: Rows, stream: Stream, issued: IssuedStep
    ) -> None:
        """Copy the tasks' rows to the device."""
        model = plan.bound.models[member.member.model]
        filled = padded(rows, bucket)
        for tensor in model.graph.inputs:
            piece, host = self._lend(model, tensor, bucket, issued)
            arrays = [row[model.graph.tensors[tensor].name] for row in filled]
            if bucket == 1:
                np.copyto(host, arrays[0])
            else:
                np.concatenate(arrays, out=host)
            self._copy_in(stream, plan, member.member, tensor, bucket, piece)

    def _depart(
        self, plan: PlanT, program: BoundProgram, member: StepMember, stream: Stream, issued: IssuedStep
    ) -> None:
        """Bring what crosses the border behind the block to the host, where somebody wants it there."""
        if not member.last and self.tap is None:
            return
        model = plan.bound.models[member.member.model]
        arrays = {}
        for tensor in model.blocks[member.member.block].live_out:
            piece, host = self._lend(model, tensor, len(member.tasks), issued)
            self._copy_out(stream, plan, program, member, tensor, piece)
            arrays[model.graph.tensors[tensor].name] = host
        if self.tap is not None:
            issued.shown.append((member, arrays))
        if member.last:
            issued.outputs[member.instance] = arrays

    def _lend(
        self, model: BoundModel, tensor: TensorId, rows: int, issued: IssuedStep
    ) -> tuple[Any, np.ndarray]:
        """Host memory for a tensor of a step, and its first rows as an array. [rows, ...]"""
        described, batch = model.graph.tensors[tensor], model.plan.batch
        size = batch * described.nbytes
        piece = self._host.take(size)
        issued.lent.append((size, piece))
        shape = described.shape if batch == 1 else (rows, *described.shape[1:])
        used = self._array(piece)[: described.nbytes * (1 if batch == 1 else rows)]
        return piece, used.view(described.dtype).reshape(shape)

    def _end(self, issued: IssuedStep) -> None:
        """Nothing on the device uses the step's host memory any more."""
        if issued.release is not None:
            issued.release()
        for size, piece in issued.lent:
            self._host.give(size, piece)
        # Its lane knows the step until the next one, which must not keep a plan's memory that is unloaded.
        issued.program, issued.release, issued.outputs = None, None, {}

    # Results

    def wait(self, step: StepId) -> StepResult:
        """Block until the step's last event has come, then hand out what it brought to the host.

        Raises:
            ExecutorError: the step failed, or an earlier one of an instance did.
        """
        issued = launched_step(self._launched.pop(step))
        try:
            self._on.synchronize(issued.ended)
            ended_s = time.monotonic()
            for member in issued.step.members:
                if member.instance in self._broken:
                    raise lost_tensors(member.instance)
            return self._result(issued, ended_s)
        except Exception as error:  # the device's
            self._launching(partial(self._lose, issued.step))
            self._broken.update(member.instance for member in issued.step.members if not member.last)
            if isinstance(error, ExecutorError):
                raise
            raise ExecutorError(f"step {step} failed: {one_line(error)}") from error
        finally:
            self._ended.pop(step, None)
            self._end(issued)

    def _result(self, issued: IssuedStep, ended_s: float) -> StepResult:
        """Times are the device's, laid so that the step's end is when the host saw it."""
        bound = self._plans[issued.step.program.plan].bound
        for member, arrays in issued.shown:
            if self.tap is not None:
                plan = self._plans[issued.step.program.plan]
                shown = self._as_modelled(plan, member.member, _copied(arrays))
                self.tap(member.instance, member.member, shown)
        outputs = {
            member.instance: split_rows(
                bound.models[member.member.model], len(member.tasks), _copied(issued.outputs[member.instance])
            )
            for member in issued.step.members
            if member.last
        }
        started_s = ended_s - self._on.elapsed_s(issued.began, issued.ended)
        return StepResult(started_s, ended_s, outputs, self._group_times(issued, started_s, ended_s))

    def _group_times(self, issued: IssuedStep, started_s: float, ended_s: float) -> tuple[GroupTime, ...]:
        if issued.program is None:
            return ()
        stream_of = issued.program.recipe.stream_of_group

        def at_s(event: Event) -> float:
            return min(ended_s, started_s + self._on.elapsed_s(issued.began, event))

        return tuple(
            GroupTime(group, stream_of[group], at_s(begin), at_s(end))
            for group, (begin, end) in sorted(issued.marks.items())
        )

    # Instances

    def move(self, action: MoveInstance) -> None:
        """Copy the instance's tensors over on a stream of its own; later steps on any lane wait for that."""
        if self._launcher is None:
            self._move(action)
        else:
            self._launcher.submit(self._move, action)

    def _move(self, action: MoveInstance) -> None:
        stream = self._on.stream(MOVING)
        for before in action.after:
            if (event := self._ended.get(before)) is not None:
                self._on.wait(stream, event)
        (old_key, old), (new_key, new) = action.old, action.new
        models = self._plans[old_key].bound.models[old.model], self._plans[new_key].bound.models[new.model]
        rows = min(model.plan.batch for model in models)
        try:
            for tensor in models[0].blocks[old.block].live_in:
                self._copy_slot(stream, action, tensor, rows)
            self._moved = self._on.record(stream)
            self._moves += 1
        except ExecutorError as error:
            log.warning("instance %s is lost: %s", action.instance, error)
            self._live.discard(action.instance)

    def drop(self, instance: InstanceId) -> None:
        """Nothing of the instance is useful any more; its slots belong to the next one."""
        self._live.discard(instance)
        self._broken.discard(instance)


def launched_step(launched: "Future[IssuedStep] | IssuedStep") -> IssuedStep:
    """The step, once it is launched."""
    return launched if isinstance(launched, IssuedStep) else launched.result()


def _copied(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Host memory goes back with the end of the step."""
    return {name: array.copy() for name, array in arrays.items()}
