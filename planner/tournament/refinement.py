"""The refinement of a tournament's best plan: which neighbour is next, and the search for its schedules.

Every shape is drawn once, and the schedule of a combined block is searched for once, by a small beam, and
kept by the digest of what it computes. Workers get what is known, and the rest to search for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final, NamedTuple, TypeAlias

from stageloom.planner.tournament.candidates import SEED_BUDGET
from stageloom.shared.blocks import combine, split
from stageloom.shared.errors import PlanError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import MAX_MEMBERS, MAX_PLAN_BYTES, CombinedBlock, Member, Plan
from stageloom.shared.schedule import Schedule
from stageloom.shared.search.beam import beam
from stageloom.shared.search.costs import CostTable, MemberOf, combined_digest
from stageloom.shared.search.interface import Limits, Scheduler
from stageloom.shared.search.isomorphism import Shared
from stageloom.shared.search.neighbours import Move, PlanShape, neighbours, shape_of

MEMBERS_LEAST: Final = 3
"""H, unless there are more models or the plan itself combines more blocks."""

_Key: TypeAlias = tuple[Digest, tuple[int, ...]]  # what members compute, and their batches
_Parts: TypeAlias = tuple[list[MemberOf], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class NeighbourJob:
    """The search for the schedules of a shape, as plain data for a worker.

    `parent` has the rules; `known`: schedules by the members that they are of.
    """

    parent: Plan
    shape: PlanShape
    known: Mapping[tuple[Member, ...], Schedule]
    graphs: Mapping[Digest, Graph]
    costs: CostTable
    limits: Limits

    def plan(self) -> Plan:
        """The neighbour.

        Raises:
            PlanError: it is too large to be sent.
        """
        shape, parts, search = self.shape, _PartsOf(self.shape, self.graphs), Shared(beam)
        combined = []
        for members in shape.combined:
            schedule = self.known.get(members) or self._scheduled(search, *parts.of(members))
            combined.append(CombinedBlock(members, schedule))
        made = replace(self.parent, models=shape.models, combined=tuple(combined), lanes=shape.lanes)
        if len(made.wire) > MAX_PLAN_BYTES:
            raise PlanError(f"a plan of {len(made.wire)} bytes is larger than {MAX_PLAN_BYTES}")
        return made

    def _scheduled(
        self, search: Scheduler, members: Sequence[MemberOf], batches: tuple[int, ...]
    ) -> Schedule:
        graph = combine([(graph, block) for _, graph, block in members])
        costs = self.costs.under(self.parent.executor).for_members(members, batches=batches)
        return search(graph, costs, self.limits, SEED_BUDGET)


class Drawn(NamedTuple):
    """A neighbour that nobody has evaluated."""

    move: Move
    job: NeighbourJob


class Refinement:
    """What was drawn and scheduled in one tournament. The same draws of the same parents give the same."""

    def __init__(
        self, graphs: Mapping[Digest, Graph], costs: CostTable, limits: Limits, *, seed: int = 0
    ) -> None:
        self._graphs, self._costs, self._limits = graphs, costs, limits
        self._rng = Random(seed)
        self._schedules: dict[_Key, Schedule] = {}
        self._drawn: set[PlanShape] = set()
        self._parent: Plan | None = None
        self._before: dict[_Key, Schedule] = {}  # those of the parent
        self._ahead: Iterator[tuple[Move, PlanShape]] = iter(())

    def draw(self, parent: Plan) -> Drawn | None:
        """Another neighbour of a plan; None where all were drawn, or it is none that has any."""
        if parent is not self._parent:
            self._parent, self._ahead = parent, self._neighbours(parent)
        for move, shape in self._ahead:
            if shape not in self._drawn:
                self._drawn.add(shape)
                return Drawn(move, self._job(parent, shape))
        return None

    def keep(self, job: NeighbourJob, plan: Plan) -> None:
        """Keep the schedules that a job found."""
        parts = _PartsOf(job.shape, self._graphs)
        for block in plan.combined:
            if block.members not in job.known:
                self._schedules.setdefault(parts.key(block.members), block.schedule)

    def _neighbours(self, parent: Plan) -> Iterator[tuple[Move, PlanShape]]:
        shape = shape_of(parent)
        if shape is None:
            return iter(())
        self._drawn.add(shape)
        parts = _PartsOf(shape, self._graphs)
        self._before = {parts.key(block.members): block.schedule for block in parent.combined}
        most = max(MEMBERS_LEAST, len(shape.models), *(len(members) for members in shape.combined))
        bound = min(most, MAX_MEMBERS)
        return neighbours(shape, self._graphs, members_max=bound, wait=parent.wait, rng=self._rng)

    def _job(self, parent: Plan, shape: PlanShape) -> NeighbourJob:
        parts = _PartsOf(shape, self._graphs)
        known = {}
        for members in shape.combined:
            key = parts.key(members)
            schedule = self._before.get(key) or self._schedules.get(key)
            if schedule is not None:
                known[members] = schedule
        return NeighbourJob(
            parent=parent,
            shape=shape,
            known=known,
            graphs=self._graphs,
            costs=self._costs,
            limits=self._limits,
        )


class _PartsOf:
    """What the members of a shape's combined blocks are."""

    def __init__(self, shape: PlanShape, graphs: Mapping[Digest, Graph]) -> None:
        self._models = shape.models
        self._graphs = [graphs[model.artifact] for model in shape.models]
        self._blocks = [
            split(graph, model.cuts) for graph, model in zip(self._graphs, shape.models, strict=True)
        ]

    def of(self, members: tuple[Member, ...]) -> _Parts:
        """Artifact, graph and block of each, and their batches."""
        parts = [
            (self._models[one.model].artifact, self._graphs[one.model], self._blocks[one.model][one.block])
            for one in members
        ]
        return parts, tuple(self._models[one.model].batch for one in members)

    def key(self, members: tuple[Member, ...]) -> _Key:
        """What schedules are kept by."""
        parts, batches = self.of(members)
        return combined_digest((artifact, block.start, block.stop) for artifact, _, block in parts), batches
