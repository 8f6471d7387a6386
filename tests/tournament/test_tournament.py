"""Best so far: what it does with candidates, failures, time and luck. Scores are made up."""

import random

import pytest

from stageloom.planner.tournament.score import Score, better
from stageloom.planner.tournament.tournament import (
    RECHECK_S,
    Actions,
    Tournament,
)


def score(throughput_per_s: float, p99_s: float = 0.1) -> Score:
    """No spread, so that 0.5 % decides."""
    return Score(
        throughput_per_s=throughput_per_s,
        throughput_spread=0.0,
        p99_s=p99_s,
        p99_spread=0.0,
        utilisation=0.5,
        utilisation_spread=0.0,
        queue_variance=0.0,
        queue_variance_spread=0.0,
        variance_growth=0.0,
        met=1.0,
    )


def started(
    size: int, *, budget_s: float = 100.0, workers: int = 1, refines: bool = False, fresh_ratio: float = 1.0
) -> Tournament:
    """One that begins at second 1,000."""
    return Tournament(
        size,
        budget_s=budget_s,
        workers=workers,
        began_s=1000.0,
        refines=refines,
        fresh_ratio=fresh_ratio,
    )


def rechecked(made: Tournament, fresh: dict[int, Score]) -> None:
    """The finalists come back, the last one first."""
    for candidate in reversed(fresh):
        assert made.outcome is None
        made.rechecked(candidate, fresh[candidate])


@pytest.mark.promise("contest-answer-before-anything")
@pytest.mark.parametrize("seed", range(20))
def test_the_best_so_far_only_gets_better_whatever_comes_back_in_whatever_order(seed: int) -> None:
    rng = random.Random(seed)
    size, workers = rng.randint(1, 12), rng.randint(1, 4)
    made = started(size, workers=workers)
    running = list(made.begin().start)
    now_s, seen, ending = 1000.0, 0, Actions()
    while running:
        assert len(running) <= workers
        now_s += rng.random()
        candidate = running.pop(rng.randrange(len(running)))
        if rng.random() < 0.2:
            actions = made.failed(candidate, "no plan", now_s)
        else:
            actions = made.was_evaluated(candidate, score(rng.choice([10.0, 20.0]), rng.random()), now_s)
        seen += 1
        assert made.done == seen
        running += actions.start
        ending = actions
    assert seen == size
    for before, after in zip(made.curve, made.curve[1:], strict=False):
        assert better(after.score, before.score) and after.at_s > before.at_s
    for _, one in made.evaluated.values():
        assert not better(one, made.evaluated[made.best][1])
    if made.evaluated:
        assert made.best in ending.recheck and not (ending.start or ending.drop)
    else:
        assert made.outcome is not None


def test_a_chain_of_plans_that_are_each_level_with_the_one_before_loses_no_throughput() -> None:
    """Each 0.4 % slower and shorter in p99: the second is level with the first, the others are not."""
    made = started(4)
    made.begin()
    for candidate, (throughput, p99) in enumerate([(100.0, 1.0), (99.6, 0.9), (99.2, 0.8), (98.8, 0.7)]):
        made.was_evaluated(candidate, score(throughput, p99), 1001.0 + candidate)
    assert [step.candidate for step in made.curve] == [0, 1]


@pytest.mark.promise("contest-answer-before-anything")
def test_there_is_an_answer_before_anything_was_judged() -> None:
    made = started(3)
    assert made.begin() == Actions(start=(0,))
    assert made.best == 0
    assert made.stop(1000.1) == Actions(drop=(0,))
    assert made.outcome is not None
    assert (made.outcome.candidate, made.outcome.unchecked) == (0, "no plan was evaluated in time")


@pytest.mark.promise("contest-answer-before-anything")
def test_one_that_fails_is_told_of_and_skipped() -> None:
    made = started(3)
    made.begin()
    assert made.was_evaluated(0, score(10.0), 1001.0) == Actions(start=(1,))
    assert made.failed(1, "a search process ended with code -9", 1002.0) == Actions(start=(2,))
    assert made.was_evaluated(2, score(20.0), 1003.0) == Actions(recheck=(0, 2))
    assert made.failures == {1: "a search process ended with code -9"}
    rechecked(made, {0: score(10.0), 2: score(20.0)})
    assert made.outcome is not None and made.outcome.candidate == 2


def test_a_first_plan_that_could_not_be_judged_does_not_stand_in_the_way() -> None:
    made = started(2)
    made.begin()
    made.failed(0, "no", 1001.0)
    assert made.was_evaluated(1, score(20.0), 1002.0) == Actions(recheck=(1,))
    rechecked(made, {1: score(5.0)})
    assert made.outcome is not None and made.outcome.candidate == 1


@pytest.mark.promise("contest-answer-before-anything")
def test_a_lucky_winner_loses_on_fresh_arrivals_to_the_first_valid_plan() -> None:
    made = started(2)
    made.begin()
    made.was_evaluated(0, score(10.0), 1001.0)
    made.was_evaluated(1, score(20.0), 1002.0)
    fresh = {0: score(10.0), 1: score(9.0)}
    rechecked(made, fresh)
    assert made.outcome is not None
    assert (made.outcome.candidate, made.outcome.fresh, made.best) == (0, fresh, 1)


def test_a_winner_nobody_could_look_at_again_is_the_answer_and_said_to_be_unchecked() -> None:
    made = started(2)
    made.begin()
    made.was_evaluated(0, score(10.0), 1001.0)
    made.was_evaluated(1, score(20.0), 1002.0)
    made.rechecked(0, score(10.0))
    made.recheck_failed("a worker died")
    assert made.outcome is not None
    assert (made.outcome.candidate, made.outcome.unchecked) == (1, "a worker died")
    assert made.outcome.fresh == {}


@pytest.mark.parametrize(("throughput_per_s", "answer"), [(100.6, 1), (102.0, 2)])
def test_a_neighbour_nobody_could_look_at_again_has_to_be_surely_better_by_what_chose(
    throughput_per_s: float, answer: int
) -> None:
    """0.6 % more throughput may have come by chance."""
    made = started(2, refines=True)
    made.begin()
    made.was_evaluated(0, score(10.0), 1001.0)
    made.was_evaluated(1, score(100.0, 0.1), 1002.0)
    made.was_evaluated(2, score(throughput_per_s, 0.2), 1003.0)
    assert made.best == 2
    made.stop(1004.0)
    made.stop(1005.0)
    assert made.outcome is not None and made.outcome.candidate == answer


def test_a_first_plan_that_was_not_evaluated_is_not_in_the_way_of_one_that_was() -> None:
    made = started(2, workers=2)
    made.begin()
    made.was_evaluated(1, score(20.0), 1001.0)
    assert made.stop(1002.0) == Actions(drop=(0,), recheck=(0, 1))
    made.recheck_failed("a worker died")
    assert made.outcome is not None and made.outcome.candidate == 1


@pytest.mark.promise("contest-answer-before-anything")
def test_the_budget_ends_what_runs_and_leaves_time_for_the_last_look() -> None:
    """A task took 10 s, so the last 10 s of 100 are kept."""
    made = started(9, workers=2)
    assert made.begin() == Actions(start=(0, 1))
    made.was_evaluated(0, score(10.0), 1010.0)
    assert made.ends_s == 1090.0
    assert made.passed(1089.9) == Actions()
    assert made.passed(1090.0) == Actions(drop=(1, 2), recheck=(0,))
    assert made.was_evaluated(1, score(99.0), 1091.0) == Actions(), "it was dropped"
    assert made.best == 0


@pytest.mark.parametrize(("workers", "kept_s"), [(1, 15.0), (2, 10.0), (3, 5.0)])
def test_time_is_left_for_all_finalists_and_all_seeds_of_the_last_look(workers: int, kept_s: float) -> None:
    """A task took 3 s, the last look has five seeds for three, and three plans are looked at again."""
    made = started(2, workers=workers, refines=True, fresh_ratio=5.0 / 3.0)
    made.begin()
    made.was_evaluated(0, score(10.0), 1003.0)
    made.was_evaluated(1, score(20.0), 1003.0 if workers > 1 else 1006.0)
    made.was_evaluated(2, score(30.0), 1006.0 if workers > 1 else 1009.0)
    assert made.best == 2
    assert made.ends_s == pytest.approx(1100.0 - kept_s)
    assert made.passed(made.ends_s).recheck == (0, 1, 2)
    assert made.ends_s == pytest.approx(max(1100.0, 1100.0 - kept_s + RECHECK_S))


def test_a_slow_last_look_may_go_on_for_what_was_kept_for_it() -> None:
    """A task took 60 s of 400, so a quarter is kept; the last task ends later than it may."""
    made = started(2, budget_s=400.0, fresh_ratio=5.0 / 3.0)
    made.begin()
    made.was_evaluated(0, score(10.0), 1060.0)
    assert made.ends_s == 1300.0
    made.was_evaluated(1, score(20.0), 1390.0)
    assert made.ends_s == 1490.0


def test_a_slow_task_keeps_no_more_than_a_quarter_of_the_budget() -> None:
    made = started(3, workers=2)
    made.begin()
    made.was_evaluated(0, score(10.0), 1060.0)
    assert made.ends_s == 1075.0


def test_no_task_begins_when_the_time_is_over() -> None:
    made = started(3)
    made.begin()
    assert made.was_evaluated(0, score(10.0), 1099.0) == Actions(recheck=(0,))


def test_the_last_look_ends_too() -> None:
    made = started(1, budget_s=40.0)
    made.begin()
    made.was_evaluated(0, score(10.0), 1039.0)
    assert made.ends_s == 1039.0 + RECHECK_S
    made.passed(1039.0 + RECHECK_S)
    assert made.outcome is not None and made.outcome.unchecked == "the last evaluation took too long"


def test_stopping_keeps_the_best_so_far_and_stopping_again_skips_the_last_look() -> None:
    made = started(3)
    made.begin()
    made.was_evaluated(0, score(10.0), 1001.0)
    made.was_evaluated(1, score(20.0), 1002.0)
    assert made.stop(1003.0) == Actions(drop=(2,), recheck=(0, 1))
    made.stop(1004.0)
    made.rechecked(0, score(10.0))
    assert made.outcome is not None
    assert made.outcome.candidate == 1
    assert made.outcome.unchecked == "it was stopped before the last evaluation"


# Refinement


def test_neighbours_are_drawn_once_all_that_are_listed_have_begun_by_workers_that_are_free() -> None:
    made = started(3, workers=2, refines=True)
    assert made.begin() == Actions(start=(0, 1))
    refining = [made.refining]
    assert made.was_evaluated(0, score(10.0), 1001.0) == Actions(start=(2,))
    assert [*refining, made.refining] == [False, True]
    assert made.was_evaluated(2, score(20.0), 1002.0) == Actions(refine=(3,)), "1 is still evaluated"
    assert made.was_evaluated(3, score(5.0), 1003.0) == Actions(refine=(4,))
    assert made.failed(1, "no plan", 1004.0) == Actions(refine=(5,))
    assert (made.done, made.left, made.neighbours) == (3, 0, 1)


def test_nothing_is_drawn_before_there_is_a_best() -> None:
    made = started(1, refines=True)
    made.begin()
    assert made.failed(0, "no", 1001.0) == Actions()
    assert made.outcome is not None and made.outcome.unchecked == "no plan was evaluated: no"


def test_it_ends_when_the_best_has_no_neighbour_left_and_none_runs() -> None:
    made = started(1, workers=2, refines=True)
    made.begin()
    assert made.was_evaluated(0, score(10.0), 1001.0) == Actions(refine=(1, 2))
    assert made.none_left(2, 1001.0) == Actions(), "1 still runs, and may become the best"
    assert made.was_evaluated(1, score(20.0), 1002.0) == Actions(refine=(3, 4)), (
        "it has neighbours of its own"
    )
    assert made.none_left(3, 1002.0) == Actions()
    assert made.none_left(4, 1002.0) == Actions(recheck=(0, 1))
    assert made.neighbours == 1


def test_the_budget_ends_the_refinement_while_a_neighbour_is_evaluated() -> None:
    made = started(1, refines=True)
    made.begin()
    made.was_evaluated(0, score(10.0), 1010.0)
    assert made.passed(made.ends_s) == Actions(drop=(1,), recheck=(0,))
    assert made.was_evaluated(1, score(99.0), 1095.0) == Actions()
    assert made.none_left(2, 1095.0) == Actions()


@pytest.mark.promise("contest-answer-before-anything")
@pytest.mark.parametrize(
    ("fresh", "answer"),
    [
        ({0: 10.0, 1: 20.0, 2: 30.0}, 2),
        ({0: 10.0, 1: 20.0, 2: 19.0}, 1),
        ({0: 10.0, 1: 9.0, 2: 9.5}, 0),
        ({0: 10.0, 1: 9.0, 2: 11.0}, 2),
    ],
)
def test_a_neighbour_has_to_win_on_fresh_arrivals_against_the_best_listed_plan_too(
    fresh: dict[int, float], answer: int
) -> None:
    made = started(2, refines=True)
    made.begin()
    made.was_evaluated(0, score(10.0), 1001.0)
    made.was_evaluated(1, score(20.0), 1002.0)
    assert made.was_evaluated(2, score(30.0), 1003.0) == Actions(refine=(3,))
    assert made.stop(1004.0) == Actions(drop=(3,), recheck=(0, 1, 2))
    rechecked(made, {candidate: score(throughput) for candidate, throughput in fresh.items()})
    assert made.outcome is not None and made.outcome.candidate == answer


def test_a_neighbour_that_may_only_be_better_by_chance_leaves_the_answer_to_the_listed_plan() -> None:
    """On fresh arrivals it has less throughput, by what counts as level, and a shorter p99."""
    made = started(2, refines=True)
    made.begin()
    made.was_evaluated(0, score(10.0), 1001.0)
    made.was_evaluated(1, score(100.0), 1002.0)
    made.was_evaluated(2, score(110.0), 1003.0)
    made.stop(1004.0)
    rechecked(made, {0: score(10.0), 1: score(100.0, 0.2), 2: score(99.6, 0.1)})
    assert made.outcome is not None and made.outcome.candidate == 1


def test_a_listed_plan_that_ends_behind_a_neighbour_is_the_best_of_the_list() -> None:
    """The slowest search of the list comes back when a neighbour leads already."""
    made = started(2, workers=2, refines=True)
    made.begin()
    made.was_evaluated(0, score(10.0), 1001.0)
    made.was_evaluated(2, score(30.0), 1002.0)
    made.was_evaluated(1, score(20.0), 1003.0)
    assert [step.candidate for step in made.curve] == [0, 2]
    assert made.stop(1004.0).recheck == (0, 1, 2)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_back_in_whatever_order_it_ends_with_all_that_is_listed(seed: int) -> None:
    """Neighbours run out at random; workers are never more than there are."""
    rng = random.Random(seed)
    size, workers = rng.randint(1, 6), rng.randint(1, 4)
    made = started(size, workers=workers, refines=True)
    waiting, now_s, actions = list(made.begin().start), 1000.0, Actions()
    seen: set[int] = set()
    while waiting:
        now_s += 0.01
        candidate = waiting.pop(rng.randrange(len(waiting)))
        if candidate >= size and rng.random() < 0.3:
            actions = made.none_left(candidate, now_s)
        elif rng.random() < 0.1:
            actions = made.failed(candidate, "no plan", now_s)
        else:
            actions = made.was_evaluated(candidate, score(rng.uniform(1.0, 100.0)), now_s)
        assert not seen & {*actions.start, *actions.refine}
        seen |= {*actions.start, *actions.refine}
        waiting += [*actions.start, *actions.refine]
        assert len(waiting) <= workers
    assert made.left == 0
    assert made.outcome is not None or made.best in actions.recheck
