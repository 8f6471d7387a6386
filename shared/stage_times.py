"""When each stage of a schedule ran, from the traced times of a step's items. Pure.

The device uses it for stage profiles, the planner for the timelines of served steps, so both mean the same by
a stage's time: from the first begin to the last end of its items. An item that covers several stages (one
group after another on one member) counts for the first of them, and the others have no time of their own.
"""

from collections.abc import Iterable

from stageloom.shared.launch_list import LaunchList


def stage_spans(
    items: LaunchList, times: Iterable[tuple[int, float, float]]
) -> dict[int, tuple[float, float]] | None:
    """Begin and end per stage, ascending; `times` are (item, begin, end) in any unit and order.

    None if an item has no time, or a time no item: the trace is of another mask, or was cut off.
    """
    known = {item: (begin, end) for item, begin, end in times}
    if known.keys() != set(range(len(items))):
        return None
    spans: dict[int, tuple[float, float]] = {}
    for index, item in enumerate(items):
        begin, end = known[index]
        first, last = spans.get(item.stage, (begin, end))
        spans[item.stage] = (min(first, begin), max(last, end))
    return dict(sorted(spans.items()))
