"""The order of a training, whoever does the work; and going on where it was interrupted."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from stageloom.planner.learning.maddpg import train as training
from stageloom.planner.learning.maddpg.candidates import Candidates, seeds
from stageloom.planner.learning.maddpg.course import (
    ALONE,
    FRESH_SEED,
    UNTRAINED,
    VALIDATION_SEED,
    TrainingCourse,
)
from stageloom.planner.learning.maddpg.learner import Learner
from stageloom.planner.learning.maddpg.settings import Start, Superblocks
from stageloom.planner.learning.maddpg.train import train
from stageloom.planner.learning.maddpg.work import Collect, Evaluate, Weights, Work, collect, run
from stageloom.planner.tournament.score import Score, best_of
from stageloom.shared.errors import DecodeError
from stageloom.shared.plan import Member
from stageloom.shared.policy.maddpg.actions import combine_blocks
from stageloom.shared.policy.maddpg.network import MaddpgNetwork
from stageloom.shared.policy.maddpg.space import Space
from tests.learning.maddpg.toy import SMALL, problem
from tests.learning.pools import InlinePool
from tests.policy.maddpg.cases import space

PROBLEM = problem()


def worth(throughput: float, p99: float) -> Score:
    rest = {"utilisation": 1.0, "queue_variance": 0.0, "variance_growth": 0.0, "met": 1.0}
    return Score(throughput_per_s=throughput, p99_s=p99, **rest)


def followed(course: TrainingCourse, steps: int) -> list[Work]:
    """One worker does so many pieces of work."""
    done: list[Work] = []
    while len(done) < steps and (work := course.next_work()) is not None:
        course.take(work, run(PROBLEM, course.table, course.settings, work))
        done.append(work)
    return done


def test_rivals_plans_are_judged_first_and_the_best_is_where_the_actors_start() -> None:
    course = TrainingCourse(PROBLEM, SMALL, seed=0)
    works = followed(course, len(course.seeds) + 1)
    assert all(isinstance(work, Evaluate) and work.row for work in works[:-1])
    assert isinstance(works[-1], Evaluate) and works[-1].weights is not None
    best = course.candidates.best
    assert best is not None
    network = MaddpgNetwork(course.learner.policy_weights(), PROBLEM.space.agents)
    said = network.actions(np.zeros(PROBLEM.space.state_width, np.float32)).tolist()
    wanted = combine_blocks(PROBLEM.space, best[0][2:]).combined
    assert combine_blocks(PROBLEM.space, said[2:]).combined == wanted


def test_without_seeds_the_untrained_actors_plan_is_judged_first_and_no_rivals() -> None:
    settings = replace(SMALL, seeded=False, start=Start.PAPER)
    course = TrainingCourse(PROBLEM, settings, seed=0)
    works = followed(course, 1000)
    plans = [work.row for work in works if isinstance(work, Evaluate) and work.row]
    said = MaddpgNetwork(Learner(PROBLEM.space, settings, 0).policy_weights(), PROBLEM.space.agents)
    assert list(plans[0]) == pytest.approx(said.actions(np.zeros(PROBLEM.space.state_width, np.float32)))
    assert not set(seeds(PROBLEM.space).values()) & set(plans)
    assert course.done and set(course.rivals_worth) == {UNTRAINED}


def test_actors_that_never_learn_are_validated_and_stay_as_they_were() -> None:
    course = TrainingCourse(PROBLEM, replace(SMALL, updates_per_transition=0.0), seed=0)
    works = followed(course, 1000)
    policies = [work.weights for work in works if isinstance(work, Evaluate) and work.weights is not None]
    assert len(course.history) > 2 and course.learner.updates == 0
    assert all((weights[name] == policies[0][name]).all() for weights in policies for name in weights)


def test_uniform_exploration_is_all_there_is_before_the_first_update_and_falls_to_nothing() -> None:
    settings = replace(SMALL, seeded=False, start=Start.PAPER, uniform_share=0.8)
    works = [work for work in followed(TrainingCourse(PROBLEM, settings, seed=0), 1000)]
    shares = [work.uniform for work in works if isinstance(work, Collect)]
    warming = settings.learn_from // settings.episode_steps
    assert shares[:warming] == [0.8] * warming
    assert shares[warming:] == sorted(shares[warming:], reverse=True) and shares[-1] == 0.0


def test_uniform_actions_are_spread_over_all_there_are() -> None:
    row = (0.5,) * PROBLEM.space.action_width
    work = Collect(number=0, seed=4, steps=60, rows=(row,), uniform=1.0)
    settings = replace(SMALL, superblocks=Superblocks.PAPER)  # what is asked for is what is stored
    actions = collect(PROBLEM, PROBLEM.table(), settings, work).actions
    assert np.abs(actions.mean(axis=0) - 0.5).max() < 0.15
    assert np.abs(actions.std(axis=0) - 12**-0.5).max() < 0.1
    some = collect(PROBLEM, PROBLEM.table(), settings, replace(work, uniform=0.5)).actions
    assert 15 < (some == np.array(row, np.float32)).all(axis=1).sum() < 45


@pytest.mark.promise("known-optimum-learned-blocks")
def test_validation_training_and_the_last_look_use_different_arrivals() -> None:
    course = TrainingCourse(PROBLEM, SMALL, seed=3)
    works = followed(course, 1000)
    training = {work.seed for work in works if isinstance(work, Collect)}
    fresh = {
        seed for work in works if isinstance(work, Evaluate) and "fresh" in work.name for seed in work.seeds
    }
    other = {
        seed
        for work in works
        if isinstance(work, Evaluate) and "fresh" not in work.name
        for seed in work.seeds
    }
    assert course.done
    assert len(training) == SMALL.transitions / SMALL.episode_steps
    assert min(fresh) >= FRESH_SEED > max(other) and min(other) >= VALIDATION_SEED > max(training)


def test_the_best_plan_stays_level_with_the_most_throughput_met_interrupted_or_not() -> None:
    first = Candidates(PROBLEM.space)
    rows = list(seeds(PROBLEM.space).values())
    assert first.judged(rows[0], worth(100.0, 1.0)) and first.judged(rows[1], worth(99.6, 0.9))
    second = Candidates(PROBLEM.space)
    second.restore(first.saved())
    for candidates in (first, second):
        assert not candidates.judged(rows[2], worth(99.2, 0.8))
        assert candidates.best is not None and candidates.best[0] == rows[1]


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_best_policy_stays_level_with_the_most_throughput_met(interrupted: bool) -> None:
    """Each validated policy serves 0.4 % less than the one before, at a shorter p99."""
    course = TrainingCourse(PROBLEM, SMALL, seed=0)
    policies: list[Weights] = []
    while len(policies) < 3:
        work = course.next_work()
        assert work is not None
        done = run(PROBLEM, course.table, course.settings, work)
        if isinstance(work, Evaluate) and work.weights is not None:
            at = len(policies)
            policies.append(work.weights)
            done = replace(done, found=worth(100.0 - 0.4 * at, 1.0 - 0.1 * at))
        course.take(work, done)
        if interrupted:
            course = TrainingCourse.restored(PROBLEM, course.state())
    assert course.policy == worth(99.6, 0.9)
    assert all((course.policy_weights[name] == policies[1][name]).all() for name in policies[1])


@pytest.mark.promise("interrupted-training-goes-bit")
def test_an_interrupted_training_goes_on_bit_by_bit() -> None:
    """The state is taken in the middle: between two episodes, and again with a validation waiting."""
    whole = TrainingCourse(PROBLEM, SMALL, seed=0)
    followed(whole, 1000)
    for stop_after in (len(whole.seeds) + 4, len(whole.seeds) + 6):
        first = TrainingCourse(PROBLEM, SMALL, seed=0)
        followed(first, stop_after)
        second = TrainingCourse.restored(PROBLEM, first.state())
        followed(second, 1000)
        assert second.history == whole.history
        assert second.fresh == whole.fresh
        assert second.candidates.saved() == whole.candidates.saved()
        assert second.table.saved() == whole.table.saved()
        for name, values in whole.policy_weights.items():
            assert (second.policy_weights[name] == values).all()


def test_work_in_flight_is_handed_out_again_after_a_restart() -> None:
    course = TrainingCourse(PROBLEM, SMALL, seed=0)
    course.next_work()
    lost = course.next_work()
    again = TrainingCourse.restored(PROBLEM, course.state())
    works = followed(again, 2)
    assert lost is not None and [work.number for work in works] == [1, lost.number]
    followed(again, 1000)
    assert again.done and again.transitions == SMALL.transitions


@pytest.mark.promise("interrupted-training-goes-bit")
def test_a_killed_workers_episode_is_collected_by_another_and_a_late_result_counts_once() -> None:
    course = TrainingCourse(PROBLEM, SMALL, seed=0)
    followed(course, len(course.seeds) + 1)
    one, other = course.next_work(), course.next_work()
    assert isinstance(one, Collect) and isinstance(other, Collect) and one.seed != other.seed
    table = PROBLEM.table()
    result = run(PROBLEM, table, SMALL, one)
    course.lost(one)
    course.take(one, result)  # late: the work was given up
    assert course.transitions == 0
    course.take(other, run(PROBLEM, table, SMALL, other))
    course.take(other, run(PROBLEM, table, SMALL, other))
    assert course.transitions == SMALL.episode_steps
    followed(course, 1000)
    assert course.done and course.transitions == SMALL.transitions


def test_a_stop_before_anything_is_known_still_ends_with_a_plan() -> None:
    course = TrainingCourse(PROBLEM, SMALL, seed=0)
    course.stop()
    followed(course, 1000)
    assert course.done and course.plan_worth is not None and course.policy_worth is not None


def test_a_training_out_of_time_keeps_the_best() -> None:
    now = iter(range(10_000))
    found = train(PROBLEM, SMALL, 0, clock=lambda: float(next(now)), budget_s=45.0)
    assert found.ended == "time" and found.transitions < SMALL.transitions
    assert found.plan_worth.throughput_per_s > 0.0


def test_a_training_that_goes_on_counts_the_seconds_of_the_run_before() -> None:
    """30 of its 45 s are spent: what is left is enough for half as much at the most."""
    now = iter(range(10_000))
    found = train(PROBLEM, SMALL, 0, clock=lambda: float(next(now)), budget_s=45.0, spent_s=30.0)
    now = iter(range(10_000))
    whole = train(PROBLEM, SMALL, 0, clock=lambda: float(next(now)), budget_s=45.0)
    assert found.train_s > 45.0 and found.transitions < whole.transitions


def test_a_run_that_had_too_little_time_goes_on_when_it_is_given_more() -> None:
    """Its time is up with the first rival's plan; with the second, under way by then, the policy is there."""

    class Two(InlinePool):
        workers = 2

    kept: list[bytes] = []
    first = train(PROBLEM, SMALL, 0, clock=lambda: 0.0, budget_s=-1.0, save=kept.append, pool=Two())
    assert first.ended == "time" and len(first.history) == 1
    found = train(PROBLEM, SMALL, 0, clock=lambda: 0.0, state=kept[-1] if kept else None)
    assert found.ended == "done" and found.transitions == SMALL.transitions


def test_ctrl_c_keeps_the_best() -> None:
    def pressed(progress: object) -> None:
        raise KeyboardInterrupt

    found = train(PROBLEM, SMALL, 0, clock=lambda: 0.0, on_progress=pressed)
    assert found.ended == "interrupted" and found.transitions == 0


def test_ctrl_c_during_the_last_look_keeps_the_best_and_a_second_one_does_not_wait() -> None:
    """The time is up, which the operator need not know; 1. pressed once: the last look goes on; 2. again."""

    def pressed(times: int) -> Callable[[TrainingCourse], None]:
        left = iter(range(times))

        def told(course: TrainingCourse) -> None:
            if course.stopped and next(left, None) is not None:
                raise KeyboardInterrupt

        return told

    found = train(PROBLEM, SMALL, 0, clock=lambda: 0.0, budget_s=-1.0, on_result=pressed(1))
    assert found.ended == "interrupted" and found.plan_worth.throughput_per_s > 0.0
    with pytest.raises(KeyboardInterrupt):
        train(PROBLEM, SMALL, 0, clock=lambda: 0.0, budget_s=-1.0, on_result=pressed(2))


def test_the_last_look_waits_for_plans_and_policies_that_could_be_the_best_yet() -> None:
    """1. Two workers evaluate plans; 2. time is up and one is done; 3. the other one's plan is better."""
    course = TrainingCourse(PROBLEM, SMALL, seed=0)
    one, other = course.next_work(), course.next_work()
    assert isinstance(one, Evaluate) and isinstance(other, Evaluate)
    course.stop()
    found = run(PROBLEM, course.table, SMALL, one)
    assert isinstance(found.found, Score)
    course.take(one, found)
    assert course.next_work() is None and not course.settled
    better = replace(found.found, throughput_per_s=2.0 * found.found.throughput_per_s)
    course.take(other, replace(found, found=better))
    last = followed(course, 1000)
    assert course.done and course.candidates.best is not None
    rows = [work.row for work in last if isinstance(work, Evaluate) and work.row]
    assert rows == [other.row, course.seeds[ALONE], other.row], "the best plan, and as the best rival's"
    assert course.candidates.best[0] == other.row


def test_the_last_look_sees_the_schedules_that_were_searched_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    monkeypatch.setattr(training, "polish", lambda *_: happened.append("polished"))

    def told(course: TrainingCourse) -> None:
        happened.extend(name for name in course.fresh if name not in happened)

    found = train(PROBLEM, SMALL, 0, clock=lambda: 0.0, on_result=told)
    assert found.ended == "done"
    assert happened[:3] == ["polished", "fresh plan", "fresh policy"]


def test_rivals_are_judged_on_the_arrivals_that_judge_what_was_learned() -> None:
    """The policy's ratio is over every block alone; the arrivals that chose say nothing of it."""
    course = TrainingCourse(PROBLEM, SMALL, seed=0)
    works = [work for work in followed(course, 1000) if isinstance(work, Evaluate)]
    last = {work.name: work.seeds for work in works if work.name.startswith("fresh")}
    assert {"fresh plan", "fresh policy", f"fresh {ALONE}"} <= set(last) and len(set(last.values())) == 1
    scores = [course.seeds_worth[name] for name in course.seeds_worth]
    assert set(course.rivals_worth) == {ALONE, list(course.seeds_worth)[best_of(scores)]}
    assert all(score == course.fresh[f"fresh {name}"] for name, score in course.rivals_worth.items())


def test_bytes_that_are_no_state_are_refused() -> None:
    with pytest.raises(DecodeError, match="begin a new training"):
        TrainingCourse.restored(PROBLEM, b"nothing")


def test_each_promising_plan_is_looked_at_once() -> None:
    course = TrainingCourse(PROBLEM, SMALL, seed=0)
    followed(course, len(course.seeds) + 8)
    kept = course.learner.replay.everything()
    rewards = np.arange(len(kept), dtype=np.float32)
    candidates = Candidates(PROBLEM.space)
    first = list(candidates.promising(kept, rewards, 3))
    assert first[0] == tuple(kept.actions[-1].tolist())
    assert not set(first) & set(candidates.promising(kept, rewards, 3))


def test_seeds_are_the_rivals_ways_to_combine() -> None:
    """Three models of 3, 1 and 2 blocks, H = 2; blocks by the share of their model that is before them."""
    where = space(3, 1, 2)
    found = {
        name: {tuple(f"{m.model}.{m.block}" for m in row) for row in _combined(where, actions)}
        for name, actions in seeds(where).items()
        if actions[0] == 0.0
    }
    assert found["alone, fast"] == {("0.0",), ("0.1",), ("0.2",), ("1.0",), ("2.0",), ("2.1",)}
    assert found["aligned, fast"] == {("0.0", "1.0"), ("2.0",), ("0.1", "2.1"), ("0.2",)}
    assert found["abreast, fast"] == {("0.0", "2.0"), ("0.1", "1.0"), ("0.2", "2.1")}
    assert found["pipelined, fast"] == {("0.0", "0.1"), ("0.2",), ("1.0",), ("2.0", "2.1")}
    assert "replicas, fast" not in found  # the same as alone


def test_replicas_of_a_block_are_combined_where_there_are_some() -> None:
    """Three blocks abreast would mix those of a model; a replica's i-th block runs with the other's."""
    where = space(2, 2, replicas=2, members_max=3)
    found = {name: _combined(where, actions) for name, actions in seeds(where).items()}
    assert [{member.block for member in row} for row in found["replicas, fast"]] == [{0}, {0}, {1}, {1}]
    assert all(len({member.model for member in row}) == 1 for row in found["replicas, fast"])


def _combined(where: Space, actions: tuple[float, ...]) -> tuple[tuple[Member, ...], ...]:
    return combine_blocks(where, actions[where.num_models :]).combined
