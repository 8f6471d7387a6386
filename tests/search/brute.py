"""The definitions, listed: what a search over endings is compared with. Exponential, for small graphs."""

from collections.abc import Iterator
from functools import cache

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Stage, StageSchedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.endings import GroupRule


def components(graph: CombinedGraph, mask: int) -> list[int]:
    """Connected components by flooding edges."""
    parts = []
    while mask:
        part, grown = 0, mask & -mask
        while grown != part:
            part = grown
            for op in bits(part):
                grown |= (graph.predecessors[op] | graph.successors[op]) & mask
        parts.append(part)
        mask ^= part
    return parts


def is_rooted(graph: CombinedGraph, group: int) -> bool:
    """Whether one operator reaches all others along edges inside the group."""

    def reached(op: int) -> int:
        found, grown = 0, 1 << op
        while grown != found:
            found = grown
            for one in bits(found):
                grown |= graph.successors[one] & group
        return found

    return any(reached(op) == group for op in bits(group))


def endings(graph: CombinedGraph, state: int, rule: GroupRule, r: int | None, s: int | None) -> set[int]:
    """Every subset of `state` that fits the definition, by trying all subsets."""
    found = set()
    subset = state
    while subset:
        closed = not any(graph.successors[op] & state & ~subset for op in bits(subset))
        groups = components(graph, subset) if closed else []
        if (
            closed
            and (s is None or len(groups) <= s)
            and (r is None or all(group.bit_count() <= r for group in groups))
            and (rule is GroupRule.CONNECTED or all(is_rooted(graph, group) for group in groups))
        ):
            found.add(subset)
        subset = (subset - 1) & state
    return found


def states(graph: CombinedGraph) -> set[int]:
    """Every set of operators but the empty one that holds what it depends on."""
    return {
        mask
        for mask in range(1, 1 << graph.size)
        if not any(graph.predecessors[op] & ~mask for op in bits(mask))
    }


def schedules(
    graph: CombinedGraph, rule: GroupRule, r: int | None, s: int | None, merges: frozenset[int] = frozenset()
) -> Iterator[StageSchedule]:
    """Every schedule, each listed out; `merges` are the masks that may also run merged."""

    @cache
    def choices(state: int) -> tuple[int, ...]:
        return tuple(sorted(endings(graph, state, rule, r, s)))

    def before(state: int) -> Iterator[tuple[Stage, ...]]:
        if not state:
            yield ()
            return
        for ending in choices(state):
            groups = tuple(tuple(bits(part)) for part in components(graph, ending))
            for earlier in before(state ^ ending):
                yield (*earlier, Stage(groups))
                if ending in merges:
                    yield (*earlier, Stage(groups, merge=True))

    for stages in before((1 << graph.size) - 1):
        yield StageSchedule(stages)


def optimum_s(
    graph: CombinedGraph,
    costs: StageCosts,
    rule: GroupRule,
    r: int | None,
    s: int | None,
    merges: frozenset[int] = frozenset(),
) -> float:
    """The cheapest of all schedules."""
    return min(costs.schedule_s(schedule) for schedule in schedules(graph, rule, r, s, merges))
