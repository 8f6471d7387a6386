"""EOP: every operator on one of two resources, or split over both (Xu et al. 2022).

    T(op, b) = max(t_0(b), t_1(extent - b)) + cm        equation 2; a split only if below both t_r(op), eq. 3
    AT = sum over operators of T                        equation 4

- `eop_paper`: algorithms 1 to 3 as printed. Key operators, fewest that take over 95 % of the time; per
  operator the axis and the ratio, of a grid of 0.01 mapped to boundaries; neighbours tuned jointly,

      F(i) = min(F(i-1) + T(op_i), F(i-2) + TuneT(op_{i-1}, op_i));

  others on their better resource. Under AT the joint tuning is *empty*: AT is a sum in which no boundary
  occurs twice, so that no pair is better than its two optima. A test holds `eop_paper` to `separate`.
- `eop`: the missing coupling, by dynamic programming (Viterbi) along each chain over states (axis, boundary),

      C(i, s) = min over s' of C(i-1, s') + cm(s', s) + max over r of t_r(s),

  with cm = 0 where parts are handed on as they are. An operator that is no key operator stays whole or
  continues a split. Chains that do not read from each other may run beside each other, each whole on one
  resource, where that is shorter than one after another.
- `separate`, `equal`, `fixed`: what they are compared with; the last two are the paper's rivals.

AT adds operator times up. It is the time of a model only where operators run strictly one after another,
which is how both resources are busy with a split operator; it is no measured latency.

Complexity: O(sum over operators of boundaries); what is entered from home is entered from the same state.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from stageloom.shared.errors import SettingError
from stageloom.shared.partition import Split
from stageloom.shared.search.split_problem import (
    AxisTimes,
    Halves,
    SplitChoice,
    SplitProblem,
    SplitState,
    SplittableOperator,
    Whole,
    apart_s,
    begun_anew_s,
    chain_s,
    each_alone,
    gathered_s,
    into_s,
    runs_of,
)

KEY_SHARE: Final = 0.95
"""Of all operators' time, taken by the key operators together."""

SPAN: Final = 0.01
"""Grid of ratios (algorithm 2)."""

TIE_S: Final = 1e-15
"""Sums that differ by less are rounded differently."""

ALL_WAYS: Final = 5
"""Chains of a stage of which all ways to run them are tried; of more, two."""


def key_operators(operators: Sequence[SplittableOperator], share: float = KEY_SHARE) -> frozenset[int]:
    """The fewest operators that take more than `share` of the time, each whole on its better resource."""
    total = math.fsum(one.least_whole_s for one in operators)
    order = sorted(range(len(operators)), key=lambda op: (-operators[op].least_whole_s, op))
    found: list[int] = []
    taken = 0.0
    for op in order:
        if taken > share * total:
            break
        found.append(op)
        taken += operators[op].least_whole_s
    return frozenset(found)


# One operator


def grid(axis: AxisTimes) -> tuple[int, ...]:
    """The boundaries nearest to the ratios 0.01 .. 0.99."""
    boundaries = axis.boundaries
    if len(boundaries) <= 1:
        return boundaries
    found, place = [], 0
    for step in range(1, round(1 / SPAN)):
        wanted = step * SPAN * axis.extent
        while place + 1 < len(boundaries) and abs(boundaries[place + 1] - wanted) < abs(
            boundaries[place] - wanted
        ):
            place += 1
        found.append(boundaries[place])
    return tuple(sorted(set(found)))


def apart_cost_s(problem: SplitProblem, op: int, state: SplitState) -> float:
    """T(op) with everything that a split of this operator alone pays for, the next one being whole."""
    if isinstance(state, Whole):
        return problem.operators[op].seconds(state)
    seconds = into_s(problem, op, problem.home, state) + problem.operators[op].seconds(state)
    return seconds + gathered_s(problem, op, state) + begun_anew_s(problem, op)


def best_split(
    problem: SplitProblem, op: int, boundaries: Callable[[AxisTimes], Sequence[int]] | None = None
) -> SplitState:
    """The operator's best split, or whole on its better resource where no split is below that (eq. 3).

    `boundaries`: which to try; all of them by default.
    """
    operator = problem.operators[op]
    best: SplitState = operator.best_whole
    least_s = operator.least_whole_s
    for axis in operator.axes:
        for boundary in axis.boundaries if boundaries is None else boundaries(axis):
            own_s = axis.seconds(boundary)
            if own_s >= least_s:
                continue
            state = Halves(axis.axis, boundary)
            if (seconds := apart_cost_s(problem, op, state)) < least_s:
                best, least_s = state, seconds
    return best


# The paper's


def separate(problem: SplitProblem) -> SplitChoice:
    """Key operators at their own optimum on the paper's grid, the others on their better resource."""
    keys = key_operators(problem.operators)
    return apart(
        problem,
        [
            best_split(problem, op, grid) if op in keys else operator.best_whole
            for op, operator in enumerate(problem.operators)
        ],
    )


def eop_paper(problem: SplitProblem) -> SplitChoice:
    """Algorithm 3 as it is printed: what a pair takes is the sum of what its operators take."""
    return apart(problem, tuned(problem, pair_apart_s).states)


PairSeconds: TypeAlias = Callable[[SplitProblem, tuple[int, int], tuple[SplitState, SplitState]], float]
"""Seconds of two key operators, one after the other, in these states."""


def pair_apart_s(problem: SplitProblem, ops: tuple[int, int], states: tuple[SplitState, SplitState]) -> float:
    """The sum, as equation 4 has it."""
    return sum(apart_cost_s(problem, op, state) for op, state in zip(ops, states, strict=True))


def pair_coupled_s(
    problem: SplitProblem, ops: tuple[int, int], states: tuple[SplitState, SplitState]
) -> float:
    """The sum, less what neighbours in a chain save that are not joined in between."""
    first, second = ops
    if second != first + 1 or any(one.start == second for one in problem.chains):
        return pair_apart_s(problem, ops, states)
    if not all(isinstance(state, Halves) for state in states):
        return pair_apart_s(problem, ops, states)
    seconds = into_s(problem, first, problem.home, states[0]) + problem.operators[first].seconds(states[0])
    seconds += into_s(problem, second, *states) + problem.operators[second].seconds(states[1])
    return seconds + gathered_s(problem, second, states[1]) + begun_anew_s(problem, second)


class Tuned(NamedTuple):
    """States of all operators, pairs of key operators tuned jointly, and F of the last key operator."""

    states: list[SplitState]
    pairs: list[tuple[int, int]]
    seconds: float


def tuned(problem: SplitProblem, pair_s: PairSeconds) -> Tuned:
    """The recursion F over the key operators in the graph's order; the others on their better resource."""
    states: list[SplitState] = [operator.best_whole for operator in problem.operators]
    keys = sorted(key_operators(problem.operators))
    alone = [best_split(problem, op, grid) for op in keys]
    alone_s = [apart_cost_s(problem, op, state) for op, state in zip(keys, alone, strict=True)]
    jointly: list[tuple[SplitState, SplitState] | None] = []
    total_s = [0.0]  # F, one longer
    for place, own_s in enumerate(alone_s):
        total_s.append(total_s[-1] + own_s)
        jointly.append(None)
        if place:
            ops, both = (keys[place - 1], keys[place]), (alone[place - 1], alone[place])
            found, found_s = tune(problem, ops, both, pair_s)
            if total_s[place - 1] + found_s < total_s[-1] - TIE_S:
                jointly[-1], total_s[-1] = found, total_s[place - 1] + found_s
    pairs = []
    place = len(keys) - 1
    while place >= 0:
        pair = jointly[place]
        if pair is None:
            states[keys[place]] = alone[place]
            place -= 1
        else:
            pairs.append((keys[place - 1], keys[place]))
            states[keys[place - 1]], states[keys[place]] = pair
            place -= 2
    return Tuned(states, pairs[::-1], total_s[-1])


def tune(
    problem: SplitProblem,
    ops: tuple[int, int],
    alone: tuple[SplitState, SplitState],
    pair_s: PairSeconds,
) -> tuple[tuple[SplitState, SplitState], float]:
    """Algorithm 2, TuneT: from both separate optima one operator's share grows while the other's shrinks.

    Returns the two states and their time. Operators that are not split are not tuned.
    """
    best, least_s = alone, pair_s(problem, ops, alone)
    first, second = alone
    if not (isinstance(first, Halves) and isinstance(second, Halves)):
        return best, least_s
    (ends, at), (others, other_at) = (
        _grid_at(problem.operators[op], state) for op, state in zip(ops, (first, second), strict=True)
    )
    for sign in (1, -1):
        for step in range(1, len(ends) + len(others)):
            here, there = at + sign * step, other_at - sign * step
            if not (0 <= here < len(ends) and 0 <= there < len(others)):
                break
            states = Halves(first.axis, ends[here]), Halves(second.axis, others[there])
            if (seconds := pair_s(problem, ops, states)) < least_s:
                best, least_s = states, seconds
    return best, least_s


def _grid_at(operator: SplittableOperator, state: Halves) -> tuple[tuple[int, ...], int]:
    """The grid of a state's axis, and where on it the state is."""
    ends = next(grid(one) for one in operator.axes if one.axis is state.axis)
    return ends, ends.index(state.boundary)


def equal(problem: SplitProblem) -> SplitChoice:
    """Every operator that can be split, in the middle of the axis on which that takes least."""
    return _at_shares(problem, [0.5] * len(problem.operators))


def fixed(problem: SplitProblem, subgraphs: Sequence[Sequence[int]] | None = None) -> SplitChoice:
    """Every operator that can be split, at its subgraph's ratio of speeds; a chain is one by default.

    A subgraph that takes s times as long on resource 1 leaves resource 0 s / (1 + s) of each operator.
    """
    shares = [0.5] * len(problem.operators)
    for subgraph in problem.chains if subgraphs is None else subgraphs:
        fast_s, slow_s = (sum(problem.operators[op].whole_s[r] for op in subgraph) for r in (0, 1))
        for op in subgraph:
            shares[op] = 1.0 / (1.0 + fast_s / slow_s) if slow_s else 0.5
    return _at_shares(problem, shares)


def _at_shares(problem: SplitProblem, shares: Sequence[float]) -> SplitChoice:
    states: list[SplitState] = []
    for op, (operator, share) in enumerate(zip(problem.operators, shares, strict=True)):
        offered = [
            Halves(axis.axis, end) for axis in operator.axes if (end := axis.nearest(share)) is not None
        ]
        best = min(offered, key=lambda state: apart_cost_s(problem, op, state), default=None)
        states.append(operator.best_whole if best is None else best)
    return apart(problem, states)


def apart(problem: SplitProblem, states: Sequence[SplitState]) -> SplitChoice:
    """Operators in these states, each joined behind itself."""
    return SplitChoice(
        states=tuple(states),
        splits=each_alone(states),
        seconds=apart_s(problem, states),
        home=problem.home,
    )


# Ours


def eop(problem: SplitProblem, keys: frozenset[int] | None = None) -> SplitChoice:
    """The best states under cm(s', s), chain by chain, and of stages that run chains beside each other.

    `keys`: where splits may begin; the key operators by default.
    """
    if keys is None:
        keys = key_operators(problem.operators)
    states: list[SplitState] = [problem.home] * len(problem.operators)
    chain_costs_s = []
    for chain in problem.chains:
        found, seconds = best_of_chain(problem, chain, keys)
        states[chain.start : chain.stop] = found
        chain_costs_s.append(seconds)
    total_s = sum(chain_costs_s)
    beside = []
    for stage in problem.stages:
        assigned, saved_s = _beside(problem, [problem.chains[place] for place in stage], stage, chain_costs_s)
        if saved_s <= 0.0:
            continue
        total_s -= saved_s
        sides: tuple[list[int], list[int]] = ([], [])
        for place, resource in assigned.items():
            chain = problem.chains[place]
            states[chain.start : chain.stop] = [Whole(resource)] * len(chain)
            sides[resource].extend(chain)
        beside.append((tuple(sides[0]), tuple(sides[1])))
    return SplitChoice(
        states=tuple(states),
        splits=runs_of(problem, states),
        seconds=total_s,
        beside=tuple(beside),
        home=problem.home,
    )


def eop_at_most(problem: SplitProblem, splits: int) -> SplitChoice:
    """`eop` with so many splits at most, those that gain most: a plan has a size on the wire.

    What a split gains is what its chain takes longer without it. No split begins at an operator of one that
    is left out. A greedy choice, no optimum.
    """
    keys = key_operators(problem.operators)
    choice = eop(problem, keys)
    chain_at = {op: chain for chain in problem.chains for op in chain}

    def gain_s(split: Split) -> float:
        chain = chain_at[split.first]
        with_it = chain_s(problem, chain, choice.states[chain.start : chain.stop])
        return best_of_chain(problem, chain, keys.difference(_inside(split)))[1] - with_it

    while len(choice.splits) > splits:
        by_gain = sorted(choice.splits, key=gain_s)
        keys = keys.difference(*map(_inside, by_gain[: len(by_gain) - splits]))
        choice = eop(problem, keys)
    return choice


def _inside(split: Split) -> range:
    return range(split.first, split.last + 1)


_Reached: TypeAlias = dict[SplitState, tuple[float, SplitState]]
"""Per state the least seconds until then, and the state before."""


def best_of_chain(
    problem: SplitProblem, chain: range, keys: frozenset[int]
) -> tuple[list[SplitState], float]:
    """Viterbi along one chain, from home to home: states and seconds."""
    reached: list[_Reached] = []
    before: _Reached = {problem.home: (0.0, problem.home)}
    for op in chain:
        before = _next(problem, op, before, op in keys)
        reached.append(before)
    seconds, state = min(
        ((one_s + gathered_s(problem, chain[-1], one), one) for one, (one_s, _) in before.items()),
        key=lambda entry: entry[0],
    )
    states: list[SplitState] = []
    for layer in reversed(reached):
        states.append(state)
        state = layer[state][1]
    return states[::-1], seconds


def _next(problem: SplitProblem, op: int, before: _Reached, is_key: bool) -> _Reached:
    """The states of an operator, each reached from the best one before.

    A state either continues the one before or is entered from home, to which all states before lead: the best
    of them is the same for all. A split of no key operator, or off its tiles, only continues one.
    """
    joins, operator, home = problem.joins, problem.operators[op], problem.home
    found: _Reached = {}
    left_s = math.inf
    source: SplitState = home
    for one, (seconds, _) in before.items():
        state = joins.carried(op, one)
        if state is not None and (own_s := operator.seconds(state)) < math.inf:
            found[state] = seconds + own_s, one
        if one != home:
            seconds += joins.leave_s(op - 1, one, home)
        if seconds < left_s:
            left_s, source = seconds, one
    entered: list[SplitState] = [Whole(0), Whole(1)]
    if is_key:
        entered += [Halves(axis.axis, end) for axis in operator.axes for end in axis.boundaries]
    for state in entered:
        seconds = left_s + joins.barrier_s + joins.enter_s(op, state, home) + operator.seconds(state)
        if seconds < found.get(state, _NOT_REACHED)[0]:
            found[state] = seconds, source
    return found


_NOT_REACHED: Final = (math.inf, Whole(0))


def _beside(
    problem: SplitProblem, chains: Sequence[range], stage: Sequence[int], chain_costs_s: Sequence[float]
) -> tuple[dict[int, int], float]:
    """Chains of a stage that run whole, beside each other: the resource of each, and the seconds saved.

    Of up to five chains each is tried on either resource or by itself; of more, all of them are spread, the
    longest first.
    """
    if len(chains) < 2:
        return {}, 0.0
    loads_s = [
        [chain_s(problem, chain, [Whole(resource)] * len(chain)) for resource in (0, 1)] for chain in chains
    ]
    in_turn_s = [chain_costs_s[place] for place in stage]
    best: tuple[float, tuple[int | None, ...]] = (0.0, ())
    for way in _ways(loads_s):
        sides = [sum(loads_s[at][r] for at, one in enumerate(way) if one == r) for r in (0, 1)]
        if not all(sides):
            continue
        before_s = sum(in_turn_s[at] for at, one in enumerate(way) if one is not None)
        saved_s = before_s - max(sides)
        if saved_s > best[0]:
            best = saved_s, way
    assigned = {place: one for place, one in zip(stage, best[1], strict=False) if one is not None}
    return assigned, best[0]


def _ways(loads_s: Sequence[Sequence[float]]) -> list[tuple[int | None, ...]]:
    if len(loads_s) <= ALL_WAYS:
        return list(product((None, 0, 1), repeat=len(loads_s)))
    way: list[int | None] = [None] * len(loads_s)
    sides = [0.0, 0.0]
    for at in sorted(range(len(loads_s)), key=lambda at: -min(loads_s[at])):
        side = min((0, 1), key=lambda r: sides[r] + loads_s[at][r])
        way[at] = side
        sides[side] += loads_s[at][side]
    return [tuple(way)]


# By name


def at_best_home(search: Callable[[SplitProblem], SplitChoice], problem: SplitProblem) -> SplitChoice:
    """The better of both homes; resource 0 of equal ones."""
    return min((search(replace(problem, home=Whole(home))) for home in (0, 1)), key=lambda one: one.seconds)


@dataclass(frozen=True, slots=True)
class Splitter:
    """A way to split a model over two resources."""

    help: str  # one line
    search: Callable[[SplitProblem], SplitChoice]

    def choose(self, problem: SplitProblem) -> SplitChoice:
        """What it finds, with tensors at home on either resource."""
        return at_best_home(self.search, problem)


_SPLITTERS: Mapping[str, Splitter] = MappingProxyType(
    {
        "eop": Splitter("operators split over two resources, joins counted between neighbours", eop),
        "eop_paper": Splitter("operators split over two resources as EOP is printed", eop_paper),
        "equal": Splitter("every operator split in the middle", equal),
        "fixed": Splitter("every operator split at its subgraph's ratio of speeds", fixed),
        "separate": Splitter("key operators split, each by itself", separate),
    }
)


def splitters() -> Mapping[str, Splitter]:
    """Return all of them by name."""
    return _SPLITTERS


def splitter(name: str) -> Splitter:
    """The one of that name.

    Raises:
        SettingError: there is none; the error lists the names.
    """
    if name not in _SPLITTERS:
        raise SettingError(
            f"there is no splitter {name!r}", remedy=f"choose one of {', '.join(sorted(_SPLITTERS))}"
        )
    return _SPLITTERS[name]
