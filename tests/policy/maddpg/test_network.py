"""What the policy sees and says."""

import numpy as np
import pytest

from stageloom.shared.errors import InputError
from stageloom.shared.policy.maddpg.network import MaddpgNetwork, state_of
from stageloom.shared.policy.queues import PolicySample
from tests.policy.maddpg.cases import arrays, space


def test_a_state_stacks_the_newest_samples_as_equation_1_does() -> None:
    where = space(2, 1, samples=2)
    samples = [
        PolicySample(((1, 1), (1,)), (9.0, -9.0)),  # older than the newest two
        PolicySample(((1, 0), (0,)), (0.5, -0.5)),
        PolicySample(((0, 1), (1,)), (2.0, -2.0)),
    ]
    assert state_of(where, samples).tolist() == [1, 0, 0, 0.5, -0.5, 0, 1, 1, 2, -2]


def test_rows_that_are_missing_count_as_idle() -> None:
    where = space(2, 1, samples=2)
    assert state_of(where, [PolicySample(((1, 0), (1,)), (1.0, -1.0))]).tolist() == [0] * 5 + [1, 0, 1, 1, -1]


def test_long_queues_enter_by_their_logarithm_short_ones_in_proportion() -> None:
    where = space(1, 1, samples=1, scale=0.5)
    found = state_of(where, [PolicySample(((0,), (0,)), (0.001, 500.0))])
    assert found[2:].tolist() == pytest.approx([0.002, np.arcsinh(1000.0)], rel=1e-5)


def test_a_sample_of_other_blocks_is_refused() -> None:
    with pytest.raises(InputError, match=r"blocks \(3,\)"):
        state_of(space(2), [PolicySample(((1, 0, 0),), (0.0,))])


def test_each_actor_is_two_hidden_layers_and_a_sigmoid_over_the_whole_state() -> None:
    """Agents with 2, 3 and 1 actions; done layer by layer, one actor at a time."""
    where = space(3, 1)
    numbers = arrays(where)
    state = np.linspace(-1.0, 1.0, where.state_width).astype(np.float32)
    wanted: list[float] = []
    for agent in range(3):
        hidden = state
        for layer in range(3):
            weight, bias = numbers[f"actor.{agent}.{layer}.weight"], numbers[f"actor.{agent}.{layer}.bias"]
            hidden = weight @ np.maximum(hidden, 0.0 if layer else -np.inf) + bias
        wanted += (1.0 / (1.0 + np.exp(-hidden))).tolist()
    found = MaddpgNetwork(numbers, where.agents).actions(state)
    assert where.agents == (2, 3, 1)
    assert found.tolist() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.promise("sure-actor-says-0")
def test_an_actor_that_is_sure_says_0_or_1_without_overflow() -> None:
    where = space(1, 1)
    numbers = {name: np.zeros_like(values) for name, values in arrays(where).items()}
    numbers["actor.0.2.bias"][:] = (-200.0, 200.0)
    state = np.zeros(where.state_width, np.float32)
    assert MaddpgNetwork(numbers, where.agents).actions(state).tolist() == [0.0, 1.0, 0.5, 0.5]
