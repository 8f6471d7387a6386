"""Training: the same policy for a seed, interrupted or not; equations 7 and 8; lessons that are exact."""

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from stageloom.planner.learning.gpg.curves import to_json, to_svg
from stageloom.planner.learning.gpg.lessons import BlockRows, StateRows, lesson
from stageloom.planner.learning.gpg.losses import Episode, batch_of, imitated, reinforced
from stageloom.planner.learning.gpg.model import GpgModel
from stageloom.planner.learning.gpg.trainer import (
    GpgResult,
    GpgSettings,
    Reward,
    Trainer,
    train,
)
from stageloom.shared.errors import DecodeError, InputError
from stageloom.shared.policy.gpg.checkpoint import decode, encode
from stageloom.shared.search.gpg import policy_stages
from stageloom.shared.search.interface import Limits
from stageloom.shared.search.ios import cheapest_by_state
from tests.learning.cases import block, drawing, models

FEW = GpgSettings(
    seed=5,
    imitation_steps=3,
    episodes=2,
    updates=1,
    blocks_per_update=2,
    validation_blocks=2,
    validate_every=1,
    patience=99,
)
NAMES = {digest: graph.name for digest, graph in models().items()}


def run(settings: GpgSettings = FEW, **more: object) -> GpgResult:
    return train(drawing(), settings, names=NAMES, costs="analytic", **more)  # type: ignore[arg-type]


@pytest.mark.promise("seed-gives-policy-interrupted")
def test_a_seed_gives_one_policy_and_another_seed_another() -> None:
    once, again, other = run(), run(), run(replace(FEW, seed=6, imitation_steps=1, episodes=0))
    assert once.checkpoint == again.checkpoint != other.checkpoint
    assert once.ended == "done" and once.steps == 5


@pytest.mark.promise("seed-gives-policy-interrupted")
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """1. a run is ended by Ctrl-C in the fourth step; 2. it leaves the best so far; 3. the same command ends
    with the policy that an undisturbed run ends with."""
    state = tmp_path / "run.pt"

    def interrupt(trainer: Trainer) -> None:
        if trainer.step == 4:
            raise KeyboardInterrupt

    broken = run(state=state, on_step=interrupt)
    assert broken.ended == "interrupted" and decode(broken.checkpoint).provenance["steps"] == 4
    resumed = run(state=state)
    assert resumed.checkpoint == run().checkpoint
    assert [one.step for one in resumed.history] == [1, 2, 3, 4, 5]


def test_a_state_of_another_run_or_of_none_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "run.pt"
    run(state=state)
    with pytest.raises(InputError, match="other settings"):
        run(replace(FEW, seed=9), state=state)
    state.write_bytes(b"no run")
    with pytest.raises(InputError, match="no training run"):
        run(state=state)


def test_a_run_without_improvement_ends_early() -> None:
    still = replace(FEW, imitation_steps=30, patience=2, learning_rate=1e-12)
    found = run(still)
    assert found.ended == "no better for a while" and found.steps < 10


def test_time_that_is_up_ends_a_run_with_the_best_so_far() -> None:
    found = run(time_limit_s=0.0)
    assert found.ended == "time" and found.steps == 1


def test_the_papers_reward_trains_without_values_to_go_by() -> None:
    paper = replace(FEW, imitation_steps=0, episodes=3, reward=Reward.PAPER, gamma=0.95)
    found = run(paper)
    assert found.steps == 3
    assert decode(found.checkpoint).provenance["settings"]["reward"] == "paper"
    assert "value_tried" in found.history[-1].losses


def test_a_lesson_of_a_small_block_knows_the_exact_worth_of_states_and_actions() -> None:
    graph, costs = block(1)
    stages = policy_stages(graph, costs, Limits(r=3, s=8))
    best_s = cheapest_by_state(stages)[(1 << graph.size) - 1]
    found = lesson(graph, costs, Random(0))
    assert found.worth[0] == pytest.approx(best_s / sum(costs.operators_s))
    per_state: dict[int, list[float]] = {}
    for at, worth in zip(found.judged.tolist(), found.judged_worth.tolist(), strict=True):
        per_state.setdefault(at, []).append(worth)
    for at, worths in per_state.items():
        assert min(worths) == pytest.approx(found.worth[at], rel=1e-5)  # the best action is among them
    assert ((found.action > 0.0) & (found.action < 1.0)).all()


def test_imitation_makes_the_losses_fall() -> None:
    torch.manual_seed(0)
    model = GpgModel()
    lessons = [lesson(*block(members, members), Random(0)) for members in (1, 2)]
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    totals = []
    for _ in range(25):
        optimiser.zero_grad()
        value, actor, critic = imitated(model, lessons)
        total = value + actor + critic
        total.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        totals.append(total.item())
    assert totals[-1] < 0.5 * totals[0]


def one_episode() -> Episode:
    """Sequential, with known rewards."""
    graph, costs = block(1)
    rows = BlockRows.of(graph, costs)
    masks = tuple((1 << count) - 1 for count in range(graph.size, 0, -1))
    reward = -np.array([costs.operators_s[mask.bit_length() - 1] for mask in masks]) / rows.found.total_s
    action = np.full(len(masks), 0.25, np.float32)
    none = np.zeros(0, np.float32)
    return Episode(rows, masks, StateRows.of(rows, masks), action, reward.astype(np.float32), none)


def test_equation_7_pulls_q_towards_the_reward_and_what_follows() -> None:
    """delta = u + gamma q' - q, and nothing follows the last: compared with a computation by hand."""
    torch.manual_seed(1)
    model, target = GpgModel(), GpgModel()
    episode = one_episode()
    _, _, loss = reinforced(model, target, [episode], gamma=0.9, bounded=False)
    batch = batch_of([(episode.block, episode.states)])
    with torch.no_grad():
        seen, seen_then = model.see(batch), target.see(batch)
        follows = target.judge(seen_then, target.act(seen_then), bounded=False).tolist()
        q = model.judge(seen, torch.from_numpy(episode.action), bounded=False).tolist()
    goals = [
        float(reward) + 0.9 * (follows[at + 1] if at + 1 < len(q) else 0.0)
        for at, reward in enumerate(episode.reward)
    ]
    wanted = sum((goal - one) ** 2 for goal, one in zip(goals, q, strict=True)) / len(q)
    assert loss.item() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.promise("learned-policy-features-paper")
def test_equation_7_moves_omega_alone_and_equation_8_theta_alone() -> None:
    torch.manual_seed(1)
    model, target = GpgModel(), GpgModel()
    _, actor, critic = reinforced(model, target, [one_episode()], gamma=1.0, bounded=True)
    critic.backward()  # type: ignore[no-untyped-call]
    moved = {name for name, one in model.named_parameters() if one.grad is not None}
    assert moved == {name for name, _ in model.named_parameters() if name.startswith("critic")}
    model.zero_grad(set_to_none=True)
    actor.backward()  # type: ignore[no-untyped-call]
    moved = {name.split(".")[0] for name, one in model.named_parameters() if one.grad is not None}
    assert moved == {"raw", "g1", "h1", "g2", "h2", "actor"}
    assert all(one.grad is None for one in target.parameters())


@pytest.mark.promise("learned-policy-features-paper")
def test_equation_8_raises_the_critics_value_of_the_action() -> None:
    torch.manual_seed(1)
    model = GpgModel()
    episode = one_episode()
    theta = [one for name, one in model.named_parameters() if not name.startswith("critic")]
    optimiser = torch.optim.SGD(theta, lr=1e-2)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        _, actor, _ = reinforced(model, model, [episode], gamma=1.0, bounded=False)
        actor.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(actor.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


def test_equation_8_moves_nothing_where_the_critic_does_not_look_at_the_action() -> None:
    """dq/dm is 0: what the critic makes of the state does not count."""
    torch.manual_seed(1)
    model = GpgModel()
    with torch.no_grad():
        dict(model.named_parameters())["critic.0.weight"][:, -1] = 0.0
    _, actor, _ = reinforced(model, model, [one_episode()], gamma=1.0, bounded=False)
    actor.backward()  # type: ignore[no-untyped-call]
    assert all(one.grad is None or not one.grad.any() for one in model.parameters())


def test_curves_hold_every_validation() -> None:
    found = run()
    assert to_json(found.history).count('"step"') == len(found.history) == 5
    svg = to_svg(found.history)
    assert svg.startswith("<svg") and svg.count("<polyline") == 1
    assert svg.count("stroke-dasharray") == 1


@pytest.mark.promise("seed-gives-policy-interrupted")
def test_checkpoints_round_trip_and_broken_ones_are_refused() -> None:
    raw = run(replace(FEW, imitation_steps=1, episodes=0)).checkpoint
    assert encode(decode(raw)) == raw
    for broken in (b"", raw[:-1], b"\x80", raw.replace(b"actor.0.bias", b"actor.9.bias")):
        with pytest.raises(DecodeError, match="train it again"):
            decode(broken)
