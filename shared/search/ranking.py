"""Counting a state's endings without listing them, and the k-th one at once.

Groups that never share an operator are independent choices. So the groups fall apart into parts; each part's
packings are listed once, by number of groups, and the parts are convolved under the cap of s groups: four
sub-blocks cost what their parts cost, not their product. TOP (V-C) maps an action to an ending; `unrank` is
that map.

The order is a mixed-radix one with reflection (Knuth, 7.2.1.1): each part's packings are the digits, and the
later parts run backwards after every odd digit, so most neighbours differ in one part. That is approximate:
neighbours within a part, and where the cap cuts, differ by more.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from stageloom.shared.search.endings import Endings, by_highest, packings


@dataclass(frozen=True, slots=True)
class _Part:
    """The packings of groups that only conflict among themselves, fewest groups first."""

    operators: int
    packings: tuple[int, ...]  # the empty one first
    groups: tuple[int, ...]  # of each packing
    starts: tuple[tuple[int, ...], ...]  # per groups still allowed, endings before each packing; last: all


class RankedEndings:
    """The endings of one state, numbered 0 .. count - 1; exact for counts of any size."""

    def __init__(self, endings: Endings, state: int, limit: int | None = None) -> None:
        """Takes time in the packings of the parts, times s.

        Raises:
            TooManyError: there are more than about `limit` groups, or packings of one part.
        """
        listed: dict[tuple[int, ...], list[list[int]]] = {}  # members of one model have equal parts
        tables = []
        for part in _parts(endings.groups(state, limit)):
            lowest = min(group & -group for group in part).bit_length() - 1
            shape = tuple(group >> lowest for group in part)
            if shape not in listed:
                listed[shape] = packings(by_highest(shape), endings.s, limit)
            tables.append([[mask << lowest for mask in level] for level in listed[shape]])
        most = min(endings.s, sum(len(table) - 1 for table in tables))
        self._most = most
        self._parts = _convolve(tables, most)
        self.count = (self._parts[0].starts[most][-1] if self._parts else 1) - 1

    def unrank(self, index: int) -> int:
        """The ending of that number.

        Raises:
            IndexError: it is not one of 0 .. count - 1.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"ending {index} of {self.count}")
        index += 1  # the empty ending is the first of the order
        allowed = self._most
        mask = 0
        for part in self._parts:
            starts = part.starts[allowed]
            digit = bisect_right(starts, index) - 1
            index -= starts[digit]
            if digit & 1:
                index = starts[digit + 1] - starts[digit] - 1 - index
            mask |= part.packings[digit]
            allowed -= part.groups[digit]
        return mask

    def rank(self, ending: int) -> int:
        """The number of an ending.

        Raises:
            ValueError: it is none of the state's.
        """
        allowed = self._most
        digits = []
        for part in self._parts:
            digit = part.packings.index(ending & part.operators)
            digits.append((part.starts[allowed], digit))
            allowed -= part.groups[digit]
            if allowed < 0:
                raise ValueError("more than s groups")
        if ending & ~sum(part.operators for part in self._parts):
            raise ValueError("operators that no ending has")
        index = 0
        for starts, digit in reversed(digits):
            if digit & 1:
                index = starts[digit + 1] - starts[digit] - 1 - index
            index += starts[digit]
        if not index:
            raise ValueError("no operator")
        return index - 1

    def holds(self, ending: int) -> bool:
        """Return whether the ending is one of those numbered."""
        try:
            self.rank(ending)
        except ValueError:
            return False
        return True

    @property
    def parts(self) -> int:
        """The number of parts that choose independently, up to the cap."""
        return len(self._parts)

    def changed(self, ending: int, number: int) -> list[int]:
        """Return the endings that differ from this one in the given part only."""
        part = self._parts[number]
        taken = ending & part.operators
        rest = ending ^ taken
        groups = sum(one.groups[one.packings.index(ending & one.operators)] for one in self._parts)
        allowed = self._most - groups + part.groups[part.packings.index(taken)]
        end = bisect_right(part.groups, allowed)  # fewest groups first
        return [rest | mask for mask in part.packings[:end] if mask != taken and rest | mask]


def _parts(groups: Sequence[int]) -> list[list[int]]:
    """Partition the groups into parts that are linked by shared operators."""
    parts: list[tuple[int, list[int]]] = []  # operators, groups
    for group in groups:
        operators, members = group, [group]
        apart = []
        for other in parts:
            if other[0] & group:
                operators |= other[0]
                members += other[1]
            else:
                apart.append(other)
        parts = [*apart, (operators, members)]
    return [sorted(members) for _, members in sorted(parts)]


def _convolve(tables: Sequence[list[list[int]]], most: int) -> list[_Part]:
    """Count the endings of the parts, from the last one back, for every number of groups still allowed."""
    left = (1,) * (most + 1)
    parts: list[_Part] = []
    for table in reversed(tables):
        groups = tuple(count for count, level in enumerate(table) for _ in level)
        starts = []
        for allowed in range(most + 1):
            weights = chain.from_iterable(
                (left[allowed - count],) * len(level) for count, level in enumerate(table[: allowed + 1])
            )
            starts.append((0, *accumulate(weights)))
        part = _Part(
            operators=_union(table[1]),
            packings=tuple(chain.from_iterable(table)),
            groups=groups,
            starts=tuple(starts),
        )
        parts.append(part)
        left = tuple(row[-1] for row in starts)
    parts.reverse()
    return parts


def _union(masks: Sequence[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union
