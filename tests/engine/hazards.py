"""The exact set of steps that a step must wait for, from the whole history of every slot.

A step that reads a slot waits for what made it; one that overwrites a slot waits for its readers since it was
made, or for what made it where nobody read it. A move stands for the steps that it waits for itself.
"""

from collections import defaultdict

from stageloom.shared.bound import BoundModel, BoundPlan
from stageloom.shared.engine.steps import CopySlot, MoveInstance, PlanKey, Step
from stageloom.shared.ids import StepId
from stageloom.shared.plan import Member

Place = tuple[PlanKey, Member]


class Hazards:
    """Every access to every slot, in issue order."""

    def __init__(self) -> None:
        self._log: dict[Place, list[tuple[str, frozenset[StepId]]]] = defaultdict(list)
        self._open: set[StepId] = set()

    def ended(self, step: StepId) -> None:
        """Nothing has to wait for it any more."""
        self._open.discard(step)

    def check(self, step: Step, bound: BoundPlan) -> None:
        """Compare `after` of an issued step with the history, and add the step to it."""
        needed: set[StepId] = set()
        own = frozenset([step.id])
        plan = step.program.plan
        for member in step.members:
            model, replica, block = member.member
            if block == 0:
                self._write(needed, (plan, member.member), own)
            for slot in bound.models[model].slot_reads[block]:
                self._read(needed, (plan, Member(model, replica, slot)), own)
            if not member.last:
                following = (plan, Member(model, replica, block + 1))
                assert member.staged == (("r", own) in self._log[following])
                self._write(needed, following, own)
        assert set(step.after) == needed & self._open, "`after` is not the exact set"
        assert list(step.after) == sorted(step.after)
        self._open.add(step.id)

    def check_copy(self, copy: CopySlot) -> None:
        """A copy waits for nothing; what overwrites its slot waits for it."""
        needed: set[StepId] = set()
        self._read(needed, copy.slot, frozenset([copy.id]))
        assert not needed & self._open, "a copy begins before its slot is made"
        self._open.add(copy.id)

    def check_move(self, move: MoveInstance, source: BoundModel, target: BoundModel) -> None:
        """The same for a move between two plans."""
        needed: set[StepId] = set()
        (old_key, old), (new_key, new) = move.old, move.new
        own = frozenset(move.after)
        for slot in range(old.block + 1):
            if source.slot_readers[slot] >= old.block:
                self._read(needed, (old_key, old._replace(block=slot)), own)
        for slot in range(new.block + 1):
            if target.slot_readers[slot] >= new.block:
                self._write(needed, (new_key, new._replace(block=slot)), own)
        assert set(move.after) == needed & self._open, "`after` of a move is not the exact set"

    def _read(self, needed: set[StepId], place: Place, own: frozenset[StepId]) -> None:
        log = self._log[place]
        made = max((i for i, (kind, _) in enumerate(log) if kind == "w"), default=None)
        if made is not None:
            needed |= log[made][1]
        log.append(("r", own))

    def _write(self, needed: set[StepId], place: Place, own: frozenset[StepId]) -> None:
        log = self._log[place]
        made = max((i for i, (kind, _) in enumerate(log) if kind == "w"), default=-1)
        readers = [steps for _, steps in log[made + 1 :]]
        for steps in readers or [log[made][1]] if log else []:
            needed |= steps
        log.append(("w", own))
