"""`onnx_cuda`: steps as runs of sessions on streams, issued ahead of the device.

All steps are launched on one thread, in the core's order: onnxruntime's arenas are safe and bounded only so
(see `sessions`), and `issue` stays short. Steps follow each other on the device by events and without the
host; `wait` blocks on the step's own last event.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

import numpy as np

from stageloom.edge_agent.executor.base import (
    BlockTap,
    GroupTime,
    OperatorTime,
    Rows,
    StepResult,
    TimingRequest,
)
from stageloom.edge_agent.executor.on_device.feeds import bucket_of, check_feeds
from stageloom.edge_agent.executor.onnx_cuda.device import MOVING, Event, OrtDevice, Stream
from stageloom.edge_agent.executor.onnx_cuda.host import HostTensors, split_rows
from stageloom.edge_agent.executor.onnx_cuda.memory import PlanMemory
from stageloom.edge_agent.executor.onnx_cuda.program import Marks, Program, bind_recipe, issue_program
from stageloom.edge_agent.executor.onnx_cuda.recipe import PlanRecipes, Recipe, recipes_of
from stageloom.edge_agent.executor.onnx_cuda.sessions import opener, run_options, session_bytes
from stageloom.edge_agent.executor.onnx_cuda.timing import time_operators, warm_up
from stageloom.edge_agent.executor.onnx_parts import ModelParts
from stageloom.edge_agent.executor.onnx_sessions import (
    Session,
    SessionCache,
    SessionKey,
    one_line,
    return_free_memory,
)
from stageloom.shared.artifact import Artifact
from stageloom.shared.bitmask import bits
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, MoveInstance, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import Digest, StepId

log = logging.getLogger(__name__)

PRECISIONS = ("fp32", "tf32")
"""The models' own types; with tf32 products of float32 may be rounded to it first."""


@dataclass(frozen=True)
class _Loaded:
    """A plan with its memory."""

    recipes: PlanRecipes
    memory: PlanMemory
    artifacts: Mapping[Digest, Artifact]
    alone: Mapping[tuple[int, int, int], Program]  # by combined block, position and bucket

    @property
    def bound(self) -> BoundPlan:
        return self.recipes.bound


@dataclass(slots=True)
class _Issued:
    """A step in flight, and the host memory that it fills."""

    step: Step
    began: Event = None
    ended: Event = None
    marks: Marks = field(default_factory=dict)
    program: Program | None = None
    shown: list[tuple[StepMember, dict[str, np.ndarray]]] = field(default_factory=list)
    outputs: dict[InstanceId, dict[str, np.ndarray]] = field(default_factory=dict)
    lent: list[np.ndarray] = field(default_factory=list)


class OnnxDeviceExecutor:
    """Runs on any `OrtDevice`; `OnnxCudaExecutor` in `cuda_executor` is the one for service."""

    name = "onnx_cuda"

    def __init__(self, device: OrtDevice) -> None:
        self.tracing = False
        self.tap: BlockTap | None = None
        self.pause: Callable[[], None] | None = None
        self._on = device
        self._cache = SessionCache(make=opener(device), weigh=session_bytes)
        self._host = HostTensors(device)
        self._options = run_options()
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="launches")
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="programs")
        self._plans: dict[PlanKey, _Loaded] = {}
        self._programs: dict[ProgramKey, Program] = {}
        self._launched: dict[StepId, Future[_Issued]] = {}
        # From here on only the launching thread writes.
        self._ended: dict[StepId, Event] = {}  # of the steps in flight
        self._lanes: dict[int, Event] = {}  # the end of each lane's last step
        self._moved: Event | None = None
        self._live: set[InstanceId] = set()  # whose slots hold what the last step made

    # Plans and programs

    def stated_bytes(self, bound: BoundPlan, *, alone: bool = False) -> int:
        """Sessions that are not there yet, slots and arenas.

        Raises:
            ExecutorError: the precision is unknown.
        """
        _check_options(bound)
        recipes = recipes_of(bound)
        sessions = _session_bytes(recipes)
        missing = sum(size for key, size in sessions.items() if alone or self._cache.get(key) is None)
        return missing + recipes.memory_bytes

    @property
    def held_bytes(self) -> int:
        """What loaded plans state for sessions, kept sessions, slots and arenas."""
        sessions: dict[SessionKey, int] = {}
        plans = list(self._plans.values())
        for loaded in plans:
            sessions |= _session_bytes(loaded.recipes)
        sessions |= self._cache.idle()
        return sum(sessions.values()) + sum(loaded.memory.nbytes for loaded in plans)

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        """Take the plan's memory, make and warm up its sessions, bind what runs members one by one.

        Raises:
            ExecutorError: an option is unknown, an artifact is missing, the device has too little memory, or
                a session cannot be made.
        """
        _check_options(bound)
        if missing := {m.plan.artifact for m in bound.models} - artifacts.keys():
            raise ExecutorError(f"artifact {min(missing)[:12]} is not here", remedy="fetch it first")
        needed, free = self.stated_bytes(bound), self._on.free_bytes()
        if needed > free:
            raise ExecutorError(
                f"the plan needs {needed >> 20} MiB of device memory, {free >> 20} MiB are free",
                remedy="unload another plan, or use fewer replicas or a smaller batch",
            )
        recipes = recipes_of(bound)
        memory = PlanMemory(recipes, self._on)
        try:
            self._hold(key, recipes.keys, artifacts)
            alone = {place: self._bind(recipe, recipes, memory) for place, recipe in recipes.alone.items()}
        except BaseException:
            self._cache.release(key)
            memory.free()
            raise
        self._host.reserve(bound)
        self._plans[key] = _Loaded(recipes, memory, dict(artifacts), alone)

    def _hold(
        self, plan: PlanKey, keys: Collection[SessionKey], artifacts: Mapping[Digest, Artifact]
    ) -> None:
        """Have these sessions for a plan; an artifact is parsed only if one is missing, and then once."""
        parsed: dict[Digest, ModelParts] = {}

        def parts(digest: Digest) -> ModelParts:
            if digest not in parsed:
                parsed[digest] = ModelParts(artifacts[digest])
            return parsed[digest]

        for key in sorted(keys, key=attrgetter("artifact", "batch", "ops", "stream")):
            new = self._cache.get(key) is None
            session = self._cache.ensure(key, plan, partial(parts, key.artifact))
            if new:
                graph = artifacts[key.artifact].graph
                self._preparer.submit(warm_up, session, key, graph, self._on, self._options).result()
        if parsed:
            parsed.clear()
            return_free_memory()

    def _bind(self, recipe: Recipe, recipes: PlanRecipes, memory: PlanMemory) -> Program:
        memory.check(recipe)
        return bind_recipe(recipe, recipes.bound, self._session, memory.address, self._on, self._options)

    def _session(self, key: SessionKey) -> Session:
        found = self._cache.get(key)
        if found is None:
            raise ExecutorError(f"no session for {len(key.ops)} operators of {key.artifact[:12]} is loaded")
        return found

    def prepare(self, program: ProgramKey) -> None:
        """Bind the program's sessions; those that only this mask needs are made now.

        Raises:
            ExecutorError: a session cannot be made, or the plan's memory is too small.
        """
        if program in self._programs:
            return
        loaded = self._plans[program.plan]
        buckets = dict(zip(bits(program.mask), program.buckets, strict=True))
        recipe = loaded.recipes.recipe(program.combined, buckets)
        self._hold(program.plan, recipe.keys, loaded.artifacts)
        self._programs[program] = self._bind(recipe, loaded.recipes, loaded.memory)

    def unload(self, key: PlanKey) -> None:
        """Free a plan's memory once nothing on the device uses it; some sessions are kept for its return."""
        loaded = self._plans.pop(key, None)
        for program in [program for program in list(self._programs) if program.plan == key]:
            del self._programs[program]
        if loaded is not None:
            moved = self._launcher.submit(lambda: self._moved).result()
            if moved is not None:
                self._on.synchronize(moved)
            loaded.memory.free()
        self._cache.release(key)

    def drop_idle(self) -> None:
        """Free the sessions that no loaded plan holds."""
        if self._cache.idle():
            self._cache.drop_idle()
            return_free_memory()

    def close(self) -> None:
        """Free everything and end the threads."""
        for launched in list(self._launched.values()):
            if launched.exception() is None:
                self._on.synchronize(launched.result().ended)
        for key in list(self._plans):
            self.unload(key)
        self._cache.drop_idle()
        self._live.clear()
        self._launcher.shutdown()
        self._preparer.shutdown()

    # Steps

    def issue(self, step: Step, feeds: Mapping[InstanceId, Rows]) -> None:
        """Hand the step to the launching thread.

        Raises:
            ExecutorError: an input is missing or has another shape or type than the graph's.
        """
        check_feeds(self._plans[step.program.plan].bound, step, feeds)
        self._launched[step.id] = self._launcher.submit(self._launch, step, feeds)

    def _launch(self, step: Step, feeds: Mapping[InstanceId, Rows]) -> _Issued:
        """Put everything of the step on its streams."""
        loaded, issued = self._plans[step.program.plan], _Issued(step)
        try:
            self._check_members(step)
            programs = self._programs_of(loaded, step)
            stream = self._on.stream(programs[0][0].recipe.stream)
            self._order_after(step, stream)
            issued.began = self._on.record(stream, timed=True)
            for member in step.members:
                if member.member.block == 0:
                    model, bucket = loaded.bound.models[member.member.model], bucket_of(step, member)
                    rows = feeds[member.instance]
                    self._host.arrive(model, loaded.memory, member, bucket, rows, stream, issued.lent)
            for program, members in programs:
                self._run(issued, program)
                for member in members:
                    self._depart(loaded, member, program.recipe, stream, issued)
            issued.ended = self._on.record(stream, timed=True)
        except Exception as error:  # a launch's: onnxruntime's exceptions share no base class
            self._live.difference_update(member.instance for member in step.members)
            self._drain(loaded)
            self._host.give_back(issued.lent)
            if isinstance(error, ExecutorError):
                raise
            raise ExecutorError(f"step {step.id} failed: {one_line(error)}") from error
        self._lanes[step.lane] = self._ended[step.id] = issued.ended
        for member in step.members:
            (self._live.discard if member.last else self._live.add)(member.instance)
        return issued

    def _check_members(self, step: Step) -> None:
        for member in step.members:
            if member.member.block and member.instance not in self._live:
                raise ExecutorError(f"instance {member.instance} lost its tensors in a failed step")

    def _programs_of(self, loaded: _Loaded, step: Step) -> list[tuple[Program, Sequence[StepMember]]]:
        """What the step runs, one after another, each with the members that it runs."""
        if not step.fallback:
            return [(self._programs[step.program], step.members)]
        combined = step.program.combined
        return [(loaded.alone[combined, m.position, bucket_of(step, m)], [m]) for m in step.members]

    def _order_after(self, step: Step, stream: Stream) -> None:
        """What must have ended: the steps in `after`, the lane's last one, and all moves so far."""
        events = [self._ended.get(before) for before in step.after]
        for event in (*events, self._lanes.get(step.lane), self._moved):
            if event is not None:
                self._on.wait(stream, event)

    def _drain(self, loaded: _Loaded) -> None:
        """Wait for what a step that failed half-way has launched: nothing else ever would."""
        for number in sorted({s for recipe in loaded.recipes.full for s in recipe.streams}):
            self._on.synchronize(self._on.record(self._on.stream(number)))

    def _run(self, issued: _Issued, program: Program) -> None:
        pause = self.pause
        before_item: Callable[[Stream], None] | None = None
        if pause is not None:

            def before_item(stream: Stream) -> None:
                began_s = time.monotonic()
                pause()
                self._on.sleep(stream, time.monotonic() - began_s)

        tracing = self.tracing and not issued.step.fallback
        if tracing:
            issued.program = program
        issue_program(program, self._on, before_item=before_item, marks=issued.marks if tracing else None)

    def _depart(
        self, loaded: _Loaded, member: StepMember, recipe: Recipe, stream: Stream, issued: _Issued
    ) -> None:
        """Bring what crosses the border behind the block to the host, where somebody wants it there."""
        if not member.last and self.tap is None:
            return
        model = loaded.bound.models[member.member.model]
        arrays = self._host.depart(model, loaded.memory, member, recipe, stream, issued.lent)
        if self.tap is not None:
            issued.shown.append((member, arrays))
        if member.last:
            issued.outputs[member.instance] = arrays

    # Results

    def wait(self, step: StepId) -> StepResult:
        """Block until the step's last event has come, then hand out what it brought to the host.

        Raises:
            ExecutorError: the step failed, or an earlier one of an instance did.
        """
        issued = self._launched.pop(step).result()
        try:
            self._on.synchronize(issued.ended)
            return self._result(issued, time.monotonic())
        except ExecutorError:
            raise
        except Exception as error:  # the device's
            members = issued.step.members
            self._launcher.submit(self._live.difference_update, {m.instance for m in members}).result()
            raise ExecutorError(f"step {step} failed: {one_line(error)}") from error
        finally:
            self._ended.pop(step, None)
            self._host.give_back(issued.lent)

    def _result(self, issued: _Issued, ended_s: float) -> StepResult:
        """Times are the device's, laid so that the step's end is when the host saw it."""
        bound = self._plans[issued.step.program.plan].bound
        for member, arrays in issued.shown:
            if self.tap is not None:
                self.tap(member.instance, member.member, {name: a.copy() for name, a in arrays.items()})
        outputs = {
            member.instance: split_rows(
                bound.models[member.member.model], len(member.tasks), issued.outputs[member.instance]
            )
            for member in issued.step.members
            if member.last
        }
        started_s = ended_s - self._on.elapsed_s(issued.began, issued.ended)
        return StepResult(started_s, ended_s, outputs, self._group_times(issued, started_s, ended_s))

    def _group_times(self, issued: _Issued, started_s: float, ended_s: float) -> tuple[GroupTime, ...]:
        if issued.program is None:
            return ()
        recipe = issued.program.recipe
        stream_of = {launch.item: launch.stream - recipe.stream for launch in reversed(recipe.launches)}

        def at_s(event: Event) -> float:
            return min(ended_s, started_s + self._on.elapsed_s(issued.began, event))

        return tuple(
            GroupTime(item, stream_of[item], at_s(begin), at_s(end))
            for item, (begin, end) in sorted(issued.marks.items())
        )

    def move(self, action: MoveInstance) -> None:
        """Copy the instance's tensors over on a stream of its own; all later steps wait for that."""
        self._launcher.submit(self._move, action)

    def _move(self, action: MoveInstance) -> None:
        try:
            self._copy_over(action)
        except ExecutorError as error:
            log.warning("instance %s is lost: %s", action.instance, error)
            self._live.discard(action.instance)

    def _copy_over(self, action: MoveInstance) -> None:
        stream = self._on.stream(MOVING)
        for before in action.after:
            if (event := self._ended.get(before)) is not None:
                self._on.wait(stream, event)
        (old_key, old), (new_key, new) = action.old, action.new
        source, target = self._plans[old_key], self._plans[new_key]
        model = source.bound.models[old.model]
        rows = min(model.plan.batch, target.bound.models[new.model].plan.batch)
        for tensor in model.blocks[old.block].live_in:
            nbytes = rows * model.graph.tensors[tensor].nbytes
            self._on.copy(stream, target.memory.slot(new, tensor), source.memory.slot(old, tensor), nbytes)
        self._moved = self._on.record(stream)

    def drop(self, instance: InstanceId) -> None:
        """Nothing of the instance is useful any more; its slots belong to the next one."""
        self._live.discard(instance)

    def time_operators(
        self, artifact: Artifact, request: TimingRequest, idle: Callable[[], bool]
    ) -> tuple[OperatorTime, ...]:
        """Run the model operator by operator; see `timing`. [num_operators]

        Raises:
            ExecutorError: an operator cannot run alone.
        """
        measured = self._preparer.submit(time_operators, artifact, request, idle, self._on, self._options)
        return measured.result()


def _check_options(bound: BoundPlan) -> None:
    """Raises:
    ExecutorError: the executor cannot honour an option.
    """
    options = bound.plan.executor
    if options.precision not in PRECISIONS:
        raise ExecutorError(
            f"the onnx_cuda executor does not know the precision {options.precision!r}",
            remedy=f"use one of {', '.join(PRECISIONS)}",
        )
    if options.intra_op_threads != 1:
        raise ExecutorError("onnx_cuda has no threads inside an operator", remedy="use 1")


def _session_bytes(recipes: PlanRecipes) -> dict[SessionKey, int]:
    graphs = {model.plan.artifact: model.graph for model in recipes.bound.models}
    return {key: session_bytes(key, graphs[key.artifact]) for key in recipes.keys}
