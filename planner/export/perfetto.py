"""A plan's predicted timeline as a Chrome trace, which Perfetto and chrome://tracing show.

Every replica runs once, with a whole batch; combined blocks run one after another. An item takes what its
operators cost and begins when its stream is free and what it waits for has ended, as in the planned timeline
of a recorded trace (docs/tracing.md): no stream slows another.
"""

from typing import Any, Final

from stageloom.shared.bound import BoundPlan
from stageloom.shared.launch_list import Item
from stageloom.shared.search.stage_costs import StageCosts

_PID: Final = 1
_STEPS: Final = 1  # the track of steps; stream i is track i + 2


def chrome_trace(bound: BoundPlan, costs: list[StageCosts], name: str, costs_from: str) -> dict[str, Any]:
    """The JSON object format; `costs` are those of each combined block, `costs_from` says whose they are."""
    steps: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    began_s = 0.0
    for index in _in_order(bound):
        combined = bound.combined[index]
        timed = _timed(bound.launches(index, combined.full_mask), costs[index], began_s)
        end_s = max((end for _, _, end in timed), default=began_s)
        names = [f"{bound.models[m.model].plan.name}#{m.replica}.{m.block}" for m in combined.members]
        about = {"combined_block": index, "executor": bound.executor_of(index).name}
        steps.append(_span(" + ".join(names), "step", _STEPS, began_s, end_s, about))
        for item, from_s, to_s in timed:
            member = combined.members[item.member]
            first = combined.graph.starts[item.member] - combined.graph.offsets[item.member]
            operators = bound.models[member.model].graph.operators
            told = ", ".join(operators[first + op].name for op in item.ops)
            about = {"combined_block": index, "stage": item.stage, "operators": told}
            title = f"{names[item.member]}: stage {item.stage}"
            runs.append(_span(title, "group", _STEPS + 1 + item.stream, from_s, to_s, about))
        began_s = end_s
    tracks = {_STEPS: "steps", **{run["tid"]: f"stream {run['tid'] - _STEPS - 1}" for run in runs}}
    return {
        "traceEvents": [
            _metadata("process_name", 0, f"planned {name} (costs {costs_from})"),
            *(_metadata("thread_name", tid, title) for tid, title in sorted(tracks.items())),
            *sorted((*steps, *runs), key=lambda span: (span["tid"], span["ts"])),
        ],
        "displayTimeUnit": "ms",
        "otherData": {"plan": bound.plan.digest, "costs": costs_from},
    }


def _in_order(bound: BoundPlan) -> list[int]:
    """Combined blocks, each after those with its members' previous blocks; of several the shallowest first.

    Without waiting, blocks of several models may form a cycle; the shallowest that is left breaks it.
    """
    before = [
        {bound.home[m._replace(block=m.block - 1)][0] for m in combined.members if m.block} - {index}
        for index, combined in enumerate(bound.combined)
    ]
    left = dict.fromkeys(sorted(range(len(before)), key=lambda index: (_depth(bound, index), index)))
    order: list[int] = []
    while left:
        ready = (index for index in left if not any(earlier in left for earlier in before[index]))
        order.append(next(ready, next(iter(left))))
        del left[order[-1]]
    return order


def _depth(bound: BoundPlan, index: int) -> int:
    """How many blocks a model has before the deepest member's."""
    return max(member.block for member in bound.combined[index].members)


def _timed(items: tuple[Item, ...], costs: StageCosts, began_s: float) -> list[tuple[Item, float, float]]:
    """(item, begin, end) in issue order."""
    merged_s = {ops: seconds for ops, seconds in costs.merges}
    ends: list[float] = []
    free_s: dict[int, float] = {}
    timed = []
    for item in items:
        start_s = max([free_s.get(item.stream, began_s), *(ends[wait] for wait in item.waits)])
        own_s = sum(costs.operators_s[op] for op in item.ops)
        took_s = merged_s.get(tuple(sorted(item.ops)), own_s) if item.merge else own_s
        ends.append(start_s + took_s)
        free_s[item.stream] = ends[-1]
        timed.append((item, start_s, ends[-1]))
    return timed


def _span(
    name: str, kind: str, track: int, from_s: float, to_s: float, about: dict[str, Any]
) -> dict[str, Any]:
    begin_us, end_us = round(1e6 * from_s, 3), round(1e6 * to_s, 3)
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "ts": begin_us,
        "dur": round(end_us - begin_us, 3),
        "pid": _PID,
        "tid": track,
        "args": about,
    }


def _metadata(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "pid": _PID, "tid": track, "args": {"name": name}}
