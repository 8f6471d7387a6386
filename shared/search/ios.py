"""IOS: the cheapest schedule of all, by dynamic programming over endings.

Ding et al. 2021, "IOS: Inter-Operator Scheduler for CNN Acceleration", algorithm 1: the cheapest way to run a
state S is the cheapest over its endings E of running S - E and then E as one stage. Pruning: r operators per
group, s groups per stage (section 4.3). O(states * endings); table 1 counts those pairs.

Ours:
- Bottom-up over the states by size, with sums and look-ups over whole lists, instead of recursion.
- Members with the same operators and costs are exchangeable: of states that differ only in which of them is
  how far, one is searched (`stageloom.shared.search.isomorphism`).
- Groups are `connected` by default; the released code's are `rooted`, a subset:
`stageloom.shared.search.endings`.
- Anytime: where the pairs exceed the budget, a beam search spends the same number once more, and the answer
  is the best of it, `greedy` and `sequential`. The answer never costs more than `sequential`.
- Of equally cheap last stages the one with the most operators is taken: fewer, longer stages.
- Stage costs come from a function, not from measuring in the loop.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from operator import add

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.baselines import sequential
from stageloom.shared.search.beam import beam
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.endings import GroupRule, TooManyError
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.isomorphism import exchangeable, images
from stageloom.shared.search.stages import Stages, Strategy
from stageloom.shared.search.states import states_by_size

_EQUAL = 1.0 + 1e-12  # sums of the same numbers in another order differ by less


def ios(
    graph: CombinedGraph,
    costs: StageCosts,
    limits: Limits,
    budget: Budget,
    *,
    rule: GroupRule = GroupRule.CONNECTED,
    strategy: Strategy = Strategy.BOTH,
) -> StageSchedule:
    """Return the cheapest schedule within `limits`, or the best one if `budget` is too small for all."""
    stages = Stages(graph, costs, limits, rule, strategy)
    try:
        found = stages.schedule(exact(stages, budget.expansions))
    except TooManyError:
        return beam(graph, costs, limits, budget, rule=rule, strategy=strategy)
    # Equal up to rounding: the plain schedule where nothing is gained.
    return min(found, sequential(graph, costs, limits, budget), key=costs.schedule_s)


def ios_rooted(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> StageSchedule:
    """Search as `ios`, over the groups that IOS's released code enumerates."""
    return ios(graph, costs, limits, budget, rule=GroupRule.ROOTED)


def ios_parallel(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> StageSchedule:
    """Search as `ios`, without merges: IOS-Parallel of the paper's figure 6."""
    return ios(graph, costs, limits, budget, strategy=Strategy.PARALLEL)


def ios_merge(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> StageSchedule:
    """Search stages of one operator or one merge: IOS-Merge of the paper's figure 6."""
    return ios(graph, costs, limits, budget, strategy=Strategy.MERGE)


def exact(stages: Stages, expansions: int | None = None) -> list[int]:
    """The endings of a cheapest schedule, in run order.

    Raises:
        TooManyError: there are more than `expansions` pairs of a state and an ending.
    """
    return _trace(stages, cheapest_by_state(stages, expansions))


def cheapest_by_state(stages: Stages, expansions: int | None = None) -> dict[int, float]:
    """Seconds of the cheapest schedule of every state, and 0 for none.

    Raises:
        TooManyError: there are more than `expansions` pairs of a state and an ending.
    """
    graph = stages.graph
    classes = exchangeable(graph, stages.costs)
    if expansions is not None:
        _check_size(stages, classes, expansions)
    cheapest_s = {0: 0.0}
    for level in states_by_size(graph):
        for state in level:
            if state not in cheapest_s:
                least_s = min(_totals(stages, cheapest_s, state, stages.endings(state)))
                cheapest_s.update(dict.fromkeys(images(graph, classes, state), least_s))
    return cheapest_s


def _check_size(stages: Stages, classes: Sequence[Sequence[int]], expansions: int) -> None:
    """Check the size of the search first: listing endings takes little time beside costing them."""
    left = expansions
    for level in states_by_size(stages.graph, expansions):
        seen: set[int] = set()
        for state in level:
            if state not in seen:
                seen.update(images(stages.graph, classes, state))
                left -= len(stages.endings(state, left))
                if left < 0:
                    raise TooManyError(f"more than {expansions} transitions")


def _totals(stages: Stages, cheapest_s: dict[int, float], state: int, endings: list[int]) -> Iterable[float]:
    """Per ending what comes before it plus the ending itself: additions in run order, all in C."""
    before = map(cheapest_s.__getitem__, map(state.__xor__, endings))
    return map(add, before, map(stages.__getitem__, endings))


def _trace(stages: Stages, cheapest_s: dict[int, float]) -> list[int]:
    """Walk back from all operators; endings were not kept, those of a few states are listed again."""
    chosen = []
    state = (1 << stages.graph.size) - 1
    while state:
        endings = stages.endings(state)
        bound_s = cheapest_s[state] * _EQUAL
        equal = [
            ending
            for ending, total_s in zip(endings, _totals(stages, cheapest_s, state, endings), strict=True)
            if total_s <= bound_s
        ]
        best = max(equal, key=lambda ending: (ending.bit_count(), ending))
        chosen.append(best)
        state ^= best
    chosen.reverse()
    return chosen


def brute(
    graph: CombinedGraph,
    costs: StageCosts,
    limits: Limits,
    budget: Budget,
    *,
    rule: GroupRule = GroupRule.CONNECTED,
    strategy: Strategy = Strategy.BOTH,
) -> StageSchedule:
    """Brute force: every schedule listed, the cheapest kept. The reference for `ios` on small graphs.

    Exponential: seven operators have up to 47,293 schedules, a block of Inception V3 has millions. The budget
    bounds the endings that are taken; the answer is then the best of the schedules completed by then and
    `sequential`. Nothing is pruned and nothing is remembered but each state's endings.

    The first of the cheapest schedules, or of those that the budget lets it see.
    """
    stages = Stages(graph, costs, limits, rule, strategy)
    best = sequential(graph, costs, limits, budget)
    best_s = costs.schedule_s(best)
    with suppress(TooManyError):
        for endings, seconds in _schedules(stages, budget.expansions):
            if seconds < best_s:
                best, best_s = stages.schedule(endings), seconds
    return best


def _schedules(stages: Stages, expansions: int) -> Iterator[tuple[list[int], float]]:
    """Every schedule as endings in run order, and its seconds; built from the last stage backwards.

    Raises:
        TooManyError: the budget is spent.
    """
    state = (1 << stages.graph.size) - 1
    known = {state: stages.endings(state, expansions)}
    chosen: list[int] = []
    spent_s = [0.0]
    pending = [iter(known[state])]  # per stage chosen so far, and the next, the endings not yet taken
    while pending:
        ending = next(pending[-1], None)
        if ending is not None:
            expansions -= 1
            if expansions < 0:
                raise TooManyError("the budget is spent")
            chosen.append(ending)
            spent_s.append(spent_s[-1] + stages[ending])
            state ^= ending
            if state:
                if state not in known:
                    known[state] = stages.endings(state, expansions)
                pending.append(iter(known[state]))
                continue
            yield chosen[::-1], spent_s[-1]
        else:
            pending.pop()
        if chosen:  # take the latest stage back
            state ^= chosen.pop()
            spent_s.pop()
