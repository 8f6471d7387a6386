"""What a policy trained by maddpg proposes, beside the plain one's proposals (TOP, algorithm 1).

Samples from the alarm -> forward pass -> combined blocks and launch intervals -> schedules by digest. The
plan is one proposal among others: ranked by predicted cost, and tried on the device like any.

Only a policy that passed its check is asked (`stageloom.planner.store.policies.fitting_policy`).

A policy belongs to a device class and to artifacts (`stageloom.shared.policy.maddpg.space`) and is asked for
nothing else. An operator may *adopt* it for another device class or other weights: its plans must win a trial
there like any. It reads neither weights nor seconds, so an artifact with the same graph will do; the
schedules that it takes along, found under the costs of its own class, are moved to the new artifacts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any, Final

from stageloom.planner.replan.policy import How, Observation, PlainPolicy, Proposal
from stageloom.planner.replan.predict import step_s
from stageloom.planner.schema.replan import Proposer
from stageloom.shared.blocks import split
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import InputError, StageloomError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.legality import violations
from stageloom.shared.plan import Member, Plan
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, encode
from stageloom.shared.policy.maddpg.decide import BlockKey, Book
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.policy.queues import PolicySample, progress_bits
from stageloom.shared.schedule import Schedule
from stageloom.shared.search.beam import beam
from stageloom.shared.search.costs import combined_digest
from stageloom.shared.search.interface import TOP_LIMITS, Budget
from stageloom.shared.search.job import BlockJob, SearchJob
from stageloom.shared.stage_string import parse

if TYPE_CHECKING:
    from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint


SCHEDULER: Final = "maddpg"
SEARCHED: Final = "beam r=3 s=8"
"""What schedules that were searched for are kept under."""

SEARCH_S: Final = 20.0
"""For one combined block, in the background."""

_AT_ONCE: Final = Budget(expansions=200)


@dataclass(frozen=True, slots=True)
class Learned:
    """What the trained policy wants to run, or `why` it has no say, empty where there is none.

    `missing`: combined blocks without a known schedule, with the one that a small beam made at once.
    """

    plan: Plan | None
    why: str = ""
    missing: tuple[BlockJob, ...] = ()


class LearnedPolicy(PlainPolicy):
    """The plain policy, and where a trained one is for what runs on the device, that one's plan as well.

    A device's settings may ask for the trained one alone (its plan is then there at once, nothing is searched
    for) or for the plain one alone.
    """

    def __init__(self) -> None:
        self._last: tuple[Observation, Learned] | None = None

    def at_once(self, seen: Observation) -> Sequence[Proposal]:
        found = self._learned(seen).plan
        if found is None:
            return super().at_once(seen)
        proposal = Proposal(found, How.LEARNED, SCHEDULER)
        return [proposal] if _alone(seen) else [*super().at_once(seen), proposal]

    def searches(self, seen: Observation) -> Sequence[SearchJob]:
        asked_alone = _alone(seen) and self._learned(seen).plan is not None
        return () if asked_alone else super().searches(seen)

    def fitting(self, seen: Observation, plan: Plan) -> Digest | None:
        """The one of the observation, if it was trained for just such plans."""
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
        return self._learned(seen).missing

    def _learned(self, seen: Observation) -> Learned:
        """The result for an observation, worked out once though it is asked for several times."""
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
    if not seen.learned:
        return Learned(None, seen.withheld or ("there is no trained policy" if _alone(seen) else ""))
    return learned(seen)


def learned(seen: Observation) -> Learned:
    """The trained policy's plan for an observation that has one."""
    from stageloom.shared.policy.maddpg.decide import require_own  # numpy, which no start needs

    try:
        policy = _decoded(seen.learned)
        require_own(policy.space, seen.incumbent, seen.environment)
        return _plan(policy, seen)
    except StageloomError as error:
        return Learned(None, str(error))


def _plan(policy: "MaddpgCheckpoint", seen: Observation) -> Learned:
    from stageloom.shared.policy.maddpg.decide import decided_plan

    cache = _ScheduleCache(policy, seen)
    samples = _samples(seen)
    made = decided_plan(
        policy.space, policy.network, seen.incumbent, seen.graphs, samples, seen.loads, cache.schedule
    )
    return Learned(made, missing=tuple(cache.missing.values()))


def _samples(seen: Observation) -> list[PolicySample]:
    """The alarm's, which are in the order of its loads, with their models in the plan's order.

    None of them where a model of the plan was not seen: a policy takes what is missing as idle.

    Raises:
        InputError: a sample is not of the loads' models.
    """
    if any(not len(sample.progress) == len(sample.deviations) == len(seen.loads) for sample in seen.samples):
        raise InputError("a sample shows other models than the alarm's loads", remedy="update the agent")
    places = {load.model: at for at, load in enumerate(seen.loads)}
    models = seen.incumbent.models
    if any(model.name not in places for model in models):
        return []
    order = [(places[model.name], model.num_blocks) for model in models]
    return [
        PolicySample(
            tuple(progress_bits((sample.progress[at],), blocks) for at, blocks in order),
            tuple(sample.deviations[at] for at, _ in order),
        )
        for sample in seen.samples
    ]


class _ScheduleCache:
    """Schedules by what they are of: the policy's, and those that were found for the device since."""

    def __init__(self, policy: "MaddpgCheckpoint", seen: Observation) -> None:
        from stageloom.shared.policy.maddpg.decide import Blocks

        self.missing: dict[tuple[Digest, int], BlockJob] = {}
        self._book = policy.book
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
    """None for text that is no schedule: one bad row must not cost the device its plan."""
    try:
        return parse(text)
    except StageloomError:
        return None


@lru_cache(maxsize=4)
def _decoded(raw: bytes) -> "MaddpgCheckpoint":
    from stageloom.shared.policy.maddpg.checkpoint import decode

    return decode(raw)


MOST_COMBINED: Final = 200_000
"""Combined blocks whose schedules are looked for under other artifacts: some seconds."""


def adopted(found: MaddpgCheckpoint, device_class: str, here: Mapping[Digest, Graph]) -> MaddpgCheckpoint:
    """The policy for a device class of this planner. `here`: the artifacts that the planner has.

    Its provenance then has `adopted`: the policy's digest, device class and artifacts as they were; its
    `models` and `graphs` are of the artifacts here. The same policy comes back where nothing changes.

    Raises:
        InputError: a model of the policy is not here, nor one with the same graph.
    """
    models = tuple(
        replace(model, artifact=_here(index, model.artifact, found.provenance, here))
        for index, model in enumerate(found.space.models)
    )
    space = replace(found.space, device_class=device_class, models=models)
    if space == found.space:
        return found
    book = found.book if models == found.space.models else _moved(found.book, found.space, space, here)
    before = {
        "policy": digest_bytes([encode(found)]),
        "device_class": found.space.device_class,
        "artifacts": [model.artifact for model in found.space.models],
    }
    about = {**found.provenance, **_artifacts_of(found, space, here), "adopted": before}
    return MaddpgCheckpoint(space, found.network, book, about)


def _artifacts_of(found: MaddpgCheckpoint, space: Space, here: Mapping[Digest, Graph]) -> dict[str, Any]:
    """The provenance's artifacts, as they are here, so that the policy can be adopted elsewhere in turn."""
    pairs = zip(found.space.models, space.models, strict=True)
    now = {before.artifact: after.artifact for before, after in pairs}
    names = found.provenance.get("models", {})
    return {
        "models": {name: now.get(artifact, artifact) for name, artifact in names.items()},
        "graphs": {artifact: here[artifact].digest for artifact in now.values()},
    }


def _here(
    index: int, artifact: Digest, provenance: Mapping[str, Any], here: Mapping[Digest, Graph]
) -> Digest:
    if artifact in here:
        return artifact
    wanted = provenance.get("graphs", {}).get(artifact)
    alike = sorted(known for known, graph in here.items() if graph.digest == wanted)
    if not alike:
        names = {known: name for name, known in provenance.get("models", {}).items()}
        raise InputError(
            f"model {index + 1} of the policy ({names.get(artifact, artifact[:12])}) is not here, nor is one "
            "that computes the same",
            remedy="import the ONNX file that it was trained with: stageloom model add",
        )
    return alike[0]


def _moved(book: Book, before: Space, after: Space, here: Mapping[Digest, Graph]) -> Book:
    """The schedules under the keys that their combined blocks have with the other artifacts."""
    keys = islice(zip(_keys(before, after, here), _keys(after, after, here), strict=True), MOST_COMBINED)
    return {new: book[old] for old, new in keys if old in book}


def _keys(space: Space, known: Space, here: Mapping[Digest, Graph]) -> Iterator[BlockKey]:
    """Of every combined block that the policy may make; `known` has the models as they are `here`."""
    spans = {}
    for index, (model, same) in enumerate(zip(space.models, known.models, strict=True)):
        for block in split(here[same.artifact], model.cuts):
            spans[index, block.index] = (model.artifact, block.start, block.stop)
    for size in range(1, space.members_max + 1):
        for members in combinations(space.members, size):
            batch = max(space.models[member.model].batch for member in members)
            yield combined_digest(spans[member.model, member.block] for member in members), batch
