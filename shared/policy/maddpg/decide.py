"""From samples to a plan: what the policy says, read as combined blocks and launch intervals. Pure.

TOP, algorithm 1 lines 31 to 38. Replicas, batches, cuts, lanes and rules stay the incumbent's. Schedules come
from the policy's book (TOP's stage_dict, line 11). Its key is what a combined block computes (artifact and
operators of every member, in the plan's order) and the largest batch of its members; the device class is the
policy's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stageloom.shared.blocks import Block, CombinedGraph, combine, split
from stageloom.shared.bound import bind
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import CombinedBlock, Member, ModelPlan, Plan
from stageloom.shared.policy.maddpg.actions import BlockCombination, combine_blocks, intervals_us
from stageloom.shared.policy.maddpg.network import MaddpgNetwork, state_of
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.policy.plain import Load, needs_no_intervals
from stageloom.shared.policy.queues import PolicySample
from stageloom.shared.schedule import Schedule
from stageloom.shared.search.baselines import sequential
from stageloom.shared.search.costs import StageCosts, combined_digest
from stageloom.shared.search.interface import Budget, Limits

Part = tuple[Digest, Graph, Block]
"""One member of a combined block as the cost table takes it."""

BlockKey = tuple[Digest, int]
"""Digest of a combined block, largest batch of its members."""


Book = Mapping[BlockKey, Schedule]
"""Schedules that were found."""

Decision = tuple[BlockCombination, tuple[int, ...]]
"""What an action row stands for under a load: combined blocks, and launch intervals in us per model [W]."""


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


def read_actions(space: Space, actions: Sequence[float], loads: Sequence[Load], lanes: int = 1) -> Decision:
    """Combined blocks and launch intervals. `actions`: [action_width]; `loads`: in the models' order [W]"""
    launcher, scheduler = actions[: space.num_models], actions[space.num_models :]
    combination = combine_blocks(space, scheduler)
    return combination, intervals_us(launcher, loads, lanes=lanes, how=space.interval_map)


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


def plan_of(template: Plan, intervals_us: Sequence[int], combined: Sequence[CombinedBlock]) -> Plan:
    """The template with these combined blocks, and with these launch intervals unless it needs none."""
    if needs_no_intervals(template):
        return replace(template, combined=tuple(combined))
    pairs = zip(template.models, intervals_us, strict=True)
    return replace(
        template,
        models=tuple(replace(model, launch_interval_us=interval_us) for model, interval_us in pairs),
        combined=tuple(combined),
    )


def decided_plan(
    space: Space,
    network: MaddpgNetwork,
    plan: Plan,
    graphs: Mapping[Digest, Graph],
    samples: Sequence[PolicySample],
    loads: Sequence[Load],
    schedule_of: Callable[[tuple[Member, ...]], Schedule],
) -> Plan:
    """The plan that the policy wants instead of this one of its space, legal for the graphs.

    `schedule_of` gives the schedule of a combined block.

    Raises:
        InputError: a sample is of other blocks than the space's.
        PlanError: a schedule is not legal for these graphs.
    """
    combination, intervals = decide(space, network, samples, loads_of(plan, loads), plan.lanes)
    combined = [CombinedBlock(members, schedule_of(members)) for members in combination.combined]
    made = plan_of(plan, intervals, combined)
    bind(made, graphs)
    return made


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
            f"the policy is not for this plan: {why}",
            remedy="train one for it: stageloom policy train maddpg",
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
    blocks = Blocks(plan.models, graphs)

    def schedule_of(members: tuple[Member, ...]) -> Schedule:
        found = book.get(blocks.key(members))
        return found or sequential(blocks.graph(members), StageCosts(()), Limits(), Budget())

    return decided_plan(space, network, plan, graphs, samples, loads, schedule_of)
