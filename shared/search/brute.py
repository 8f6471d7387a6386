"""Brute force: every schedule listed, the cheapest kept. What `ios` is judged by on small graphs.

Exponential: seven operators have up to 47,293 schedules, a block of Inception V3 has millions. The budget
bounds the endings that are taken; the answer is then the best of the schedules completed by then and
`sequential`. Nothing is pruned and nothing is remembered but each state's endings.
"""

from collections.abc import Iterator
from contextlib import suppress

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.endings import GroupRule, TooManyError
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.sequential import sequential
from stageloom.shared.search.stages import Stages, Strategy


def brute(
    graph: CombinedGraph,
    costs: StageCosts,
    limits: Limits,
    budget: Budget,
    *,
    rule: GroupRule = GroupRule.CONNECTED,
    strategy: Strategy = Strategy.BOTH,
) -> StageSchedule:
    """The first of the cheapest schedules, or of those that the budget lets it see."""
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
