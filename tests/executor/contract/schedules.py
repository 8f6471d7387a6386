"""Random legal schedules of both kinds, and plans made of them."""

import random
from collections.abc import Sequence
from dataclasses import replace

from stageloom.shared.artifact import Artifact
from stageloom.shared.bitmask import bits, mask_of
from stageloom.shared.blocks import CombinedGraph, combine, split
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.engine.steps import InstanceId, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.ids import StepId, TaskId
from stageloom.shared.launch_list import Barrier
from stageloom.shared.plan import CombinedBlock, Member, ModelPlan, Plan
from stageloom.shared.schedule import Launch, Schedule, Stage, StageSchedule, StreamSchedule, stage_schedule


def sequential(graph: CombinedGraph) -> StageSchedule:
    return stage_schedule([[[op]] for op in range(graph.size)])


def random_stages(graph: CombinedGraph, rng: random.Random) -> StageSchedule:
    """Stages of up to eight operators, each stage split into its connected components."""
    done, stages = 0, []
    while done != (1 << graph.size) - 1:
        chosen = 0
        for _ in range(rng.randint(1, 8)):
            ready = [
                op
                for op in range(graph.size)
                if not (done | chosen) >> op & 1 and not graph.predecessors[op] & ~(done | chosen)
            ]
            if ready:
                chosen |= 1 << rng.choice(ready)
        stages.append(_components(chosen, graph))
        done |= chosen
    return stage_schedule(stages)


def _components(chosen: int, graph: CombinedGraph) -> list[list[int]]:
    groups = []
    while chosen:
        group, grown = 0, chosen & -chosen
        while grown:
            group |= grown
            near = 0
            for op in bits(grown):
                near |= (graph.predecessors[op] | graph.successors[op]) & chosen
            grown = near & ~group
        groups.append(sorted(bits(group)))
        chosen &= ~group
    return groups


def random_streams(graph: CombinedGraph, rng: random.Random, streams: int = 4) -> StreamSchedule:
    """A random topological order over up to so many streams."""
    done = 0
    launches: list[Launch] = []
    while len(launches) < graph.size:
        ready = [op for op in range(graph.size) if not done >> op & 1 and not graph.predecessors[op] & ~done]
        op = rng.choice(ready)
        launches.append(Launch(op, rng.randrange(streams)))
        done |= 1 << op
    return StreamSchedule(tuple(launches))


def merged(graph: CombinedGraph) -> StageSchedule:
    """All operators of a class that are ready become one merge stage, again and again; others run alone."""
    done = 0
    stages: list[Stage] = []
    while done != (1 << graph.size) - 1:
        ready = [op for op in range(graph.size) if not done >> op & 1 and not graph.predecessors[op] & ~done]
        same = [op for op in ready if graph.merge_class[op] == graph.merge_class[ready[0]]]
        chosen = same if graph.may_merge(same) else ready[:1]
        stages.append(Stage(tuple((op,) for op in chosen), merge=len(chosen) > 1))
        done |= mask_of(chosen)
    return StageSchedule(tuple(stages))


def plan_of(
    artifacts: Sequence[Artifact],
    cuts: Sequence[tuple[int, ...]],
    groups: Sequence[Sequence[Member]],
    schedule: "Sequence[Schedule] | None" = None,
    *,
    batch: int = 1,
    replicas: int = 1,
    barrier: Barrier = Barrier.FULL,
    lanes: int = 1,
) -> Plan:
    """A plan with the given combined blocks; without schedules they are sequential."""
    models = tuple(
        ModelPlan(name=f"m{i}", artifact=a.digest, cuts=c, batch=batch, replicas=replicas)
        for i, (a, c) in enumerate(zip(artifacts, cuts, strict=True))
    )
    combined = tuple(
        CombinedBlock(
            tuple(members),
            schedule[i] if schedule else sequential(graph_of(artifacts, cuts, members)),
        )
        for i, members in enumerate(groups)
    )
    return replace(Plan(models=models, combined=combined), barrier=barrier, lanes=lanes)


def graph_of(
    artifacts: Sequence[Artifact], cuts: Sequence[tuple[int, ...]], members: Sequence[Member]
) -> CombinedGraph:
    return combine(
        [(artifacts[m.model].graph, split(artifacts[m.model].graph, cuts[m.model])[m.block]) for m in members]
    )


def bound_of(plan: Plan, artifacts: Sequence[Artifact]) -> BoundPlan:
    """Join a plan with its artifacts' graphs."""
    return bind(plan, {artifact.digest: artifact.graph for artifact in artifacts})


class StepMaker:
    """Makes the steps that a core would issue for instances that move through a plan one block at a time."""

    def __init__(self, key: PlanKey, bound: BoundPlan) -> None:
        self.key = key
        self.bound = bound
        self._next = 0

    def step(
        self,
        combined: int,
        instances: dict[int, tuple[InstanceId, int]],
        *,
        after: Sequence[StepId] = (),
        lane: int = 0,
        fallback: bool = False,
    ) -> Step:
        """One step; `instances` maps a position to an instance and its number of tasks."""
        members = self.bound.combined[combined].members
        active = []
        for position in sorted(instances):
            instance, tasks = instances[position]
            member = members[position]
            last = member.block == len(self.bound.models[member.model].blocks) - 1
            rows = tuple(TaskId(instance * 100 + row) for row in range(tasks))
            active.append(StepMember(position, member, instance, rows, last))
        mask = mask_of(instances)
        buckets = tuple(
            self.bound.models[members[p].model].bucket_for(instances[p][1]) for p in sorted(instances)
        )
        self._next += 1
        program = ProgramKey(self.key, combined, mask, buckets)
        return Step(StepId(self._next), lane, program, tuple(active), tuple(after), fallback)
