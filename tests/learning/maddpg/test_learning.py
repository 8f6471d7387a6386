"""What is known to be best is found: a bandit's optimum, and whether combining pays on a device."""

from dataclasses import replace

import numpy as np
import pytest

from stageloom.planner.learning.maddpg.course import TrainingCourse
from stageloom.planner.learning.maddpg.learner import Learner
from stageloom.planner.learning.maddpg.replay import Floats, Transitions
from stageloom.planner.learning.maddpg.settings import MaddpgSettings, Scale, Start
from stageloom.planner.learning.maddpg.train import train
from stageloom.planner.learning.maddpg.work import Collect, collect, run
from stageloom.shared.plan import Member
from stageloom.shared.policy.maddpg.checkpoint import decode
from stageloom.shared.policy.maddpg.decide import replanned
from stageloom.shared.policy.maddpg.network import MaddpgNetwork
from tests.learning.maddpg.toy import GRAPHS, SMALL, problem
from tests.policy.maddpg.cases import space

BANDIT = MaddpgSettings(
    gamma=0.0,
    learn_from=200,
    batch=32,
    learning_rate=3e-3,
    actor_learning_rate=1e-3,
    actors=(16, 16),
    critics=(64, 48, 32),
    actor_after=300,
    actor_every=1,
    pull=0.0,
    latency=Scale.PLAIN,
    start=Start.ALONE,
)


def bandit(count: int, best: Floats, random: np.random.Generator) -> Transitions:
    """One state; each agent's latency is the squared distance of its own actions from the best."""
    actions = random.random((count, len(best))).astype(np.float32)
    off = np.square(actions - best)
    figures = np.stack([np.ones(count)] * 3 + [off[:, [0, 2, 3]].mean(1), off[:, [1, 4]].mean(1)], axis=1)
    states = np.zeros((count, space(2, 1).state_width), np.float32)
    return Transitions(states, actions, figures, np.zeros(count), np.ones(count, np.bool_), states)


@pytest.mark.promise("known-optimum-learned-blocks")
def test_a_bandits_known_optimum_is_learned() -> None:
    best = np.array([0.3, 0.7, 0.25, 0.8, 0.6], np.float32)
    learner = Learner(space(2, 1), BANDIT, seed=0)
    learner.add(bandit(400, best, np.random.default_rng(0)))
    learner.update(600)
    network = MaddpgNetwork(learner.policy_weights(), learner.space.agents)
    found = network.actions(np.zeros(learner.space.state_width, np.float32))
    assert np.abs(found - best).max() < 0.12


@pytest.mark.promise("known-optimum-learned-blocks")
@pytest.mark.parametrize(("factor", "members"), [(0.6, 2), (1.6, 1)])
def test_blocks_are_combined_where_that_pays_and_only_there(factor: float, members: int) -> None:
    """Both the best plan and the policy itself; 1.2 device seconds a second are asked of the device."""
    found = train(problem(factor), SMALL, 0, clock=lambda: 0.0)
    assert {len(block.members) for block in found.plan.combined} == {members}
    assert found.ended == "done" and found.transitions == SMALL.transitions
    policy = decode(found.checkpoint)
    made = replanned(policy.space, policy.network, policy.book, found.plan, "toy", GRAPHS, (), ())
    assert {len(block.members) for block in made.combined} == {members}


def test_the_policy_learns_to_combine_from_a_start_that_does_not() -> None:
    """From every block alone, the actors have to move blocks into one interval by equation 4."""
    settings = replace(
        SMALL,
        start=Start.ALONE,
        transitions=240,
        replay=240,
        noise=0.3,
        noise_share=0.5,
        actor_learning_rate=1e-3,
        pull=0.0,
        actor_every=1,
    )
    where = problem(0.3)
    course = TrainingCourse(where, settings, seed=1)
    table = where.table()
    while (work := course.next_work()) is not None and course.transitions < settings.transitions:
        course.take(work, run(where, table, settings, work))
    first, last = course.history[0].policy, course.history[-1].policy
    assert last.throughput_per_s >= first.throughput_per_s
    policy = Collect(number=0, seed=7, steps=1, weights=course.policy_weights)
    row = collect(where, table, settings, policy).actions[0]
    bins = [int(action * 4) for action in row[2:]]
    assert len(set(bins)) < 4


def test_the_papers_superblocks_run_nothing_and_end_no_episode() -> None:
    where = problem()
    settings = MaddpgSettings.paper(step_s=1.0)
    row = (0.0, 0.0, 0.5, 0.5, 0.5, 0.9)
    found = collect(where, where.table(), settings, Collect(number=0, seed=0, steps=3, rows=(row,)))
    assert not found.ran.any() and (found.figures == 0.0).all()
    assert found.actions[0].tolist() == pytest.approx(row)  # as asked for, not as split
    assert (found.following == found.states).all()


def test_what_ran_is_stored_and_not_what_was_asked_for() -> None:
    where = problem()
    row = (0.0, 0.0, 0.6, 0.6, 0.6, 0.9)
    found = collect(where, where.table(), SMALL, Collect(number=0, seed=0, steps=1, rows=(row,)))
    assert found.ran.all() and found.excess.tolist() == [0.25]
    assert found.actions[0].tolist() == pytest.approx((0.0, 0.0, 0.6, 0.6, 0.375, 0.9))


def test_queues_are_carried_over_within_an_episode() -> None:
    """1.6 times slower than the arrivals: what waits grows from step to step."""
    where = problem(1.6)
    together = (0.0, 0.0, 0.1, 0.4, 0.1, 0.4)
    found = collect(where, where.table(), SMALL, Collect(number=0, seed=0, steps=4, rows=(together,)))
    assert list(found.figures[:, 3]) == sorted(found.figures[:, 3])
    assert (found.states[1:] == found.following[:-1]).all()


def test_members_of_one_combined_block_are_named_in_the_plans_order() -> None:
    where = problem()
    table = where.table()
    collect(
        where,
        table,
        SMALL,
        Collect(number=0, seed=0, steps=1, rows=((0.0, 0.0, 0.9, 0.1, 0.8, 0.4),)),
    )
    assert (Member(0, 0, 0), Member(1, 0, 0)) in table.most_used(9)
