"""One combined block in words: its stages, what each costs and how that is known, and other schedules of it.

Pure: what the store knows comes in.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stageloom.planner.replan.predict import block_costs
from stageloom.planner.schema.explanation import (
    AlternativeSchedule,
    BlockExplanation,
    CostSource,
    StageExplanation,
)
from stageloom.shared.bound import BoundPlan
from stageloom.shared.errors import PlanError
from stageloom.shared.legality import violations
from stageloom.shared.schedule import (
    Group,
    Schedule,
    Stage,
    StageSchedule,
    StreamSchedule,
    names_resources,
)
from stageloom.shared.search.baselines import greedy, sequential
from stageloom.shared.search.comparison import bound_s, gap, optimum_s
from stageloom.shared.search.costs import CostTable, StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.makespan import schedule_s
from stageloom.shared.stage_string import parse, to_string

if TYPE_CHECKING:
    from stageloom.planner.store.tables import OperatorCostRow, ScheduleRow, StageCostRow

EXACT_EXPANSIONS: Final = 20_000
"""How much the optimum may cost to find: a second or so."""

_CHAIN: Final = 3
"""Single operators in a row that are told as one line."""


Measurement: TypeAlias = "OperatorCostRow | StageCostRow"
"""Where a measured time comes from."""


def explain_block(
    bound: BoundPlan,
    index: int,
    table: CostTable,
    *,
    operators: "Sequence[OperatorCostRow | None]",
    stages: "Mapping[str, StageCostRow]" = MappingProxyType({}),
    found: "Sequence[ScheduleRow]" = (),
    step_us: float | None = None,
) -> BlockExplanation:
    """A combined block's stages or streams with their costs, its bound and optimum, and alternatives.

    What the store knows of it: the measurements of its `operators` [num_ops] and, by stage string, of its
    `stages`; the schedules that were `found` for it; and what a whole step took.
    """
    combined = bound.combined[index]
    graph, schedule = combined.graph, combined.plan.schedule
    costs, executor = block_costs(bound, index, table), bound.executor_of(index)
    predicted_s = schedule_s(schedule, graph, costs)
    least_s = bound_s(schedule, (graph, costs), Limits())
    best_s = None
    if isinstance(schedule, StageSchedule) and not names_resources(schedule):  # of one resource
        best_s = optimum_s([(graph, costs)], Limits(), Budget(expansions=EXACT_EXPANSIONS))
    names = _names(bound, index)
    if isinstance(schedule, StageSchedule):
        lines = _lines(schedule, costs, operators, stages, names)
    else:
        lines = _streams(schedule, costs, operators, names)
    return BlockExplanation(
        index=index,
        members=" + ".join(
            f"{bound.models[m.model].plan.name}#{m.replica}.{m.block}" for m in combined.plan.members
        ),
        executor=executor.name,
        intra_op_threads=executor.intra_op_threads,
        resources=combined.plan.resources,
        cores=bound.cores_of(index),
        operators=graph.size,
        stage_string=to_string(schedule),
        lines=tuple(lines),
        streams=None if isinstance(schedule, StageSchedule) else len(lines),
        predicted_us=1e6 * predicted_s,
        bound_us=1e6 * least_s,
        over_bound=gap(predicted_s, least_s),
        optimum_us=None if best_s is None else 1e6 * best_s,
        over_optimum=None if best_s is None else gap(predicted_s, best_s),
        step_us=step_us,
        beside=tuple(_beside(bound, index, costs, found, predicted_s)),
    )


def _names(bound: BoundPlan, index: int) -> list[str]:
    """The operators' names in the file, with the model's where several are combined. [num_ops]"""
    members = bound.combined[index].plan.members
    found = []
    for member in members:
        model = bound.models[member.model]
        prefix = f"{model.plan.name}:" if len(members) > 1 else ""
        found += [
            f"{prefix}{model.graph.operators[op].name or model.graph.operators[op].kind}"
            for op in model.blocks[member.block].operators
        ]
    return found


def _lines(
    schedule: StageSchedule,
    costs: StageCosts,
    operators: "Sequence[OperatorCostRow | None]",
    stages: "Mapping[str, StageCostRow]",
    names: Sequence[str],
) -> list[StageExplanation]:
    """The stages as they run: those that become one launch of one group are one line."""
    lines: list[StageExplanation] = []
    row: list[StageExplanation] = []
    first = 0
    for stage in costs.runs(schedule.stages):
        last = first
        while sum(len(one.operators) for one in schedule.stages[first : last + 1]) < len(stage.operators):
            last += 1
        whole = stages.get(to_string(StageSchedule((stage,))))
        origins: list[Measurement | None] = [operators[op] for op in stage.operators]
        line = _line(first, last, stage, costs, origins if whole is None else [whole], names)
        first = last + 1
        if len(stage.operators) == 1 and (not row or row[-1].source is line.source):
            row.append(line)
            continue
        lines += _joined(row)
        row = [line] if len(stage.operators) == 1 else []
        lines += [] if row else [line]
    return lines + _joined(row)


def _streams(
    schedule: StreamSchedule,
    costs: StageCosts,
    operators: "Sequence[OperatorCostRow | None]",
    names: Sequence[str],
) -> list[StageExplanation]:
    """One line per stream."""
    streams: dict[int, list[int]] = {}
    for launch in schedule.launches:
        streams.setdefault(launch.stream, []).append(launch.op)
    lines = []
    for stream, ops in sorted(streams.items()):
        measured = [origin for op in ops if (origin := operators[op]) is not None]
        whole = len(measured) == len(ops)
        lines.append(
            StageExplanation(
                first=stream,
                last=stream,
                text=_text(tuple(ops), names),
                merge=False,
                predicted_us=1e6 * sum(costs.operators_s[op] for op in ops),
                source=CostSource.OPERATORS if whole else CostSource.ANALYTIC,
                sure=whole,
                doubt=None,
                **_oldest(measured if whole else []),
            )
        )
    return lines


def _oldest(origins: Sequence[Measurement]) -> dict[str, Any]:
    """The fields of a line that tell of its measurements; without any it is an estimate."""
    return {
        "measured_at_us": min((one.measured_at_us for one in origins), default=None),
        "runs": min((one.runs for one in origins), default=None),
        "measured_on": ", ".join(dict.fromkeys(one.measured_on for one in origins)),
    }


def _joined(row: Sequence[StageExplanation]) -> list[StageExplanation]:
    """Single operators one after another as one line, if they are many."""
    if len(row) < _CHAIN:
        return list(row)
    times = [line.measured_at_us for line in row]
    runs = [line.runs for line in row if line.runs is not None]
    return [
        StageExplanation(
            first=row[0].first,
            last=row[-1].last,
            text=_chain(row[0].text, row[-1].text),
            merge=False,
            predicted_us=sum(line.predicted_us for line in row),
            source=row[0].source,
            sure=all(line.sure for line in row),
            doubt=None,
            measured_at_us=min((at for at in times if at is not None), default=None),
            runs=min(runs, default=None),
            measured_on=", ".join(dict.fromkeys(line.measured_on for line in row if line.measured_on)),
        )
    ]


def _line(
    first: int,
    last: int,
    stage: Stage,
    costs: StageCosts,
    origins: "Sequence[Measurement | None]",
    names: Sequence[str],
) -> StageExplanation:
    measured = [one for one in origins if one is not None]
    seen = costs.is_measured(stage)
    whole = len(measured) == len(origins) and (seen or not stage.merge)  # a merge is estimated from shapes
    elsewhere = bool(stage.resources) and len(stage.groups) > 1  # the longest group, and no more
    together = len(stage.operators) > 1 and not elsewhere
    if seen:
        source = CostSource.MEASURED
    elif not whole:
        source = CostSource.ANALYTIC
    elif together and costs.interference is not None and costs.interference.samples:
        source = CostSource.FITTED
    else:
        source = CostSource.OPERATORS
    text = (" + " if stage.merge else " | ").join(_text(group, names) for group in stage.groups)
    if last - first >= _CHAIN:
        text = _chain(names[stage.operators[0]], names[stage.operators[-1]])
    return StageExplanation(
        first=first,
        last=last,
        text=text,
        merge=stage.merge,
        predicted_us=1e6 * costs.one_stage_s(stage),
        source=source,
        sure=costs.is_sure(stage),
        doubt=_doubt(stage, costs) if source is CostSource.FITTED else None,
        **_oldest(measured if whole else []),
    )


def _doubt(stage: Stage, costs: StageCosts) -> float | None:
    if costs.interference is None:
        return None
    doubt = costs.interference.doubt(costs.terms(stage.groups))
    return doubt if isfinite(doubt) else None


def _chain(first: str, last: str) -> str:
    return f"{first} ... {last}, one after another"


def _text(group: Group, names: Sequence[str]) -> str:
    return ", ".join(names[op] for op in group)


def _beside(
    bound: BoundPlan, index: int, costs: StageCosts, found: "Sequence[ScheduleRow]", this_s: float
) -> list[AlternativeSchedule]:
    """`sequential` and `greedy`, and whatever the device class has kept of this block, cheapest first."""
    combined = bound.combined[index]
    graph, own = combined.graph, combined.plan.schedule
    limits, budget = Limits(), Budget()
    others: list[tuple[str, Schedule, int | None]] = [
        ("sequential", sequential(graph, costs, limits, budget), None),
        ("greedy", greedy(graph, costs, limits, budget), None),
    ]
    for one in found:
        try:
            schedule = parse(one.stage_string)
        except PlanError:
            continue
        if violations(schedule, graph):
            continue  # kept by a version that counted operators otherwise
        others = [other for other in others if other[0] != one.scheduler]
        others.append((one.scheduler, schedule, one.found_at_us))
    beside = []
    for scheduler, schedule, at_us in others:
        try:
            seconds = schedule_s(schedule, graph, costs)
        except KeyError:
            continue  # it merges what is no merge under these costs
        beside.append(
            AlternativeSchedule(
                scheduler=scheduler,
                stage_string=to_string(schedule),
                predicted_us=1e6 * seconds,
                over_this=gap(seconds, this_s),
                same=schedule == own,
                found_at_us=at_us,
            )
        )
    return sorted(beside, key=lambda one: (one.predicted_us, one.scheduler))
