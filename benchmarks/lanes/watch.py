"""Whether a lane that is idle could begin something, worked out from what was issued and what has ended.

Nothing of the engine's own books is used, so that a defect in them shows: a replica's slots follow from where
its instances stand, and what runs follows from the steps. A task that has not started counts as able to begin
in whichever replica its model's first block could. Only in a plan that waits for members it stands where the
engine launched it, as which members are there decides what may run.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from stageloom.shared.bound import BoundModel, BoundPlan
from stageloom.shared.engine.steps import InstanceId, Step
from stageloom.shared.plan import Member, Wait

_Replica = tuple[int, int]  # model, replica


class Watch:
    """The instances of one plan, batches of one, on its replicas.

    `launched` tells whether a task that has not started was launched into a replica, by model and replica.
    """

    def __init__(self, bound: BoundPlan, launched: Callable[[int, int], bool]) -> None:
        self._bound = bound
        self._launched = launched
        self._waiting: Counter[int] = Counter()  # tasks that have not started, by model
        self._standing: dict[_Replica, dict[InstanceId, int]] = {}  # the next block of each that has started
        self._running: dict[_Replica, Counter[int]] = {}  # blocks in flight
        self._replica_of: dict[InstanceId, _Replica] = {}
        self._in_flight: Counter[int] = Counter()  # steps, by combined block
        self._since_s: dict[int, float] = {}  # since when a member of a combined block could move
        for index, model in enumerate(bound.models):
            for replica in range(model.plan.replicas):
                self._standing[index, replica], self._running[index, replica] = {}, Counter()

    def arrived(self, model: int) -> None:
        """A task was submitted."""
        self._waiting[model] += 1

    def gave_up(self, model: int) -> None:
        """A task ended before it started."""
        self._waiting[model] -= 1

    def issued(self, step: Step) -> None:
        """A step was handed to its lane: its members' instances stand at the next block from now on."""
        self._in_flight[step.program.combined] += 1
        for one in step.members:
            model, replica, block = one.member
            if block == 0:
                self._waiting[model] -= 1
            if one.last:
                self._standing[model, replica].pop(one.instance, None)
            else:
                self._standing[model, replica][one.instance] = block + 1
            self._running[model, replica][block] += 1
            self._replica_of[one.instance] = model, replica

    def ended(self, step: Step) -> None:
        """A step has ended."""
        self._in_flight[step.program.combined] -= 1
        for one in step.members:
            model, replica, block = one.member
            self._running[model, replica] -= Counter({block: 1})

    def dropped(self, instance: InstanceId) -> None:
        """An instance goes no further."""
        self._standing[self._replica_of[instance]].pop(instance, None)

    def could_begin(self, now: float) -> bool:
        """Whether some combined block could begin in an idle lane."""
        found = False
        plan = self._bound.plan
        for index, combined in enumerate(self._bound.combined):
            able = 0 if self._in_flight[index] else self._able(combined.members)
            if not able:
                self._since_s.pop(index, None)
                continue
            since_s = self._since_s.setdefault(index, now)
            timed_out = plan.wait is Wait.TIMEOUT and now > since_s + plan.wait_timeout_us * 1e-6
            found |= plan.wait is Wait.NONE or timed_out or able == len(combined.members)
        return found

    def _able(self, members: Iterable[Member]) -> int:
        """How many of the members could run in one step now."""
        able = {member for member in members if self._is_there(member) and self._is_clear(member)}
        while True:
            kept = {member for member in able if self._has_room(member, able)}
            if kept == able:
                return len(able)
            able = kept

    def _is_there(self, member: Member) -> bool:
        """An instance stands at the block, or a task waits for its launch and slot 0 is free."""
        model, replica, block = member
        if block in self._standing[model, replica].values():
            return True
        if self._bound.plan.wait is not Wait.NONE:
            return block == 0 and self._launched(model, replica)
        return block == 0 and self._waiting[model] > 0 and not self._holders(member, 0)

    def _is_clear(self, member: Member) -> bool:
        """No step in flight writes what the block reads, or touches what it overwrites."""
        model, replica, block = member
        bound = self._bound.models[model]
        reads, writes = set(bound.slot_reads[block]), _writes(bound, block)
        for running in self._running[model, replica]:
            theirs = _writes(bound, running)
            if reads & theirs - ({0} if block == 0 else set()) or writes & (
                theirs | set(bound.slot_reads[running])
            ):
                return False
        return True

    def _has_room(self, member: Member, able: set[Member]) -> bool:
        """Its next slot is free, or is freed by another member of the same step."""
        model, _, block = member
        bound = self._bound.models[model]
        if block + 1 == len(bound.blocks):
            return True
        holders = self._holders(member, block + 1)
        freer = member._replace(block=bound.slot_readers[block + 1])
        return not holders or (freer in able and holders == [freer.block])

    def _holders(self, member: Member, slot: int) -> list[int]:
        """Where the instances stand that hold a slot of the member's replica."""
        model, replica, _ = member
        last = self._bound.models[model].slot_readers[slot]
        return [block for block in self._standing[model, replica].values() if slot <= block <= last]


def _writes(bound: BoundModel, block: int) -> set[int]:
    written = {block + 1} if block + 1 < len(bound.blocks) else set()
    return written | {0} if block == 0 else written
