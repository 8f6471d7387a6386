"""An agent without a planner in reach: its state on a disk that fills up."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from stageloom.edge_agent.lifecycle import shell
from stageloom.edge_agent.lifecycle.core import Lifecycle
from stageloom.edge_agent.lifecycle.events import PlanStaged, TimePassed
from stageloom.edge_agent.lifecycle.session import LinkConfig
from stageloom.edge_agent.lifecycle.shell import LifecycleShell, NoLink
from stageloom.edge_agent.lifecycle.statefile import load_state, save_state
from stageloom.edge_agent.lifecycle.states import LinkState, PlanRef, RunnablePlan
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Desired, DeviceState, Origin
from tests.lifecycle import orders

PLAN = RunnablePlan(PlanRef(Digest("a" * 64), Origin.PLANNER), b"a", ())
RECEIVED = LinkState(
    desired=Desired(epoch=1, generation=1, plan_digest=PLAN.ref.digest, plan=b"a"), state=DeviceState.RECEIVED
)


def test_verdicts_bear_the_time_of_a_clock_that_was_set_while_the_agent_ran() -> None:
    plans: Any = orders.RecordingPlans()
    core, nothing, wall_s = Lifecycle(LinkState(), config=LinkConfig(boot=1), plans=plans), None, [7.0]
    agent = LifecycleShell(
        *(core, NoLink("alone", "alone"), None),
        environment="",
        present=frozenset(),
        now=lambda: 5.0,
        wall=lambda: wall_s[0],
    )
    agent.start(nothing)  # type: ignore[arg-type]
    assert core.wall_s == 2.0
    wall_s[0] = 1.7e9
    agent.handle(TimePassed())
    assert core.wall_s == 1.7e9 - 5.0
    agent.stop()


def test_full_disk_holds_a_deployment_back_and_it_goes_on_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "link.state"
    save_state(path, RECEIVED)
    now_s = [100.0]
    plans: Any = orders.RecordingPlans()
    core = Lifecycle(RECEIVED, config=LinkConfig(boot=1, storage_again_s=5.0), plans=plans)
    asked: list[Any] = []

    class Recording(LifecycleShell):
        def carry_on(self, action: Any) -> None:
            asked.append(action)

    agent = Recording(
        core,
        NoLink("not_joined", "not joined"),
        path,
        environment="",
        present=frozenset(),
        now=lambda: now_s[0],
    )
    nothing: Any = None
    agent.start(nothing)
    assert [type(call) for call in asked] == [orders.VerifyPlan]
    agent.do(core.verified((1, 1)))
    assert isinstance(asked[-1], orders.StagePlan)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(shell, "save_state", full)
        agent.do(core.staged(PlanStaged((1, 1))))
        assert isinstance(asked[-1], orders.StagePlan), "nothing is asked for"
        assert "No space left" in agent.status().detail
        assert load_state(path)[0].state is DeviceState.RECEIVED
    now_s[0] += 6.0
    agent.handle(TimePassed())
    assert isinstance(asked[-1], orders.ActivatePlan)
    assert load_state(path)[0].state is DeviceState.PROBATION
    assert agent.status().detail == "not joined"
    agent.stop()
