"""Slots, positions and combined blocks of one loaded plan, in logical time.

A slot changes hands when a step is issued; what the executor must order is worked out from who wrote and who
reads each slot (`Step.after`). Everything here is a table lookup or a bit operation per member of a step.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from stageloom.shared.bound import BoundModel, BoundPlan
from stageloom.shared.engine.pace import Pace
from stageloom.shared.engine.records import MAX_REMEMBERED, Instance, ProgramState, ProgramTable, StepRecord
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.ids import StepId
from stageloom.shared.plan import Member, StepChoice, Wait

if TYPE_CHECKING:
    from stageloom.shared.engine.choice import Rank, Rivals
    from stageloom.shared.engine.placing import PlanPlacement, Sought

InFlight: TypeAlias = dict[StepId, StepRecord]
"""The steps in flight, by id."""

NO_LANE = -1

Touched: TypeAlias = "dict[CombinedState, None]"
"""Combined blocks whose moves must be worked out again, in a fixed order."""


class Slot:
    """What one block of one replica finds made when it runs: who holds it, and who stands at the block.

    An instance at block b holds slot b and every earlier slot in which a tensor lies that block b or a later
    one reads. `PlanState` links the slots; links are looked up in every step, hence so many.
    """

    __slots__ = (
        "ahead",
        "behind",
        "bit",
        "block",
        "frees",
        "holder",
        "holds",
        "home",
        "instance",
        "last",
        "member",
        "position",
        "readers",
        "reads",
        "track",
        "writers",
    )

    def __init__(self, track: "Track", block: int) -> None:
        self.track = track
        self.block = block
        self.last = block + 1 == track.blocks
        self.member = Member(track.model.index, track.replica, block)
        self.ahead: Slot | None = None  # of the next block
        self.behind: Slot | None = None  # of the block before
        self.reads: tuple[Slot, ...] = ()  # what the block reads
        self.frees: tuple[Slot, ...] = ()  # what nobody reads once the block was issued
        self.holds: tuple[Slot, ...] = ()  # what an instance at the block holds
        self.holder: Instance | None = None
        self.instance: Instance | None = None  # that stands at the block
        self.writers: list[StepId] = []  # made what lies in the slot
        self.readers: list[StepId] = []  # read it since
        self.home: CombinedState  # the block's combined block,
        self.position = 0  # its place among the members there,
        self.bit = 1  # and the place's bit

    def occupy(self, instance: Instance) -> None:
        """Give the free slot to an instance: the block before it can no longer run another one."""
        self.holder = instance
        behind = self.behind
        if behind is not None:
            behind.home.next_free &= ~behind.bit
        else:
            self.track.model.free_tracks &= ~(1 << self.track.replica)

    def release(self, touched: "Touched") -> None:
        """Free the slot in logical time."""
        self.holder = None
        behind = self.behind
        if behind is not None:
            home = behind.home
            home.next_free |= behind.bit
            if behind.instance is not None:
                touched[home] = None
        else:
            track = self.track
            track.model.free_tracks |= 1 << track.replica
            track.plan.vacated = True

    def enter(self, instance: Instance, touched: "Touched") -> None:
        """The instance's input for the block is ready."""
        home = self.home
        self.instance = instance
        if instance.live:
            home.ready |= self.bit
        else:
            home.empty |= self.bit
        touched[home] = None

    def leave(self, touched: "Touched") -> None:
        """The instance is no longer at the block."""
        home = self.home
        self.instance = None
        home.ready &= ~self.bit
        home.empty &= ~self.bit
        touched[home] = None

    def advance(self, instance: Instance, touched: "Touched") -> None:
        """Move the instance one block on in logical time: slots only, no data.

        The same as `leave`, `release` of what the block frees, and `occupy` and `enter` ahead, written out:
        it is the hottest path of the engine.
        """
        home, bit = self.home, self.bit
        self.instance = None
        if instance.live:
            home.ready ^= bit
        else:
            home.empty ^= bit
        touched[home] = None
        for slot in self.frees:
            behind = slot.behind
            if behind is None:
                slot.release(touched)
            else:
                slot.holder = None
                behind.home.next_free |= behind.bit
                if behind.instance is not None:
                    touched[behind.home] = None
        instance.block = self.block + 1
        ahead = self.ahead
        if ahead is None:
            self.track.plan.population -= 1
            return
        ahead.holder = ahead.instance = instance
        home.next_free &= ~bit
        home = ahead.home
        if instance.live:
            home.ready |= ahead.bit
        else:
            home.empty |= ahead.bit
        touched[home] = None

    def access(self, step: StepId, in_flight: InFlight, after: set[StepId]) -> bool:
        """Note what running the block in `step` reads and overwrites; `after` collects what it must wait for.

        Returns whether a member that was noted before, in the same step, reads the slot that is overwritten.
        Members must be noted downstream first, before `advance`.
        """
        if self.behind is None:
            self.overwrite(step, in_flight, after)
        for slot in self.reads:
            for writer in slot.writers:
                if writer in in_flight:
                    after.add(writer)
            slot.readers.append(step)
        ahead = self.ahead
        return ahead is not None and ahead.overwrite(step, in_flight, after)

    def overwrite(self, step: StepId, in_flight: InFlight, after: set[StepId]) -> bool:
        """New content: wait for the readers of the old one, or for its writer where nobody read it."""
        readers = self.readers
        for before in readers or self.writers:
            if before in in_flight:
                after.add(before)
        self.writers = [step]
        self.readers = []
        return step in readers

    def lanes_before(self, in_flight: InFlight, waiter: "CombinedState | None" = None) -> tuple[int, int]:
        """The lanes, as masks, of the steps in flight that running the block now must come after.

        First those that make what the block reads, then those that read what it overwrites. `waiter` is noted
        at each of these steps, to be looked at again when it ends. Until then no step is added to them: slots
        that the block reads have been written, the slot that it writes has had its last reader.
        """
        made = overwritten = 0
        ahead = self.ahead
        if self.behind is None:
            for step in self.readers or self.writers:
                overwritten |= _lane_of(step, in_flight, waiter)
        else:
            for slot in self.reads:
                for step in slot.writers:
                    made |= _lane_of(step, in_flight, waiter)
        if ahead is not None:
            for step in ahead.readers or ahead.writers:
                overwritten |= _lane_of(step, in_flight, waiter)
        return made, overwritten

    def vacate(self, touched: "Touched") -> None:
        """Take the instance out of the block and free all that it holds."""
        self.leave(touched)
        for slot in self.holds:
            slot.release(touched)
        self.track.plan.population -= 1


def _lane_of(step: StepId, in_flight: InFlight, waiter: "CombinedState | None") -> int:
    """The lane of a step in flight, as a bit; 0 once it has ended."""
    record = in_flight.get(step)
    if record is None:
        return 0
    if waiter is not None:
        record.waiters[waiter] = None
    return 1 << record.lane


class Track:
    """One replica of one model: its slots, by block."""

    __slots__ = ("blocks", "bound", "model", "newest", "plan", "replica", "slots")

    def __init__(self, plan: "PlanState", model: "ModelState", replica: int) -> None:
        self.plan = plan
        self.model = model
        self.replica = replica
        self.bound = model.bound
        self.blocks = len(self.bound.blocks)
        self.newest: Instance | None = None  # that came last, by a launch or from another plan
        self.slots = tuple(Slot(self, block) for block in range(self.blocks))
        last = self.bound.slot_readers
        for block, slot in enumerate(self.slots):
            if block:
                slot.behind, self.slots[block - 1].ahead = self.slots[block - 1], slot
            slot.reads = tuple(self.slots[s] for s in self.bound.slot_reads[block])
            slot.frees = tuple(one for one in self.slots if last[one.block] == block)
            slot.holds = tuple(one for one in self.slots[: block + 1] if last[one.block] >= block)

    @property
    def room(self) -> int:
        """Blocks that the instance that came last has behind it; all of them where none is on its way."""
        newest = self.newest
        if newest is None or newest.track is not self or newest.over:
            return self.blocks
        return newest.passed

    def may_begin(self, in_flight: InFlight, lanes: int) -> bool:
        """Whether an instance that is launched into the free slot 0 could run its first block in a lane.

        `lanes`: those that come into question, as a mask.
        """
        first = self.slots[0]
        if not first.home.lanes & lanes:
            return False
        ahead = first.ahead
        if ahead is not None and ahead.holder is not None:
            return False
        made, overwritten = first.lanes_before(in_flight)
        if self.plan.lanes == 1:
            return (made | overwritten) <= 1
        return first.home.lane == NO_LANE and not made | overwritten


class ModelState:
    """One model of a loaded plan."""

    __slots__ = (
        "_at_once",
        "_in_order",
        "apart",
        "bound",
        "free_tracks",
        "index",
        "lanes_share",
        "name",
        "pace",
        "tracks",
    )

    def __init__(self, plan: "PlanState", index: int, bound: BoundModel) -> None:
        self.name = bound.plan.name
        self.index = index
        self.bound = bound
        self.tracks = [Track(plan, self, replica) for replica in range(bound.plan.replicas)]
        self.pace = Pace(len(bound.blocks))
        self.lanes_share = plan.lanes / len(plan.bound.models)  # each model's, where all want to run
        self.free_tracks = (1 << bound.plan.replicas) - 1  # replicas whose slot 0 is free
        first_lanes = {
            plan.bound.lanes_of(plan.bound.home[Member(index, replica, 0)][0])
            for replica in range(bound.plan.replicas)
        }
        self.apart = len(first_lanes) > 1  # replicas begin in different lanes: which are idle matters
        self._in_order = plan.lanes == 1 and not plan.by_deadline
        self._at_once = (bound.plan.replicas == 1 or plan.wait is not Wait.NONE) and not plan.by_deadline

    def next_track(self, in_flight: InFlight, lanes: int = -1) -> Track | None:
        """The replica that the next launch goes into; None where none is free, or a better one may be soon.

        `lanes`: those in which its first block is to begin, as a mask.

        In one lane: the first one whose slot 0 is free. In several: one whose first block could begin, and of
        those the one whose newest instance is furthest ahead, as blocks that follow each other never overlap
        in one replica. Where none could begin a task waits for the first that can. A model's only replica
        takes it at once, to have it ready behind the step that it waits for; so does the first one in a plan
        that waits for members, where others may wait for just this task.
        """
        free = self.free_tracks
        if not free:
            return None
        if self._in_order:
            return self.tracks[(free & -free).bit_length() - 1]
        found: Track | None = None
        for track in self.tracks:
            if free >> track.replica & 1 and track.may_begin(in_flight, lanes):
                if found is None or track.room > found.room:
                    found = track
        if found is None and self._at_once:
            return self.tracks[(free & -free).bit_length() - 1]
        return found


class CombinedState:
    """One combined block: which members could run, and how it stands in the choice of the next step."""

    __slots__ = (
        "active_sum",
        "at_one",
        "chain",
        "empty",
        "full",
        "in_flight",
        "index",
        "lane",
        "lanes",
        "last_choice",
        "late_s",
        "most_skips",
        "moves",
        "next_free",
        "ones",
        "order",
        "overdue_seq",
        "passes",
        "placement",
        "plan",
        "programs",
        "rank",
        "ready",
        "rivals",
        "runs",
        "since_s",
        "since_turn",
        "size",
        "slots",
        "sought",
        "stands",
        "stride",
        "total_skips",
        "variant",
    )

    def __init__(self, plan: "PlanState", index: int, slots: tuple[Slot, ...]) -> None:
        self.plan = plan
        self.index = index
        self.size = len(slots)
        self.full = (1 << self.size) - 1
        self.slots = slots  # by position
        for position, slot in enumerate(slots):
            slot.home, slot.position, slot.bit = self, position, 1 << position
        # Downstream first, so that a slot is freed before the block upstream of it fills it again.
        self.order = tuple(sorted(slots, key=lambda slot: (-slot.block, slot.member)))
        self.chain = self._chain()
        self.ready = 0  # members whose slot is ready
        self.empty = 0  # members with a dead instance that travels on (wait: all, timeout)
        self.next_free = self.full  # members whose next slot is free
        self.moves = 0  # members that would move if the block ran now
        self.programs = ProgramTable(plan.key, index)
        self.at_one: dict[
            int, ProgramState
        ] = {}  # those that `program` found, by mask, where every batch is one
        self.variant = 0  # the way in which it runs
        self.placement: PlanPlacement | None = None  # of a plan that places its blocks,
        self.sought: Sought | None = None  # and how far that is for the next run
        self.lanes = plan.bound.lanes_of(index)  # in which it may run, as a mask
        self.lane = NO_LANE  # of the steps in flight
        self.in_flight = 0
        self.since_s = math.inf  # when a member first could move, while others are waited for
        self.stands: list[Rivals] = []  # the lines it may stand in, by lane, the last one of no lane
        self.rivals: Rivals | None = None  # those it stands in line with; None while it cannot run
        self.rank: Rank | None = None  # its place in that line
        self.since_turn = 0  # the rivals' turns when it had been passed over 0 times
        self.late_s = math.inf  # when its oldest instance is past half its time
        self.overdue_seq = 0  # the choice at which it was passed over max_skips times, 0 before that
        self.last_choice = 0  # the choice that took it last
        self.passes = 0.0  # runs over weight, for StepChoice.WEIGHTED
        models = plan.bound.plan.models
        single = all(models[slot.member.model].batch == 1 for slot in slots)
        self.ones = [(1,) * count for count in range(self.size + 1)] if single else None
        self.stride = 1.0 / sum(models[slot.member.model].weight for slot in slots)
        self.runs = 0
        self.active_sum = 0
        self.total_skips = 0
        self.most_skips = 0

    def stand_on(self, resource: int) -> None:
        """It was placed: until it has run it may run in the lanes of this resource alone."""
        bound = self.plan.bound
        self.lanes = bound.lanes_on(resource)
        self.stands = self.plan.rivals[self.lanes]
        variant = bound.combined[self.index].plan.variant_on[resource]
        if variant != self.variant:
            self.variant = variant
            self.at_one = {}

    def stand_anywhere(self) -> None:
        """Its next run is not placed yet."""
        self.sought = None
        self.lanes = self.plan.bound.lanes_of(self.index)

    def _chain(self) -> list[tuple[int, int]]:
        """Pairs (own bit, bit of the member whose run frees the next slot), downstream first."""
        pairs = []
        for slot in self.order:
            if slot.ahead is not None:
                track = slot.track
                freer = track.slots[track.bound.slot_readers[slot.block + 1]]
                if freer in self.slots:
                    pairs.append((slot.bit, freer.bit))
        return pairs

    @property
    def skips(self) -> int:
        """Times passed over since it could run."""
        return 0 if self.rivals is None else self.rivals.turns - self.since_turn

    @property
    def input_ratio(self) -> float:
        """Active members over members, if it ran now."""
        return (self.moves & self.ready).bit_count() / self.size

    def buckets(self, active: int) -> tuple[int, ...]:
        """The batch buckets of the active members, ascending by position."""
        ones = self.ones
        if ones is not None:
            return ones[active.bit_count()]
        instances = [slot.instance for slot in self.slots if active & slot.bit]
        return tuple([instance.bucket for instance in instances if instance is not None])

    def program(self, active: int) -> ProgramState:
        """The program for these active members."""
        program = self.programs.find(active, self.buckets(active), self.variant)
        if self.ones is not None and len(self.at_one) < MAX_REMEMBERED:
            self.at_one[active] = program
        return program

    def find_moves(self, present: int) -> int:
        """The members among the `present` that are active, and the empty ones that would travel on with them.

        A member is active if its slot is ready and its next slot is free, or is freed by another active
        member. Only the instance at block `slot_readers[b]` can hold slot b while it is there.
        """
        moves = present & self.next_free
        if moves != present:
            for bit, freer in self.chain:
                if present & bit and moves & freer:
                    moves |= bit
        return moves

    def place(self, moves: int, in_flight: InFlight) -> list[tuple[int, int]]:
        """Where those that would `move` could begin, best first: pairs of a lane, or `NO_LANE`, and members.

        A member may run in a lane if all steps in flight that it must come after lie there. So those that
        come after none can begin in any idle lane, if nothing of the combined block is in flight. Behind a
        step in a busy lane stands only what reads its result: that waits for nothing else then, and no other
        lane could have begun it earlier. What merely overwrites something that is still read there is looked
        at when that step ends: an older instance may want the lane. Members that must come after steps in
        several lanes wait until those end.
        """
        ready, one_lane = self.ready, self.plan.lanes == 1
        own_lanes = self.lanes  # an instance may come after steps elsewhere, of another plan too
        free = moves & self.empty
        behind: dict[int, int] = {}
        for slot in self.order:
            bit = slot.bit
            if moves & ready & bit:
                made, overwritten = slot.lanes_before(in_flight, self)
                lanes = made | overwritten
                if not lanes or (one_lane and lanes == 1):
                    free |= bit
                elif lanes & own_lanes and not lanes & (lanes - 1) and (made or slot.track.blocks == 1):
                    lane = lanes.bit_length() - 1
                    behind[lane] = behind.get(lane, 0) | bit
        places = []
        if self.lane == NO_LANE or one_lane:
            mask = self.find_moves(free)
            if mask & ready:
                places.append((NO_LANE, mask))
        if behind and not one_lane:
            for lane in sorted(behind, key=lambda lane: (-behind[lane].bit_count(), lane)):
                mask = self.find_moves(free | behind[lane])
                if mask & behind[lane] and self.lane in (NO_LANE, lane):
                    places.append((lane, mask))
        return places

    def oldest(self) -> Instance:
        """The oldest instance among the members that would move; dead ones only where all are."""
        mask = self.moves & self.ready or self.moves
        low = mask & -mask
        best = self.slots[low.bit_length() - 1].instance
        assert best is not None
        mask ^= low
        while mask:  # seldom: most masks have one bit
            low = mask & -mask
            instance = self.slots[low.bit_length() - 1].instance
            assert instance is not None
            if instance.id < best.id:
                best = instance
            mask ^= low
        return best

    def earliest_wanted_s(self) -> float:
        """By when the first of the members that would move is wanted."""
        mask = self.moves & self.ready
        return min(
            slot.instance.wanted_by_s for slot in self.slots if mask & slot.bit and slot.instance is not None
        )


class PlanState:
    """A loaded plan."""

    __slots__ = (
        "alone",
        "bound",
        "by_deadline",
        "combined",
        "kept",
        "key",
        "lanes",
        "loose",
        "max_skips",
        "models",
        "placement",
        "population",
        "precedence",
        "preparing",
        "programs",
        "rivals",
        "run_ahead",
        "step_choice",
        "steps",
        "superseded",
        "vacated",
        "wait",
        "wait_timeout_s",
    )

    def __init__(self, key: PlanKey, bound: BoundPlan) -> None:
        self.key = key
        self.alone = (self,)  # what most of its steps hold
        self.bound = bound
        self.precedence = 0.0  # of its combined blocks: those of the plan that was activated last go last
        self.lanes = bound.plan.lanes
        self.run_ahead = bound.plan.run_ahead
        self.max_skips = bound.plan.max_skips
        self.step_choice = bound.plan.step_choice
        self.wait = bound.plan.wait
        self.wait_timeout_s = bound.plan.wait_timeout_us * 1e-6
        # Tasks are launched in the order of their deadlines, too, unless members wait for each other's tasks.
        self.by_deadline = self.step_choice is StepChoice.DEADLINE and self.wait is Wait.NONE
        self.models = [ModelState(self, index, model) for index, model in enumerate(bound.models)]
        self.combined = [
            CombinedState(self, index, tuple(self._slot(member) for member in combined.members))
            for index, combined in enumerate(bound.combined)
        ]
        self.placement: PlanPlacement | None = None  # of a plan that places its blocks
        self.rivals: dict[int, list[Rivals]] = {}  # by the lanes of combined blocks; filled by the chooser
        self.population = 0  # instances that still have a block to be issued
        self.programs = 0  # asked for so far
        self.preparing = 0  # asked for on demand and not there yet
        self.steps = 0  # steps in flight that use this plan's slots
        self.superseded = False  # was active, is no longer
        self.kept = False  # stays loaded though superseded: it is to be activated again
        self.loose = False  # acts as `wait: none`: while draining or superseded, until it is empty
        self.vacated = False  # some slot 0 was freed since launches were last looked at

    def _slot(self, member: Member) -> Slot:
        return self.models[member.model].tracks[member.replica].slots[member.block]

    def lines(self) -> Iterator[int]:
        """The lanes, as masks, that combined blocks may be in line for together."""
        if self.bound.plan.places:
            yield from (self.bound.lanes_on(resource) for resource in self.bound.plan.lane_resources)
        else:
            yield from (combined.lanes for combined in self.combined)

    @property
    def waits(self) -> bool:
        """Whether combined blocks wait for members that have no input yet."""
        return self.wait is not Wait.NONE and not self.loose

    @property
    def empty(self) -> bool:
        """Nothing of it is in flight."""
        return not self.population and not self.steps
