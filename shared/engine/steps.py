"""What passes between the engine core, the runtime that drives it, and an executor.

All but `Task` are frozen. They are msgspec structs because some of them are made in every step: a frozen
dataclass of six fields takes a microsecond to make, a struct a tenth of it. They hold no cycles: `gc=False`
spares the collector the look.
"""

import math
from enum import Enum
from typing import TYPE_CHECKING, NewType, TypeAlias

from msgspec import Struct

from stageloom.shared.ids import StepId, TaskId
from stageloom.shared.plan import Member

if TYPE_CHECKING:
    from stageloom.shared.engine.records import Instance

PlanKey = NewType("PlanKey", int)
"""Which loaded plan: counts up with every swap within one life of an engine process."""

InstanceId = NewType("InstanceId", int)
"""A task or a batch of tasks of one model in flight."""


class Outcome(Enum):
    """How a task ended. Every task ends in exactly one of these ways."""

    COMPLETED = "completed"
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Code(str, Enum):
    """Why a task did not complete: fixed words that applications may test for."""

    UNKNOWN_MODEL = "unknown_model"
    MODEL_REMOVED = "model_removed"
    MODEL_CHANGED = "model_changed"
    QUEUE_FULL = "queue_full"
    TOO_LARGE = "too_large"
    DRAINING = "draining"
    EXECUTOR_FAILED = "executor_failed"
    SHARED_PART = "shared_part"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Task:
    """One inference request, from its submission to its one end. A runtime adds the tensors in a subclass.

    A shared task names several models that all read the same input; it is one task and ends once. The engine
    that the task is submitted to owns all that the constructor does not take.
    """

    __slots__ = (
        "arrived_s",
        "buffered",
        "deadline_s",
        "ended",
        "id",
        "instances",
        "models",
        "nbytes",
        "parts",
        "patient_until_s",
        "plan",
        "priority",
        "seq",
        "shared",
        "tried",
        "trouble",
    )

    def __init__(
        self,
        *,
        id: TaskId,
        models: tuple[str, ...],
        nbytes: int,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> None:
        self.id = id
        self.models = models  # names; more than one is a shared input
        self.nbytes = nbytes  # of all input tensors, counted against the queue's bytes
        self.priority = priority  # higher runs earlier under QueueRule.PRIORITY
        self.deadline_s = math.inf if deadline_s is None else deadline_s  # on the engine's clock
        self.shared = len(models) > 1
        self.seq = 0  # order of arrival
        self.arrived_s = 0.0
        self.patient_until_s = math.inf  # by when it counts as due without a deadline
        self.buffered = False  # a shared task that is, or has been, in the buffers of its models
        self.tried = False  # runs although by what is known it never had the time
        self.ended = False
        self.instances: list[Instance] = []  # one per model in which it was launched
        self.parts: dict[str, Outcome] = {}  # of a shared task: how it ended in each model so far
        self.plan: PlanKey | None = None  # whose step ended it, where one did
        self.trouble = ""  # of a shared task: why it did not complete in some model

    @property
    def begun(self) -> bool:
        """In each of its models a step was issued with it."""
        return len(self.instances) == len(self.models) and all(one.started for one in self.instances)


class ProgramKey(Struct, frozen=True, gc=False, cache_hash=True):
    """What an executor prepares: one combined block under one mask, each active member at a batch bucket."""

    plan: PlanKey
    combined: int
    mask: int
    buckets: tuple[int, ...]  # per active member, ascending by position [num_active]
    variant: int = 0  # of the ways to run it: `stageloom.shared.plan.CombinedBlock.variants`


class StepMember(Struct, frozen=True, gc=False):
    """One active member of a step.

    It reads slot (plan, member) and writes the slot of the next block; the model's first block also fills its
    own slot from the task's inputs. `staged` says that another member of the same step still reads that next
    slot: its output is put aside and moved over after the last reader.
    """

    position: int  # among the members of the combined block
    member: Member
    instance: InstanceId
    tasks: tuple[TaskId, ...]  # rows of the batch, in order, ended ones too; up to the bucket is padding
    last: bool  # the model's last block: outputs leave when the step completes
    staged: bool = False


class Step(Struct, frozen=True, gc=False):
    """One run of a combined block, in issue order.

    `after` names every earlier step that must have ended first: it made a slot that this one reads, or reads
    a slot that this one overwrites; steps reported as ended are left out. An executor that honours it, and
    runs a lane's steps in order, needs nothing else to be correct. `members` are ordered downstream first.
    With `fallback` the program was not ready: they run one after another in that order, and `staged` is moot.
    """

    id: StepId
    lane: int
    program: ProgramKey
    members: tuple[StepMember, ...]
    after: tuple[StepId, ...]
    fallback: bool = False


# Actions: what the core tells its shell to do, in this order. A `Step` is to be handed to the executor.


class FinishTask(Struct, frozen=True, gc=False):
    """Answer the task. Its outputs left with the last block's step, per model for a shared task.

    A shared task whose models did not all complete has the outcome FAILED and `parts` per model. `plan` is
    the one whose step completed or failed it, None where no step did.
    """

    task: TaskId
    outcome: Outcome
    code: str = ""  # a member of Code's values, empty when completed
    reason: str = ""  # one line: cause; remedy
    parts: tuple[tuple[str, Outcome], ...] = ()  # of a shared task: how it ended in each model
    plan: PlanKey | None = None


class PrepareProgram(Struct, frozen=True, gc=False):
    """Prepare off the hot path, then report with `program_ready`."""

    program: ProgramKey


class MoveInstance(Struct, frozen=True, gc=False):
    """An instance between two blocks goes over to a new plan: its slot's tensors become the other slot's.

    All tensors live across the cut go where the new plan's blocks look for them. The move happens once the
    steps in `after` have ended, and before any step issued later that touches one of the slots; such a step
    names the steps in `after` that are still in flight among its own.
    """

    instance: InstanceId
    old: tuple[PlanKey, Member]
    new: tuple[PlanKey, Member]
    after: tuple[StepId, ...]


class CopySlot(Struct, frozen=True, gc=False):
    """Copy what lies in a slot to one more memory node; report the end with `EngineCore.copy_done`.

    What made it has ended. No step that reads or overwrites the slot is issued before the copy has ended;
    `id` is one of the steps' ids, which `DropInstance.after` may name.
    """

    id: StepId
    instance: InstanceId
    slot: tuple[PlanKey, Member]
    node: int


class DropInstance(Struct, frozen=True, gc=False):
    """The instance goes no further (cancelled, expired, failed); free what it holds after these steps."""

    instance: InstanceId
    after: tuple[StepId, ...]


class ReleasePlan(Struct, frozen=True, gc=False):
    """No instance is left on this plan: its programs and slots can be freed."""

    plan: PlanKey


Action: TypeAlias = Step | FinishTask | PrepareProgram | MoveInstance | CopySlot | DropInstance | ReleasePlan
