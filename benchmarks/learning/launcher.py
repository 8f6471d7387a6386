"""What launch intervals can do under deadlines that a fixed rule cannot: contestants on the same arrivals.

A *pace* is launches per arrival: at 0.5 a strict interval lets every other task of a model be launched at
most. The *oracle* finds the paces that serve best in a load that stays; it may look at as many simulated
seconds as it likes, so no launcher whose intervals stay can do better. Contestants:

| contestant | queues | launches |
| --- | --- | --- |
| `as it is` | in order of arrival | as fast as the device could serve (u = 0), or as tasks arrive (u = 1) |
| `in order of arrival, strict` | the same | the oracle's strict intervals |
| `by deadline` | earliest deadline first over all models, expired tasks dropped | as lanes become free |
| `by deadline, feasible` | the same, and what can no longer end in time is not launched | the same |
| `by deadline, equal shares` | the same | strict, each model at 1 / load of its arrivals |
| `by deadline, heaviest refused` | the same | none of the models with the longest tasks, until load is 1 |
| `by deadline, strict` | the same | the oracle's strict intervals |

`by deadline, feasible` is `step_choice=deadline` with queues of the same rule, as the engine has it. `by
deadline` alone exists here only: a twin whose engine never learns how long tasks take.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import fsum, inf
from typing import Final, NamedTuple, TypeAlias

from stageloom.planner.replan.levers import by_deadline
from stageloom.planner.tournament.score import Score, figures_of
from stageloom.planner.twin.reference import Twin
from stageloom.planner.twin.window import MakeDevice
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.engine.pace import Pace
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Plan
from stageloom.shared.policy.maddpg.actions import intervals_us
from stageloom.shared.policy.plain import Load

Paces: TypeAlias = tuple[float | None, ...]
"""Launches per arrival, one per model; None: no interval at all. [W]"""

GRID: Final[Paces] = (None, 1.2, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.35, 0.2, 0.0)
COARSE: Final[Paces] = (None, 0.7, 0.0)
"""Of these the oracle tries every combination before it begins."""

WARM_S: Final = 2.0
LONGEST_US: Final = 3_600_000_000

FIXED: Final = "by deadline, feasible"
EXPIRY_ALONE: Final = "by deadline"
REFUSING: Final = "by deadline, heaviest refused"
LEVEL: Final = 0.99
"""Of the fixed rule's goodput: what the objective `variance` must keep."""


class LauncherCell(NamedTuple):
    """A device under a load, with the plan whose launches are in question. Rows are by model."""

    plan: Plan  # in order of arrival, without intervals
    graphs: Mapping[Digest, Graph]
    rates_per_s: tuple[float, ...]
    service_s: tuple[float, ...]  # of a task by itself
    load: float  # of capacity
    make_device: MakeDevice
    make_unknowing: MakeDevice
    """Of engines that do not know how long tasks take: nothing is given up before it expires."""
    make_patient: MakeDevice
    """The same arrivals without deadlines."""


class Served(NamedTuple):
    """What one seed's window came to. The engine ends tasks at their deadline: what completed was in time."""

    score: Score
    shares: tuple[float, ...]  # in time, of those that came [W]
    arrived: tuple[int, ...]  # [W]
    busy: float  # share of the time with a step in flight

    @property
    def goodput_per_s(self) -> float:
        return self.score.throughput_per_s

    @property
    def least_share(self) -> float:
        return min(self.shares)


class UnknowingTwin(Twin):
    """A twin whose engine takes every task for one that can still end in time."""

    def deploy(self, bound: BoundPlan) -> None:
        super().deploy(bound)
        for plan in self._core._plans.values():
            for model in plan.models:
                model.pace = _UnknownPace(model.bound.plan.num_blocks)


class _UnknownPace(Pace):
    def note(self, block: int, seconds: float) -> None:
        """Learn nothing."""


def strict(plan: Plan, paces: Paces, rates_per_s: Sequence[float]) -> Plan:
    """The plan with strict launch intervals of 1 / (pace x rate)."""
    models = tuple(
        model
        if pace is None
        else replace(
            model,
            work_conserving=False,
            launch_interval_us=round(min(1e6 / (pace * rate), LONGEST_US)) if pace else LONGEST_US,
        )
        for model, pace, rate in zip(plan.models, paces, rates_per_s, strict=True)
    )
    return replace(plan, models=models)


def as_policies_launch(cell: LauncherCell, action: float) -> Plan:
    """The plan with the intervals that agent 0 gives for one action for all models; not strict."""
    loads = [
        Load(model=model.name, arrivals_per_s=rate, service_s=service_s, queued=0)
        for model, rate, service_s in zip(cell.plan.models, cell.rates_per_s, cell.service_s, strict=True)
    ]
    given = intervals_us([action] * len(loads), loads, lanes=cell.plan.lanes)
    pairs = zip(cell.plan.models, given, strict=True)
    models = tuple(replace(model, launch_interval_us=interval_us) for model, interval_us in pairs)
    return replace(cell.plan, models=models)


def served(
    cell: LauncherCell, plan: Plan, seeds: Iterable[int], seconds: float, make: MakeDevice | None = None
) -> list[Served]:
    """One row per seed, from empty queues, behind `WARM_S` that do not count. `make`: else the cell's own."""
    bound, rows = bind(plan, cell.graphs), []
    for seed in seeds:
        device = (make or cell.make_device)(seed)
        device.deploy(bound)
        device.run(WARM_S)
        window = device.run(seconds)
        rows.append(
            Served(
                score=figures_of([window], cell.service_s),
                shares=tuple(one.ended.completed / one.submitted for one in window.models),
                arrived=tuple(one.submitted for one in window.models),
                busy=window.busy_s / window.seconds,
            )
        )
    return rows


# The oracle

Worth: TypeAlias = tuple[float, ...]
Objective: TypeAlias = Callable[[Sequence[Served], Sequence[Served]], Worth]
"""What a row of seeds is worth beside that of the fixed rule on the same arrivals; the greatest wins."""


def _mean(rows: Sequence[Served], figure: Callable[[Served], float]) -> float:
    return fsum(map(figure, rows)) / len(rows)


def _goodput(rows: Sequence[Served], fixed: Sequence[Served]) -> Worth:
    return (_over(rows, fixed, lambda one: one.goodput_per_s),)


def _least(rows: Sequence[Served], fixed: Sequence[Served]) -> Worth:
    return (_over(rows, fixed, lambda one: one.least_share),)


def _both(rows: Sequence[Served], fixed: Sequence[Served]) -> Worth:
    return (min(_goodput(rows, fixed)[0], _least(rows, fixed)[0]),)


def _variance(rows: Sequence[Served], fixed: Sequence[Served]) -> Worth:
    goodput = _goodput(rows, fixed)[0]
    enough = goodput >= LEVEL
    return (float(enough), -_mean(rows, lambda one: one.score.queue_variance) if enough else goodput)


def _over(rows: Sequence[Served], fixed: Sequence[Served], figure: Callable[[Served], float]) -> float:
    under = _mean(fixed, figure)
    return _mean(rows, figure) / under if under else inf


OBJECTIVES: Final[Mapping[str, Objective]] = {
    "goodput": _goodput,  # tasks in time per second
    "least share": _least,  # of the model that is served worst
    "both": _both,  # the lesser of the two gains over the fixed rule: above 1 only if neither is lost
    "variance": _variance,  # least variance of queued work that costs at most 1 % of the goodput
}


def oracle(worth: Callable[[Paces], Worth], models: int) -> Paces:
    """The best paces: of one pace for all and of a coarse grid the best, then one model at a time until none
    gains. `worth` is asked more than once for the same paces."""
    starts = [*((pace,) * models for pace in GRID), *product(COARSE, repeat=models)]
    best = max(starts, key=worth)
    while True:
        before = best
        for place in range(models):
            changed = [(*best[:place], pace, *best[place + 1 :]) for pace in GRID]
            best = max((best, *changed), key=worth)
        if best == before:
            return best


def chosen_paces(
    cell: LauncherCell, plan: Plan, seeds: Sequence[int], seconds: float
) -> tuple[dict[str, Paces], int]:
    """The oracle's paces of a plan by objective, and how many it simulated; equal ones once."""
    fixed = served(cell, by_deadline(cell.plan), seeds, seconds)
    known: dict[Paces, list[Served]] = {}

    def worth(objective: Objective, paces: Paces) -> Worth:
        if paces not in known:
            known[paces] = served(cell, strict(plan, paces, cell.rates_per_s), seeds, seconds)
        return objective(known[paces], fixed)

    found = {
        name: oracle(partial(worth, objective), len(plan.models)) for name, objective in OBJECTIVES.items()
    }
    return found, len(known)


# Bounds and contestants


def goodput_bound_per_s(arrived: Sequence[int], service_s: Sequence[float], seconds: float) -> float:
    """Tasks a second that no launcher exceeds on one lane of whole models: the cheapest first, none waits.

    max sum(n) over n <= arrived with sum(n service_s) <= seconds, a fractional knapsack of equal values.
    """
    left_s, tasks = seconds, 0.0
    for taken_s, came in sorted(zip(service_s, arrived, strict=True)):
        fit = min(float(came), left_s / taken_s)
        tasks, left_s = tasks + fit, left_s - fit * taken_s
    return tasks / seconds


def refusing_heaviest(rates_per_s: Sequence[float], service_s: Sequence[float]) -> Paces:
    """No launches of the models with the longest tasks, of as few as leave a load of 1 or less."""
    paces: list[float | None] = [None] * len(service_s)
    left = fsum(rate * taken for rate, taken in zip(rates_per_s, service_s, strict=True))
    for place in sorted(range(len(service_s)), key=lambda place: -service_s[place]):
        if left <= 1.0:
            break
        paces[place] = 0.0
        left -= rates_per_s[place] * service_s[place]
    return tuple(paces)


class Contestant(NamedTuple):
    """`paces`: of its strict intervals, where it has any."""

    name: str
    plan: Plan
    paces: Paces = ()
    unknowing: bool = False


def contestants(
    cell: LauncherCell, in_order: Mapping[str, Paces], deadlines: Mapping[str, Paces]
) -> list[Contestant]:
    """All of a cell; the mappings are the oracle's paces by objective under either order."""
    fixed = by_deadline(cell.plan)
    share = None if cell.load <= 1.0 else 1.0 / cell.load
    equal: Paces = (share,) * len(cell.plan.models)
    rates = cell.rates_per_s
    refusing = refusing_heaviest(rates, cell.service_s)
    return [
        Contestant("as it is, u = 0", as_policies_launch(cell, 0.0)),
        Contestant("as it is, u = 1", as_policies_launch(cell, 1.0)),
        *(
            Contestant(f"in order of arrival, strict for {name}", strict(cell.plan, paces, rates), paces)
            for name, paces in in_order.items()
        ),
        Contestant(EXPIRY_ALONE, fixed, unknowing=True),
        Contestant(FIXED, fixed),
        Contestant("by deadline, equal shares", strict(fixed, equal, rates), equal),
        Contestant(REFUSING, strict(fixed, refusing, rates), refusing),
        *(
            Contestant(f"by deadline, strict for {name}", strict(fixed, paces, rates), paces)
            for name, paces in deadlines.items()
        ),
    ]


ACTIONS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
STRICT_PACES: Final = (1.2, 1.0, 0.8, 0.6, 0.4)


def range_of(found: Sequence[Sequence[Served]]) -> dict[str, float]:
    """How far figures move: the highest over the lowest of the means, for each of them."""
    figures: dict[str, Callable[[Served], float]] = {
        "goodput": lambda one: one.goodput_per_s,
        "p99": lambda one: one.score.p99_s,
        "variance": lambda one: one.score.queue_variance,
    }
    means = {name: [_mean(rows, figure) for rows in found] for name, figure in figures.items()}
    return {name: max(row) / min(row) if min(row) > 0.0 else inf for name, row in means.items()}


def launcher_alone(cell: LauncherCell, seeds: Sequence[int], seconds: float) -> dict[str, dict[str, float]]:
    """What changing agent 0's actions alone moves, as intervals are read today and read as strict paces.

    With deadlines no p99 lies beyond them; without, backlog shows in it.
    """
    rows = {}
    for order, plan, make in (
        ("without deadlines", cell.plan, cell.make_patient),
        ("in order of arrival", cell.plan, cell.make_device),
        (FIXED, by_deadline(cell.plan), cell.make_device),
    ):
        given = [as_policies_launch(cell._replace(plan=plan), action) for action in ACTIONS]
        below = [strict(plan, (pace,) * len(plan.models), cell.rates_per_s) for pace in STRICT_PACES]
        for how, plans in (("as it is", given), ("strict", below)):
            rows[f"{order}, {how}"] = range_of([served(cell, one, seeds, seconds, make) for one in plans])
    return rows
