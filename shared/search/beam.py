"""Beam search, which ends when its budget does: the best partial schedules, from the last stage backwards.

Partial schedules are kept by state, cheapest first, and compared among states with as many operators left: by
what they cost so far plus the operators that are left, one after another. Every size of state gets an equal
share of what is left of the budget, so the search always arrives. A state with more endings than its share
shows only some of them: fewer groups per stage, groups that are rooted or small, and packings as full as they
get. Deterministic; O(budget).

Ours, where IOS publishes nothing: its dynamic programming has its first answer at the very end (section 4.3).
"""

from collections.abc import Iterable

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.baselines import greedy, sequential
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.endings import GroupRule, TooManyError, by_highest, packings
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.stages import Stages, Strategy

_SMALL_GROUP = 3  # operators of a connected group that is looked at where there are too many; TOP's r
# A state shows about so many endings at least, and at most: more states teach more than more endings of one.
_ENDINGS_MIN = 32
_ENDINGS_MAX = 1000


def beam(
    graph: CombinedGraph,
    costs: StageCosts,
    limits: Limits,
    budget: Budget,
    *,
    rule: GroupRule = GroupRule.CONNECTED,
    strategy: Strategy = Strategy.BOTH,
) -> StageSchedule:
    """Return the cheapest of the beam, `greedy` (if groups may run side by side) and `sequential`."""
    stages = Stages(graph, costs, limits, rule, strategy)
    found = [stages.schedule(best_endings(stages, budget.expansions))]
    if not stages.only_merges:
        found.append(greedy(graph, costs, limits, budget))
    return min((*found, sequential(graph, costs, limits, budget)), key=costs.schedule_s)


def best_endings(stages: Stages, expansions: int) -> list[int]:
    """Return endings in run order; visits about `expansions` pairs of a state and an ending."""
    size = stages.graph.size
    everything = (1 << size) - 1
    spent_s = {everything: 0.0}  # the stages chosen so far, by state
    chosen_at: dict[int, int] = {}  # the state before the stage that led here
    waiting: list[list[int]] = [[] for _ in range(size + 1)]  # by number of operators left
    waiting[size] = [everything]
    for left in range(size, 0, -1):
        share = expansions // left
        looked_at = 0
        for state in sorted(
            waiting[left], key=lambda state: (spent_s[state] + stages.operators_s(state), state)
        ):
            wanted = min(max(share - looked_at, _ENDINGS_MIN), _ENDINGS_MAX)
            endings = some_endings(stages, state, wanted)
            for ending in endings:
                rest = state ^ ending
                seconds = spent_s[state] + stages[ending]
                known = spent_s.get(rest)
                if known is None:
                    waiting[rest.bit_count()].append(rest)
                if known is None or seconds < known:
                    spent_s[rest] = seconds
                    chosen_at[rest] = state
            looked_at += len(endings)
            if looked_at >= share:
                break
        expansions -= looked_at
        waiting[left] = []
    found, state = [], 0
    while state != everything:
        found.append(chosen_at[state] ^ state)
        state = chosen_at[state]
    return found


def some_endings(stages: Stages, state: int, wanted: int) -> list[int]:
    """Return all endings of `state`, or a non-empty choice if there are many more than `wanted`."""
    try:
        return stages.endings(state, wanted)
    except TooManyError:
        pass
    space = stages.space
    groups = space.rooted_groups(state)
    try:
        if space.rule is GroupRule.CONNECTED:
            small = space.connected_groups(state, min(space.r, _SMALL_GROUP), wanted)
            groups = list(dict.fromkeys([*groups, *small]))
    except TooManyError:
        pass
    buckets = by_highest(groups)
    merges = stages.merges_at(state)[:wanted]
    full = [_full_packing(order, space.s) for order in (groups, _by_cost(stages, groups))]
    s = min(space.s, len(buckets))
    while s > 1:
        s -= 1
        try:
            levels = packings(buckets, s, wanted)
        except TooManyError:
            continue
        return list(dict.fromkeys([*full, *merges, *(ending for level in levels[1:] for ending in level)]))
    return list(dict.fromkeys([*full, *merges, *groups]))


def _by_cost(stages: Stages, groups: list[int]) -> list[int]:
    return sorted(groups, key=lambda group: (-stages.operators_s(group), group))


def _full_packing(groups: Iterable[int], s: int) -> int:
    """Take groups in order, up to `s`, that are disjoint from those before."""
    taken = count = 0
    for group in groups:
        if not group & taken and count < s:
            taken |= group
            count += 1
    return taken
