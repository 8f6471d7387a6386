"""What the arrivals of an alarm meet under any plan of its device: demand, times of models, how lanes share.

Times of whole models, by executor and threads, are what the device measured of them alone. The plan that runs
says how far they hold. What its steps take beyond that is the doing of lanes that run beside each other, up
to `BESIDE_MOST`, or of somebody else who uses the cores (the device's own clients, too), which slows every
plan alike, wide lanes no less. Nothing tells the two apart, so half of it is put down to lanes, and what a
plan gains is as uncertain as that. A way to run a model that was never measured has no time, but for the
plan's own, so plans that use it cannot be judged here. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stageloom.planner.replan.judge import (
    GAIN,
    Arrivals,
    Judged,
    ModelDemand,
    ServedPlan,
    arrivals_of,
    judge,
    log_gain,
)
from stageloom.planner.replan.predict import block_costs, bound_plan, step_s
from stageloom.shared.bound import BoundPlan
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.plan import ExecutorOptions, Plan, StepChoice
from stageloom.shared.policy.arrivals import late_s
from stageloom.shared.policy.plain import Load
from stageloom.shared.schedule import Schedule, StageSchedule
from stageloom.shared.search.arrangements import STEP_S, computing_lanes, express_of, with_borders
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.lane_load import BESIDE, ServedModel
from stageloom.shared.search.split_costs import split_costs

WayTimes = Mapping[tuple[ExecutorOptions, int], float]
"""Seconds of one run of a whole model, by executor and batch."""

BESIDE_MOST: Final = 0.25
"""More than that is not the lanes' doing: two cores seldom cost each other more."""

BESIDE_ERROR: Final = 0.1  # of it, where nothing tells
SHAPE_ERROR: Final = 0.1
"""Of the log of a gain, where a plan shares the cores otherwise than the one that runs, or cuts models
otherwise: what the simulation leaves out (caches, handing over, how a core is shared). An assumption: trials
on two cores found less than was predicted, 1.06 for 1.13, 1.13 for 1.15, 1.35 for 1.62 and 1.05 for 1.59."""
TIMES_ERROR: Final = 0.05  # of a way to run models that is not the running plan's
SAME_TIMES_ERROR: Final = 0.01  # of the same way: what cuts and batches add
_SLOW: Final = (0.5, 4.0)  # what the running plan may take of the times alone
_TOLD: Final = 0.2  # busy other lanes, at least, where what steps take tells of them
_BURST: Final = 3.0  # standard deviations above the usual count that chance does not explain


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Over times alone. `told`: the running plan says what lanes cost each other.

    `doubt`: `slow` is so many times as much if lanes cost each other nothing.
    """

    slow: float
    beside: float
    told: bool
    doubt: float = 1.0


def rate_per_s(load: Load) -> float:
    """Arrivals to judge by: the usual ones, unless more came of late than chance explains."""
    if load.usual_per_s <= 0.0:
        return load.arrivals_per_s
    counted_s = late_s(load.arrivals_per_s)
    usual = load.usual_per_s * counted_s
    burst = load.arrivals_per_s * counted_s > usual + _BURST * math.sqrt(usual) + 1.0
    return load.arrivals_per_s if burst else load.usual_per_s


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A plan beside the one that runs: the log of its gain, with the standard error of that."""

    judged: Judged
    log_gain: float
    error: float


@dataclass(frozen=True, kw_only=True)
class LoadScene:
    """One alarm: every plan is judged on the same arrivals."""

    incumbent: Plan
    graphs: Mapping[Digest, Graph]
    costs: CostTable
    times: Mapping[Digest, WayTimes]  # alone; the running plan's own are in it
    demand: tuple[ModelDemand, ...]  # in the plan's order
    speed: DeviceSpeed
    cores: int
    streams: Sequence[Arrivals]
    base: Judged

    @classmethod
    def of(
        cls,
        incumbent: Plan,
        graphs: Mapping[Digest, Graph],
        costs: CostTable,
        known: Mapping[Digest, WayTimes],
        loads: Sequence[Load],
        *,
        cores: int,
        tasks: int,
    ) -> "LoadScene | None":
        """None where nothing arrives, where no time of a model is known, or where blocks are placed anew.

        `cores`: of the device. `tasks`: of each stream of arrivals.
        """
        by_model = {load.model: load for load in loads}
        seen = [by_model.get(model.name) for model in incumbent.models]
        if incumbent.places or any(load is None for load in seen):
            return None
        of_models = [load for load in seen if load is not None]
        bound = bound_plan(incumbent, graphs)
        times = {artifact: dict(ways) for artifact, ways in known.items()}
        speed = _speed(bound, costs, times, of_models, cores)
        for index, load in enumerate(of_models):
            model = incumbent.models[index]
            ways = times.setdefault(model.artifact, {})
            options = _way(bound, index)
            if options is not None and load.service_s > 0.0 and (options, 1) not in ways:
                ways[options, 1] = load.service_s / speed.slow
        demand = tuple(
            ModelDemand(
                name=load.model,
                rate_per_s=rate_per_s(load),
                work_s=load.service_s,
                deadline_s=load.deadline_s or math.inf,
                queued=load.queued,
                oldest_age_s=load.oldest_age_s,
            )
            for load in of_models
        )
        served = _served(bound, costs, times, demand, speed, cores)
        streams = arrivals_of(demand, tasks=tasks)
        if served is None or not streams or not any(one.work_s > 0.0 for one in demand):
            return None
        return cls(
            incumbent=incumbent,
            graphs=graphs,
            costs=costs,
            times=times,
            demand=demand,
            speed=speed,
            cores=cores,
            streams=streams,
            base=judge(served, demand, streams),
        )

    def weigh(self, plan: Plan) -> Weighed | None:
        """A plan of the same models beside the one that runs; None where it uses a way that has no time.

        Raises:
            PlanError: the plan is not legal for these graphs.
        """
        bound = bound_plan(plan, self.graphs)
        served = _served(bound, self.costs, self.times, self.demand, self.speed, self.cores)
        if served is None:
            return None
        judged = judge(served, self.demand, self.streams)
        gained, spread = log_gain(self.base, judged)
        if gained < math.log1p(GAIN):  # less than a half likely, however sure the times are
            return Weighed(judged=judged, log_gain=gained, error=spread)
        same = _ways(bound) == _ways(bound_plan(self.incumbent, self.graphs))
        as_many = _lanes(plan, self.cores) == _lanes(self.incumbent, self.cores)
        off = served.slower(
            SAME_TIMES_ERROR if same else TIMES_ERROR,
            0.0 if self.speed.told or as_many else BESIDE_ERROR,
        )
        less, _ = log_gain(self.base, judge(off, self.demand, self.streams))
        shape = 0.0 if _shape(plan) == _shape(self.incumbent) else SHAPE_ERROR
        error = math.hypot(spread, gained - less, shape)
        if self.speed.doubt > 1.0 and not as_many:
            others = served.slower(self.speed.doubt - 1.0, -self.speed.beside)
            less, _ = log_gain(self.base, judge(others, self.demand, self.streams))
            error = math.hypot(error, gained - less)
        return Weighed(judged=judged, log_gain=gained, error=error)


def _speed(
    bound: BoundPlan,
    costs: CostTable,
    times: Mapping[Digest, WayTimes],
    loads: Sequence[Load],
    cores: int,
) -> DeviceSpeed:
    """What the running plan's steps say of the device, beside what their models took alone."""
    plan = bound.plan
    alone, took = 0.0, 0.0
    for index, load in enumerate(loads):
        blocks_s = _blocks_s(bound, index, costs, times)
        if blocks_s is not None and load.service_s > 0.0:
            alone += load.arrivals_per_s * math.fsum(blocks_s) / plan.models[index].batch
            took += load.arrivals_per_s * load.service_s
    if alone <= 0.0:
        return DeviceSpeed(1.0, BESIDE, told=False)
    ratio = min(max(took / alone, _SLOW[0]), _SLOW[1])
    lanes = _lanes(plan, cores)
    others = (lanes - 1) * min(took / lanes, 1.0)
    told = others >= _TOLD
    beside = 0.5 * min(max((ratio - 1.0) / others, 0.0), BESIDE_MOST) if told else BESIDE
    by_lanes = 1.0 + beside * others
    return DeviceSpeed(ratio / by_lanes, beside, told, by_lanes if told else 1.0)


def _shape(plan: Plan) -> object:
    """How a plan shares the cores, and how it cuts its models."""
    cores = [plan.cores_of(lane) for lane in range(plan.lanes)]
    return cores, express_of(plan), [model.cuts for model in plan.models]


def _lanes(plan: Plan, cores: int) -> int:
    """Steps that the cores carry beside each other: lanes beyond those take turns."""
    threads = min(options.intra_op_threads for options in plan.executors)
    return min(computing_lanes(plan), max(cores // threads, 1))


def _way(bound: BoundPlan, model: int) -> ExecutorOptions | None:
    """The executor of all blocks of a model; None where they have several."""
    found = {
        bound.executor_of(index)
        for index, block in enumerate(bound.plan.combined)
        if any(member.model == model for member in block.members)
    }
    return found.pop() if len(found) == 1 else None


def _ways(bound: BoundPlan) -> list[ExecutorOptions | None]:
    return [_way(bound, index) for index in range(len(bound.plan.models))]


def _blocks_s(
    bound: BoundPlan, model: int, costs: CostTable, times: Mapping[Digest, WayTimes], batch: int = 0
) -> list[float] | None:
    """Seconds of a model's blocks alone, in its plan's batches or of `batch`; None where nothing tells.

    The whole model's time, shared out as the costs of operators are, with what borders add.
    """
    part, options = bound.models[model], _way(bound, model)
    ways = times.get(part.plan.artifact, {})
    if options is None:
        return None
    batch = batch or part.plan.batch
    whole_s = ways.get((options, batch))
    if whole_s is None and (one_s := ways.get((options, 1))) is not None:
        whole_s = batch * one_s
    if whole_s is None or not whole_s < math.inf:
        return None
    under = split_costs(costs, bound).under(options)
    shares = [
        math.fsum(under.operator_s(part.graph_key, part.graph, OpId(op)) for op in block.operators)
        for block in part.blocks
    ]
    total = math.fsum(shares) or 1.0
    gained = _scheduled(bound, model, costs)
    border_s = (with_borders(options, 0.0, len(shares))) / len(shares)
    return [share / total * whole_s * gained + border_s for share in shares]


def _scheduled(bound: BoundPlan, model: int, costs: CostTable) -> float:
    """What the schedules of a model's blocks are predicted to take of its operators one after another."""
    blocks = [
        index
        for index, block in enumerate(bound.combined)
        if any(member.model == model and member.replica == 0 for member in block.members)
    ]
    if all(_in_a_row(bound.combined[index].plan.schedule) for index in blocks):
        return 1.0
    took, alone = 0.0, 0.0
    for index in blocks:
        block = bound.combined[index]
        known = block_costs(bound, index, costs)
        operators_s = math.fsum(known.operators_s)
        alone += operators_s
        in_a_row = _in_a_row(block.plan.schedule)
        took += operators_s if in_a_row else step_s(known, block.graph, block.plan.schedule, block.full_mask)
    return took / alone if alone > 0.0 else 1.0


def _in_a_row(schedule: Schedule) -> bool:
    return isinstance(schedule, StageSchedule) and all(
        len(stage.groups) == 1 and not stage.merge for stage in schedule.stages
    )


def _served(
    bound: BoundPlan,
    costs: CostTable,
    times: Mapping[Digest, WayTimes],
    demand: Sequence[ModelDemand],
    speed: DeviceSpeed,
    cores: int,
) -> ServedPlan | None:
    """A plan as lanes serve it; None where nothing tells what a model of it takes.

    Members of a combined block are taken to run as steps of their own, each for its part of the joint one.
    """
    plan = bound.plan
    if plan.places or [model.name for model in plan.models] != [one.name for one in demand]:
        return None
    models, express = [], express_of(plan)
    for index, one in enumerate(demand):
        model = plan.models[index]
        alone_s = _blocks_s(bound, index, costs, times, 1)
        full_s = alone_s if model.batch == 1 else _blocks_s(bound, index, costs, times)
        if alone_s is None or full_s is None:
            return None
        more_s = max(math.fsum(full_s) - math.fsum(alone_s), 0.0) / max(model.batch - 1, 1)
        models.append(
            ServedModel(
                blocks_s=tuple(speed.slow * taken + STEP_S for taken in alone_s),
                deadline_s=one.deadline_s,
                at_once=max(model.replicas * model.num_blocks // 2, model.replicas),
                batch=model.batch,
                each_more_s=speed.slow * more_s if model.batch > 1 else 0.0,
                room=model.queue.max_tasks,
                express=index in express,
            )
        )
    return ServedPlan(
        models=tuple(models),
        lanes=_lanes(plan, cores),
        by_deadline=plan.step_choice is StepChoice.DEADLINE,
        beside=speed.beside,
    )
