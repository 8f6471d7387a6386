"""A device as the engine's executor sees it: slots in memory, steps that overlap in time.

A step reads its slots from its start to its end and writes all through that time, so its outputs are garbage
until it ends. Steps are ordered by `Step.after`, those of one combined block by issue order, and those of one
lane by issue order where `lane_order` is on; by nothing else. Every tensor's value is a hash of what it was
computed from, so a missing order, an early reuse or a lost move shows as a wrong value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stageloom.shared.blocks import Block
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import (
    CopySlot,
    DropInstance,
    InstanceId,
    MoveInstance,
    PlanKey,
    Step,
    StepMember,
)
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, StepId, TaskId
from stageloom.shared.plan import Member

Values = dict[int, tuple[int, ...]]
"""Per tensor its value in every row of the batch."""

GARBAGE = -1


class Wrong(AssertionError):
    """The device did something that a correct engine never makes it do."""


@dataclass
class Slot:
    """What lies in a slot. Every write gives a new version, on the writer's memory node alone."""

    version: int = 0
    values: Values = field(default_factory=dict)
    nodes: set[int] = field(default_factory=set)


@dataclass
class Running:
    """A step that was issued."""

    step: Step
    started: bool = False
    saw: dict[tuple[PlanKey, Member], int] = field(
        default_factory=dict
    )  # versions of the slots that it reads
    made: list[tuple[StepMember, Values]] = field(default_factory=list)


def input_value(task: TaskId, tensor: int) -> int:
    """What an application put into a graph input."""
    return hash(("input", task, tensor))


def op_value(artifact: Digest, tensor: int, inputs: tuple[int, ...]) -> int:
    """What an operator makes of its inputs."""
    return hash((artifact, tensor, inputs))


class Oracle:
    """What every tensor of every task must be: the whole model evaluated at once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Digest, TaskId], list[int]] = {}

    def values(self, artifact: Digest, graph: Graph, task: TaskId) -> list[int]:
        """Per tensor its value."""
        found = self._known.get((artifact, task))
        if found is None:
            found = [0] * len(graph.tensors)
            for tensor in graph.inputs:
                found[tensor] = input_value(task, tensor)
            for operator in graph.operators:
                inputs = tuple(found[t] for t in operator.inputs)
                for tensor in operator.outputs:
                    found[tensor] = op_value(artifact, tensor, inputs)
            self._known[artifact, task] = found
        return found


class Device:
    """Loaded plans, their slots, and the steps in flight."""

    def __init__(self, *, lane_order: bool) -> None:
        self._lane_order = lane_order
        self.plans: dict[PlanKey, BoundPlan] = {}
        self._slots: dict[tuple[PlanKey, Member], Slot] = {}
        self._running: dict[StepId, Running] = {}
        self._moves: list[MoveInstance] = []
        self._copies: dict[StepId, tuple[CopySlot, int]] = {}  # under way, and the version that is copied
        self._oracle = Oracle()
        self._version = 0
        self.live: set[TaskId] = set()
        self.outputs: set[tuple[TaskId, str]] = set()  # correct outputs that left, by task and model
        self.dropped: set[InstanceId] = set()

    def load(self, key: PlanKey, bound: BoundPlan) -> None:
        """Make room for a plan's slots."""
        self.plans[key] = bound
        for members in bound.combined:
            for member in members.members:
                self._slots[key, member] = Slot()

    def unload(self, key: PlanKey) -> None:
        """Free a plan; whatever still uses it is an error."""
        if any(running.step.program.plan == key for running in self._running.values()):
            raise Wrong(f"plan {key} was released under a step in flight")
        if any(key in (move.old[0], move.new[0]) for move in self._moves):
            raise Wrong(f"plan {key} was released under a pending move")
        if any(copy.slot[0] == key for copy, _ in self._copies.values()):
            raise Wrong(f"plan {key} was released under a copy")
        del self.plans[key]
        self._slots = {place: slot for place, slot in self._slots.items() if place[0] != key}

    # Issue, start, end

    def issue(self, step: Step) -> None:
        """Take a step."""
        for member in step.members:
            if member.instance in self.dropped:
                raise Wrong(f"instance {member.instance} runs in step {step.id} after it was dropped")
        self._running[step.id] = Running(step)

    def move(self, move: MoveInstance) -> None:
        """Take a move; it happens once the steps that it waits for have ended."""
        self._moves.append(move)
        self._do_moves()

    def copy(self, copy: CopySlot) -> None:
        """A copy begins."""
        self._copies[copy.id] = (copy, self._slots[copy.slot].version)

    def end_copy(self, id: StepId) -> None:
        """A copy is over: what it read must not have changed."""
        copy, version = self._copies.pop(id)
        slot = self._slots[copy.slot]
        if slot.version != version:
            raise Wrong(f"slot {copy.slot} was overwritten while it was copied")
        slot.nodes.add(copy.node)

    def drop(self, drop: DropInstance) -> None:
        """Take note that an instance goes no further."""
        copied = {id for id, (copy, _) in self._copies.items() if copy.instance == drop.instance}
        using = copied | {
            step_id
            for step_id, running in self._running.items()
            if any(member.instance == drop.instance for member in running.step.members)
        }
        if not using <= set(drop.after):
            raise Wrong(f"instance {drop.instance} is dropped under the steps {sorted(using)}")
        self.dropped.add(drop.instance)

    def startable(self) -> list[StepId]:
        """Steps that nothing holds back, in issue order."""
        ready = []
        lanes: set[int] = set()
        combined: set[tuple[PlanKey, int]] = set()
        for step_id, running in self._running.items():
            step = running.step
            block = (step.program.plan, step.program.combined)
            held = any(one in self._running or one in self._copies for one in step.after) or block in combined
            if self._lane_order and step.lane in lanes:
                held = True
            if not held and not running.started:
                ready.append(step_id)
            lanes.add(step.lane)
            combined.add(block)
        return ready

    def start(self, step_id: StepId) -> Step:
        """The step begins: it reads, and its outputs become garbage."""
        running = self._running[step_id]
        running.started = True
        step = running.step
        for member in step.members:
            running.made.append((member, self._compute(running, member)))
        for member in step.members:
            if not member.staged and not step.fallback and not member.last:
                self._write(step.program.plan, _next(member.member), {}, self._node(step))
        return step

    def end(self, step_id: StepId, *, failed: bool = False) -> None:
        """The step is over: what it read must not have changed; its outputs are in place."""
        running = self._running.pop(step_id)
        step = running.step
        for place, version in running.saw.items():
            if self._slots[place].version != version and self._reads_live(step, place):
                raise Wrong(f"slot {place} was overwritten while step {step_id} read it")
        for member, values in running.made:
            if failed:
                values = {}
            if member.last:
                self._hand_out(step, member, values)
            else:
                self._write(step.program.plan, _next(member.member), values, self._node(step))
        self._do_moves()

    def _node(self, step: Step) -> int:
        return self.plans[step.program.plan].plan.memory_of(step.lane)

    def _reads_live(self, step: Step, place: tuple[PlanKey, Member]) -> bool:
        """Whether a member with a live task reads the slot."""
        _, (model, replica, slot) = place
        bound = self.plans[step.program.plan].models[model]
        return any(
            m.member.model == model
            and m.member.replica == replica
            and slot in bound.slot_reads[m.member.block]
            and self._is_live(m)
            for m in step.members
        )

    def _is_live(self, member: StepMember) -> bool:
        return member.instance not in self.dropped and any(task in self.live for task in member.tasks)

    def _compute(self, running: Running, member: StepMember) -> Values:
        plan = running.step.program.plan
        model, replica, block_index = member.member
        bound = self.plans[plan].models[model]
        graph, block = bound.graph, bound.blocks[block_index]
        node = self._node(running.step)
        if block_index == 0:
            feed: Values = {t: tuple(input_value(task, t) for task in member.tasks) for t in graph.inputs}
            self._write(plan, member.member, feed, node)
            self._slots[plan, member.member].nodes.add(0)  # where it came from
        known: Values = {}
        wanted = {t for op in block.operators for t in graph.operators[op].inputs}
        if member.last:
            wanted.update(graph.outputs)
        for tensor in sorted(wanted):
            if graph.producer[tensor] >= block.start:
                continue
            place = (plan, Member(model, replica, self.lies(bound.graph, bound.blocks, tensor)))
            slot = self._slots[place]
            running.saw[place] = slot.version
            if self.plans[plan].plan.places and node not in slot.nodes and self._is_live(member):
                raise Wrong(f"slot {place} is read on node {node}, where it is not valid")
            known[tensor] = slot.values.get(tensor, (GARBAGE,) * len(member.tasks))
            self._check(bound.plan.artifact, graph, member, tensor, known[tensor])
        for op in block.operators:
            operator = graph.operators[op]
            for tensor in operator.outputs:
                known[tensor] = tuple(
                    op_value(bound.plan.artifact, tensor, tuple(known[t][row] for t in operator.inputs))
                    for row in range(len(member.tasks))
                )
        kept = graph.outputs if member.last else block.makes
        return {tensor: known[tensor] for tensor in kept}

    @staticmethod
    def lies(graph: Graph, blocks: Sequence[Block], tensor: int) -> int:
        """The slot in which a tensor lies: the one after the block that makes it."""
        made = graph.producer[tensor]
        return 0 if made < 0 else next(b.index for b in blocks if b.start <= made < b.stop) + 1

    def _check(
        self, artifact: Digest, graph: Graph, member: StepMember, tensor: int, values: tuple[int, ...]
    ) -> None:
        for row, task in enumerate(member.tasks):
            if task in self.live and member.instance not in self.dropped:
                expected = self._oracle.values(artifact, graph, task)[tensor]
                if row >= len(values) or values[row] != expected:
                    raise Wrong(f"task {task} finds a wrong value of tensor {tensor} in {member.member}")

    def _hand_out(self, step: Step, member: StepMember, values: Values) -> None:
        if not values:
            return
        bound = self.plans[step.program.plan].models[member.member.model]
        for tensor, rows in values.items():
            self._check(bound.plan.artifact, bound.graph, member, tensor, rows)
        for task in member.tasks:
            if task in self.live and member.instance not in self.dropped:
                if (task, bound.plan.name) in self.outputs:
                    raise Wrong(f"task {task} ran twice in model {bound.plan.name}")
                self.outputs.add((task, bound.plan.name))

    def _write(self, plan: PlanKey, place: Member, values: Values, node: int = 0) -> None:
        self._version += 1
        slot = self._slots[plan, place]
        slot.version = self._version
        slot.values = values
        slot.nodes = {node}

    def _do_moves(self) -> None:
        """Carry out the moves that wait for nothing, in issue order."""
        waiting = []
        for move in self._moves:
            if any(step in self._running for step in move.after):
                waiting.append(move)
            else:
                self._do_move(move)
        self._moves = waiting

    def _do_move(self, move: MoveInstance) -> None:
        old_key, old = move.old
        new_key, new = move.new
        source, target = self.plans[old_key].models[old.model], self.plans[new_key].models[new.model]
        fresh: dict[int, Values] = {}
        for tensor in target.blocks[new.block].live_in:
            there = self.lies(source.graph, source.blocks, tensor)
            here = self.lies(target.graph, target.blocks, tensor)
            slot = self._slots[old_key, old._replace(block=there)]
            if tensor in slot.values:
                fresh.setdefault(here, {})[tensor] = slot.values[tensor]
        for slot_index in range(new.block + 1):
            if target.slot_readers[slot_index] >= new.block:
                self._write(new_key, new._replace(block=slot_index), fresh.get(slot_index, {}))


def _next(member: Member) -> Member:
    return member._replace(block=member.block + 1)
