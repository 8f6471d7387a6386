"""The learner: equations 3 and 4 by hand, the numpy forward pass, and going on bit by bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stageloom.planner.learning.maddpg.learner import Actors, Learner, Stack, alone_actions
from stageloom.planner.learning.maddpg.replay import Floats, Replay, Transitions
from stageloom.planner.learning.maddpg.settings import MaddpgSettings, Start
from stageloom.shared.errors import DecodeError
from stageloom.shared.policy.maddpg.network import MaddpgNetwork
from stageloom.shared.policy.maddpg.space import Space
from tests.learning.maddpg.toy import SMALL
from tests.policy.maddpg.cases import space

SPACE = space(2, 1)
TINY = replace(SMALL, learn_from=8, replay=16, batch=4, actors=(5, 4), critics=(6, 5, 4), actor_after=0)


def transitions(where: Space, count: int, seed: int = 0) -> Transitions:
    random = np.random.default_rng(seed)

    def single(*shape: int) -> Floats:
        return random.random(shape).astype(np.float32)

    return Transitions(
        states=single(count, where.state_width),
        actions=single(count, where.action_width),
        figures=random.random((count, 3 + where.num_models)),
        excess=np.zeros(count),
        ran=np.ones(count, np.bool_),
        following=single(count, where.state_width),
    )


def learner(settings: MaddpgSettings = TINY, seed: int = 1) -> Learner:
    made = Learner(SPACE, settings, seed)
    made.add(transitions(SPACE, 8))
    return made


def test_critic_targets_are_reward_plus_discounted_worth_of_the_target_policys_actions() -> None:
    """Linear networks of one layer: what a target is can be worked out by hand."""
    made = learner()
    agents, width = len(SPACE.agents), SPACE.state_width + SPACE.action_width
    made.target_actors = Actors(
        SPACE.agents,
        Stack([torch.zeros(agents, SPACE.state_width, 2)], [torch.full((agents, 1, 2), 0.0)]),
    )  # says sigmoid(0) = 0.5 everywhere
    weight = torch.zeros(agents, width, 1)
    weight[:, 0, 0] = 2.0  # the first number of the state
    weight[:, SPACE.state_width, 0] = torch.tensor([1.0, 3.0, 5.0])  # the first action of the launcher
    made.target_critics = Stack([weight], [torch.zeros(agents, 1, 1)])
    following = torch.zeros(1, SPACE.state_width)
    following[0, 0] = 7.0
    found = made.targets(torch.tensor([[1.0, 2.0, 3.0]]), following)
    wanted = [r + 0.95 * (2.0 * 7.0 + k * 0.5) for r, k in ((1.0, 1.0), (2.0, 3.0), (3.0, 5.0))]
    assert found[:, 0, 0].tolist() == pytest.approx(wanted)


def test_a_critic_moves_towards_its_target_and_the_printed_form_away_from_it() -> None:
    """y = 10 everywhere and Q starts below it: y - Q pulls Q up; y times the gradient of Q drives it down."""
    for printed, sign in ((False, 1.0), (True, -1.0)):
        made = learner(replace(TINY, printed_critic=printed))
        kept = made.replay.everything()
        rows = torch.from_numpy(np.concatenate([kept.states, kept.actions], axis=1))
        every = rows.expand(len(SPACE.agents), *rows.shape)
        y = torch.full((len(SPACE.agents), len(kept), 1), 1000.0)
        before = made.critics(every).mean().item()
        made._improve_critics(torch.from_numpy(kept.states), torch.from_numpy(kept.actions), y)
        assert sign * (made.critics(every).mean().item() - before) > 0.0


def test_each_actor_is_moved_by_its_own_critic_and_through_its_own_actions_alone() -> None:
    """Critic 1 likes every action high, the others like nothing: only agent 1 moves, and upwards."""
    made = learner(replace(TINY, pull=0.0))
    agents, width = len(SPACE.agents), SPACE.state_width + SPACE.action_width
    weight = torch.zeros(agents, width, 1)
    weight[1, SPACE.state_width :, 0] = 1.0
    made.critics = Stack([weight], [torch.zeros(agents, 1, 1)])
    states = torch.from_numpy(made.replay.everything().states)
    before = made.actors.rows(states).detach()
    made._improve_actors(states, torch.from_numpy(made.replay.everything().actions))
    moved = (made.actors.rows(states) - before).detach()
    own = slice(SPACE.agents[0], SPACE.agents[0] + SPACE.agents[1])
    assert (moved[:, own] > 0.0).all()
    moved[:, own] = 0.0
    assert (moved == 0.0).all()


def test_the_actors_loss_is_the_mean_over_their_own_updates_however_seldom_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = learner(replace(TINY, actor_every=3))
    monkeypatch.setattr(made, "_improve_critics", lambda *_: 2.0)
    monkeypatch.setattr(made, "_improve_actors", lambda *_: 5.0)
    assert made.update(6) == {"critic": 2.0, "actor": 5.0}
    assert made.update(2) == {"critic": 2.0}, "none of these was the actors'"


def test_targets_follow_slowly() -> None:
    made = learner(replace(TINY, target_rate=0.25))
    for one in made.target_critics.tensors:
        one.zero_()
    made.target_critics.follow(made.critics, 0.25)
    for slow, fast in zip(made.target_critics.tensors, made.critics.tensors, strict=True):
        assert torch.allclose(slow, 0.25 * fast.detach())


@pytest.mark.promise("policy-refuses-was-trained")
def test_the_forward_pass_without_torch_says_what_torch_says() -> None:
    made = learner()
    made.update(20)
    states = transitions(SPACE, 5, seed=9).states
    wanted = made.actors.rows(torch.from_numpy(states)).detach().numpy()
    network = MaddpgNetwork(made.policy_weights(), SPACE.agents)
    for state, row in zip(states, wanted, strict=True):
        assert network.actions(state).tolist() == pytest.approx(row.tolist(), abs=1e-6)


def test_actors_start_at_the_centres_of_the_intervals() -> None:
    made = Learner(SPACE, TINY, seed=1)
    found = made.actors.rows(torch.rand(4, SPACE.state_width)).detach()
    wanted = torch.tensor([max(action, 0.01) for action in alone_actions(SPACE)])
    assert torch.allclose(found, wanted.expand_as(found), atol=0.02)


def test_the_papers_actors_start_in_the_middle() -> None:
    made = Learner(SPACE, replace(TINY, start=Start.PAPER), seed=1)
    assert (made.actors.rows(torch.zeros(1, SPACE.state_width)) - 0.5).abs().max() < 0.2


def test_z_scores_freeze_when_there_is_enough_to_learn_from() -> None:
    made = Learner(SPACE, TINY, seed=1)
    made.add(transitions(SPACE, 7))
    assert made.update(3) == {} and not made.ready
    made.add(transitions(SPACE, 1, seed=1))
    frozen = made.normaliser
    assert frozen is not None
    made.add(transitions(SPACE, 8, seed=2))
    assert made.normaliser is frozen


def test_critics_start_at_the_return_of_the_mean_reward() -> None:
    made = learner()
    wanted = made.rewards(made.replay.everything()).mean(axis=0) / 0.05
    assert made.critics.biases[-1].detach().flatten().tolist() == pytest.approx(wanted.tolist(), rel=1e-5)


def test_a_superblock_of_the_paper_is_worth_nothing() -> None:
    made = learner()
    kept = transitions(SPACE, 2)
    kept.ran[1] = False
    rewards = made.rewards(kept)
    assert (rewards[0] > 0.0).all() and (rewards[1] == 0.0).all()


def test_equal_seeds_give_equal_learners_and_others_do_not() -> None:
    one, same, other = learner(seed=1), learner(seed=1), learner(seed=2)
    for made in (one, same, other):
        made.update(5)
    weights = [made.policy_weights() for made in (one, same, other)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    assert any((weights[0][name] != weights[2][name]).any() for name in weights[0])


@pytest.mark.promise("interrupted-training-goes-bit")
def test_a_restored_learner_goes_on_bit_by_bit() -> None:
    """Networks, targets, optimisers, replay past its wrap, random numbers, z-scores."""
    made = learner()
    made.update(7)
    made.add(transitions(SPACE, 11, seed=3))
    copy = Learner.restored(SPACE, made.state())
    for each in (made, copy):
        each.update(5)
        each.add(transitions(SPACE, 3, seed=4))
        each.update(4)
    assert copy.updates == made.updates == 16
    for name, stack in made._stacks().items():
        for mine, its in zip(stack.tensors, copy._stacks()[name].tensors, strict=True):
            assert torch.equal(mine, its), name
    assert made.random.random() == copy.random.random()


def test_a_short_training_learns_from_half_of_its_transitions_on() -> None:
    assert MaddpgSettings.of_length(40).learn_from == 20
    assert MaddpgSettings.of_length(20_000) == MaddpgSettings(transitions=20_000)


def test_state_of_another_space_or_of_nothing_is_refused() -> None:
    raw = learner().state()
    with pytest.raises(DecodeError, match="agents"):
        Learner.restored(space(1, 1), raw)
    for broken in (b"", raw[:100], b"x" * 1000):
        with pytest.raises(DecodeError, match="begin a new training"):
            Learner.restored(SPACE, broken)


def test_the_replay_keeps_the_newest() -> None:
    replay = Replay(5)
    first, second = transitions(SPACE, 4), transitions(SPACE, 3, seed=1)
    replay.add(first)
    replay.add(second)
    assert len(replay) == 5 and replay.added == 7
    kept = replay.everything().states
    assert (kept[[2, 3]] == first.states[[2, 3]]).all()
    assert (kept[[4, 0, 1]] == second.states).all()


def test_settings_survive_json_and_unknown_ones_are_refused() -> None:
    settings = MaddpgSettings.paper(learning_rate=0.5)
    assert MaddpgSettings.of(settings.plain()) == settings
    with pytest.raises(Exception, match="no setting of a training"):
        MaddpgSettings.of({"learning": 1})
