"""From a choice of splits to a plan: which operators run where, in groups as large as they may be.

Neighbours that stay whole on one resource are one group, so that one session runs them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stageloom.shared.bitmask import bits
from stageloom.shared.bound import bind
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import CombinedBlock, ExecutorOptions, Member, ModelPlan, Plan, Resource
from stageloom.shared.schedule import OWN_RESOURCE, Group, Stage, StageSchedule, stage_of
from stageloom.shared.search.split_problem import SplitChoice, Whole, chains_of
from stageloom.shared.split_graph import DerivedGraph, SplitRole, derive


@dataclass(frozen=True, slots=True)
class ResourcePair:
    """The two resources of a choice: what runs on each, and its cores."""

    executors: tuple[ExecutorOptions, ExecutorOptions]
    cores: tuple[tuple[int, ...], tuple[int, ...]]


def split_plan(name: str, artifact: Digest, graph: Graph, choice: SplitChoice, pair: ResourcePair) -> Plan:
    """A plan of one model: its lane is at the choice's home, halves and what is elsewhere have helpers.

    Raises:
        PlanError: the choice is not legal for the graph.
    """
    home = choice.home.resource
    apart = pair.executors[0] != pair.executors[1]
    resources = tuple(
        Resource(cores=cores, executor=number if apart and number != home else None)
        for number, cores in enumerate(pair.cores)
    )
    plan = Plan(
        models=(ModelPlan(name=name, artifact=artifact, splits=choice.splits),),
        combined=(CombinedBlock((Member(0, 0, 0),), choice_schedule(graph, choice), home if apart else 0),),
        executor=pair.executors[0],
        further_executors=pair.executors[1:] if apart else (),
        resources=resources,
        lane_resources=(home,),
    )
    bind(plan, {artifact: graph})
    return plan


def choice_schedule(graph: Graph, choice: SplitChoice) -> StageSchedule:
    """Stages of the derived graph: halves side by side, and chains that the choice runs beside each other."""
    derived = derive(graph, choice.splits)
    stages: list[Stage] = []
    run: list[int] = []
    run_on = OWN_RESOURCE
    pair_of = {op: number for number, sides in enumerate(choice.beside) for side in sides for op in side}
    done: set[int] = set()

    def end_run() -> None:
        stages.extend(stage_of((group,), False, (run_on,)) for group in _connected(derived.graph, run))
        run.clear()

    for op in _order(graph, derived, choice):
        origin = derived.origins[op]
        if origin.role is SplitRole.SECOND:
            continue
        if origin.role is SplitRole.FIRST:
            end_run()
            stages.append(stage_of(((op,), (op + 1,)), False, (0, 1)))
            continue
        pair = pair_of.get(origin.ops[0]) if origin.role is SplitRole.WHOLE else None
        if pair is not None:
            if pair not in done:
                end_run()
                stages.append(_beside(derived, choice, pair))
                done.add(pair)
            continue
        on = _resource(choice, origin.ops[0]) if origin.role is SplitRole.WHOLE else OWN_RESOURCE
        if on != run_on:
            end_run()
            run_on = on
        run.append(op)
    end_run()
    return StageSchedule(tuple(stages))


def _resource(choice: SplitChoice, op: int) -> int:
    state = choice.states[op]
    return state.resource if isinstance(state, Whole) and state != choice.home else OWN_RESOURCE


def _order(graph: Graph, derived: DerivedGraph, choice: SplitChoice) -> Sequence[int]:
    """The derived graph's operators as they are numbered; where chains run side by side, stage by stage."""
    everything = range(len(derived.origins))
    if not choice.beside:
        return everything
    chains, stages = chains_of(graph)
    level = {op: at for at, stage in enumerate(stages) for place in stage for op in chains[place]}
    return sorted(everything, key=lambda op: (level[derived.origins[op].ops[0]], op))


def _beside(derived: DerivedGraph, choice: SplitChoice, pair: int) -> Stage:
    at: dict[int, int] = {
        origin.ops[0]: op for op, origin in enumerate(derived.origins) if origin.role is SplitRole.WHOLE
    }
    groups: list[tuple[Group, int]] = []
    for resource, side in enumerate(choice.beside[pair]):
        on = OWN_RESOURCE if resource == choice.home.resource else resource
        groups += [(group, on) for group in _connected(derived.graph, [at[op] for op in side])]
    groups.sort()
    return stage_of([group for group, _ in groups], False, [on for _, on in groups])


def _connected(graph: Graph, ops: Sequence[int]) -> Iterator[Group]:
    """Connected components, by their first operator; the operators of each ascending."""
    leader = {op: op for op in ops}

    def find(op: int) -> int:
        while leader[op] != op:
            op = leader[op]
        return op

    for op in ops:
        for before in bits(graph.predecessors[op]):
            if before in leader:
                one, other = sorted((find(op), find(before)))
                leader[other] = one
    groups: dict[int, list[int]] = {}
    for op in sorted(ops):
        groups.setdefault(find(op), []).append(op)
    for first in sorted(groups):
        yield tuple(groups[first])
