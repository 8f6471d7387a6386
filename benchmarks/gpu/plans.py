"""Every policy as a plan for our executor: Nimble, Opara, IOS, greedy, sequential; and for the mix.

A model is one block here, so that it is one graph on the device. Stage searches run on the model's blocks
and their schedules are put one after another: that is IOS's own way, and keeps the search small.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from benchmarks.gpu.networks import Subject
from benchmarks.gpu.rivals import MIX
from stageloom.edge_agent.executor.cuda.streams import Nature
from stageloom.shared.blocks import Block, CombinedGraph, combine, split
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.plan import CombinedBlock, ExecutorOptions, IssueOrder, Member, ModelPlan, Plan
from stageloom.shared.schedule import Launch, Schedule, Stage, StageSchedule, StreamSchedule
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.baselines import greedy, sequential
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.interface import TOP_LIMITS, Budget, Scheduler
from stageloom.shared.search.ios import ios
from stageloom.shared.search.isomorphism import Shared
from stageloom.shared.search.stage_costs import StageCosts
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

    @property
    def key(self) -> tuple[str, str]:
        return self.subject, self.name


@dataclass(frozen=True)
class Knowledge:
    """What our executor measured of the operators of each subject; estimates where nothing was."""

    executor: str
    precision: str = "fp16"
    natures: Mapping[str, Mapping[OpId, Nature]] = field(default_factory=dict)  # by subject

    def costs(self, subjects: Sequence[Subject], contention: float = 1.0) -> CostTable:
        measured = {
            (subject.artifact.digest, op): nature.seconds + _LAUNCH_S
            for subject in subjects
            for op, nature in self.natures.get(subject.name, {}).items()
        }
        rates = DeviceRates(
            flop_per_s=1e14, bytes_per_s=1e12, launch_s=_LAUNCH_S, barrier_s=_BARRIER_S, contention=contention
        )
        return CostTable(measured_s=measured, rates=rates)

    def profiles(self, subjects: Sequence[Subject]) -> list[OperatorProfile] | None:
        """What Opara's order reads of the subjects' operators side by side; None where nothing was measured.

        An operator that runs as part of another one's kernel asks for nothing.
        """
        if not all(self.natures.get(subject.name) for subject in subjects):
            return None
        natures = [
            self.natures[subject.name].get(OpId(op), Nature())
            for subject in subjects
            for op in range(len(subject.artifact.graph.operators))
        ]
        return [OperatorProfile(threads=own.demand, memory_intensive=own.memory_bound) for own in natures]

    @property
    def listed(self) -> IssueOrder:
        """As schedules list their launches, where the executor can do that."""
        return IssueOrder.SCHEDULE if self.executor == "torch_cuda" else IssueOrder.DEVICE

    def plan(
        self,
        subjects: Sequence[Subject],
        schedule: Schedule,
        *,
        replicas: int = 1,
        issue: IssueOrder = IssueOrder.DEVICE,
    ) -> Plan:
        """Whole models, all replicas in one combined block."""
        models = tuple(
            ModelPlan(name=subject.name, artifact=subject.artifact.digest, replicas=replicas)
            for subject in subjects
        )
        members = tuple(
            Member(model, replica, 0) for replica in range(replicas) for model in range(len(subjects))
        )
        options = ExecutorOptions(name=self.executor, precision=self.precision, issue=issue)
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


def within(schedule: StreamSchedule) -> StreamSchedule:
    """The same on at most `GROUP_STREAMS` streams (P3)."""
    launches = (replace(launch, stream=launch.stream % GROUP_STREAMS) for launch in schedule.launches)
    return replace(schedule, launches=tuple(launches))


def sequential_candidate(subject: Subject, known: Knowledge) -> Candidate:
    """One operator after another; loading it first measures them."""
    graph, costs = _side_by_side([subject], known)
    schedule = sequential(graph, costs, TOP_LIMITS, _BUDGET)
    return Candidate(subject.name, SEQUENTIAL, known.plan([subject], schedule))


def model_candidates(subject: Subject, known: Knowledge) -> list[Candidate]:
    """Every policy on one model; equal plans appear once, under the first name.

    `nimble` and `opara` keep their own streams and launch order, `ours` folds the streams and orders launches
    by what it measured of them.
    """
    graph, costs = _side_by_side([subject], known)
    profiles = known.profiles([subject])
    streams = {
        "nimble": nimble(graph, costs, TOP_LIMITS, _BUDGET),
        "opara": opara(graph, costs, TOP_LIMITS, _BUDGET, profiles=profiles),
    }
    rivals = {name: known.plan([subject], schedule, issue=known.listed) for name, schedule in streams.items()}
    schedules: dict[str, Schedule] = {f"ours {name}": within(schedule) for name, schedule in streams.items()}
    schedules["ours ios greedy"] = by_blocks(subject, greedy, known.costs([subject]))
    for strategy, name in ((Strategy.PARALLEL, "parallel"), (Strategy.BOTH, "with merge")):
        for contention in CONTENTIONS:
            search = Shared(partial(ios, strategy=strategy))
            table = known.costs([subject], contention)
            schedules[f"ours ios {name}, c={contention}"] = by_blocks(subject, search, table)
    merges = Shared(partial(ios, strategy=Strategy.MERGE))
    schedules["ours ios merge only"] = by_blocks(subject, merges, known.costs([subject]))
    plans = rivals | {name: known.plan([subject], schedule) for name, schedule in schedules.items()}
    candidates = [Candidate(subject.name, name, plan) for name, plan in plans.items()]
    return _unlike([sequential_candidate(subject, known), *candidates])


def mix_candidates(
    subjects: Sequence[Subject], known: Knowledge, chosen: Mapping[str, Schedule]
) -> list[Candidate]:
    """All models in one combined block; `chosen` is per subject the schedule that was fastest alone."""
    candidates = []
    for replicas in (1, 2, 4, 8):
        members = [*subjects] * replicas
        for streams in sorted({min(len(members), GROUP_STREAMS), len(members)}):
            schedule = on_own_streams(whole(members), streams)
            issue = IssueOrder.DEVICE if streams <= GROUP_STREAMS else known.listed
            plan = known.plan(subjects, schedule, replicas=replicas, issue=issue)
            name = f"ours, {len(members)} members on {streams} streams"
            candidates.append(Candidate(MIX, name, plan, replicas))
    graph, costs = _side_by_side(subjects, known, 0.5)
    in_order = sequential(graph, costs, TOP_LIMITS, _BUDGET)
    joint = within(opara(graph, costs, TOP_LIMITS, _BUDGET, profiles=known.profiles(subjects)))
    candidates.append(Candidate(MIX, SEQUENTIAL, known.plan(subjects, in_order)))
    candidates.append(Candidate(MIX, "ours opara, joint", known.plan(subjects, joint)))
    beside = stages_beside([chosen[subject.name] for subject in subjects if subject.name in chosen], graph)
    if beside is not None:
        candidates.append(Candidate(MIX, "ours ios, stages beside", known.plan(subjects, beside)))
    return _unlike(candidates)


def _side_by_side(
    subjects: Sequence[Subject], known: Knowledge, contention: float = 1.0
) -> tuple[CombinedGraph, StageCosts]:
    members = [
        (subject.artifact.digest, subject.artifact.graph, split(subject.artifact.graph, ())[0])
        for subject in subjects
    ]
    return whole(subjects), known.costs(subjects, contention).for_members(members)


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


def _unlike(candidates: Sequence[Candidate]) -> list[Candidate]:
    found: dict[Digest, Candidate] = {}
    for one in candidates:
        found.setdefault(one.plan.digest, one)
    return list(found.values())
