"""A real agent without a planner: a burst on one queue, its alarm, and the plan that the agent makes."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from stageloom import Client
from stageloom.edge_agent.lifecycle.statefile import load_state, save_state
from stageloom.edge_agent.lifecycle.states import LinkState
from stageloom.edge_agent.link.factory import STATE_NAME
from stageloom.shared.artifact import Artifact
from stageloom.shared.messages.control import Autonomy, Desired, DeviceState, Origin
from stageloom.shared.plan import decode_plan
from tests.agent.models import ROW_SHAPE, import_tiny, plan_for
from tests.agent.process import AgentProcess

ROW = np.ones(ROW_SHAPE, np.float32)
INTERVAL_US = 200_000  # five tasks a second, and not one more: the queue of a burst only grows


def committed(home: Path, autonomy: Autonomy) -> Artifact:
    """The state of a device that its planner has left alone with a plan far too slow for what is to come."""
    tiny = import_tiny(home / "artifacts")
    plan = plan_for({"tiny": tiny}, interval_us=INTERVAL_US)
    desired = Desired(
        epoch=1,
        generation=4,
        plan_digest=plan.ref.digest,
        plan=plan.wire,
        artifacts=plan.artifacts,
        autonomy=autonomy,
    )
    state = LinkState(
        last_good=plan, active=plan.ref, desired=desired, state=DeviceState.COMMITTED, environment=""
    )
    save_state(home / STATE_NAME, state)
    return tiny


def alarmed(agent: AgentProcess) -> bool:
    return any("alarm: " in problem for problem in agent.now().problems)


@pytest.mark.more
@pytest.mark.promise("without-planner-device-plans")
def test_a_burst_is_answered_by_a_local_plan_which_a_kill_takes_back(tmp_path: Path) -> None:
    """1. Tasks pile up behind a launch interval that is far too long; the agent may re-plan by itself.
    2. It does: the plan that runs is its own, with a shorter interval, and the burst is served.
    3. kill -9 while that plan is still watched: the next start runs last-known-good and holds it against it.
    """
    committed(tmp_path, Autonomy.FULL)
    with AgentProcess(tmp_path) as agent:
        agent.until_ready()
        with Client(agent.socket) as client:
            futures = [client.submit("tiny", {"input": ROW}) for _ in range(60)]
            found = agent.until(
                lambda status: status.plan is not None and status.plan.origin == "local", "it re-plans"
            )
            assert found.link.desired == "1.4" and alarmed(agent)
            for future in futures:
                future.result(60)
            state, _ = load_state(tmp_path / STATE_NAME)
            assert state.local is not None and state.local.state is DeviceState.PROBATION
            assert found.plan is not None and found.plan.digest == state.local.plan.ref.digest
            made = decode_plan(state.local.plan.wire)
            assert made.models[0].launch_interval_us < INTERVAL_US / 2
            os.kill(agent.process.pid, signal.SIGKILL)
            agent.process.wait(30)
    with AgentProcess(tmp_path) as revived:
        found = revived.until_ready()
        assert found.plan is not None and found.plan.origin == "planner"
        assert found.link.desired_state == "committed"
        state, _ = load_state(tmp_path / STATE_NAME)
        assert state.local is None and len(state.barred) == 1 and state.local_counter == 1
        assert state.active is not None and state.active.origin is Origin.PLANNER


def test_without_the_right_to_re_plan_the_agent_raises_its_alarm_and_serves_on(tmp_path: Path) -> None:
    committed(tmp_path, Autonomy.OFF)
    with AgentProcess(tmp_path) as agent:
        agent.until_ready()
        with Client(agent.socket) as client:
            futures = [client.submit("tiny", {"input": ROW}) for _ in range(20)]
            agent.until(lambda _: alarmed(agent), "the alarm is raised")
            for future in futures:
                future.result(60)
        found = agent.now()
        assert found.plan is not None and found.plan.origin == "planner"
        assert load_state(tmp_path / STATE_NAME)[0].local_counter == 0
