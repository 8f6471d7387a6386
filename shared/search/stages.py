"""The stages that a search chooses from: the endings of each state, their costs, and how they run."""

from enum import Enum

from stageloom.shared.bitmask import bits, mask_of
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Group, Stage, StageSchedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.endings import Endings, GroupRule
from stageloom.shared.search.interface import Limits


class Strategy(Enum):
    """How the operators of a stage may run (IOS, section 3.2)."""

    PARALLEL = "parallel"  # groups side by side
    MERGE = "merge"  # one operator, or several as one launch
    BOTH = "both"  # whichever costs less, stage by stage


class Stages(dict[int, float]):
    """Seconds of the stage over a mask of operators, computed when first asked for.

    A dictionary that fills itself, since a search asks for the same ending in many states: only the first
    time costs more than a look-up.
    """

    def __init__(
        self, graph: CombinedGraph, costs: StageCosts, limits: Limits, rule: GroupRule, strategy: Strategy
    ) -> None:
        super().__init__()
        self.graph = graph
        self.space = Endings(graph, rule=rule, r=limits.r, s=limits.s)
        self.costs = costs
        self._strategy = strategy
        self._groups: dict[int, tuple[Group, ...]] = {0: ()}  # endings share their groups
        self._merged_s = {} if strategy is Strategy.PARALLEL else _mergeable(graph, costs, self.space.s)

    def __missing__(self, ending: int) -> float:
        seconds = self.costs.stage_s(self.groups(ending))
        seconds = min(seconds, self._merged_s.get(ending, seconds))
        self[ending] = seconds
        return seconds

    def endings(self, state: int, limit: int | None = None) -> list[int]:
        """The endings of `state` that the strategy and the limits allow.

        Raises:
            TooManyError: there are more than about `limit`.
        """
        if self._strategy is Strategy.MERGE:
            return self.merge_endings(state)
        return self.space.endings(state, limit)

    def merge_endings(self, state: int) -> list[int]:
        """Return single last operators of `state`, and sets of them that may become one launch."""
        last = self._last(state)
        return [1 << op for op in bits(last)] + self.merges_at(state)

    def merges_at(self, state: int) -> list[int]:
        """Return sets of last operators of `state` that may become one launch."""
        if not self._merged_s:
            return []
        last = self._last(state)
        return [mask for mask in self._merged_s if not mask & ~last]

    def _last(self, state: int) -> int:
        return mask_of(op for op in bits(state) if not self.graph.successors[op] & state)

    @property
    def only_merges(self) -> bool:
        """Return whether a stage is one operator or one launch."""
        return self._strategy is Strategy.MERGE

    def groups(self, ending: int) -> tuple[Group, ...]:
        """Return the connected components, in canonical order."""
        known = self._groups
        parts = []
        rest = ending
        while rest not in known:  # without its first group an ending is still one, and most likely known
            parts.append(self.space.component(rest))
            rest ^= parts[-1]
        groups = known[rest]
        for part in reversed(parts):
            own = known.get(part)
            if own is None:
                own = known[part] = (tuple(bits(part)),)
            groups = own + groups
        known[ending] = groups
        return groups

    def operators_s(self, mask: int) -> float:
        """Return the seconds of the operators one after another."""
        return sum(self.costs.operators_s[op] for op in bits(mask))

    def schedule(self, endings: list[int]) -> StageSchedule:
        """Return the schedule of these endings, given in run order; each runs the cheaper way."""
        return StageSchedule(tuple(self._stage(ending) for ending in endings))

    def _stage(self, ending: int) -> Stage:
        groups = self.groups(ending)
        merged_s = self._merged_s.get(ending)
        return Stage(groups, merge=merged_s is not None and merged_s < self.costs.stage_s(groups))


def _mergeable(graph: CombinedGraph, costs: StageCosts, s: int) -> dict[int, float]:
    """Return the legal merges of at most `s` operators, each as cheap as the costs hope."""
    found = costs.merged_s.items()
    return {mask_of(ops): seconds for ops, seconds in found if len(ops) <= s and graph.may_merge(ops)}
