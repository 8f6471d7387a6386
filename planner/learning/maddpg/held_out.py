"""Loads that no training saw, and what a policy and the best seed do under them on a twin. No torch.

The best seed is that of the load: it is chosen on arrivals of its own, so that it is compared on such as did
not choose it. Policy and seed then run on the same arrivals, with the same schedules where they combine the
same blocks: those that the policy brings, and a small beam's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from stageloom.planner.learning.maddpg.candidates import Candidates, seeds
from stageloom.planner.learning.maddpg.gate import LoadOutcome
from stageloom.planner.learning.maddpg.problem import Problem, ScheduleEntry, ScheduleTable
from stageloom.planner.learning.maddpg.replay import Floats
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.learning.maddpg.work import Environment, EnvironmentStep, clipped_row
from stageloom.planner.tournament.score import Score, figures_of, score_of
from stageloom.planner.twin.arrivals import Bursty, Poisson, Process
from stageloom.planner.twin.window import MakeDevice
from stageloom.shared.plan import Member
from stageloom.shared.policy.maddpg.actions import combine_blocks
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint
from stageloom.shared.policy.maddpg.decide import Book
from stageloom.shared.schedule import StageSchedule

CHOOSING_SEED: Final = 2_200_000_000
PAIRED_SEED: Final = 2_300_000_000
"""First seeds of arrivals; trainings use others."""

FACTORS: Final = (0.5, 0.75, 1.25, 1.5)
TURNS_MOST: Final = 2
_SAME: Final = 0.01
"""Of a rate: models that bring equal work have no other mix when turned."""

BURST: Final = (1.75, 0.25, 2.0)
"""Factors of the mean rate in and between bursts, and the mean seconds that either lasts."""

Says = Callable[[Floats], Sequence[float]]
"""An action row for a state: [state_width] -> [action_width]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """How long a policy is looked at, per load; a step is a second of the device."""

    arrivals: int = 8  # on which policy and best seed are compared
    steps: int = 10
    choosing_arrivals: int = 2  # on which the best seed is chosen
    choosing_steps: int = 5

    def __post_init__(self) -> None:
        assert self.arrivals > 1 and min(self.steps, self.choosing_arrivals, self.choosing_steps) > 0


def held_out(problem: Problem, make: Callable[[Mapping[str, Process]], MakeDevice]) -> dict[str, Problem]:
    """The problem under other loads, by name. `make` gives devices where such tasks arrive.

    Rates of all models times each of `FACTORS`; the models' shares of the work turned, so that each has that
    of the next, where that is another mix; and every model in bursts of its own, so that rates and mix change
    within an episode. Arrivals are Poisson.
    """
    rates = problem.arrivals_per_s
    loads = {f"rates x{factor:g}": tuple(factor * rate for rate in rates) for factor in FACTORS}
    for turn in range(1, min(len(rates) - 1, TURNS_MOST) + 1):
        other = turned(rates, problem.service_s, turn)
        if any(abs(one - own) > _SAME * own for one, own in zip(other, rates, strict=True)):
            loads[f"mix turned by {turn}"] = other
    names = [model.name for model in problem.template.models]
    found: dict[str, Problem] = {}
    for load, per_s in loads.items():
        steady = {name: Poisson(rate_per_s=rate) for name, rate in zip(names, per_s, strict=True)}
        found[load] = replace(problem, arrivals_per_s=per_s, make_device=make(steady))
    on, off, mean_s = BURST
    bursts = {
        name: Bursty(on_rate_per_s=on * rate, off_rate_per_s=off * rate, mean_on_s=mean_s, mean_off_s=mean_s)
        for name, rate in zip(names, rates, strict=True)
    }
    found["bursts"] = replace(problem, make_device=make(bursts))
    return found


def turned(rates: Sequence[float], service_s: Sequence[float], turn: int) -> tuple[float, ...]:
    """Rates with which each model brings the work that the one `turn` places behind it brought. [W]"""
    work = [rate * one_s for rate, one_s in zip(rates, service_s, strict=True)]
    return tuple(work[(at + turn) % len(work)] / one_s for at, one_s in enumerate(service_s))


def load_outcome(
    load: str, problem: Problem, policy: MaddpgCheckpoint, settings: CheckSettings
) -> LoadOutcome:
    """What the policy and the best seed do under one load."""
    table = problem.table()
    best = _best_seed(problem, table, policy.book, settings)
    best_row = seeds(problem.space)[best]

    def says(state: Floats) -> tuple[float, ...]:
        return clipped_row(policy.network.actions(state))

    paired = range(PAIRED_SEED, PAIRED_SEED + settings.arrivals)
    ours = [_episode(problem, table, policy.book, says, seed, settings.steps) for seed in paired]
    theirs = [
        _episode(problem, table, policy.book, _always(best_row), seed, settings.steps) for seed in paired
    ]
    met = [state for _, states in (*ours, *theirs) for state in states]
    return LoadOutcome(
        load=load,
        seed=best,
        policy=tuple(score for score, _ in ours),
        best_seed=tuple(score for score, _ in theirs),
        actions=np.array([says(state) for state in met], np.float32),
    )


def _best_seed(problem: Problem, table: ScheduleTable, book: Book, settings: CheckSettings) -> str:
    """The seed that a training would hold as the best plan, by name."""
    held, best = Candidates(problem.space), ""
    for name, row in seeds(problem.space).items():
        episodes = [
            _episode(problem, table, book, _always(row), seed, settings.choosing_steps)[0]
            for seed in range(CHOOSING_SEED, CHOOSING_SEED + settings.choosing_arrivals)
        ]
        if held.judged(row, score_of(episodes)):
            best = name
    return best


def _always(row: tuple[float, ...]) -> Says:
    return lambda state: row


def _episode(
    problem: Problem, table: ScheduleTable, book: Book, says: Says, seed: int, steps: int
) -> tuple[Score, list[Floats]]:
    """The score of `steps` steps, and the states between them.

    The first step, when queues are empty and nothing is in flight, does not count.
    """
    space = problem.space
    environment = Environment(problem, table, MaddpgSettings(), seed, thorough=True)
    done: list[EnvironmentStep] = []
    states: list[Floats] = []
    for _ in range(steps + 1):
        row = says(environment.state)
        _bring(table, book, combine_blocks(space, row[space.num_models :]).combined)
        done.append(environment.step(row))
        states.append(environment.state)
    windows = [step.window for step in done[1:] if step.window is not None]
    return figures_of(windows, problem.service_s), states


def _bring(table: ScheduleTable, book: Book, combined: Sequence[tuple[Member, ...]]) -> None:
    """Have the table know the book's schedules of these combined blocks."""
    for members in combined:
        key = table.blocks.key(members)
        schedule = book.get(key)
        if key in table.entries or not isinstance(schedule, StageSchedule):
            continue
        costs = table.costs.for_members(table.blocks.parts(members), batches=table.blocks.batches(members))
        table.put({key: ScheduleEntry(schedule, costs.schedule_s(schedule))})
