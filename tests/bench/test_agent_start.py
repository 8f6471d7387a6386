"""How long a comparison waits for its agent, on a clock of the test's."""

import pytest

from stageloom.edge_agent.bench.contestant_process import start_limit_s
from stageloom.edge_agent.bench.rival_settings import NAIVE
from stageloom.edge_agent.bench.stageloom_contestant import AgentSetting, StartPatience


def test_an_agent_that_ends_one_measurement_after_another_is_waited_for_however_long_it_takes() -> None:
    patience = StartPatience(0.0, 240.0)
    now_s = 0.0
    for measuring in range(60, 0, -1):
        now_s += 100.0
        assert not patience.is_over(now_s)
        patience.note(0, measuring, now_s)
    assert not patience.is_over(now_s + 239.0)
    assert patience.is_over(now_s + 240.0)


@pytest.mark.parametrize("left", [(0, 7), (0, 0), None], ids=["measuring", "on trial", "no answer"])
def test_an_agent_that_gets_no_further_is_not_waited_for(left: tuple[int, int] | None) -> None:
    patience = StartPatience(0.0, 240.0)
    for now_s in range(0, 240, 10):
        assert not patience.is_over(now_s)
        if left is not None:
            patience.note(*left, now_s)
    assert patience.is_over(240.0)


def test_what_follows_the_last_measurement_has_time_of_its_own() -> None:
    patience = StartPatience(0.0, 240.0)
    patience.note(1, 0, 0.0)
    patience.note(0, 1, 230.0)  # it serves all models
    patience.note(0, 0, 460.0)
    assert not patience.is_over(699.0)
    assert patience.is_over(700.0)


def test_a_contestant_that_measures_has_no_limit_beside_its_own() -> None:
    assert start_limit_s(AgentSetting("stageloom")) is None
    assert start_limit_s(AgentSetting("stageloom", plan=b"given")) == start_limit_s(NAIVE) == 300.0
