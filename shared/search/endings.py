"""Endings: what may be the last stage of the operators still to schedule.

An ending of a state S is a set of operators closed under successors within S (IOS, Ding et al. 2021, section
4.1). Its connected components are the groups of the stage; `r` bounds the operators per group and `s` the
groups per stage (section 4.3). Two rules for groups:

- `connected`, the default: any connected component.
- `rooted`: one operator of the group reaches all others of it. IOS's released code enumerates these only, and
  its table 1 counts them; a legal ending whose group has two entries is missed.

Two disjoint sets that are closed under successors have no edge between them: it would leave the first one. So
an ending is exactly a set of pairwise disjoint groups, each closed by itself, and both rules share everything
but the list of groups. Groups with the same
highest operator exclude each other and form a bucket.

Sets of operators are masks. Time and space grow with the number of endings, not with that of subsets.
"""

from collections.abc import Sequence
from enum import Enum
from itertools import chain

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph


class GroupRule(Enum):
    """Which connected components may be groups."""

    CONNECTED = "connected"
    ROOTED = "rooted"


class TooManyError(Exception):
    """There are more states, groups or endings than the limit of the caller."""


class Endings:
    """The endings of one graph's states; a state is a mask of operators closed under predecessors."""

    def __init__(
        self,
        graph: CombinedGraph,
        *,
        rule: GroupRule = GroupRule.CONNECTED,
        r: int | None = None,
        s: int | None = None,
    ) -> None:
        self.graph = graph
        self.rule = rule
        self.r = graph.size if r is None else r
        self.s = graph.size if s is None else s
        self._successors = graph.successors
        self._predecessors = graph.predecessors
        self._reach = _reach(graph)

    def groups(self, state: int, limit: int | None = None) -> list[int]:
        """The groups that an ending of `state` may have, by descending lowest operator.

        Raises:
            TooManyError: there are more than `limit`.
        """
        if self.rule is GroupRule.ROOTED:
            return self.rooted_groups(state)
        return self.connected_groups(state, self.r, limit)

    def rooted_groups(self, state: int) -> list[int]:
        """Return every operator of `state` with all it reaches there, if these are at most r operators."""
        found = []
        for op in _descending(state):
            cone = self._reach[op] & state
            if cone.bit_count() <= self.r:
                found.append(cone)
        return found

    def connected_groups(self, state: int, r: int, limit: int | None = None) -> list[int]:
        """Connected sets of up to `r` operators that are closed under successors within `state`.

        The lowest operator of such a set is an entry of it. What remains without it is a set of disjoint
        groups that hold all its successors, each at least one: covering those successors one after another
        by groups found before gives every set exactly once.

        Raises:
            TooManyError: there are more than `limit`.
        """
        found: list[int] = []
        holding: dict[int, list[int]] = {}  # per operator, as a mask of one, the groups that hold it
        for op in _descending(state):
            own = 1 << op
            needed = self._successors[op] & state
            if not needed:
                new = [own]
            elif (self._reach[op] & state).bit_count() > r:
                continue
            else:
                new = _cover(own, needed, r, holding)
            found += new
            if limit is not None and len(found) > limit:
                raise TooManyError(f"more than {limit} groups")
            for group in new:
                rest = group
                while rest:
                    low = rest & -rest
                    holding.setdefault(low, []).append(group)
                    rest ^= low
        return found

    def endings(self, state: int, limit: int | None = None) -> list[int]:
        """Every ending of `state` but the empty one, each once.

        Raises:
            TooManyError: there are more than about `limit`; never for fewer.
        """
        if self.rule is GroupRule.CONNECTED and self.r >= state.bit_count() <= self.s:
            return self._closed(state, limit)
        buckets = by_highest(self.groups(state, limit))
        if len(buckets) <= self.s:  # an ending takes at most one group of each bucket
            return _free_packings(buckets, limit)
        return list(chain.from_iterable(packings(buckets, self.s, limit)[1:]))

    def _closed(self, state: int, limit: int | None) -> list[int]:
        """Return every closed set but the empty one: the endings if no limit can be exceeded."""
        found = [0]
        for op in _descending(state):
            own = 1 << op
            needed = self._successors[op] & state
            found += [taken | own for taken in found if taken & needed == needed]
            if limit is not None and len(found) > limit + 1:
                raise TooManyError(f"more than {limit} endings")
        del found[0]
        return found

    def component(self, ending: int) -> int:
        """The group of an ending's lowest operator, which is an entry of it.

        All that an entry reaches is in its group, and all that reaches any of that.
        """
        low = ending & -ending
        found = self._reach[low.bit_length() - 1] & ending
        if found == ending:
            return found
        rest = found ^ low
        while rest:
            low = rest & -rest
            rest ^= low
            new = self._predecessors[low.bit_length() - 1] & ending & ~found
            while new:  # seldom: another way into the group
                entry = new & -new
                reached = self._reach[entry.bit_length() - 1] & ending & ~found
                found |= reached
                rest |= reached
                new &= ~found
        return found

    def components(self, ending: int) -> list[int]:
        """Return the groups of an ending, by ascending lowest operator."""
        parts: list[int] = []
        while ending:
            parts.append(self.component(ending))
            ending ^= parts[-1]
        return parts


def packings(buckets: Sequence[Sequence[int]], s: int, limit: int | None = None) -> list[list[int]]:
    """Unions of pairwise disjoint groups, at most one of each bucket, by number of groups. [up to s + 1][...]

    Raises:
        TooManyError: there are more than about `limit`.
    """
    levels: list[list[int]] = [[0]]
    seen = 0
    for bucket in buckets:
        if len(levels) <= s:
            levels.append([])
        for count in range(len(levels) - 1, 0, -1):  # descending: level count - 1 is as before this bucket
            base = levels[count - 1]
            new = levels[count]
            for group in bucket:
                if group & seen:
                    new += [taken | group for taken in base if not taken & group]
                else:
                    new += [taken | group for taken in base]
        for group in bucket:
            seen |= group
        if limit is not None and sum(map(len, levels)) > limit + 1:
            raise TooManyError(f"more than {limit} endings")
    return levels


def _free_packings(buckets: Sequence[Sequence[int]], limit: int | None) -> list[int]:
    """As `packings` with no bound on the number of groups, less the empty union."""
    found = [0]
    seen = 0
    for bucket in buckets:
        base = found.copy()
        for group in bucket:
            if group & seen:
                found += [taken | group for taken in base if not taken & group]
            else:
                found += [taken | group for taken in base]
        for group in bucket:
            seen |= group
        if limit is not None and len(found) > limit + 1:
            raise TooManyError(f"more than {limit} endings")
    del found[0]
    return found


def _cover(own: int, needed: int, r: int, holding: dict[int, list[int]]) -> list[int]:
    """`own` joined with disjoint groups that together hold `needed`, up to `r` operators in all."""
    done: list[int] = []
    open_sets = [own]
    while open_sets:
        taken = open_sets.pop()
        missing = needed & ~taken
        if not missing:
            done.append(taken)
            continue
        open_sets += [
            taken | group
            for group in holding.get(missing & -missing, ())
            if not group & taken and (taken | group).bit_count() <= r
        ]
    return done


def by_highest(groups: Sequence[int]) -> list[list[int]]:
    """Return the groups by their highest operator, ascending."""
    found: dict[int, list[int]] = {}
    for group in groups:
        found.setdefault(group.bit_length(), []).append(group)
    return [found[top] for top in sorted(found)]


def _descending(mask: int) -> list[int]:
    ops = list(bits(mask))
    ops.reverse()
    return ops


def _reach(graph: CombinedGraph) -> list[int]:
    """Return for each operator itself and all that depend on it. [num_ops]"""
    reach = [0] * graph.size
    for op in reversed(range(graph.size)):
        reach[op] = 1 << op
        for successor in bits(graph.successors[op]):
            reach[op] |= reach[successor]
    return reach
