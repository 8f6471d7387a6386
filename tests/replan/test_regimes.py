"""What a library of regimes answers: distances, the nearest, contradictions, and whose plan runs already."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from stageloom.planner.replan.policy import How, Observation
from stageloom.planner.replan.regimes import (
    ExpectedRegime,
    KnownRegime,
    RegimeRate,
    distance,
    expected_plan,
    has_won,
    known_winner,
    losses,
    rates_of,
    returning_plan,
    winner,
)
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Plan, StepChoice
from stageloom.shared.policy.plain import Load
from tests.policy.test_plain import PLAN, plan_of, with_intervals

NIGHT, DAY = (1.0, 0.5, 0.25), (10.0, 5.0, 2.5)
A = PLAN
B, C = replace(PLAN, lanes=2), replace(PLAN, lanes=3)


def rates(*per_s: float) -> tuple[RegimeRate, ...]:
    return tuple(RegimeRate(name, one, 0.01) for name, one in zip("abc", per_s, strict=True))


def entry(won: Plan, lost: Plan, per_s: tuple[float, ...], at_us: int = 0) -> KnownRegime:
    return KnownRegime(rates(*per_s), won, lost.structure, at_us)


def commit(won: Plan, before: Plan, per_s: tuple[float, ...], at_us: int = 0) -> KnownRegime:
    return replace(entry(won, before, per_s, at_us), replaced=before)


def times(per_s: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(one * factor for one in per_s)


def seen(incumbent: Plan, cause: str, late: tuple[float, ...], usual: tuple[float, ...] = DAY) -> Observation:
    loads = tuple(
        Load(model=name, arrivals_per_s=one, service_s=0.01, queued=0, usual_per_s=two)
        for name, one, two in zip("abc", late, usual, strict=True)
    )
    return cast(Observation, SimpleNamespace(incumbent=incumbent, cause=cause, loads=loads))


def test_loads_lie_as_far_apart_as_their_rates_by_work() -> None:
    assert distance(rates(*DAY), rates(*DAY)) == 1.0
    assert distance(rates(*DAY), rates(*times(DAY, 3.0))) == pytest.approx(3.0)
    assert distance(rates(*times(DAY, 3.0)), rates(*DAY)) == pytest.approx(3.0)
    assert distance(rates(4, 2, 1), rates(1, 2, 4)) == pytest.approx(4 ** (5 / 7))
    assert distance(rates(*DAY)[:2], rates(*DAY)) == math.inf, "other models"
    assert math.isfinite(distance(rates(0, 0, 0), rates(*DAY)))


def test_the_plan_that_won_under_such_a_load_is_known_and_under_no_other() -> None:
    library = [entry(B, A, DAY), entry(A, B, NIGHT)]
    assert winner(library, rates(*times(DAY, 1.2))) is B
    assert winner(library, rates(*times(NIGHT, 0.8))) is A
    assert winner(library, rates(*times(NIGHT, 3.0))) is None
    assert winner([], rates(*DAY)) is None


def test_a_later_winner_takes_the_place_of_the_one_it_beat() -> None:
    assert winner([entry(C, B, DAY), entry(B, A, DAY)], rates(*DAY)) is C


def test_winners_that_never_met_contradict_each_other() -> None:
    assert winner([entry(C, A, DAY), entry(B, A, DAY)], rates(*DAY)) is None
    farther = entry(B, A, times(DAY, 1.4))
    assert winner([entry(C, A, DAY), entry(C, A, DAY), farther], rates(*DAY)) is C, "the two nearest agree"


def test_an_alarm_for_other_arrivals_stands_for_the_usual_ones_and_a_queue_for_those_of_late() -> None:
    loads = seen(A, "regime", NIGHT, DAY).loads
    assert [one.arrivals_per_s for one in rates_of("regime", loads)] == list(DAY)
    assert [one.arrivals_per_s for one in rates_of("variance", loads)] == list(NIGHT)
    unknown = tuple(replace(load, usual_per_s=0.0) for load in loads)
    assert [one.arrivals_per_s for one in rates_of("regime", unknown)] == list(NIGHT)


def test_a_known_winner_is_proposed_with_launch_intervals_for_the_load() -> None:
    slow = with_intervals((900_000, 0, 0))
    found = known_winner(seen(B, "regime", DAY), [entry(slow, B, DAY)])
    assert found is not None and found.how is How.REGIME
    assert found.plan.structure == A.structure
    assert found.plan.models[0].launch_interval_us == 100_000


def test_a_known_winner_that_goes_by_deadlines_without_intervals_gets_none() -> None:
    fast = replace(with_intervals((0, 0, 0)), step_choice=StepChoice.DEADLINE)
    found = known_winner(seen(replace(B, lanes=3), "regime", DAY), [entry(fast, B, DAY)])
    assert found is not None and found.plan is fast


def test_the_plan_that_runs_is_the_answer_to_other_arrivals_that_it_won_under() -> None:
    library = [entry(A, B, DAY)]
    found = known_winner(seen(A, "regime", DAY), library)
    assert found is not None and found.plan is A
    assert known_winner(seen(A, "variance", DAY), library) is None, "it does not cope: look for another"


def test_what_ran_until_other_arrivals_came_returns_when_they_are_gone() -> None:
    library = [entry(B, C, NIGHT), commit(B, A, NIGHT)]
    found = returning_plan(seen(B, "variance", DAY), library)
    assert found is not None and found.how is How.RETURNING and found.plan.structure == A.structure
    assert returning_plan(seen(B, "variance", times(NIGHT, 1.4)), library) is None, "it lost under these"
    assert returning_plan(seen(C, "variance", DAY), library) is None, "another plan runs"
    assert returning_plan(seen(B, "drift", DAY), library) is None, "costs are not what they were"
    assert returning_plan(seen(B, "variance", DAY), [entry(B, A, NIGHT)]) is None, "what was tried never ran"


def test_what_lost_under_these_arrivals_too_does_not_return() -> None:
    library = [commit(B, A, NIGHT), entry(B, A, DAY)]
    assert returning_plan(seen(B, "variance", times(DAY, 1.2)), library) is None
    assert returning_plan(seen(B, "variance", times(DAY, 3.0)), library) is not None


def test_what_lost_to_the_plan_that_runs_under_such_arrivals_is_known_unless_it_has_won_since() -> None:
    library = [entry(B, C, DAY, 4), entry(A, B, DAY, 3), entry(B, A, DAY, 2), entry(B, A, NIGHT, 1)]
    assert losses(seen(B, "variance", DAY), library) == {C.structure: library[:1]}
    assert losses(seen(A, "variance", DAY), library) == {B.structure: library[1:2]}
    assert losses(seen(B, "variance", NIGHT), library) == {C.structure: library[:1]}, (
        "these seconds are a lull"
    )
    assert losses(seen(B, "regime", NIGHT, NIGHT), library) == {A.structure: library[3:]}
    assert losses(seen(B, "drift", DAY), library) == {}, "costs are not what they were"
    assert has_won(seen(B, "variance", DAY), library) and not has_won(seen(C, "variance", DAY), library)


@pytest.mark.parametrize("cause", ["drift", "power_mode"])
def test_where_costs_changed_the_library_says_nothing(cause: str) -> None:
    assert known_winner(seen(B, cause, DAY), [entry(A, B, DAY)]) is None


def test_other_models_have_a_library_of_their_own() -> None:
    other = plan_of()
    assert other.structure == A.structure
    library = [KnownRegime(rates(*DAY)[:2], A, Digest("0" * 64), 0)]
    assert known_winner(seen(B, "regime", DAY), library) is None


def test_the_nearest_plan_found_ahead_is_expected_and_never_the_one_that_runs() -> None:
    known = [
        ExpectedRegime(rates(*times(DAY, 1.3)), C, 0.9, 2),
        ExpectedRegime(rates(*DAY), B, 0.9, 1),
    ]
    found = expected_plan(seen(A, "regime", DAY), known)
    assert found is not None and found.how is How.EXPECTED and found.plan.structure == B.structure
    assert expected_plan(seen(B, "regime", DAY), known) is None
    assert expected_plan(seen(A, "variance", NIGHT), known) is None, "the queues' load is another one"
    assert expected_plan(seen(A, "drift", DAY), known) is None, "costs are not what they were"
    assert expected_plan(seen(A, "regime", DAY), []) is None
