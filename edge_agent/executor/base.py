"""What the engine needs from a backend. An executor knows nothing of how a schedule was found."""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from msgspec import Struct

from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundModel, BoundPlan
from stageloom.shared.engine.steps import (
    CopySlot,
    InstanceId,
    MoveInstance,
    PlanKey,
    ProgramKey,
    Step,
    StepMember,
)
from stageloom.shared.errors import ExecutorError, StageloomError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, StepId
from stageloom.shared.plan import ExecutorOptions, IssueOrder, Member
from stageloom.shared.schedule import OWN_RESOURCE, resources_named
from stageloom.shared.shape_ranges import range_text, shape_text

if TYPE_CHECKING:
    import numpy

Rows: TypeAlias = "Sequence[Mapping[str, numpy.ndarray]]"
"""Per task of an instance its tensors by name, each with the graph's batch-1 shape."""

StepFeeds: TypeAlias = "Mapping[InstanceId, Rows]"
"""The inputs of a step's members whose block is the model's first."""

BlockTap: TypeAlias = "Callable[[InstanceId, Member, Mapping[str, numpy.ndarray]], None]"
"""Called after a block of an instance has run, with every tensor that crosses the border behind it, by name
and with the batch's rows along axis 0. Runs on the lane's thread: for verification, not for service."""


def bucket_of(step: Step, member: StepMember) -> int:
    """The batch that the member's program was built for."""
    rank = (step.program.mask & ((1 << member.position) - 1)).bit_count()
    return step.program.buckets[rank]


def check_feeds(bound: BoundPlan, step: Step, feeds: StepFeeds) -> None:
    """Raises:
    ExecutorError: inputs are missing or have another shape or type than the graph's.
    """
    for member in step.members:
        if member.member.block:
            continue
        graph = bound.models[member.member.model].graph
        rows = feeds.get(member.instance, ())
        if len(rows) != len(member.tasks):
            raise ExecutorError(f"step {step.id} begins instance {member.instance} without its inputs")
        for row in rows:
            if problem := input_problem(graph, row):
                raise ExecutorError(problem)


def input_problem(graph: Graph, row: "Mapping[str, numpy.ndarray]") -> str:
    """What is wrong with one task's inputs of a model; empty where they are as its graph says."""
    for number in graph.inputs:
        tensor = graph.tensors[number]
        array = row.get(tensor.name)
        if array is None:
            return f"model {graph.name!r} needs the input {tensor.name!r}"
        if not graph.takes(number, array.shape) or array.dtype.name != tensor.dtype:
            wanted = f"{tensor.dtype} {range_text(graph.smallest(number), tensor.shape)}"
            given = shape_text(array.shape)
            return f"input {tensor.name!r} is {array.dtype} {given}, not {wanted}"
    return ""


def padded(rows: Rows, bucket: int) -> Rows:
    """Rows for a whole bucket: what is missing repeats the first row. [bucket]

    That is real data: zeros can be slow (denormals) or outside what a model accepts.
    """
    return [*rows, *[rows[0]] * (bucket - len(rows))]


def split_rows(model: BoundModel, tasks: int, arrays: "Mapping[str, numpy.ndarray]") -> Rows:
    """Per task its tensors, each with the graph's batch-1 shape: views of `arrays`. [rows, ...]"""
    if model.plan.batch == 1:
        return [dict(arrays)] * tasks
    return [{name: array[row : row + 1] for name, array in arrays.items()} for row in range(tasks)]


def require_artifacts(bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
    """Raises:
    ExecutorError: a model's artifact is missing.
    """
    if missing := {model.plan.artifact for model in bound.models} - artifacts.keys():
        raise ExecutorError(f"artifact {min(missing)[:12]} is not here", remedy="fetch it first")


def require_options(
    bound: BoundPlan,
    executor: str,
    precisions: Sequence[str],
    remedy: str = "",
    *,
    issues: Sequence[IssueOrder] = (IssueOrder.DEVICE,),
) -> None:
    """Raises:
    ExecutorError: the executor does not know a precision or an order of launches that the plan wants of it.
    """
    for options in options_for(bound, executor):
        if options.precision not in precisions:
            raise ExecutorError(
                f"the {executor} executor does not know the precision {options.precision!r}",
                remedy=remedy or f"use one of {', '.join(precisions)}",
            )
        if options.issue not in issues:
            raise ExecutorError(
                f"the {executor} executor does not issue launches in the order {options.issue.value!r}",
                remedy=f"use {IssueOrder.DEVICE.value}; torch_cuda knows both",
            )


def options_for(bound: BoundPlan, executor: str) -> list[ExecutorOptions]:
    """What a plan tells an executor: of the blocks that it runs, and of groups of any block. Each once."""
    told = dict.fromkeys(
        bound.group_executor(index, variant, resource)
        for index, variant in bound.variants
        for resource in (OWN_RESOURCE, *resources_named(bound.combined[index].plan.variants[variant][1]))
    )
    return [options for options in told if options.name == executor]


def sole_options(bound: BoundPlan, executor: str) -> ExecutorOptions:
    """What a plan tells an executor that takes one set of options for all that it runs.

    Raises:
        ExecutorError: it tells different things of several blocks or groups, or has no whole block for it.
    """
    if not bound.run_by(executor):
        raise ExecutorError(
            f"the {executor} executor runs whole blocks, and the plan has only groups for it",
            remedy="use onnx or openvino for the groups, or give it a block",
        )
    first, *others = options_for(bound, executor)
    differing = [
        field.name
        for field in fields(first)
        if any(getattr(first, field.name) != getattr(other, field.name) for other in others)
    ]
    if differing:
        raise ExecutorError(
            f"the {executor} executor takes one set of options for all that it runs, and the plan has "
            f"several of {', '.join(differing)}",
            remedy="give all of its blocks and groups the same, or run some of them on another executor",
        )
    return first


def require_whole(bound: BoundPlan, executor: str) -> None:
    """Raises:
    ExecutorError: the plan splits operators, or runs groups on several resources, which the executor cannot.
    """
    if bound.splits or any(
        resources_named(schedule) for block in bound.plan.combined for _, schedule in block.variants
    ):
        raise ExecutorError(
            f"the {executor} executor does not split operators over resources",
            remedy="use onnx, openvino or torch_cpu, or a plan without splits",
        )


def require_pinned(bound: BoundPlan, executor: str) -> None:
    """Raises:
    ExecutorError: a model that the executor is to run has open dimensions.
    """
    for index, _ in bound.run_by(executor):
        for member in bound.combined[index].members:
            if bound.models[member.model].graph.ranges is not None:
                raise ExecutorError(
                    f"model {bound.models[member.model].plan.name!r} has open dimensions, which the "
                    f"{executor} executor does not run",
                    remedy="use onnx, or pin its shapes",
                )


def one_line(error: BaseException) -> str:
    """A backend's error as one line, short enough for a report."""
    if isinstance(error, StageloomError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def lost_tensors(instance: InstanceId) -> ExecutorError:
    """What a step raises whose instance an earlier step has left without its tensors."""
    return ExecutorError(f"instance {instance} lost its tensors in a failed step")


class ExecutorPlan(Protocol):
    """A loaded plan, with whatever an executor keeps for it."""

    @property
    def bound(self) -> BoundPlan: ...


NO_GROUP = -1
"""Of an item that an executor adds: it comes from no item of the schedule's launch list."""


class GroupTime(NamedTuple):
    """When one item of the launch list ran, on the host's monotonic clock."""

    item: int
    stream: int
    started_s: float
    ended_s: float


class StepResult(Struct, frozen=True):
    """What a step that ended leaves behind."""

    started_s: float
    ended_s: float
    outputs: "Mapping[InstanceId, Rows]" = MappingProxyType({})  # of members with `last`
    groups: tuple[GroupTime, ...] = ()  # filled while tracing is on


class TimingRequest(Struct, frozen=True, kw_only=True):
    """How to time a model's operators."""

    batch: int = 1
    intra_op_threads: int = 1
    repeats: int = 5
    limit_s: float = 20.0  # of work
    wall_s: float = 600.0  # with the pauses in which the device serves


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One operator run alone; `spread_us` is half the distance of the 16th and the 84th percentile."""

    median_us: float
    spread_us: float
    runs: int  # 0: the limit came first, and there is no time


NOT_TIMED = OperatorTime(0.0, 0.0, 0)


class StepRunner(Protocol):
    """What the engine runs steps on: one executor, or several.

    `load`, `prepare` and `unload` may be slow; those of one plan come one at a time, those of two plans may
    come from two threads (a plan is profiled beside the one that serves). `issue`, `move` and `drop`
    come in the core's order, one at a time, from whichever thread took the decision, and must be short.
    `wait` runs on the lane's thread. Steps of different lanes overlap; `issue` of a step may come before the
    steps in `step.after` have ended: ordering them is the executor's duty.
    """

    tracing: bool  # fill StepResult.groups; set by the owner at any time

    def stated_bytes(self, bound: BoundPlan, *, alone: bool = False) -> int:
        """Bytes that `load` and `prepare` will add for this plan beyond what is loaded already.

        `alone`: with nothing else loaded.

        Raises:
            ExecutorError: nothing runs such a plan here.
        """

    @property
    def held_bytes(self) -> int:
        """Bytes that the loaded plans state together; what they share counts once."""

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        """Make a plan known. Weights of an artifact are shared by all plans and replicas.

        Raises:
            ExecutorError: an option is unknown or a model cannot be loaded.
        """

    def prepare(self, program: ProgramKey) -> None:
        """Build what `issue` needs for this program; a second call is free.

        Raises:
            ExecutorError: the program cannot be built.
        """

    def issue(self, step: Step, feeds: StepFeeds) -> None:
        """Start a step. `feeds` holds the inputs of members whose block is the model's first."""

    def wait(self, step: StepId) -> StepResult:
        """Block until an issued step has ended.

        Raises:
            ExecutorError: the step failed; its members' slots hold nothing useful.
        """

    def move(self, action: MoveInstance) -> None:
        """Carry out a move in issue order."""

    def drop(self, instance: InstanceId) -> None:
        """Free what the instance holds; called after the steps and copies that use it have ended."""

    def unload(self, key: PlanKey) -> None:
        """Free a plan that no instance uses; what it takes to load it again soon may be kept.

        A plan that is not loaded, or did not load, is nothing.
        """

    def drop_idle(self) -> None:
        """Free what is kept for plans that are not loaded."""

    def close(self) -> None:
        """Free everything."""


@runtime_checkable
class CopyRunner(Protocol):
    """What the engine needs beside for plans that place their blocks on several memory nodes."""

    def copy(self, copy: CopySlot) -> None:
        """Copy a slot's tensors to another memory node, on this thread; several come one after another.

        Raises:
            ExecutorError: the instance has lost its tensors.
        """


@runtime_checkable
class DeviceRunner(Protocol):
    """What the engine asks beside of executors on a device that the process may lose."""

    def lost(self) -> bool:
        """Whether the device refuses whatever is asked of it; asked after a failure, on any thread."""


class Executor(StepRunner, Protocol):
    """One backend inside the engine's process."""

    tap: "BlockTap | None"  # set by the owner while nothing runs
    pause: Callable[[], None] | None  # called before every group, to shift them in time; as `tap`

    @property
    def name(self) -> str:
        """The registry's name."""

    def time_operators(
        self, artifact: Artifact, request: "TimingRequest", idle: Callable[[], bool]
    ) -> tuple[OperatorTime, ...]:
        """Time of each operator, run alone; NOT_TIMED where the limit came first.

        Runs on a thread of its own and measures only while `idle()`, asked before and after every run.
        [num_operators]

        Raises:
            ExecutorError: an operator cannot run alone.
        """


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SharedTable(Generic[K, V]):
    """Values by key, with who holds them: made for the first holder, kept until the last one lets go.

    Methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # also while a value is made: two would want twice the memory at once
        self._values: dict[K, V] = {}
        self._holders: dict[K, set[Hashable]] = {}

    def __len__(self) -> int:
        """Values that somebody holds."""
        return len(self._holders)

    def get(self, key: K) -> V | None:
        """The value if it is there."""
        return self._values.get(key)

    def values(self) -> list[V]:
        """All values that are there."""
        with self._lock:
            return list(self._values.values())

    def hold(self, holder: Hashable, key: K, make: Callable[[], V]) -> V:
        """The value, made now if it is not there, for a holder until `release`."""
        with self._lock:
            if key not in self._values:
                self._values[key] = make()
            self._holders.setdefault(key, set()).add(holder)
            self._taken(key)
            return self._values[key]

    def release(self, holder: Hashable) -> None:
        """The holder needs none of its values any more."""
        with self._lock:
            for key in [key for key, holders in self._holders.items() if holder in holders]:
                self._holders[key].discard(holder)
                if not self._holders[key]:
                    del self._holders[key]
                    self._left(key)

    def _taken(self, key: K) -> None:
        """Somebody holds a value. The lock is held."""

    def _left(self, key: K) -> None:
        """Nobody holds a value any more. The lock is held."""
        del self._values[key]
