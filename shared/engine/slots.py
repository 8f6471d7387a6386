"""Slots, positions and combined blocks of one loaded plan, in logical time.

A slot changes hands when a step is issued; what the executor must order is worked out from who wrote and who
reads each slot (`Step.after`). Everything here is a table lookup or a bit operation per member of a step.
"""

import math
from typing import TypeAlias

from shared.bound import BoundModel, BoundPlan
from shared.engine.programs import ProgramTable
from shared.engine.records import Instance, StepRecord
from shared.engine.steps import PlanKey
from shared.ids import StepId
from shared.plan import Member, Wait

InFlight: TypeAlias = dict[StepId, StepRecord]
"""The steps in flight, by id."""

NO_LANE = -1

Touched: TypeAlias = "dict[CombinedState, None]"
"""Combined blocks whose moves must be worked out again, in a fixed order."""


class Track:
    """One replica of one model: its slots, and which instance holds each.

    Slot b holds what block b finds made when it runs. An instance at block b holds slot b and every earlier
    slot in which a tensor lies that block b or a later one reads.
    """

    __slots__ = (
        "bits",
        "blocks",
        "bound",
        "frees",
        "holder",
        "holds",
        "home",
        "members",
        "model",
        "plan",
        "position",
        "readers",
        "reads",
        "replica",
        "writers",
    )

    def __init__(self, plan: "PlanState", model: "ModelState", replica: int) -> None:
        self.plan = plan
        self.model = model
        self.replica = replica
        self.bound = model.bound
        count = len(self.bound.blocks)
        last = self.bound.slot_readers
        self.blocks = count
        self.members = tuple(Member(model.index, replica, block) for block in range(count))
        self.reads = self.bound.slot_reads
        self.frees = tuple(tuple(s for s in range(count) if last[s] == b) for b in range(count))
        self.holds = tuple(tuple(s for s in range(b + 1) if last[s] >= b) for b in range(count))
        self.holder: list[Instance | None] = [None] * count
        self.writers: list[list[StepId]] = [[] for _ in range(count)]  # made what lies in the slot
        self.readers: list[list[StepId]] = [[] for _ in range(count)]  # read it since
        self.home: list[CombinedState] = []  # per block its combined block, filled by PlanState
        self.position: list[int] = []  # its position there
        self.bits: list[int] = []  # and the position's bit

    def occupy(self, slot: int, instance: Instance) -> None:
        """Give a free slot to an instance: the block before it can no longer run another one."""
        self.holder[slot] = instance
        if slot:
            self.home[slot - 1].next_free &= ~self.bits[slot - 1]
        else:
            self.model.free_tracks &= ~(1 << self.replica)

    def release(self, slot: int, touched: "Touched") -> None:
        """Free a slot in logical time."""
        self.holder[slot] = None
        if slot:
            home = self.home[slot - 1]
            home.next_free |= self.bits[slot - 1]
            touched[home] = None
        else:
            self.model.free_tracks |= 1 << self.replica

    def enter(self, block: int, instance: Instance, touched: "Touched") -> None:
        """The instance's input for `block` is ready."""
        home = self.home[block]
        home.held[self.position[block]] = instance
        if instance.live:
            home.ready |= self.bits[block]
        else:
            home.empty |= self.bits[block]
        touched[home] = None

    def leave(self, block: int, touched: "Touched") -> None:
        """The instance is no longer at `block`."""
        home = self.home[block]
        home.held[self.position[block]] = None
        home.ready &= ~self.bits[block]
        home.empty &= ~self.bits[block]
        touched[home] = None

    def advance(self, instance: Instance, touched: "Touched") -> None:
        """Move the instance one block on in logical time: slots only, no data.

        The same as `leave`, `release` of what the block frees, `occupy` and `enter`, written out: it is the
        hottest path of the engine.
        """
        block = instance.block
        home, bit = self.home[block], self.bits[block]
        home.held[self.position[block]] = None
        home.ready &= ~bit
        home.empty &= ~bit
        touched[home] = None
        for slot in self.frees[block]:
            self.release(slot, touched)
        following = instance.block = block + 1
        if following == self.blocks:
            self.plan.population -= 1
            return
        self.holder[following] = instance
        home.next_free &= ~bit
        ahead = self.home[following]
        ahead.held[self.position[following]] = instance
        if instance.live:
            ahead.ready |= self.bits[following]
        else:
            ahead.empty |= self.bits[following]
        touched[ahead] = None

    def access(self, block: int, step: StepId, in_flight: InFlight, after: set[StepId]) -> bool:
        """Note what running `block` in `step` reads and overwrites; `after` collects what it must wait for.

        Returns whether a member that was noted before, in the same step, reads the slot that is overwritten.
        Members must be noted downstream first, before `advance`.
        """
        writers, readers = self.writers, self.readers
        if block == 0:
            self.overwrite(0, [step], in_flight, after)
        for slot in self.reads[block]:
            for writer in writers[slot]:
                if writer in in_flight:
                    after.add(writer)
            readers[slot].append(step)
        if block + 1 == self.blocks:
            return False
        staged = step in readers[block + 1]
        self.overwrite(block + 1, [step], in_flight, after)
        return staged

    def overwrite(self, slot: int, writers: list[StepId], in_flight: InFlight, after: set[StepId]) -> None:
        """New content: wait for the readers of the old one, or for its writer where nobody read it."""
        for step in self.readers[slot] or self.writers[slot]:
            if step in in_flight:
                after.add(step)
        self.writers[slot] = writers
        self.readers[slot] = []

    def vacate(self, instance: Instance, touched: "Touched") -> None:
        """Take an instance out of its block and free all that it holds."""
        self.leave(instance.block, touched)
        for slot in self.holds[instance.block]:
            self.release(slot, touched)
        self.plan.population -= 1


class ModelState:
    """One model of a loaded plan."""

    __slots__ = ("bound", "free_tracks", "index", "name", "tracks")

    def __init__(self, plan: "PlanState", index: int, bound: BoundModel) -> None:
        self.name = bound.plan.name
        self.index = index
        self.bound = bound
        self.tracks = [Track(plan, self, replica) for replica in range(bound.plan.replicas)]
        self.free_tracks = (1 << bound.plan.replicas) - 1  # replicas whose slot 0 is free


class CombinedState:
    """One combined block: which members could run, and how it stands in the choice of the next step."""

    __slots__ = (
        "active_sum",
        "chain",
        "empty",
        "full",
        "held",
        "in_flight",
        "index",
        "lane",
        "lanes",
        "last_choice",
        "max_skips",
        "most_skips",
        "moves",
        "next_free",
        "ones",
        "order",
        "overdue_seq",
        "passes",
        "plan",
        "programs",
        "rank",
        "ready",
        "run_ahead",
        "runs",
        "since_s",
        "size",
        "skips",
        "stride",
        "total_skips",
        "urgent_s",
    )

    def __init__(self, plan: "PlanState", index: int, members: tuple[Member, ...]) -> None:
        self.plan = plan
        self.lanes, self.run_ahead, self.max_skips = plan.lanes, plan.run_ahead, plan.max_skips
        self.index = index
        self.size = len(members)
        self.full = (1 << self.size) - 1
        # Downstream first, so that a slot is freed before the block upstream of it fills it again.
        self.order = sorted(range(self.size), key=lambda p: (-members[p].block, members[p]))
        self.chain = self._chain(plan, members)
        self.held: list[Instance | None] = [None] * self.size
        self.ready = 0  # members whose slot is ready
        self.empty = 0  # members with a dead instance that travels on (wait: all, timeout)
        self.next_free = self.full  # members whose next slot is free
        self.moves = 0  # members that would move if the block ran now
        self.programs = ProgramTable(plan.key, index)
        self.lane = NO_LANE  # of the steps in flight
        self.in_flight = 0
        self.since_s = math.inf  # when a member first could move, while others are waited for
        self.urgent_s = math.inf  # from then on it is overdue, or its oldest instance past half its time
        self.rank: tuple[float, ...] = ()
        self.skips = 0  # times passed over since it could run
        self.overdue_seq = 0  # the choice at which skips reached the bound, 0 before that
        self.last_choice = 0  # the choice that took it last
        self.passes = 0.0  # runs over weight, for StepChoice.WEIGHTED
        models = plan.bound.plan.models
        single = all(models[member.model].batch == 1 for member in members)
        self.ones = [(1,) * count for count in range(self.size + 1)] if single else None
        self.stride = 1.0 / sum(models[member.model].weight for member in members)
        self.runs = 0
        self.active_sum = 0
        self.total_skips = 0
        self.most_skips = 0

    def _chain(self, plan: "PlanState", members: tuple[Member, ...]) -> list[tuple[int, int]]:
        """Pairs (own bit, bit of the member whose run frees the next slot), downstream first."""
        at = {member: position for position, member in enumerate(members)}
        pairs = []
        for position in self.order:
            member = members[position]
            last = plan.bound.models[member.model].slot_readers
            if member.block + 1 < len(last):
                freer = at.get(member._replace(block=last[member.block + 1]))
                if freer is not None:
                    pairs.append((1 << position, 1 << freer))
        return pairs

    def buckets(self, active: int) -> tuple[int, ...]:
        """The batch buckets of the active members, ascending by position."""
        ones = self.ones
        if ones is not None:
            return ones[active.bit_count()]
        return tuple(i.bucket for p, i in enumerate(self.held) if i is not None and active >> p & 1)

    def find_moves(self) -> int:
        """The members that are active, and the empty ones that would travel on with them.

        A member is active if its slot is ready and its next slot is free, or is freed by another active
        member. Only the instance at block `slot_readers[b]` can hold slot b while it is there.
        """
        present = self.ready | self.empty
        moves = present & self.next_free
        if moves != present:
            for bit, freer in self.chain:
                if present & bit and moves & freer:
                    moves |= bit
        return moves

    def oldest(self) -> Instance:
        """The oldest instance among the members that would move; dead ones only where all are."""
        held = self.held
        best: Instance | None = None
        mask = self.moves & self.ready or self.moves
        while mask:
            low = mask & -mask
            instance = held[low.bit_length() - 1]
            assert instance is not None
            if best is None or instance.id < best.id:
                best = instance
            mask ^= low
        assert best is not None
        return best


class PlanState:
    """A loaded plan."""

    __slots__ = (
        "bound",
        "combined",
        "kept",
        "key",
        "lanes",
        "loose",
        "max_skips",
        "models",
        "population",
        "precedence",
        "preparing",
        "programs",
        "run_ahead",
        "step_choice",
        "steps",
        "superseded",
        "wait",
        "wait_timeout_s",
    )

    def __init__(self, key: PlanKey, bound: BoundPlan) -> None:
        self.key = key
        self.bound = bound
        self.precedence = float(key)  # of its combined blocks: those of an older plan go first
        self.lanes = bound.plan.lanes
        self.run_ahead = bound.plan.run_ahead
        self.max_skips = bound.plan.max_skips
        self.step_choice = bound.plan.step_choice
        self.wait = bound.plan.wait
        self.wait_timeout_s = bound.plan.wait_timeout_us * 1e-6
        self.models = [ModelState(self, index, model) for index, model in enumerate(bound.models)]
        self.combined = [CombinedState(self, i, c.members) for i, c in enumerate(bound.combined)]
        for model in self.models:
            for track in model.tracks:
                homes = [bound.home[member] for member in track.members]
                track.home = [self.combined[index] for index, _ in homes]
                track.position = [position for _, position in homes]
                track.bits = [1 << position for _, position in homes]
        self.population = 0  # instances that still have a block to be issued
        self.programs = 0  # asked for so far
        self.preparing = 0  # asked for on demand and not there yet
        self.steps = 0  # steps in flight that use this plan's slots
        self.superseded = False  # was active, is no longer
        self.kept = False  # stays loaded though superseded: it is to be activated again
        self.loose = False  # acts as `wait: none`: while draining or superseded, until it is empty

    @property
    def waits(self) -> bool:
        """Whether combined blocks wait for members that have no input yet."""
        return self.wait is not Wait.NONE and not self.loose

    @property
    def empty(self) -> bool:
        """Nothing of it is in flight."""
        return not self.population and not self.steps
