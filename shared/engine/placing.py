"""Placement of one loaded plan: what the engine's blocks, slots and steps are to a `Placer`.

A block is placed as soon as all that it reads is made, once for every run; then it competes in the lanes of
its resource alone, by the plan's step choice. What it reads and does not find on the resource's memory node
is copied at once, and it begins once the copies have ended: no lane waits for one. A block whose active
members or their batches change before it begins is placed anew.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from stageloom.shared.bitmask import bits
from stageloom.shared.bound import BoundPlan
from stageloom.shared.digest import canonical, digest_bytes
from stageloom.shared.engine.history import DurationHistory, Footprint
from stageloom.shared.engine.placement import Placed, Placer, ReadyTask, WorkerSpec
from stageloom.shared.engine.residency import Bus, NodeId, Residency
from stageloom.shared.engine.steps import InstanceId
from stageloom.shared.plan import PlacementPolicy
from stageloom.shared.stage_string import to_tokens

if TYPE_CHECKING:
    from stageloom.shared.engine.slots import CombinedState, PlanState, Slot

HOST = NodeId(0)
"""Where inputs come from and outputs go to."""


def footprint(bound: BoundPlan, combined: int, mask: int, buckets: tuple[int, ...]) -> Footprint:
    """What a combined block computes with the members in `mask` active, each at its bucket."""
    members = bound.combined[combined].members
    parts = []
    for position, bucket in zip(bits(mask), buckets, strict=True):
        model = bound.models[members[position].model]
        block = model.blocks[members[position].block]
        parts.append(f"{model.graph_key[:16]}:{block.start}-{block.stop}x{bucket}")
    return Footprint("+".join(parts))


def kind_on(bound: BoundPlan, combined: int, resource: int) -> str:
    """What runs a combined block on a resource: the executor with its options, the cores, the schedule."""
    block = bound.combined[combined].plan
    variant = block.variant_on[resource]
    executor, where = bound.executor_of(combined, variant), bound.plan.resources[resource]
    cores = ",".join(map(str, where.cores)) or "any"
    schedule = digest_bytes([canonical(list(to_tokens(block.variants[variant][1])))])[:8]
    options = f"{executor.name}/{executor.intra_op_threads}/{executor.precision}"
    return f"{options}@{cores}/{where.memory} {schedule}"


class Sought(Struct):
    """A run of a combined block that a resource is sought for, or was found for."""

    task: int
    members: tuple[tuple[int, InstanceId, int], ...]  # position, instance and bucket of those that would run
    placed: bool = False
    copying: int = 0  # copies that it waits for


class PlanPlacement:
    """The placer of one plan, told of what its blocks do."""

    def __init__(self, plan: "PlanState", history: DurationHistory, bus: Bus) -> None:
        self._plan = plan
        bound = self._bound = plan.bound
        resources = bound.plan.resources
        self.placer: Placer[Slot] = Placer(
            bound.plan.placement,
            [
                WorkerSpec(
                    kind=str(index),
                    node=NodeId(resource.memory),
                    lanes=max(bound.plan.lane_resources.count(index), 1),
                )
                for index, resource in enumerate(resources)
            ],
            history=history,
            residency=Residency(bus),
        )
        self._history = history
        self._bus = bus
        self._next_task = 0
        self._seeking: dict[int, CombinedState] = {}  # by task, those without a resource
        self._allowed = [tuple(sorted(block.plan.variant_on)) for block in bound.combined]
        self._kinds = [
            tuple(kind_on(bound, index, resource) for resource in allowed)
            for index, allowed in enumerate(self._allowed)
        ]
        self._bytes: dict[Slot, list[int]] = {}
        for combined in plan.combined:
            for slot in combined.slots:
                self._bytes[slot] = self._bytes_of(slot)

    @property
    def seeking(self) -> bool:
        """Some block waits for a resource."""
        return bool(self._seeking)

    def first_seeking(self) -> "CombinedState":
        """One of those blocks."""
        return next(iter(self._seeking.values()))

    def _bytes_of(self, slot: "Slot") -> list[int]:
        """Per tensor of a slot its bytes, at batch 1."""
        model = slot.track.bound
        made = model.graph.inputs if slot.behind is None else model.blocks[slot.block - 1].makes
        return [model.graph.tensors[tensor].nbytes for tensor in made]

    # Before a step

    @staticmethod
    def awaits_copies(combined: "CombinedState") -> bool:
        """It was placed and waits for copies, as long as all of its members would still run."""
        sought = combined.sought
        if sought is None or not sought.copying:
            return False
        for position, instance, _ in sought.members:
            standing = combined.slots[position].instance
            if standing is None or standing.id != instance or not combined.moves >> position & 1:
                return False
        return True

    def members(self, combined: "CombinedState", moves: int) -> tuple[tuple[int, InstanceId, int], ...]:
        """Who would run, and in which bucket: what a run takes is learned for just that."""
        found = []
        for position in bits(moves & combined.ready):
            instance = combined.slots[position].instance
            assert instance is not None
            found.append((position, instance.id, instance.bucket))
        return tuple(found)

    def seek(self, combined: "CombinedState", moves: int) -> None:
        """The block could run with these members; `place` says where."""
        active = moves & combined.ready
        index = combined.index
        allowed = self._allowed[index]
        task = ReadyTask(
            self._next_task,
            footprint(self._bound, index, active, combined.buckets(active)),
            allowed,
            tuple(dict.fromkeys(slot for slot in self._reads(combined, active))),
            combined.oldest().id,
            self._rank_s(combined, active) if self.placer.policy is PlacementPolicy.HEFT else 0.0,
            self._kinds[index],
        )
        combined.sought = Sought(self._next_task, self.members(combined, moves))
        self._seeking[self._next_task] = combined
        self._next_task += 1
        self.placer.ready(task)

    @staticmethod
    def _reads(combined: "CombinedState", active: int) -> "Iterator[Slot]":
        """What is made before the step; a model's inputs come with its first block."""
        for position in bits(active):
            slot = combined.slots[position]
            if slot.behind is not None:
                yield from slot.reads

    def _rank_s(self, combined: "CombinedState", active: int) -> float:
        """The upward rank, HEFT's: of the member that has the most before it."""
        return max(self._slot_rank_s(combined.slots[position]) for position in bits(active))

    def _slot_rank_s(self, slot: "Slot | None") -> float:
        rank_s = 0.0
        while slot is not None:
            rank_s += self._mean_s(slot)
            if slot.ahead is not None:
                rank_s += self._mean_transfer_s(slot, slot.ahead)
            slot = slot.ahead
        return rank_s

    def _mean_s(self, slot: "Slot") -> float:
        """What the block takes on those of its resources where that is known, on average; alone in its
        combined block and at its instance's batch."""
        instance, index = slot.instance, slot.home.index
        bucket = 1 if instance is None else instance.bucket
        what = footprint(self._bound, index, slot.bit, (bucket,))
        known = [self._history.expected_s(what, kind) for kind in self._kinds[index]]
        times_s = [one for one in known if one is not None]
        return sum(times_s) / len(times_s) if times_s else 0.0

    def _mean_transfer_s(self, slot: "Slot", ahead: "Slot") -> float:
        nodes = [worker.spec.node for worker in self.placer.workers]
        pairs = [
            nodes[one] != nodes[other]
            for one in self._allowed[slot.home.index]
            for other in self._allowed[ahead.home.index]
        ]
        return self._bus.copy_s(self._bytes[ahead]) * sum(pairs) / len(pairs)

    def give_up(self, combined: "CombinedState") -> None:
        """The block cannot run any more as it was to."""
        assert combined.sought is not None
        self.placer.withdraw(combined.sought.task)
        self._seeking.pop(combined.sought.task, None)
        combined.stand_anywhere()

    def place(self, now: float) -> "Iterator[tuple[CombinedState, Placed[Slot]]]":
        """Find resources for the blocks that wait for one; the copies that a decision names begin now."""
        for placed in self.placer.place(now):
            assert isinstance(placed.task.id, int)
            combined = self._seeking.pop(placed.task.id)
            assert combined.sought is not None
            combined.sought.placed = True
            combined.stand_on(placed.resource)
            yield combined, placed

    # Steps

    def begin(self, combined: "CombinedState", lane: int, now: float) -> int:
        """A step of the block is issued; the task that it runs. Its instances have not moved on yet."""
        sought = combined.sought
        assert sought is not None and sought.placed
        self.placer.begin(sought.task, now)
        node = NodeId(self._bound.plan.memory_of(lane))
        residency = self.placer.residency
        for position, _, _ in sought.members:
            slot = combined.slots[position]
            instance = slot.instance
            assert instance is not None
            if slot.behind is None:
                residency.write(slot, HOST, [nbytes * instance.bucket for nbytes in self._bytes[slot]])
                residency.copy(slot, node)
            if slot.ahead is not None:
                bytes_ahead = [nbytes * instance.bucket for nbytes in self._bytes[slot.ahead]]
                residency.write(slot.ahead, node, bytes_ahead)
        combined.stand_anywhere()
        return sought.task

    def end(self, task: int, compute_s: float | None) -> None:
        """The step of a task ended; `compute_s` is what it took, None where that is unknown."""
        self.placer.end(task, compute_s)
