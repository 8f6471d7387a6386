"""Every policy as a plan for our executor: Nimble, Opara, IOS, greedy, sequential; and for the mix.

A model is one block here, so that it is one graph on the device. Stage searches run on the model's blocks
and their schedules are put one after another: that is IOS's own way, and keeps the search small.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from benchmarks.gpu.networks import Subject
from benchmarks.gpu.profiled_kernels import OperatorResources, opara_profile
from benchmarks.gpu.rivals import MIX
from stageloom.edge_agent.executor.cuda.device import Multiprocessor
from stageloom.shared.blocks import Block, CombinedGraph, combine, split
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.plan import CombinedBlock, ExecutorOptions, Member, ModelPlan, Plan
from stageloom.shared.schedule import Launch, Schedule, Stage, StageSchedule, StreamSchedule
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.baselines import greedy, sequential
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.interface import TOP_LIMITS, Budget, Scheduler
from stageloom.shared.search.ios import ios
from stageloom.shared.search.isomorphism import Shared
from stageloom.shared.search.stages import Strategy
from stageloom.shared.search.streams import OperatorProfile, nimble, opara

SEQUENTIAL: Final = "ours sequential"
GROUP_STREAMS: Final = 8
CONTENTIONS: Final = (0.2, 0.5, 0.8)
"""How much groups may slow each other down: each gives IOS another schedule, and measuring decides."""

_BUDGET: Final = Budget(expansions=50_000)
_LAUNCH_S: Final = 2e-6  # of a node in a graph
_BARRIER_S: Final = 2e-6


@dataclass(frozen=True)
class Candidate:
    """One plan of one subject (a model, or the mix); a run gives `units` images of each model."""

    subject: str
    name: str
    plan: Plan
    units: int = 1


@dataclass(frozen=True)
class Knowledge:
    """What was measured of the operators of each subject; estimates where nothing was."""

    executor: str
    precision: str = "fp16"
    resources: Mapping[str, Sequence[OperatorResources]] = field(default_factory=dict)  # by subject
    multiprocessor: Multiprocessor = field(default_factory=Multiprocessor)

    def costs(self, subjects: Sequence[Subject], contention: float) -> CostTable:
        measured: dict[tuple[Digest, OpId], float] = {}
        for subject in subjects:
            for op, one in enumerate(self.resources.get(subject.name, ())):
                if one.device_us:
                    measured[subject.artifact.digest, OpId(op)] = one.device_us * 1e-6 + _LAUNCH_S
        rates = DeviceRates(
            flop_per_s=1e14,
            bytes_per_s=1e12,
            launch_s=_LAUNCH_S,
            barrier_s=_BARRIER_S,
            contention=contention,
        )
        return CostTable(measured_s=measured, rates=rates)

    def profiles(self, subjects: Sequence[Subject]) -> list[OperatorProfile] | None:
        """Opara's profiles of the subjects' operators side by side; None where one was not measured."""
        known = [self.resources.get(subject.name, ()) for subject in subjects]
        if not all(known):
            return None
        return [opara_profile(one, self.multiprocessor) for own in known for one in own]

    def plan(
        self, subjects: Sequence[Subject], schedule: Schedule, *, replicas: int = 1, batch: int = 1
    ) -> Plan:
        """Whole models, all replicas in one combined block."""
        models = tuple(
            ModelPlan(name=one.name, artifact=one.artifact.digest, replicas=replicas, batch=batch)
            for one in subjects
        )
        members = tuple(
            Member(model, replica, 0) for replica in range(replicas) for model in range(len(subjects))
        )
        options = ExecutorOptions(name=self.executor, precision=self.precision)
        return Plan(models=models, combined=(CombinedBlock(members, schedule),), executor=options)


def whole(subjects: Sequence[Subject]) -> CombinedGraph:
    """All operators of whole models side by side."""
    return combine([(one.artifact.graph, split(one.artifact.graph, ())[0]) for one in subjects])


def blocks_of(subject: Subject) -> tuple[Block, ...]:
    """The blocks that the papers search in, else those at the base cuts."""
    offered = dict(subject.artifact.graph.partitions)
    return split(subject.artifact.graph, offered.get("paper", offered["base"]))


def by_blocks(subject: Subject, scheduler: Scheduler, costs: CostTable) -> StageSchedule:
    """Stages of the whole model: those of its blocks, one after another."""
    stages: list[Stage] = []
    for block in blocks_of(subject):
        graph = combine([(subject.artifact.graph, block)])
        stage_costs = costs.for_members([(subject.artifact.digest, subject.artifact.graph, block)])
        found = scheduler(graph, stage_costs, TOP_LIMITS, _BUDGET)
        assert isinstance(found, StageSchedule)
        stages += [
            Stage(tuple(tuple(op + block.start for op in group) for group in stage.groups), stage.merge)
            for stage in found.stages
        ]
    return StageSchedule(tuple(stages))


def on_own_streams(graph: CombinedGraph, streams: int = GROUP_STREAMS) -> StreamSchedule:
    """Every member in its own order on one stream, launched in turns: independent streams as one graph."""
    queues = [
        [Launch(op, member % streams) for op in range(graph.offsets[member], graph.offsets[member + 1])]
        for member in range(graph.num_members)
    ]
    order = sorted(
        (index / max(len(queue), 1), member, index)
        for member, queue in enumerate(queues)
        for index in range(len(queue))
    )
    return StreamSchedule(tuple(queues[member][index] for _, member, index in order))


def within(schedule: StreamSchedule, streams: int = GROUP_STREAMS) -> StreamSchedule:
    """The same on at most so many streams (P3)."""
    return replace(
        schedule, launches=tuple(replace(one, stream=one.stream % streams) for one in schedule.launches)
    )


def model_candidates(subject: Subject, known: Knowledge) -> list[Candidate]:
    """Every policy on one model; equal schedules appear once, under the first name."""
    graph = whole([subject])
    base = known.costs([subject], 1.0)
    costs = base.for_members([(subject.artifact.digest, subject.artifact.graph, _only_block(subject))])
    profiles = known.profiles([subject])
    made: list[tuple[str, Callable[[], Schedule]]] = [
        (SEQUENTIAL, lambda: sequential(graph, costs, TOP_LIMITS, _BUDGET)),
        ("ours nimble", lambda: within(nimble(graph, costs, TOP_LIMITS, _BUDGET))),
        ("ours opara", lambda: within(opara(graph, costs, TOP_LIMITS, _BUDGET, profiles=profiles))),
        ("ours ios greedy", lambda: by_blocks(subject, greedy, base)),
    ]
    for strategy, name in ((Strategy.PARALLEL, "parallel"), (Strategy.BOTH, "with merge")):
        for contention in CONTENTIONS:
            search = Shared(partial(ios, strategy=strategy))
            table = known.costs([subject], contention)
            made.append((f"ours ios {name}, c={contention}", partial(by_blocks, subject, search, table)))
    merges = Shared(partial(ios, strategy=Strategy.MERGE))
    made.append(("ours ios merge only", partial(by_blocks, subject, merges, known.costs([subject], 1.0))))
    return _unlike([Candidate(subject.name, name, known.plan([subject], make())) for name, make in made])


def mix_candidates(
    subjects: Sequence[Subject], known: Knowledge, chosen: Mapping[str, Schedule]
) -> list[Candidate]:
    """All models in one combined block; `chosen` is per subject the schedule that was fastest alone."""
    found = []
    for replicas in (1, 2, 4):
        members = [*subjects] * replicas
        graph = whole(members)
        schedule = on_own_streams(graph)
        name = f"ours, {len(members)} members on {min(len(members), GROUP_STREAMS)} streams"
        found.append(Candidate(MIX, name, known.plan(subjects, schedule, replicas=replicas), replicas))
    graph = whole(subjects)
    costs = known.costs(subjects, 0.5).for_members(
        [(one.artifact.digest, one.artifact.graph, _only_block(one)) for one in subjects]
    )
    profiles = known.profiles(subjects)
    in_order = sequential(graph, costs, TOP_LIMITS, _BUDGET)
    interleaved = within(opara(graph, costs, TOP_LIMITS, _BUDGET, profiles=profiles))
    found.append(Candidate(MIX, SEQUENTIAL, known.plan(subjects, in_order)))
    found.append(Candidate(MIX, "ours opara, joint", known.plan(subjects, interleaved)))
    beside = stages_beside([chosen[one.name] for one in subjects if one.name in chosen], graph)
    if beside is not None:
        found.append(Candidate(MIX, "ours ios, stages beside", known.plan(subjects, beside)))
    return _unlike(found)


def stages_beside(schedules: Sequence[Schedule], graph: CombinedGraph) -> StageSchedule | None:
    """The i-th stages of all members as one; None unless every member has stages. Merges stay alone."""
    own = [one.stages for one in schedules if isinstance(one, StageSchedule)]
    if len(own) != graph.num_members:
        return None
    stages: list[Stage] = []
    for number in range(max(map(len, own))):
        together: list[tuple[int, ...]] = []
        for member, found in enumerate(own):
            if number >= len(found):
                continue
            groups = tuple(
                tuple(op + graph.offsets[member] for op in group) for group in found[number].groups
            )
            if found[number].merge:
                stages.append(Stage(groups, merge=True))
            else:
                together += groups
        if together:
            stages.append(Stage(tuple(sorted(together))))
    return StageSchedule(tuple(stages))


def _only_block(subject: Subject) -> Block:
    return split(subject.artifact.graph, ())[0]


def _unlike(candidates: Sequence[Candidate]) -> list[Candidate]:
    found: dict[Digest, Candidate] = {}
    for one in candidates:
        found.setdefault(one.plan.digest, one)
    return list(found.values())
