"""An agent without a planner in reach: its state on a disk that fills up."""

import errno
import os
import select
import time
from pathlib import Path

import pytest

from stageloom.edge_agent.lifecycle import events
from stageloom.edge_agent.lifecycle.core import LinkCore
from stageloom.edge_agent.lifecycle.session import LinkConfig
from stageloom.edge_agent.lifecycle.statefile import load_state, save_state
from stageloom.edge_agent.lifecycle.states import LinkState, PlanRef, RunnablePlan
from stageloom.edge_agent.link import offline
from stageloom.edge_agent.link.offline import OfflineLink
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Desired, DeviceState, Origin

PLAN = RunnablePlan(PlanRef(Digest("a" * 64), Origin.PLANNER), b"a", ())
RECEIVED = LinkState(
    desired=Desired(epoch=1, generation=1, plan_digest=PLAN.ref.digest, plan=b"a"), state=DeviceState.RECEIVED
)


def test_full_disk_holds_a_deployment_back_and_it_goes_on_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "link.state"
    save_state(path, RECEIVED)
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    core = LinkCore(RECEIVED, config=LinkConfig(boot=1, storage_again_s=5.0))
    link = OfflineLink(core, path, environment="", present=frozenset(), why="not joined")
    assert [type(order) for order in link.take()] == [events.VerifyPlan]
    link.tell(events.PlanVerified((1, 1)))
    assert any(isinstance(order, events.StagePlan) for order in link.take())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(offline, "save_state", full)
        link.tell(events.PlanStaged((1, 1)))
        assert not select.select([link.fileno()], [], [], 0)[0], "nothing is ordered"
        assert "No space left" in link.status().detail
        assert load_state(path)[0].state is DeviceState.RECEIVED
    now_s[0] += 6.0
    link.tick()
    assert any(isinstance(order, events.ActivatePlan) for order in link.take())
    assert load_state(path)[0].state is DeviceState.PROBATION
    assert link.status().detail == "not joined"
    link.stop()
