"""The world of the compiled twin as arrays of records: what a plan fixes, and what changes with every event.

The records mirror the classes of `stageloom.shared.engine`, field by field under the same names: `PLAN` is
`PlanState`, `TARGET` is `ModelState`, `TRACK` is `Track`, `SLOT` is what a track knows of one block,
`COMBINED` is `CombinedState`, `INSTANCE`, `STEP` and `RIDER` are `Instance` and `StepRecord`, `MODEL` is
`Launcher` with its queue. References are indices into the other arrays, `NOBODY` stands for None, and sets
are bit masks.
"""

from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Records: TypeAlias = Any
"""`np.recarray` of one of the types below; an element is a view, and its fields are attributes."""

# Numbers of numpy's, as numba compiles a function anew for every plain number that it is called with.
NOBODY: Final[Any] = np.int64(-1)
ANY_LANE: Final[Any] = np.int64(-1)  # as a mask of lanes
MAX_BITS: Final = 62  # members of a combined block, replicas of a model, steps in flight, loaded plans
NEVER: Final = np.inf

# Outcomes of a task, in the log of endings.
COMPLETED: Final[Any] = np.int64(0)
REFUSED: Final[Any] = np.int64(1)
EXPIRED: Final[Any] = np.int64(2)

# StepChoice and Wait as numbers.
RATIO, ROUND_ROBIN, WEIGHTED, BY_DEADLINE = range(4)
WAIT_NONE, WAIT_ALL, WAIT_TIMEOUT = range(3)

# Why a run stopped.
DONE: Final = 0  # at the time that was asked for
LACKS_DURATION: Final = 1  # of the step in `CLOCK.lacking`
ENDS_FULL: Final = 2  # the log of endings may not hold what the next event ends
TRACE_FULL: Final = 3  # nor the trace what it issues

# How far a program is.
UNASKED, PREPARING, READY = range(3)
MAX_PREPARING: Final = 2  # the defaults of `EngineCore`
MAX_PROGRAMS: Final = 1024


def _record(**fields: str) -> np.dtype[np.void]:
    return np.dtype([(name, kind) for kind, names in fields.items() for name in names.split()])


CLOCK: Final = _record(
    f8="""now_s passes
        interference beside_s item_beside_s crowded
        slow changed_s counted_s used_rate next_end_s busy_s used_s""",
    i8="""active loaded next_instance next_step next_task choices max_load touched timed deadlines open
        asked handed_first handed lacking next_ending running arrival sample ends traced traces
        num_models num_plans num_combined num_lanes num_steps num_instances num_noise""",
)
PLAN: Final = _record(
    f8="wait_timeout_s",
    i8="""key loaded superseded waits population steps lanes run_ahead step_choice wait by_deadline
        programs preparing
        first_combined num_combined first_slot num_slots first_target""",
)
TARGET: Final = _record(
    f8="interval_s delay_s lanes_share",
    i8="""plan first_track replicas free batch work_conserving max_tasks drop_oldest in_order at_once
        apart executor""",
)
TRACK: Final = _record(i8="plan model target replica first_slot blocks newest newest_id")
SLOT: Final = _record(
    f8="least_s",  # of a model's first replica; see `stageloom.shared.engine.pace`
    i8="""track block start home bit stride holder held writers readers
        first_freed num_freed first_read num_read first_held num_held""",
)
COMBINED: Final = _record(
    f8="since_s urgent_s rank passes stride",
    i8="""plan index lanes own run_ahead max_skips num_members full first_member first_pair num_pairs
        first_time ready empty next_free moves lane in_flight touched timed runnable stand waits_for
        tie skips overdue_seq last_choice""",
)
LINK: Final = _record(i8="block")  # of a list of slots, by the block
MEMBER: Final = _record(i8="slot bit")  # of a combined block, downstream first
PAIR: Final = _record(i8="bit freer")  # see CombinedState.chain
MODEL: Final = _record(
    f8="interval_s delay_s last_s next_s deadline_s tightest_s patience_s turn_s busy_s",
    i8="""batch work_conserving max_tasks drop_oldest head queued arrived launched last_count completed
        refused expired target""",
)
ROW: Final = _record(f8="arrived_s", i8="task")  # a queued task, or a row of an instance
INSTANCE: Final = _record(
    f8="ready_s deadline_s expires_s wanted_by_s turn_s",
    i8="id used on_board track model block passed over started tried live begin count bucket level steps",
)
STEP: Final = _record(
    f8="issued_s left_s began_s share",
    i8="id used combined lane holds after num_riders time tally fallback following",
)
RIDER: Final = _record(i8="instance track block")
LANE: Final = _record(f8="free_s", i8="load running pending last")
TIME: Final = _record(
    f8="alone_s share crowded_s crowded_share apart_s apart_share apart_crowded_s apart_crowded_share",
    i8="items apart_items status",
)  # NaN: not known yet; ProgramStatus
TALLY: Final = _record(f8="sum_s max_s", i8="count")
ARRIVAL: Final = _record(f8="at_s", i8="model")
END: Final = _record(f8="at_s arrived_s", i8="key model task outcome")
TRACE: Final = _record(f8="at_s", i8="key step lane combined active after instance track block task tasks")
SAMPLE: Final = _record(f8="at_s oldest_age_s tightest_s", i8="queued arrived progress")


# The world's arrays: their records, and how many there are at scale 1 [rows] or [rows, columns].
_ARRAYS: Final[dict[str, tuple[Any, tuple[int, ...]]]] = {
    "clock": (CLOCK, (1,)),
    "models": (MODEL, (8,)),
    "queues": (ROW, (8, 512)),  # rings, one row longer than any queue
    "plans": (PLAN, (8,)),
    "targets": (TARGET, (32,)),
    "tracks": (TRACK, (64,)),
    "slots": (SLOT, (256,)),
    "links": (LINK, (1024,)),  # lists of slots that a block frees, reads and holds
    "combined": (COMBINED, (256,)),
    "members": (MEMBER, (256,)),
    "pairs": (PAIR, (256,)),
    "times": (TIME, (4096,)),  # per combined block, by its active members and their buckets
    "tallies": (TALLY, (4096,)),  # of steps that ended, at the times of the same members with buckets of 1
    "touched": (np.int64, (256,)),  # a stack of combined blocks
    "candidates": (np.int64, (256,)),  # combined blocks that a lane could take
    "behind": (np.int64, (16,)),  # members that could run behind the steps of a lane, by lane
    "asked": (np.int64, (16,)),  # programs that are being prepared: indices of their times
    "lanes": (LANE, (16,)),
    "steps": (STEP, (MAX_BITS,)),
    "riders": (RIDER, (MAX_BITS, 16)),  # [steps, members of one]
    "running": (np.int64, (16,)),  # steps on the device, in the order in which they began
    "handed": (np.int64, (MAX_BITS,)),  # steps issued that no lane has yet
    "instances": (INSTANCE, (512,)),
    "rows": (ROW, (512, 8)),  # [instances, tasks of one]
    "noise": (np.float64, (4096,)),  # factors, by step
    "ends": (END, (2048,)),
    "trace": (TRACE, (2048,)),
}
_FIXED: Final = frozenset({"clock", "noise", "lanes", "behind", "steps", "running", "handed"})


World: TypeAlias = SimpleNamespace
"""Views of one stretch of memory, by the names of `_ARRAYS`; kernels change it in place."""


def memory_type(scale: int) -> np.dtype[np.void]:
    """The world as one record.

    numba compiles the kernels for each type that it meets, so sizes come in steps. One record is one pointer
    to it, where a tuple of arrays is two hundred arguments of every call, and minutes of compiling.
    """
    fields = []
    for name, (kind, shape) in _ARRAYS.items():
        scaled = list(shape)
        if name not in _FIXED:
            scaled = [scale * length for length in shape]
            if name == "riders":
                scaled[0] = MAX_BITS
        fields.append((name, kind, tuple(scaled)))
    return np.dtype(fields)


def views(memory: npt.NDArray[np.void]) -> World:
    """The arrays in a stretch of memory. `memory`: [1]"""
    found = {name: memory[name][0] for name in _ARRAYS}
    return World(**{name: one.view(np.recarray) if one.dtype.names else one for name, one in found.items()})


def records(kind: np.dtype[np.void], *shape: int) -> Records:
    """Records of one type, all 0."""
    return np.zeros(shape, kind).view(np.recarray)
