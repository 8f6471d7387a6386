"""The agent's wiring: what the engine process reports and nothing else would notice."""

from pathlib import Path

import msgspec

from stageloom.edge_agent.config import AgentConfig
from stageloom.edge_agent.lifecycle.shell import alone
from stageloom.edge_agent.lifecycle.states import PlanRef, RunnablePlan
from stageloom.edge_agent.reporting.status import AgentStatus
from stageloom.edge_agent.service import Agent
from stageloom.edge_agent.worker import messages as engine
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Origin

PLAN = RunnablePlan(PlanRef(Digest("a" * 64), Origin.LOCAL), b"a", ())


def test_arena_that_the_engine_refuses_is_among_the_problems(tmp_path: Path) -> None:
    agent = Agent(AgentConfig(home=str(tmp_path)), lambda plans: (alone(PLAN, plans), ()))
    try:
        agent._on_report(engine.ArenaRefused(3, "it can shrink"))
        (problem,) = msgspec.json.decode(agent.status(), type=AgentStatus).problems
    finally:
        agent.loop.call_at(agent.loop.now(), agent.request_stop)
        agent.run()
    assert "arena_refused: tasks that name arena 3 are refused: it can shrink" in problem


def test_sign_of_life_of_the_engine_process_is_no_telemetry(tmp_path: Path) -> None:
    agent = Agent(AgentConfig(home=str(tmp_path)), lambda plans: (alone(PLAN, plans), ()))
    try:
        agent._on_report(engine.Stats(1.0, None, 0.0, (), (), sign=True))
        assert agent._load.stats is None
        agent._on_report(engine.Stats(2.0, None, 0.0, (), ()))
        assert agent._load.stats is not None
    finally:
        agent.loop.call_at(agent.loop.now(), agent.request_stop)
        agent.run()
