"""What there is to learn from one combined block: states with the numbers that the networks should give.

Imitation is ours. Exact dynamic programming knows the cheapest way on from every state of a small block, and
so the best action, and the worth of any action; of a larger block a beam search's schedule tells the same for
the states on its way. The policy starts from that instead of from noise, and learns on by equations 7 and 8.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from stageloom.planner.learning.gpg.model import Level
from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.matmul import matmul
from stageloom.shared.policy.gpg.choose import ranked
from stageloom.shared.policy.gpg.features import (
    Floats,
    Measures,
    bit_rows,
    measures,
    operator_rows,
    state_rows,
)
from stageloom.shared.policy.gpg.network import levels
from stageloom.shared.search.beam import best_endings
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.endings import GroupRule, TooManyError
from stageloom.shared.search.gpg import refined
from stageloom.shared.search.interface import TOP_LIMITS
from stageloom.shared.search.ios import cheapest_by_state
from stageloom.shared.search.ranking import RankedEndings
from stageloom.shared.search.stages import Stages, Strategy

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
    return Level(np.array(ops, np.int64), np.array(child, np.int64), np.array(parent, np.int64))
