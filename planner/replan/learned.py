"""What a policy trained by maddpg proposes, beside the plain one's proposals (TOP, algorithm 1 lines 31-38).

Samples from the alarm -> forward pass -> combined blocks and launch intervals -> schedules by digest. It is
one proposal among others: ranked by predicted cost, and tried on the device like any. Pure.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from planner.replan.observation import Observation
from planner.replan.policy import How, PlainPolicy, Policy, Proposal
from shared.bound import bind
from shared.errors import StageloomError
from shared.messages.admin import Proposer
from shared.plan import CombinedBlock, Member, Plan
from shared.schedule import Schedule
from shared.search.beam import beam
from shared.search.interface import Budget, Limits
from shared.search.job import SearchJob

if TYPE_CHECKING:
    from shared.policy.maddpg.checkpoint import Checkpoint

SCHEDULER: Final = "maddpg"
_LIMITS: Final = Limits(r=3, s=8)  # as in training
_AT_ONCE: Final = Budget(expansions=200)


class LearnedPolicy:
    """The plain policy, and where a trained one is for what runs on the device, that one's plan as well.

    A device's settings may ask for the trained one alone (its plan is then there at once, nothing is searched
    for) or for the plain one alone.
    """

    def __init__(self, plain: Policy | None = None) -> None:
        self._plain = plain or PlainPolicy()

    def at_once(self, seen: Observation) -> Sequence[Proposal]:
        """See `Policy`. A combined block that the policy has no schedule of is scheduled by a small beam."""
        found = _asked(seen)
        if not isinstance(found, Plan):
            return self._plain.at_once(seen)
        learned = Proposal(found, How.LEARNED, SCHEDULER)
        return [learned] if _alone(seen) else [*self._plain.at_once(seen), learned]

    def searches(self, seen: Observation) -> Sequence[SearchJob]:
        """See `Policy`."""
        return () if _alone(seen) and isinstance(_asked(seen), Plan) else self._plain.searches(seen)

    def after(self, seen: Observation, found: Sequence[tuple[SearchJob, Plan]]) -> Sequence[Proposal]:
        """See `Policy`."""
        return self._plain.after(seen, found)

    def remark(self, seen: Observation) -> str:
        """Why the trained policy had no say; empty where it had, or where there is none or none was asked."""
        found = _asked(seen)
        return "" if isinstance(found, Plan) else found


def _alone(seen: Observation) -> bool:
    return seen.settings.proposer is Proposer.LEARNED


def _asked(seen: Observation) -> Plan | str:
    """As `learned_plan`, if the settings ask for it."""
    if seen.settings.proposer is Proposer.PLAIN:
        return ""
    found = learned_plan(seen)
    return found or ("there is no trained policy" if _alone(seen) else "")


def learned_plan(seen: Observation) -> Plan | str:
    """What the trained policy wants to run, or why it has no say; an empty reason where there is none."""
    if not seen.learned:
        return ""
    from shared.policy.maddpg.decide import require_own  # numpy, which no start needs

    try:
        policy = _decoded(seen.learned)
        require_own(policy.space, seen.incumbent, seen.environment)
        return _plan(policy, seen)
    except StageloomError as error:
        return str(error)


def _plan(policy: "Checkpoint", seen: Observation) -> Plan:
    from shared.policy.maddpg.book import Blocks
    from shared.policy.maddpg.decide import decide, loads_of, plan_of
    from shared.policy.samples import Sample, progress_bits

    plan = seen.incumbent
    samples = [
        Sample(
            tuple(
                progress_bits((mask,), model.num_blocks)
                for mask, model in zip(one.progress, plan.models, strict=False)
            ),
            one.deviations,
        )
        for one in seen.samples
    ]
    decision = decide(policy.space, policy.network, samples, loads_of(plan, seen.loads), plan.lanes)
    blocks = Blocks(plan.models, seen.graphs)

    def schedule_of(members: tuple[Member, ...]) -> Schedule:
        found = policy.book.schedules.get(blocks.key(members))
        if found is not None:
            return found
        costs = seen.costs.for_members(blocks.parts(members), batch=blocks.batch(members))
        return beam(blocks.graph(members), costs, _LIMITS, _AT_ONCE)

    combined = [CombinedBlock(members, schedule_of(members)) for members in decision.combination.combined]
    made = plan_of(plan, decision, combined)
    bind(made, seen.graphs)
    return made


@lru_cache(maxsize=4)
def _decoded(raw: bytes) -> "Checkpoint":
    from shared.policy.maddpg.checkpoint import decode

    return decode(raw)
