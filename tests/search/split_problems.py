"""Seeded problems of operators to split, and all their solutions listed."""

from itertools import product
from math import inf
from random import Random

from stageloom.shared.partition import Axis
from stageloom.shared.search.eop import key_operators
from stageloom.shared.search.patterns import Pattern
from stageloom.shared.search.split_problem import (
    AxisTimes,
    BorderJoins,
    Halves,
    Joins,
    OperatorBytes,
    Reads,
    SplitProblem,
    SplitState,
    SplittableOperator,
    Whole,
    coupled_s,
)


def times(random: Random, extents: dict[Axis, int]) -> SplittableOperator:
    """An operator with its axes, resource 1 up to six times slower, or faster."""
    slow = random.choice([1.0, 3.0, 6.0, 0.5]) * random.uniform(0.8, 1.2)
    axes = []
    for axis, extent in extents.items():
        quantum = random.choice([1, 2])
        fast = Pattern(random.uniform(0, 0.2), random.uniform(0.1, 2.0), quantum)
        late = Pattern(random.uniform(0, 0.2), fast.step_s * slow, quantum)
        axes.append(AxisTimes(axis, extent, (fast, late), (quantum, quantum)))
    whole = axes[0] if axes else None
    if whole is None:
        return SplittableOperator((random.uniform(0.1, 1.0), random.uniform(0.1, 1.0)))
    return SplittableOperator((whole.part_s[0](whole.extent), whole.part_s[1](whole.extent)), tuple(axes))


def chain_ends(random: Random, size: int) -> tuple[range, ...]:
    starts = sorted({0, *(op for op in range(1, size) if random.random() < 0.3)})
    return tuple(map(range, starts, [*starts[1:], size]))


def problem(seed: int, joins: Joins | None = None, size: int | None = None) -> SplitProblem:
    """Up to six operators in chains; joins by their bytes unless others are given."""
    random = Random(seed)
    size = size or random.randint(1, 6)
    extents = {Axis.CHANNELS: random.choice([4, 6]), Axis.ROWS: random.choice([4, 5])}
    operators = []
    for _ in range(size):
        kept = [axis for axis in extents if random.random() < 0.8]
        operators.append(times(random, {axis: extents[axis] for axis in kept}))
    windows = [
        {
            axis.axis: Reads(axis.axis, 1, random.choice([1, 1, 3]), 0)
            for axis in one.axes
            if random.random() < 0.8
        }
        for one in operators
    ]
    if joins is None:
        sizes = [random.randint(1, 100) for _ in range(size + 1)]
        joins = BorderJoins(
            operators=[
                OperatorBytes(
                    input_bytes=sizes[op],
                    output_bytes=sizes[op + 1],
                    input_extents=extents,
                    output_extents=extents,
                    reads=reads,
                )
                for op, reads in enumerate(windows)
            ],
            barrier_s=random.choice([0.0, 0.1, 1.0]),
            latency_s=random.choice([0.0, 0.1]),
            bytes_per_s=random.choice([inf, 50.0, 500.0]),
        )
    return SplitProblem(operators=operators, joins=joins, chains=chain_ends(random, size))


class TableJoins:
    """Seeded joins that follow no law; a state is carried here and there."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.barrier_s = self._drawn("barrier")

    def _drawn(self, *key: object) -> float:
        return Random(f"{self._seed} {key}").uniform(0.0, 1.5)

    def carried(self, op: int, before: SplitState) -> SplitState | None:
        if isinstance(before, Whole):
            return before
        return before if self._drawn(op, before) > 0.7 else None

    def leave_s(self, op: int, state: SplitState, home: Whole) -> float:
        return self._drawn("leave", op, state, home)

    def enter_s(self, op: int, state: SplitState, home: Whole) -> float:
        return self._drawn("enter", op, state, home)


def least_by_listing(of: SplitProblem) -> float:
    """The least seconds of all ways: key operators split at their boundaries, any where one continues."""
    keys = key_operators(of.operators)
    starts = {chain.start for chain in of.chains}
    offered: list[list[SplitState]] = []
    for operator in of.operators:
        states: list[SplitState] = [Whole(0), Whole(1)]
        states += [Halves(axis.axis, end) for axis in operator.axes for end in range(1, axis.extent)]
        offered.append(states)

    def allowed(way: tuple[SplitState, ...], op: int) -> bool:
        state = way[op]
        if isinstance(state, Whole):
            return True
        if op in keys and any(
            one.axis is state.axis and state.boundary in one.boundaries for one in of.operators[op].axes
        ):
            return True
        return op not in starts and of.joins.carried(op, way[op - 1]) == state

    return min(
        coupled_s(of, way) for way in product(*offered) if all(allowed(way, op) for op in range(len(way)))
    )
