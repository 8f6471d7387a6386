"""Steps on the processor: each runs inside `wait`, on its lane's own thread, further groups on a pool.

A backend says what a program is and how one of its items runs. What an instance keeps from one block to the
next is its *slot*: nothing but a mark where tensors lie in buffers, the tensors themselves where they pass by
reference.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Generic, Protocol, TypeVar, cast

from stageloom.edge_agent.executor.base import (
    NO_GROUP,
    BlockTap,
    ExecutorPlan,
    GroupTime,
    Rows,
    StepFeeds,
    StepResult,
    lost_tensors,
    one_line,
    split_rows,
)
from stageloom.edge_agent.executor.slot_store import SlotStore
from stageloom.edge_agent.executor.threads import MAX_THREADS, StepOrder, StreamPool, Threading
from stageloom.shared.engine.steps import InstanceId, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import StepId
from stageloom.shared.launch_list import LaunchList
from stageloom.shared.schedule import OWN_RESOURCE

if TYPE_CHECKING:
    import numpy


class HostProgram(Protocol):
    """Items that threads share."""

    @property
    def items(self) -> LaunchList:
        """In an order that obeys every wait."""

    @property
    def groups(self) -> Sequence[int]:
        """Per item the one of the schedule's launch list that it belongs to, or NO_GROUP. [num_items]"""

    @property
    def threading(self) -> Threading:
        """How threads share the items."""


NO_SLOT: Final = object()
"""There is no such slot."""

PlanT = TypeVar("PlanT", bound=ExecutorPlan)
ProgramT = TypeVar("ProgramT", bound=HostProgram)
SlotT = TypeVar("SlotT")


class HostExecutor(ABC, Generic[PlanT, ProgramT, SlotT]):
    """Orders steps and runs their items. A step that fails loses the tensors of its members alone."""

    name: ClassVar[str]
    knows_nodes: ClassVar[bool] = False
    """It works on the memory node of a step's lane, and may run a block in one of several ways."""

    passes_slots: ClassVar[bool] = False
    """Slots hold arrays by reference, so that executors of which this is true can share a plan."""

    def __init__(self) -> None:
        self.tracing = False
        self.tap: BlockTap | None = None
        self.pause: Callable[[], None] | None = None
        self.order = StepOrder()  # shared by executors that share a plan,
        self.store = SlotStore()  # and so is this: of those that pass slots
        self.partner: Callable[[str], object] = self._no_partner
        """The executor of a name that shares a plan, for the groups of a block that it runs."""
        self._pool = StreamPool()
        self._plans: dict[PlanKey, PlanT] = {}
        self._programs: dict[ProgramKey, ProgramT] = {}
        self._issued: dict[StepId, tuple[Step, StepFeeds]] = {}
        self._slots: dict[InstanceId, SlotT] = {}  # of instances between two blocks

    def _no_partner(self, name: str) -> object:
        raise ExecutorError(f"there is no executor {name!r} beside {self.name!r}", remedy="use one of them")

    # What a backend does

    @abstractmethod
    def _build(self, key: ProgramKey) -> ProgramT:
        """Make a program.

        Raises:
            ExecutorError: it cannot be made.
        """

    @abstractmethod
    def _alone(self, step: Step, member: StepMember) -> ProgramT:
        """What runs one member of a step by itself, without a program that was prepared."""

    @abstractmethod
    def _arrive(self, step: Step, member: StepMember, rows: Rows) -> SlotT:
        """Take in the inputs of an instance's tasks; its slot."""

    @abstractmethod
    def _run_item(self, program: ProgramT, index: int, slots: Mapping[int, SlotT]) -> None:
        """Run one item, on any thread; `slots` by the members' positions."""

    @abstractmethod
    def _settle(
        self, step: Step, member: StepMember, slot: SlotT, *, wanted: bool
    ) -> "Mapping[str, numpy.ndarray]":
        """The member's block has run: keep what crosses the border behind it, and no more.

        Returns those tensors by name, with the tasks' rows, if they are `wanted`.
        """

    def _between_steps(self) -> None:
        """A step is about to begin, or has ended."""

    # Programs

    def prepare(self, program: ProgramKey) -> None:
        """Make the program and have a thread for each of its streams.

        Raises:
            ExecutorError: it cannot be made.
        """
        if program in self._programs:
            return
        built = self._build(program)
        plan = self._plans[program.plan].bound.plan
        self._pool.grow(plan.lanes * min(built.threading.threads - 1, MAX_THREADS))
        for resource in set(built.threading.resources) - {OWN_RESOURCE}:
            self._pool.grow_on(plan.resources[resource].cores, plan.lanes)
        self._programs[program] = built

    def unload(self, key: PlanKey) -> None:
        """Let go of a plan and its programs."""
        self._plans.pop(key, None)
        for program in [program for program in list(self._programs) if program.plan == key]:
            del self._programs[program]

    def close(self) -> None:
        """Let go of everything and end the pool."""
        for key in list(self._plans):
            self.unload(key)
        self._slots.clear()
        self._pool.close()

    # Steps

    def issue(self, step: Step, feeds: StepFeeds) -> None:
        """Take the step in; it runs in `wait`."""
        self.order.issue(step)
        self._issued[step.id] = (step, feeds)

    def wait(self, step: StepId) -> StepResult:
        """Run the step on this thread.

        Raises:
            ExecutorError: an item failed, or an instance lacks its tensors because an earlier step failed.
        """
        issued, feeds = self._issued.pop(step)
        self.order.begin(issued)
        self._between_steps()
        self._pool.begin()
        started_s = time.monotonic()
        try:
            outputs, groups = self._run(issued, feeds)
        except Exception as error:  # a backend's: their exceptions share no base class
            for member in issued.members:
                self.drop(member.instance)
            if isinstance(error, ExecutorError):
                raise
            raise ExecutorError(f"step {step} failed: {one_line(error)}") from error
        finally:
            self._pool.end()
            self.order.end(issued)
            self._between_steps()
        return StepResult(started_s, time.monotonic(), outputs, tuple(groups))

    def _run(self, step: Step, feeds: StepFeeds) -> tuple[dict[InstanceId, Rows], list[GroupTime]]:
        slots = {member.position: self._gather(step, member, feeds) for member in step.members}
        outputs: dict[InstanceId, Rows] = {}
        groups: list[GroupTime] = []
        for program, members in self._parts(step):
            body = self._body(step, program, slots, groups)
            if step.fallback or program.threading.alone:
                for index in range(len(program.items)):
                    body(index)
            else:
                self._run_on_threads(step, program, body)
            for member in members:
                self._end_block(step, member, slots[member.position], outputs)
        return outputs, groups

    def _run_on_threads(self, step: Step, program: ProgramT, body: Callable[[int], None]) -> None:
        if not program.threading.resources:
            self._pool.run(program.threading, body)
            return
        plan = self._plans[step.program.plan].bound.plan
        resource = plan.resource_of(step.lane)
        own = OWN_RESOURCE if resource is None else resource
        cores = {number: resource.cores for number, resource in enumerate(plan.resources)}
        self._pool.run(program.threading, body, own, cores)

    def _gather(self, step: Step, member: StepMember, feeds: StepFeeds) -> SlotT:
        """The member's slot."""
        if not member.member.block:
            return self._arrive(step, member, feeds[member.instance])
        slot = self._kept(step, member)
        if slot is NO_SLOT:
            raise lost_tensors(member.instance)
        return cast(SlotT, slot)

    def _kept(self, step: Step, member: StepMember) -> object:
        """What the member's instance has from its blocks before; `NO_SLOT` where nothing is left of it."""
        return self._slots.get(member.instance, NO_SLOT)

    def _keep(self, instance: InstanceId, slot: SlotT) -> None:
        """Have the slot for the next block."""
        self._slots[instance] = slot

    def _parts(self, step: Step) -> Iterable[tuple[ProgramT, Sequence[StepMember]]]:
        """What a step runs, one after another, each with the members that it runs."""
        if not step.fallback:
            return [(self._programs[step.program], step.members)]
        return [(self._alone(step, member), [member]) for member in step.members]

    def _body(
        self, step: Step, program: ProgramT, slots: Mapping[int, SlotT], groups: list[GroupTime]
    ) -> Callable[[int], None]:
        """What runs an item of the program, on whichever thread."""
        tracing, pause, in_turn = self.tracing, self.pause, step.fallback

        def run(index: int) -> None:
            group = program.groups[index]
            if pause is not None and group != NO_GROUP:
                pause()
            started_s = time.monotonic() if tracing else 0.0
            self._run_item(program, index, slots)
            if tracing and group != NO_GROUP:
                stream = 0 if in_turn else program.items[index].stream
                groups.append(GroupTime(group, stream, started_s, time.monotonic()))

        return run

    def _end_block(
        self, step: Step, member: StepMember, slot: SlotT, outputs: dict[InstanceId, Rows]
    ) -> None:
        arrays = self._settle(step, member, slot, wanted=member.last or self.tap is not None)
        if self.tap is not None:
            self.tap(member.instance, member.member, arrays)
        if member.last:
            self.drop(member.instance)
            model = self._plans[step.program.plan].bound.models[member.member.model]
            outputs[member.instance] = split_rows(model, len(member.tasks), arrays)
        else:
            self._keep(member.instance, slot)

    def drop(self, instance: InstanceId) -> None:
        """Let go of the instance's slot."""
        self._slots.pop(instance, None)
