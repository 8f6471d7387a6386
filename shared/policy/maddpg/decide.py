"""From samples to a plan: what the policy says, read as combined blocks and launch intervals. Pure.

TOP, algorithm 1 lines 31 to 38. Replicas, batches, cuts, lanes and rules stay the incumbent's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stageloom.shared.bound import bind
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import CombinedBlock, Member, Plan
from stageloom.shared.policy.maddpg.book import Blocks, Book
from stageloom.shared.policy.maddpg.combining import Combination, combine_blocks
from stageloom.shared.policy.maddpg.features import state_of
from stageloom.shared.policy.maddpg.intervals import intervals_us
from stageloom.shared.policy.maddpg.network import MaddpgNetwork
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.policy.plain import Load
from stageloom.shared.policy.samples import Sample
from stageloom.shared.schedule import Schedule
from stageloom.shared.search.baselines import sequential
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits


@dataclass(frozen=True, slots=True)
class Decision:
    """What an action row stands for under a load."""

    combination: Combination
    intervals_us: tuple[int, ...]  # per model [W]


def read_actions(space: Space, actions: Sequence[float], loads: Sequence[Load], lanes: int = 1) -> Decision:
    """Combined blocks and launch intervals. `actions`: [action_width]; `loads`: in the models' order [W]"""
    launcher, scheduler = actions[: space.num_models], actions[space.num_models :]
    return Decision(
        combine_blocks(space, scheduler),
        intervals_us(launcher, loads, lanes=lanes, how=space.interval_map),
    )


def decide(
    space: Space, network: MaddpgNetwork, samples: Sequence[Sample], loads: Sequence[Load], lanes: int = 1
) -> Decision:
    """What the policy says of what it sees.

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
    """A policy has a say only over what it was trained for.

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
    samples: Sequence[Sample],
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
