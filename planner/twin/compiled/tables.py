"""A bound plan as records: what the kernels read of it, as it is before the first launch."""

import math
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from stageloom.planner.twin.compiled import layout
from stageloom.planner.twin.compiled.layout import MAX_BITS, NEVER, NOBODY, Records
from stageloom.shared.bound import BoundModel, BoundPlan
from stageloom.shared.errors import PlanError
from stageloom.shared.plan import MAX_LANES, Member, QueueRule, StepChoice, Wait

MAX_PROGRAMS_PER_BLOCK: Final = 1 << 16
"""Masks of one combined block times the buckets of its members: its times are a dense table."""

_CHOICES: Final = {
    StepChoice.RATIO: layout.RATIO,
    StepChoice.ROUND_ROBIN: layout.ROUND_ROBIN,
    StepChoice.WEIGHTED: layout.WEIGHTED,
    StepChoice.DEADLINE: layout.BY_DEADLINE,
}
_WAITS: Final = {
    Wait.NONE: layout.WAIT_NONE,
    Wait.ALL: layout.WAIT_ALL,
    Wait.TIMEOUT: layout.WAIT_TIMEOUT,
}


class Tables(NamedTuple):
    """The records of one plan; indices in them count from the plan's own first records."""

    plan: Records  # [1]
    targets: Records
    tracks: Records
    slots: Records
    links: Records
    combined: Records
    members: Records
    pairs: Records
    num_times: int


def plan_tables(bound: BoundPlan, key: int, executor: int) -> Tables:
    """Work out the records of a plan. Instances move only between plans of one `executor`, a number.

    Raises:
        PlanError: the plan is too large for bit masks and dense tables.
    """
    plan = bound.plan
    _check(bound)
    by_deadline = plan.step_choice is StepChoice.DEADLINE and plan.wait is Wait.NONE
    targets, tracks, slots, links, slot_of = _tracks(bound, by_deadline)
    combined, members, pairs, num_times = _combined(bound, slots, slot_of)
    head = _filled(
        layout.PLAN,
        [
            {
                "key": key,
                "wait_timeout_s": plan.wait_timeout_us * 1e-6,
                "loaded": 1,
                "lanes": plan.lanes,
                "run_ahead": plan.run_ahead,
                "step_choice": _CHOICES[plan.step_choice],
                "wait": _WAITS[plan.wait],
                "waits": plan.wait is not Wait.NONE,
                "by_deadline": by_deadline,
                "executor": executor,
                "num_combined": len(combined),
                "num_slots": len(slots),
            }
        ],
    )
    return Tables(
        head,
        _filled(layout.TARGET, targets),
        _filled(layout.TRACK, tracks),
        _filled(layout.SLOT, slots),
        _filled(layout.LINK, links),
        _filled(layout.COMBINED, combined),
        _filled(layout.MEMBER, members),
        _filled(layout.PAIR, pairs),
        num_times,
    )


_Row = dict[str, float]


def _filled(kind: "np.dtype[np.void]", rows: list[_Row]) -> Records:
    """Records from rows, which have the same fields; a field that they lack is 0."""
    filled = np.zeros(len(rows), kind)
    for name in rows[0] if rows else ():
        filled[name] = [row[name] for row in rows]
    return filled


def _check(bound: BoundPlan) -> None:
    plan = bound.plan
    if plan.lanes > MAX_LANES or plan.lanes * plan.run_ahead > MAX_BITS:
        raise PlanError(
            f"{plan.lanes} lanes of {plan.run_ahead} steps are more than {MAX_LANES} or {MAX_BITS} steps"
        )
    for model in plan.models:
        if max(model.replicas, model.num_blocks) > MAX_BITS:
            raise PlanError(f"model {model.name!r} has more than {MAX_BITS} replicas or blocks")
    for index, combined in enumerate(bound.combined):
        if math.prod(_radix(bound.models[m.model]) for m in combined.members) > MAX_PROGRAMS_PER_BLOCK:
            raise PlanError(
                f"combined block {index} has more than {MAX_PROGRAMS_PER_BLOCK} programs",
                remedy="use the reference twin",
            )


def _radix(model: BoundModel) -> int:
    """In how many ways a member can take part in a step: not at all, or with one of its buckets."""
    return 1 + len(model.buckets)


def _queue_bound(model: BoundModel) -> int:
    """How many tasks of this model its queue holds: all are of one size."""
    queue = model.plan.queue
    return min(
        queue.max_tasks, queue.max_bytes // model.input_bytes if model.input_bytes else queue.max_tasks
    )


def _tracks(
    bound: BoundPlan, by_deadline: bool
) -> tuple[list[_Row], list[_Row], list[_Row], list[_Row], dict[Member, int]]:
    """Targets, tracks, slots, the lists that slots refer to, and the slot of each member."""
    targets: list[_Row] = []
    tracks: list[_Row] = []
    slots: list[_Row] = []
    links: list[_Row] = []
    slot_of: dict[Member, int] = {}
    for index, model in enumerate(bound.models):
        plan = model.plan
        targets.append(
            {
                "first_track": len(tracks),
                "replicas": plan.replicas,
                "free": (1 << plan.replicas) - 1,
                "batch": plan.batch,
                "interval_s": plan.launch_interval_us * 1e-6,
                "delay_s": plan.batch_max_delay_us * 1e-6,
                "work_conserving": plan.work_conserving,
                "max_tasks": _queue_bound(model),
                "drop_oldest": plan.queue.rule is QueueRule.DROP_OLDEST,
                "in_order": bound.plan.lanes == 1 and not by_deadline,
                "at_once": not by_deadline and (plan.replicas == 1 or bound.plan.wait is not Wait.NONE),
            }
        )
        lists = [_listed(links, model, block) for block in range(plan.num_blocks)]
        for replica in range(plan.replicas):
            for block in range(plan.num_blocks):
                slot_of[Member(index, replica, block)] = len(slots)
                slots.append(
                    {
                        "track": len(tracks),
                        "block": block,
                        "start": model.blocks[block].start,
                        "holder": NOBODY,
                        "held": NOBODY,
                        **lists[block],
                    }
                )
            tracks.append(
                {
                    "model": index,
                    "target": index,
                    "replica": replica,
                    "first_slot": len(slots) - plan.num_blocks,
                    "blocks": plan.num_blocks,
                    "newest": NOBODY,
                    "newest_id": NOBODY,
                }
            )
    return targets, tracks, slots, links, slot_of


def _listed(links: list[_Row], model: BoundModel, block: int) -> _Row:
    """Append which slots a block frees, reads and holds, and say where."""
    row: _Row = {}
    lists = _slots_of(model.slot_readers, block)
    for name, found in zip(("freed", "held", "read"), (*lists, model.slot_reads[block]), strict=True):
        row[f"first_{name}"], row[f"num_{name}"] = len(links), len(found)
        links.extend({"block": s} for s in found)
    return row


@lru_cache(maxsize=4096)
def _slots_of(last: tuple[int, ...], block: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which slots a block frees, and which an instance at it holds; see
    `stageloom.shared.engine.slots.Track`."""
    freed = tuple(slot for slot in range(len(last)) if last[slot] == block)
    return freed, tuple(slot for slot in range(block + 1) if last[slot] >= block)


def _combined(
    bound: BoundPlan, slots: list[_Row], slot_of: dict[Member, int]
) -> tuple[list[_Row], list[_Row], list[_Row], int]:
    """Combined blocks, their members downstream first, and pairs; tells each slot where it belongs."""
    combined: list[_Row] = []
    members: list[_Row] = []
    pairs: list[_Row] = []
    num_times = 0
    for index, block in enumerate(bound.combined):
        at = {member: position for position, member in enumerate(block.members)}
        stride = 1
        for member, position in at.items():
            slots[slot_of[member]].update(home=index, bit=1 << position, stride=stride)
            stride *= _radix(bound.models[member.model])
        order = sorted(block.members, key=lambda member: (-member.block, member))
        first_pair = len(pairs)
        for member in order:
            last = bound.models[member.model].slot_readers
            if member.block + 1 < len(last):
                freer = at.get(member._replace(block=last[member.block + 1]))
                if freer is not None:
                    pairs.append({"bit": 1 << at[member], "freer": 1 << freer})
        full = (1 << len(order)) - 1
        combined.append(
            {
                "index": index,
                "lanes": bound.plan.lanes,
                "run_ahead": bound.plan.run_ahead,
                "max_skips": bound.plan.max_skips,
                "num_members": len(order),
                "full": full,
                "next_free": full,
                "first_member": len(members),
                "first_pair": first_pair,
                "num_pairs": len(pairs) - first_pair,
                "first_time": num_times,
                "since_s": NEVER,
                "urgent_s": NEVER,
                "lane": NOBODY,
                "stride": 1.0 / sum(bound.plan.models[member.model].weight for member in order),
            }
        )
        members.extend({"slot": slot_of[member], "bit": 1 << at[member]} for member in order)
        num_times += stride
    return combined, members, pairs, num_times


def program_of(bound: BoundPlan, combined: int, number: int) -> tuple[int, tuple[int, ...]]:
    """Mask and buckets of a combined block's program by its place in the table of times."""
    mask, buckets = 0, []
    for position, member in enumerate(bound.combined[combined].members):
        model = bound.models[member.model]
        number, level = divmod(number, _radix(model))
        if level:
            mask |= 1 << position
            buckets.append(model.buckets[level - 1])
    return mask, tuple(buckets)


def loaded_programs(bound: BoundPlan, combined: int) -> tuple[int, ...]:
    """The programs asked for when the plan is loaded: all members, with the largest buckets and with 1."""
    largest = smallest = 0
    stride = 1
    for member in bound.combined[combined].members:
        model = bound.models[member.model]
        largest += stride * len(model.buckets)
        smallest += stride
        stride *= _radix(model)
    return tuple(dict.fromkeys((largest, smallest)))
