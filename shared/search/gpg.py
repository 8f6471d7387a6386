"""The scheduler `gpg`: a trained policy, and whatever beats it.

TOP (Lin et al. 2025, V-C) picks the endings of a combined block by a policy that was trained on others; the
policy is `stageloom.shared.policy.gpg`. Ours: the policy's roll-out looks ahead, its schedule is refined by a
local search, and as no policy is better on every block, the answer is the cheapest of that, of a beam search
within the budget, of `greedy` and of `sequential`. So it never costs more than `sequential`.

A checkpoint comes with the package; the planner hands in its own where one was trained for the device's
class.
"""

from functools import lru_cache, partial
from importlib import resources
from random import Random
from typing import TYPE_CHECKING, Final

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.beam import beam
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.endings import GroupRule
from stageloom.shared.search.interface import Budget, Limits, Scheduler
from stageloom.shared.search.refine import refined
from stageloom.shared.search.stages import Stages, Strategy

if TYPE_CHECKING:
    from stageloom.shared.policy.gpg.network import GpgNetwork

R: Final = 3  # TOP's limits, and those that the policy was trained under; tighter ones are kept
S: Final = 8
MAX_OPERATORS: Final = 200
"""Above that the policy is not asked: its parts of a state are then too many to look through in seconds."""


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
    """What the policy and the local search find, without beam's help."""
    from stageloom.shared.policy.gpg.choose import (
        LookAhead,
        looked_ahead,
    )  # numpy only where a policy is asked
    from stageloom.shared.policy.gpg.network import EncodedBlock

    stages = policy_stages(graph, costs, limits)
    endings = looked_ahead(EncodedBlock(network, graph, costs), stages, LookAhead(), Random(0))
    return stages.schedule(refined(stages, endings))


def policy_stages(graph: CombinedGraph, costs: StageCosts, limits: Limits) -> Stages:
    """What the policy chooses from: TOP's r and s, or the tighter limits; groups side by side."""
    within = Limits(r=min(limits.r or R, R), s=min(limits.s or S, S))
    return Stages(graph, costs, within, GroupRule.CONNECTED, Strategy.PARALLEL)


def with_checkpoint(checkpoint: bytes) -> Scheduler:
    """The scheduler over another policy than the packaged one."""
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
    """The checkpoint that comes with the package; docs/schedulers/gpg.md says how it was trained."""
    return resources.files("stageloom.shared.policy.gpg").joinpath("default.checkpoint").read_bytes()
