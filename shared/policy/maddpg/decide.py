"""From samples to a plan: what the policy says, read as combined blocks and launch intervals. Pure.

TOP, algorithm 1 lines 31 to 38. Replicas, batches, cuts, lanes and rules stay the incumbent's. Schedules come
from the policy's book (TOP's stage_dict, line 11). Its key is what a combined block computes (artifact and
operators of every member, in the plan's order) and the largest batch of its members; the device class is the
policy's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stageloom.shared.blocks import Block, CombinedGraph, combine, split
from stageloom.shared.bound import bind
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import CombinedBlock, Member, ModelPlan, Plan
from stageloom.shared.policy.maddpg.actions import BlockCombination, combine_blocks, intervals_us
from stageloom.shared.policy.maddpg.network import MaddpgNetwork, state_of
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.policy.plain import Load
from stageloom.shared.policy.queues import PolicySample
from stageloom.shared.schedule import Schedule
from stageloom.shared.search.baselines import sequential
from stageloom.shared.search.costs import StageCosts, combined_digest
from stageloom.shared.search.interface import Budget, Limits

Part = tuple[Digest, Graph, Block]
"""One member of a combined block as the cost table takes it."""

BlockKey = tuple[Digest, int]
"""Digest of a combined block, largest batch of its members."""


@dataclass(frozen=True)
class Book:
    """Schedules that were found."""

    schedules: Mapping[BlockKey, Schedule] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[BlockKey, Schedule]]:
        """In the order of the keys, so that equal books have equal bytes."""
        return iter(sorted(self.schedules.items(), key=lambda item: item[0]))


class Blocks:
    """The blocks of one plan's models, to look combined blocks of them up by."""

    def __init__(self, models: Sequence[ModelPlan], graphs: Mapping[Digest, Graph]) -> None:
        self._batches = [model.batch for model in models]
        self._parts: dict[tuple[int, int], Part] = {
            (index, block.index): (model.artifact, graphs[model.artifact], block)
            for index, model in enumerate(models)
            for block in split(graphs[model.artifact], model.cuts)
        }
        self._keys: dict[tuple[Member, ...], BlockKey] = {}

    def parts(self, members: Sequence[Member]) -> list[Part]:
        return [self._parts[member.model, member.block] for member in members]

    def batches(self, members: Sequence[Member]) -> list[int]:
        """Tasks at a time of each member."""
        return [self._batches[member.model] for member in members]

    def key(self, members: tuple[Member, ...]) -> BlockKey:
        """What the members' schedule is found by."""
        found = self._keys.get(members)
        if found is None:
            spans = ((artifact, block.start, block.stop) for artifact, _, block in self.parts(members))
            found = self._keys[members] = combined_digest(spans), max(self.batches(members))
        return found

    def graph(self, members: Sequence[Member]) -> CombinedGraph:
        """The operators of all members."""
        return combine([(graph, block) for _, graph, block in self.parts(members)])


@dataclass(frozen=True, slots=True)
class Decision:
    """What an action row stands for under a load."""

    combination: BlockCombination
    intervals_us: tuple[int, ...]  # per model [W]


def read_actions(space: Space, actions: Sequence[float], loads: Sequence[Load], lanes: int = 1) -> Decision:
    """Combined blocks and launch intervals. `actions`: [action_width]; `loads`: in the models' order [W]"""
    launcher, scheduler = actions[: space.num_models], actions[space.num_models :]
    return Decision(
        combine_blocks(space, scheduler),
        intervals_us(launcher, loads, lanes=lanes, how=space.interval_map),
    )


def decide(
    space: Space,
    network: MaddpgNetwork,
    samples: Sequence[PolicySample],
    loads: Sequence[Load],
    lanes: int = 1,
) -> Decision:
    """The policy's decision for these samples.

    Raises:
        InputError: a sample is of other blocks than the space's.
    """
    return read_actions(space, network.actions(state_of(space, samples)).tolist(), loads, lanes)


def plan_of(template: Plan, decision: Decision, combined: Sequence[CombinedBlock]) -> Plan:
    """The template with the decision's launch intervals, and its combined blocks as they were scheduled."""
    pairs = zip(template.models, decision.intervals_us, strict=True)
    return replace(
        template,
        models=tuple(replace(model, launch_interval_us=interval_us) for model, interval_us in pairs),
        combined=tuple(combined),
    )


def loads_of(plan: Plan, loads: Sequence[Load]) -> tuple[Load, ...]:
    """One load per model of the plan, in order; a model that nothing is known of has none. [W]"""
    known = {load.model: load for load in loads}
    nothing = Load(model="", arrivals_per_s=0.0, service_s=0.0, queued=0)
    return tuple(known.get(model.name, replace(nothing, model=model.name)) for model in plan.models)


def require_own(space: Space, plan: Plan, device_class: str) -> None:
    """Check that the policy was trained for such a plan on this device class.

    Raises:
        InputError: it was trained for something else; the error names the first difference.
    """
    if why := space.refusal(plan, device_class):
        raise InputError(
            f"the policy is not for this plan: {why}", remedy="train one for it: stageloom train maddpg"
        )


def replanned(
    space: Space,
    network: MaddpgNetwork,
    book: Book,
    plan: Plan,
    device_class: str,
    graphs: Mapping[Digest, Graph],
    samples: Sequence[PolicySample],
    loads: Sequence[Load],
) -> Plan:
    """The plan that the policy wants instead, legal for the graphs.

    A combined block that the book has no schedule of runs its operators one after another: that is never
    worse than what it was trained from, and a search may find better.

    Raises:
        InputError: the policy is for something else, or a sample is.
        PlanError: the book's schedule of a combined block is not legal for these graphs.
    """
    require_own(space, plan, device_class)
    decision = decide(space, network, samples, loads_of(plan, loads), plan.lanes)
    blocks = Blocks(plan.models, graphs)

    def schedule_of(members: tuple[Member, ...]) -> Schedule:
        found = book.schedules.get(blocks.key(members))
        return found or sequential(blocks.graph(members), StageCosts(()), Limits(), Budget())

    combined = decision.combination.combined
    made = plan_of(plan, decision, [CombinedBlock(members, schedule_of(members)) for members in combined])
    bind(made, graphs)
    return made
