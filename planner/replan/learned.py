"""What a policy trained by maddpg proposes, beside the plain one's proposals (TOP, algorithm 1 lines 31-38).

Samples from the alarm -> forward pass -> combined blocks and launch intervals -> schedules by digest. It is
one proposal among others: ranked by predicted cost, and tried on the device like any. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from stageloom.planner.replan.observation import Observation
from stageloom.planner.replan.policy import How, PlainPolicy, Policy, Proposal
from stageloom.planner.replan.predict import step_s
from stageloom.shared.bound import bind
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import InputError, StageloomError
from stageloom.shared.ids import Digest
from stageloom.shared.legality import violations
from stageloom.shared.messages.admin import Proposer
from stageloom.shared.plan import CombinedBlock, Member, Plan
from stageloom.shared.policy.samples import Sample, progress_bits
from stageloom.shared.schedule import Schedule
from stageloom.shared.search.beam import beam
from stageloom.shared.search.interface import TOP_LIMITS, Budget
from stageloom.shared.search.job import BlockJob, SearchJob
from stageloom.shared.stage_string import parse

if TYPE_CHECKING:
    from stageloom.shared.policy.maddpg.checkpoint import Checkpoint

SCHEDULER: Final = "maddpg"
SEARCHED: Final = "beam r=3 s=8"
"""What schedules that were searched for are kept under."""

SEARCH_S: Final = 20.0
"""For one combined block, while nobody waits."""

_AT_ONCE: Final = Budget(expansions=200)


@dataclass(frozen=True, slots=True)
class Learned:
    """What the trained policy wants to run, or `why` it has no say, empty where there is none.

    `missing`: combined blocks that nobody has a schedule of, with those that a small beam made at once.
    """

    plan: Plan | None
    why: str = ""
    missing: tuple[BlockJob, ...] = ()


class LearnedPolicy:
    """The plain policy, and where a trained one is for what runs on the device, that one's plan as well.

    A device's settings may ask for the trained one alone (its plan is then there at once, nothing is searched
    for) or for the plain one alone.
    """

    def __init__(self, plain: Policy | None = None) -> None:
        self._plain = plain or PlainPolicy()
        self._last: tuple[Observation, Learned] | None = None

    def at_once(self, seen: Observation) -> Sequence[Proposal]:
        """See `Policy`."""
        found = self._learned(seen).plan
        if found is None:
            return self._plain.at_once(seen)
        proposal = Proposal(found, How.LEARNED, SCHEDULER)
        return [proposal] if _alone(seen) else [*self._plain.at_once(seen), proposal]

    def searches(self, seen: Observation) -> Sequence[SearchJob]:
        """See `Policy`."""
        asked_alone = _alone(seen) and self._learned(seen).plan is not None
        return () if asked_alone else self._plain.searches(seen)

    def after(self, seen: Observation, found: Sequence[tuple[SearchJob, Plan]]) -> Sequence[Proposal]:
        """See `Policy`."""
        return self._plain.after(seen, found)

    def fitting(self, seen: Observation, plan: Plan) -> Digest | None:
        """See `Policy`: the one of the observation, if it was trained for just such plans."""
        if not seen.learned:
            return None
        try:
            space = _decoded(seen.learned).space
        except StageloomError:
            return None
        return digest_bytes([seen.learned]) if not space.refusal(plan, seen.environment) else None

    def remark(self, seen: Observation) -> str:
        """That the trained policy proposed a plan, or why it had no say; empty where there is none."""
        found = self._learned(seen)
        if found.plan is None:
            return found.why
        return f"policy {digest_bytes([seen.learned])[:12]} proposed {found.plan.digest[:12]}"

    def missing(self, seen: Observation) -> Sequence[BlockJob]:
        """See `Policy`."""
        return self._learned(seen).missing

    def _learned(self, seen: Observation) -> Learned:
        """Asked more than once of an observation, worked out once: somebody waits for the answer."""
        last = self._last
        if last is None or last[0] is not seen:
            last = self._last = seen, _asked(seen)
        return last[1]


def _alone(seen: Observation) -> bool:
    return seen.settings.proposer is Proposer.LEARNED


def _asked(seen: Observation) -> Learned:
    """As `learned`, if the settings ask for it."""
    if seen.settings.proposer is Proposer.PLAIN:
        return Learned(None)
    if _alone(seen) and not seen.learned:
        return Learned(None, "there is no trained policy")
    return learned(seen)


def learned(seen: Observation) -> Learned:
    """What the trained policy says of an observation."""
    if not seen.learned:
        return Learned(None)
    from stageloom.shared.policy.maddpg.decide import require_own  # numpy, which no start needs

    try:
        policy = _decoded(seen.learned)
        require_own(policy.space, seen.incumbent, seen.environment)
        return _plan(policy, seen)
    except StageloomError as error:
        return Learned(None, str(error))


def _plan(policy: "Checkpoint", seen: Observation) -> Learned:
    from stageloom.shared.policy.maddpg.decide import decide, loads_of, plan_of

    plan, loads = seen.incumbent, loads_of(seen.incumbent, seen.loads)
    decision = decide(policy.space, policy.network, _samples(seen), loads, plan.lanes)
    shelf = _Shelf(policy, seen)
    combined = [CombinedBlock(members, shelf.schedule(members)) for members in decision.combination.combined]
    made = plan_of(plan, decision, combined)
    bind(made, seen.graphs)
    return Learned(made, missing=tuple(shelf.missing.values()))


def _samples(seen: Observation) -> list[Sample]:
    """The alarm's, which are in the order of its loads, with their models in the plan's order.

    None of them where a model of the plan was not seen: a policy takes what is missing as idle.

    Raises:
        InputError: a sample is not of the loads' models.
    """
    if any(not len(one.progress) == len(one.deviations) == len(seen.loads) for one in seen.samples):
        raise InputError("a sample shows other models than the alarm's loads", remedy="update the agent")
    places = {load.model: at for at, load in enumerate(seen.loads)}
    models = seen.incumbent.models
    if any(model.name not in places for model in models):
        return []
    order = [(places[model.name], model.num_blocks) for model in models]
    return [
        Sample(
            tuple(progress_bits((one.progress[at],), blocks) for at, blocks in order),
            tuple(one.deviations[at] for at, _ in order),
        )
        for one in seen.samples
    ]


class _Shelf:
    """Schedules by what they are of: the policy's, and those that were found for the device since."""

    def __init__(self, policy: "Checkpoint", seen: Observation) -> None:
        from stageloom.shared.policy.maddpg.book import Blocks

        self.missing: dict[tuple[Digest, int], BlockJob] = {}
        self._book = policy.book.schedules
        self._seen = seen
        self._blocks = Blocks(seen.incumbent.models, seen.graphs)

    def schedule(self, members: tuple[Member, ...]) -> Schedule:
        """The cheapest that is known, by today's costs; made at once by a small beam where none is."""
        key, graph = self._blocks.key(members), self._blocks.graph(members)
        known = [self._book[key]] if key in self._book else []
        known += [
            one
            for text in self._seen.schedules.get(key, ())
            if (one := _parsed(text)) is not None and not violations(one, graph)
        ]
        if len(known) == 1:
            return known[0]
        parts, batches = self._blocks.parts(members), self._blocks.batches(members)
        costs = self._seen.costs.for_members(parts, batches=batches)
        if known:
            return min(known, key=lambda one: step_s(costs, graph, one, (1 << len(members)) - 1))
        made = beam(graph, costs, TOP_LIMITS, _AT_ONCE)
        self.missing[key] = BlockJob(
            combined_block=key[0],
            batch=key[1],
            graph=graph,
            costs=costs,
            first=made,
            limits=TOP_LIMITS,
            budget_s=SEARCH_S,
        )
        return made


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Schedule | None:
    """None: it is none. One bad row must not cost the device its plan."""
    try:
        return parse(text)
    except StageloomError:
        return None


@lru_cache(maxsize=4)
def _decoded(raw: bytes) -> "Checkpoint":
    from stageloom.shared.policy.maddpg.checkpoint import decode

    return decode(raw)
