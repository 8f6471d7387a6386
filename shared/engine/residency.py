"""Where the tensors of slots lie: per slot the memory nodes on which they are valid.

A copy adds a node and takes none away; a write leaves the writer's node alone. Everything is in logical time,
as in the rest of the engine: a copy counts from the moment it is issued, and whoever reads it comes after it.

A transfer is predicted as StarPU does (`src/core/perfmodel/perfmodel.c`): one after another, latency and
bytes over bandwidth of every tensor that is not valid on the node.
"""

import math
from collections.abc import Hashable, Iterable
from typing import Generic, NewType, TypeVar

from msgspec import Struct

NodeId = NewType("NodeId", int)
"""A memory node: what resources of one node read is written once for all of them."""

SlotT = TypeVar("SlotT", bound=Hashable)


class Bus(Struct, frozen=True, kw_only=True):
    """What a copy between any two memory nodes takes."""

    latency_s: float = 0.0  # per tensor
    bytes_per_s: float = math.inf

    def copy_s(self, tensor_bytes: Iterable[int]) -> float:
        """Seconds that copies of tensors of these sizes take, one after another; an empty one takes none."""
        return sum(self.latency_s + nbytes / self.bytes_per_s for nbytes in tensor_bytes if nbytes)


class _Contents:
    """What lies in a slot. `nodes`: a mask of the memory nodes on which it is valid."""

    __slots__ = ("copy_s", "nodes")

    def __init__(self, nodes: int, copy_s: float) -> None:
        self.nodes = nodes
        self.copy_s = copy_s


class Residency(Generic[SlotT]):
    """The valid memory nodes of every slot that holds something. Slots are whatever names them."""

    def __init__(self, bus: Bus | None = None) -> None:
        self.bus = bus or Bus()
        self._slots: dict[SlotT, _Contents] = {}

    def __len__(self) -> int:
        """Slots that hold something."""
        return len(self._slots)

    def write(self, slot: SlotT, node: NodeId, tensor_bytes: Iterable[int]) -> None:
        """New tensors of these sizes, in bytes, were put into a slot on a node: older copies are stale."""
        self._slots[slot] = _Contents(1 << node, self.bus.copy_s(tensor_bytes))

    def copy(self, slot: SlotT, node: NodeId) -> None:
        """The slot's tensors were copied to one more node.

        Raises:
            KeyError: the slot holds nothing.
        """
        self._slots[slot].nodes |= 1 << node

    def release(self, slot: SlotT) -> None:
        """The slot holds nothing any more; a slot that held nothing stays as it is."""
        self._slots.pop(slot, None)

    def valid(self, slot: SlotT, node: NodeId) -> bool:
        """Whether the slot's tensors can be read on a node."""
        contents = self._slots.get(slot)
        return contents is not None and bool(contents.nodes >> node & 1)

    def missing(self, slots: Iterable[SlotT], node: NodeId) -> tuple[SlotT, ...]:
        """The slots, in their order, that have to be copied before they are read on a node.

        Raises:
            KeyError: a slot holds nothing.
        """
        return tuple(slot for slot in slots if not self._slots[slot].nodes >> node & 1)

    def transfer_s(self, slots: Iterable[SlotT], node: NodeId) -> float:
        """Seconds that it takes to make the slots readable on a node; 0 where all are.

        Raises:
            KeyError: a slot holds nothing.
        """
        return sum(self._slots[slot].copy_s for slot in self.missing(slots, node))


def exposed_transfer_s(transfer_s: float, *, now: float, expected_end_s: float) -> float:
    """The part of a transfer that begins now and outlasts what is queued until `expected_end_s`.

    StarPU books only this part for a task whose inputs are prefetched when it is placed
    (`push_task_on_best_worker`, `src/sched_policies/deque_modeling_policy_data_aware.c`).
    """
    return max(0.0, now + transfer_s - expected_end_s)
