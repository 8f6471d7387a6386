"""Local search on a stage schedule: moves that each make it cheaper, until none does.

Two moves: two neighbouring stages become one, and an operator changes its stage, as far up or down as its
neighbours in the graph allow. Ours; TOP and IOS have no such step. Under costs that say what every stage
takes, this is cheap and exact, and it repairs what a learned choice gets slightly wrong. Deterministic.
"""

from collections.abc import Sequence

from stageloom.shared.bitmask import bits
from stageloom.shared.search.stages import Stages

_GAIN = 1.0 - 1e-9  # less is rounding


def refined(stages: Stages, endings: Sequence[int], moves: int = 20_000) -> list[int]:
    """Endings in run order, never dearer than those given; looks at about `moves` changes at most."""
    return _Refining(stages, endings, moves).run()


class _Refining:
    """Stages as masks in run order, and the stage of every operator."""

    def __init__(self, stages: Stages, endings: Sequence[int], moves: int) -> None:
        self._stages = stages
        self._graph = stages.graph
        self._masks = list(endings)
        self._left = moves
        self._legal: dict[int, bool] = {}

    def run(self) -> list[int]:
        """Moves of both kinds in turn while one of them helps."""
        improved = True
        while improved and self._left > 0:
            improved = self._join()
            for op in range(self._graph.size):
                improved |= self._move(op)
        return self._masks

    def _join(self) -> bool:
        improved = False
        at = 0
        while at + 1 < len(self._masks):
            first, second = self._masks[at], self._masks[at + 1]
            self._left -= 1
            if self._allowed(first | second) and self._cheaper((first | second,), (first, second)):
                self._masks[at : at + 2] = [first | second]
                improved = True
            else:
                at += 1
        return improved

    def _move(self, op: int) -> bool:
        """The best other stage for an operator, one of its own between neighbours included."""
        own = 1 << op
        home = next(at for at, mask in enumerate(self._masks) if mask & own)
        before, after = self._graph.predecessors[op], self._graph.successors[op]
        low = max((at for at, mask in enumerate(self._masks) if mask & before), default=0)
        high = min((at for at, mask in enumerate(self._masks) if mask & after), default=len(self._masks) - 1)
        rest = self._masks[home] ^ own
        if low == high or not self._allowed(rest):
            return False
        freed_s = self._stages[self._masks[home]] - (self._stages[rest] if rest else 0.0)
        best_s, best = 0.0, home
        for at in range(low, high + 1):
            if at == home:
                continue
            self._left -= 1
            grown = self._masks[at] | own
            if not self._allowed(grown):
                continue
            gain_s = freed_s - (self._stages[grown] - self._stages[self._masks[at]])
            if gain_s > best_s + (1.0 - _GAIN) * freed_s:
                best_s, best = gain_s, at
        if best == home:
            return False
        self._masks[best] |= own
        self._masks[home] = rest
        if not rest:
            del self._masks[home]
        return True

    def _cheaper(self, new: Sequence[int], old: Sequence[int]) -> bool:
        return sum(map(self._stages.__getitem__, new)) < _GAIN * sum(map(self._stages.__getitem__, old))

    def _allowed(self, mask: int) -> bool:
        """Whether the operators may be one stage; none at all may."""
        known = self._legal.get(mask)
        if known is None:
            groups = self._components(mask)
            known = len(groups) <= self._stages.space.s and all(
                group.bit_count() <= self._stages.space.r for group in groups
            )
            self._legal[mask] = known
        return known

    def _components(self, mask: int) -> list[int]:
        """Connected components under both directions of the edges."""
        found = []
        while mask:
            group = mask & -mask
            frontier = group
            while frontier:
                near = 0
                for op in bits(frontier):
                    near |= self._graph.predecessors[op] | self._graph.successors[op]
                frontier = near & mask & ~group
                group |= frontier
            found.append(group)
            mask &= ~group
        return found
