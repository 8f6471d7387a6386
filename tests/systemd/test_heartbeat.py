"""When the agent says that it lives, and when the planner does."""

from pathlib import Path

import pytest

from stageloom.edge_agent.config import AgentConfig
from stageloom.edge_agent.lifecycle.shell import alone
from stageloom.edge_agent.service import Agent, Watchdog
from stageloom.planner.service import _beat
from stageloom.shared.systemd.notify import Notifier
from tests.agent.test_service import PLAN
from tests.systemd.manager import Manager


def watchdog(address: str = "", watchdog_s: float | None = None, load_limit_s: float = 120.0) -> Watchdog:
    return Watchdog(Notifier(address, watchdog_s), silent_s=30.0, load_limit_s=load_limit_s)


@pytest.mark.parametrize(
    ("quiet_s", "serving", "stalled"),
    [(44.0, True, False), (46.0, True, True), (134.0, False, False), (136.0, False, True)],
)
def test_engine_may_be_quiet_for_as_long_as_a_load_takes_but_not_while_it_serves(
    quiet_s: float, serving: bool, stalled: bool
) -> None:
    assert watchdog().stalled(100.0, 100.0 + quiet_s, serving=serving) is stalled


def test_a_short_load_limit_does_not_make_a_loading_engine_less_patient_than_a_serving_one() -> None:
    assert not watchdog(load_limit_s=1.0).stalled(0.0, 40.0, serving=False)


def test_beats_come_four_times_an_interval_and_stop_with_the_engines_signs(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        heartbeat = watchdog(manager.address, 20.0)
        for tenth in range(0, 1000):
            heartbeat.beat(tenth / 10, 0.0, lambda: "ready", serving=True)
        heartbeat.close()
        said = manager.take()
    assert said == [{"STATUS": "ready"}] + [{"WATCHDOG": "1"}] * 10  # at 0, 5, ..., 45 seconds


def test_status_is_told_when_it_changes_and_without_a_watchdog_too(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        heartbeat = watchdog(manager.address)
        for status in ("waits", "waits", "ready"):
            heartbeat.beat(0.0, 0.0, lambda status=status: status, serving=True)  # type: ignore[misc]
        heartbeat.close()
        assert manager.take() == [{"STATUS": "waits"}, {"STATUS": "ready"}]


@pytest.mark.promise("watchdog-fed-real-progress")
def test_agent_whose_engine_shows_no_sign_feeds_no_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Manager(tmp_path) as manager:
        monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
        monkeypatch.setenv("WATCHDOG_USEC", "1")
        agent = Agent(AgentConfig(home=str(tmp_path / "home")), lambda plans: (alone(PLAN, plans), ()))
        try:
            agent._tick()
            assert {"WATCHDOG": "1"} in manager.take()
            agent._engine.sign_s -= 1000.0
            agent._tick()
            assert {"WATCHDOG": "1"} not in manager.take()
        finally:
            agent.loop.call_at(agent.loop.now(), agent.request_stop)
            agent.run()


class PlayedPlanner:
    def __init__(self, answers: bool) -> None:
        self._answers = answers

    def summary(self) -> str:
        if not self._answers:
            raise TimeoutError
        return "2 devices online"


@pytest.mark.promise("watchdog-fed-real-progress")
@pytest.mark.parametrize("answers", [True, False])
def test_planner_feeds_the_watchdog_only_if_the_devices_thread_answers(tmp_path: Path, answers: bool) -> None:
    with Manager(tmp_path) as manager:
        notifier = Notifier(manager.address, 60.0)
        _beat(PlayedPlanner(answers), notifier)  # type: ignore[arg-type]
        notifier.close()
        expected = [{"STATUS": "2 devices online", "WATCHDOG": "1"}] if answers else []
        assert manager.take() == expected
