"""Reports of steps with very many groups: they end neither a lane nor the process."""

import pytest

from stageloom.edge_agent.executor.base import GroupTime, StepResult
from stageloom.edge_agent.worker import messages
from stageloom.edge_agent.worker.channel import Channel, channel_pair
from stageloom.edge_agent.worker.messages import MAX_GROUPS, MAX_MESSAGE_BYTES, StepTraced, WorkerConfig
from stageloom.edge_agent.worker.process import EngineProcess, traced
from stageloom.shared.engine.steps import PlanKey, ProgramKey, Step
from stageloom.shared.ids import StepId

STEP = Step(StepId(1), 0, ProgramKey(PlanKey(1), 0, 1, (1,)), (), ())
GROUPS = tuple(GroupTime(item, 0, item / 3, item / 2) for item in range(10_000))


@pytest.mark.parametrize(
    ("groups", "told", "whole"), [(128, 128, True), (129, 128, False), (10_000, 128, False)]
)
def test_a_traced_step_tells_the_groups_that_a_row_holds_and_is_whole_only_with_all_of_them(
    groups: int, told: int, whole: bool
) -> None:
    report = traced(STEP, StepResult(0.0, 1.0, groups=GROUPS[:groups]), whole=True)
    assert (len(report.groups), report.whole) == (told, whole)
    assert len(messages.encode(report)) < MAX_MESSAGE_BYTES
    assert MAX_GROUPS == 128


def test_a_trace_that_fits_no_message_is_logged_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    (agent, engine), (ends_here, ends_there) = channel_pair(), channel_pair()
    here = Channel(agent)
    process = EngineProcess(Channel(engine), Channel(ends_there), WorkerConfig())
    process.report(StepTraced(1, 0, 1, 0, 1, 0.0, 1.0, GROUPS))
    process.report(messages.Drained())
    received = here.receive()
    assert received is not None and messages.decode_report(received[0]) == messages.Drained()
    assert "a StepTraced of" in caplog.text and "is left out" in caplog.text
    for sock in (agent, engine, ends_here, ends_there):
        sock.close()
