"""The scheduler `gpg`: a trained policy, and whatever beats it.

TOP (Lin et al. 2025, V-C) picks the endings of a combined block by a policy that was trained on others; the
policy is `stageloom.shared.policy.gpg`. Ours: the policy's roll-out looks ahead, its schedule is refined by a
local search, and as no policy is better on every block, the answer is the cheapest of that, of a beam search
within the budget, of `greedy` and of `sequential`. So it never costs more than `sequential`.

A checkpoint comes with the package; the planner hands in its own where one was trained for the device's
class.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from importlib import resources
from random import Random
from typing import TYPE_CHECKING, Final

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.beam import beam
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.endings import GroupRule
from stageloom.shared.search.interface import Budget, Limits, Scheduler
from stageloom.shared.search.stages import Stages, Strategy

if TYPE_CHECKING:
    from stageloom.shared.policy.gpg.network import GpgNetwork


_GAIN = 1.0 - 1e-9  # less is rounding


def refined(stages: Stages, endings: Sequence[int], moves: int = 20_000) -> list[int]:
    """Local search on a stage schedule: moves that each make it cheaper, until none does.

    Two moves: two neighbouring stages become one, and an operator changes its stage, as far up or down as its
    neighbours in the graph allow. Ours; TOP and IOS have no such step. Under costs that say what every stage
    takes, this is cheap and exact, and it repairs what a learned choice gets slightly wrong. Deterministic.

    Endings in run order, never dearer than those given; looks at about `moves` changes at most.
    """
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
        """Apply moves of both kinds in turn while one of them helps."""
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
        """Move an operator to its best other stage, or to a new one between neighbours."""
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
        """Return whether the operators may be one stage; the empty set may."""
        known = self._legal.get(mask)
        if known is None:
            groups = self._components(mask)
            known = len(groups) <= self._stages.space.s and all(
                group.bit_count() <= self._stages.space.r for group in groups
            )
            self._legal[mask] = known
        return known

    def _components(self, mask: int) -> list[int]:
        """Return the components that are connected by edges in either direction."""
        components = []
        while mask:
            group = mask & -mask
            frontier = group
            while frontier:
                near = 0
                for op in bits(frontier):
                    near |= self._graph.predecessors[op] | self._graph.successors[op]
                frontier = near & mask & ~group
                group |= frontier
            components.append(group)
            mask &= ~group
        return components


R: Final = 3  # TOP's limits, and those that the policy was trained under; tighter ones are kept
S: Final = 8
MAX_OPERATORS: Final = 200
"""The largest graph for the policy: a larger one has too many parts of a state to search in seconds."""


def gpg(
    graph: CombinedGraph,
    costs: StageCosts,
    limits: Limits,
    budget: Budget,
    *,
    checkpoint: bytes = b"",
) -> StageSchedule:
    """The cheapest of the policy's schedule, of `beam`'s, and so of `greedy` and `sequential`.

    `checkpoint` is a trained policy's bytes; without any the packaged one decides.

    Raises:
        DecodeError: the bytes are no checkpoint that this version can use.
    """
    other = beam(graph, costs, limits, budget)
    if graph.size > MAX_OPERATORS:
        return other
    return min(policy_alone(graph, costs, limits, network_of(checkpoint)), other, key=costs.schedule_s)


def policy_alone(
    graph: CombinedGraph, costs: StageCosts, limits: Limits, network: "GpgNetwork"
) -> StageSchedule:
    """Return the schedule of the policy and the local search, without beam."""
    from stageloom.shared.policy.gpg.choose import (
        LookAhead,
        looked_ahead,
    )  # numpy only where a policy is asked
    from stageloom.shared.policy.gpg.network import EncodedBlock

    stages = policy_stages(graph, costs, limits)
    endings = looked_ahead(EncodedBlock(network, graph, costs), stages, LookAhead(), Random(0))
    return stages.schedule(refined(stages, endings))


def policy_stages(graph: CombinedGraph, costs: StageCosts, limits: Limits) -> Stages:
    """Return the stages that the policy chooses from: TOP's limits or tighter ones; groups side by side."""
    within = Limits(r=min(limits.r or R, R), s=min(limits.s or S, S))
    return Stages(graph, costs, within, GroupRule.CONNECTED, Strategy.PARALLEL)


def with_checkpoint(checkpoint: bytes) -> Scheduler:
    """Return the scheduler over another policy than the packaged one."""
    return partial(gpg, checkpoint=checkpoint)


@lru_cache(maxsize=4)
def network_of(checkpoint: bytes = b"") -> "GpgNetwork":
    """A checkpoint's network; the packaged one's for no bytes.

    Raises:
        DecodeError: the bytes are no checkpoint that this version can use.
    """
    from stageloom.shared.policy.gpg.checkpoint import decode

    return decode(checkpoint or packaged_checkpoint()).network


def packaged_checkpoint() -> bytes:
    """Return the packaged checkpoint; docs/schedulers/gpg.md describes its training."""
    return resources.files("stageloom.shared.policy.gpg").joinpath("default.checkpoint").read_bytes()
