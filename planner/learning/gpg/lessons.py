"""What GPG learns from: random combined blocks (TOP, V-C.2), and lessons, states with what the networks
should say.

Imitation is ours. Exact dynamic programming knows the cheapest way on from every state of a small block, and
so the best action, and the value of any action; of a larger block a beam search's schedule tells the same for
the states on its way. The policy starts from that instead of from noise, and learns on by equations 7 and 8.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stageloom.planner.learning.gpg.model import Level
from stageloom.planner.twin.device_file import load_device
from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import Block, CombinedGraph, combine, split
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.matmul import matmul
from stageloom.shared.policy.gpg.choose import ranked
from stageloom.shared.policy.gpg.network import (
    Floats,
    Measures,
    bit_rows,
    levels,
    measures,
    operator_rows,
    state_rows,
)
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.beam import best_endings
from stageloom.shared.search.costs import CostTable, StageCosts
from stageloom.shared.search.endings import GroupRule, TooManyError
from stageloom.shared.search.gpg import refined
from stageloom.shared.search.interface import TOP_LIMITS
from stageloom.shared.search.ios import cheapest_by_state
from stageloom.shared.search.ranking import RankedEndings
from stageloom.shared.search.stages import Stages, Strategy

MemberOf = tuple[Digest, Graph, Block]
CostsOf = Callable[[Sequence[MemberOf], Random], StageCosts]

DEVICES: Final = ("a100", "nano", "tx2", "xavier_nx")
"""TOP's (table I), by their device files."""

_WINDOW: Final = (6, 36)  # operators of a piece of a block that is larger


@dataclass(frozen=True)
class Drawing:
    """Where blocks come from: models by digest, what stages cost, and how many members at most."""

    models: Mapping[Digest, Graph]
    costs: CostsOf
    members_max: int = 3

    def draw(self, random: Random) -> tuple[CombinedGraph, StageCosts]:
        """One combined block and its costs."""
        count = random.randint(1, self.members_max)
        digests = list(self.models)
        chosen = [random.choice(digests) for _ in range(count)]
        if random.random() < 0.2:
            chosen = [chosen[0]] * count  # replicas, perhaps of different blocks
        members = [(digest, self.models[digest], _block(self.models[digest], random)) for digest in chosen]
        return combine([(graph, block) for _, graph, block in members]), self.costs(members, random)


def analytic_costs(members: Sequence[MemberOf], random: Random) -> StageCosts:
    """Estimates for a device of TOP's table I, its figures varied, so that no one device is learned.

    Half of them are like the largest: the small ones leave little to choose.
    """
    name = "a100" if random.random() < 0.5 else random.choice(DEVICES)
    return CostTable(rates=varied(_rates(name), random)).for_members(members)


@cache
def _rates(device: str) -> DeviceRates:
    return load_device(device).rates()


def varied(rates: DeviceRates, random: Random) -> DeviceRates:
    """A device like this one. What groups cost each other no data sheet says, so any of a range is drawn."""

    def times(value: float, spread: float) -> float:
        return float(value * spread ** random.uniform(-1.0, 1.0))

    return replace(
        rates,
        flop_per_s=times(rates.flop_per_s, 2.0),
        bytes_per_s=times(rates.bytes_per_s, 2.0),
        launch_s=times(rates.launch_s, 2.0),
        barrier_s=times(rates.barrier_s, 3.0),
        contention=random.choice((0.0, 0.05, 0.1, 0.2, 0.4)),
        threads=max(round(times(rates.threads, 2.0)), 1),
    )


def _block(graph: Graph, random: Random) -> Block:
    """A block between two of the model's cuts, or a piece of one that is too large to learn from at once."""
    offered = dict(graph.partitions)
    cuts = offered.get("paper") or offered.get("base") or graph.base_cuts
    block = random.choice(split(graph, cuts))
    size = block.stop - block.start
    wanted = random.randint(*_WINDOW)
    if size <= wanted:
        return block
    start = block.start + random.randint(0, size - wanted)
    return replace(block, start=start, stop=start + wanted)


_EXACT = 60_000  # pairs of a state and an ending
_BEAM = 4_000
_STATES = 64  # of one block
_ACTED = 12  # of these with an action
_EQUAL = 1.0 + 1e-9


@dataclass(frozen=True)
class BlockRows:
    """A combined block as arrays."""

    graph: CombinedGraph
    found: Measures
    rows: Floats  # [num_ops, OPERATOR_FEATURES]
    levels: Sequence[Level]

    @staticmethod
    def of(graph: CombinedGraph, costs: StageCosts) -> "BlockRows":
        """Computed once; states are added by `StateRows`."""
        found = measures(graph, costs)
        return BlockRows(
            graph, found, operator_rows(graph, found), [_level(graph, ops) for ops in levels(graph)]
        )


@dataclass(frozen=True)
class StateRows:
    """States of one block as arrays."""

    leaf_state: NDArray[np.int64]
    leaf_op: NDArray[np.int64]
    rows: Floats  # [num_states, STATE_FEATURES]

    @staticmethod
    def of(block: BlockRows, masks: Sequence[int]) -> "StateRows":
        """Masks of the operators left."""
        size = block.graph.size
        left = bit_rows(masks, size)
        leaves = left * (matmul(left, bit_rows(block.graph.successors, size).T) == 0.0)
        leaf_state, leaf_op = np.nonzero(leaves)
        return StateRows(leaf_state, leaf_op, state_rows(block.found, left, leaves))


@dataclass(frozen=True)
class Lesson:
    """States of one block with what is known of them; shares of the block's seconds."""

    block: BlockRows
    states: StateRows
    worth: Floats  # seconds still to take [num_states]
    acted: NDArray[np.int64]  # states with a best action [num_acted]
    action: Floats  # the best one [num_acted]
    judged: NDArray[np.int64]  # states, each as often as actions are judged
    judged_action: Floats
    judged_worth: Floats  # seconds still to take after that action, its stage included


def lesson(graph: CombinedGraph, costs: StageCosts, random: Random) -> Lesson:
    """From exact dynamic programming, or from a beam search where that is too large."""
    stages = Stages(graph, costs, TOP_LIMITS, GroupRule.CONNECTED, Strategy.PARALLEL)
    block = BlockRows.of(graph, costs)
    try:
        cheapest_s = cheapest_by_state(stages, _EXACT)
    except TooManyError:
        return _from_schedule(block, stages)
    everything = (1 << graph.size) - 1
    others = [state for state in cheapest_s if state and state != everything]
    masks = [everything, *random.sample(others, min(len(others), _STATES - 1))]
    acted, action, judged, judged_action, judged_s = [], [], [], [], []
    for at, state in enumerate(masks[:_ACTED]):
        space = ranked(stages, state)
        best = _best_endings(stages, cheapest_s, space, state)
        acted.append(at)
        action.append((space.rank(best) + 0.5) / space.count)
        ranks = [space.rank(best), random.randrange(space.count)]
        for rank in ranks:
            ending = space.unrank(rank)
            judged.append(at)
            judged_action.append((rank + 0.5) / space.count)
            judged_s.append(stages[ending] + cheapest_s[state ^ ending])
    total_s = np.float32(block.found.total_s)
    return Lesson(
        block,
        StateRows.of(block, masks),
        np.array([cheapest_s[state] for state in masks], np.float32) / total_s,
        np.array(acted, np.int64),
        np.array(action, np.float32),
        np.array(judged, np.int64),
        np.array(judged_action, np.float32),
        np.array(judged_s, np.float32) / total_s,
    )


def _best_endings(stages: Stages, cheapest_s: dict[int, float], space: RankedEndings, state: int) -> int:
    """Of equally cheap endings the largest."""
    bound_s = cheapest_s[state] * _EQUAL
    return max(
        (
            ending
            for ending in stages.endings(state)
            if cheapest_s[state ^ ending] + stages[ending] <= bound_s
        ),
        key=lambda ending: (ending.bit_count(), ending),
    )


def _from_schedule(block: BlockRows, stages: Stages) -> Lesson:
    """The states that a good schedule passes through."""
    endings = refined(stages, best_endings(stages, _BEAM))
    masks, action, spent = [], [], []
    state, total_s = 0, 0.0
    for ending in endings:
        state |= ending
        total_s += stages[ending]
        masks.append(state)
        spent.append(total_s)
    acted = []
    for at, (state, ending) in enumerate(zip(masks, endings, strict=True)):
        space = ranked(stages, state)
        if space.holds(ending):  # not where the state has too many endings to count them all
            acted.append(at)
            action.append((space.rank(ending) + 0.5) / space.count)
    worth = np.array(spent, np.float32) / np.float32(block.found.total_s)
    places, actions = np.array(acted, np.int64), np.array(action, np.float32)
    return Lesson(block, StateRows.of(block, masks), worth, places, actions, places, actions, worth[places])


def _level(graph: CombinedGraph, ops: Sequence[int]) -> Level:
    edges = [(at, before) for at, op in enumerate(ops) for before in bits(graph.predecessors[op])]
    child, parent = zip(*edges, strict=True) if edges else ((), ())
    return np.array(ops, np.int64), np.array(child, np.int64), np.array(parent, np.int64)
