"""The agent's wiring: what the engine process reports and nothing else would notice."""

import os
import resource
import signal
from pathlib import Path

import msgspec
import pytest

from stageloom.edge_agent.config import AgentConfig
from stageloom.edge_agent.lifecycle.events import Action
from stageloom.edge_agent.lifecycle.shell import alone
from stageloom.edge_agent.lifecycle.states import PlanRef, RunnablePlan
from stageloom.edge_agent.reporting.status import AgentStatus, task_totals
from stageloom.edge_agent.run import allow_open_files
from stageloom.edge_agent.service import Agent
from stageloom.edge_agent.worker import messages as engine
from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import ArtifactNeed, Origin, ProfileRequest

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


def test_engine_process_that_hangs_before_it_is_ready_is_ended_after_the_time_of_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(AgentConfig(home=str(tmp_path)), lambda plans: (alone(PLAN, plans), ()))
    try:
        assert agent._engine.pid is not None
        os.kill(agent._engine.pid, signal.SIGSTOP)
        with monkeypatch.context() as later:
            later.setattr(agent._lifecycle, "do", lambda actions: None)
            for after_s, lives in ((119.0, True), (121.0, False)):
                now_s = agent._started_s + after_s
                later.setattr(agent.loop, "now", lambda now_s=now_s: now_s)
                agent._tick()
                assert (agent._engine.pid is not None) is lives
    finally:
        agent.loop.call_at(agent.loop.now(), agent.request_stop)
        agent.run()


def test_an_agent_may_open_as_many_files_as_the_system_lets_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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


def test_end_of_the_engine_process_is_told_from_one_at_a_measurement_but_not_beside_a_plan_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(AgentConfig(home=str(tmp_path)), lambda plans: (alone(PLAN, plans), ()))
    told: list[bool] = []

    def exited(how: str, now_s: float, *, measuring: bool) -> list[Action]:
        told.append(measuring)
        return []

    try:
        agent._profiles.wanted(ProfileRequest(1, ArtifactNeed("m", PLAN.ref.digest, 8), 1, 20.0))
        with monkeypatch.context() as played:
            played.setattr(agent._plans, "exited", exited)
            for number in (1, 0):
                agent._on_report(engine.Profiling(1))
                agent._on_report(engine.Profiling(number))
                agent._on_report(engine.Exited(-signal.SIGSEGV))
            for _ in range(3):
                agent._plans._engine.loading[PlanKey(1)] = PLAN
                agent._on_report(engine.Profiling(1))
                agent._on_report(engine.Exited(-signal.SIGSEGV))
            assert agent._profiles.needed() == {PLAN.ref.digest}, "the request is still open"
    finally:
        agent.loop.call_at(agent.loop.now(), agent.request_stop)
        agent.run()
    assert told == [True, *[False] * 4]


def test_no_way_is_measured_while_another_plan_is_on_its_way_or_on_probation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(AgentConfig(home=str(tmp_path)), lambda plans: (alone(PLAN, plans), ()))
    plans, told = agent._plans, list[bool]()
    orders = (plans.verify, plans.stage, plans.activate)
    try:
        with monkeypatch.context() as played:
            played.setattr(agent._lifecycle, "do", lambda actions: None)
            played.setattr(agent._ways, "tick", lambda *, free: told.append(free))
            plans.ready()
            for order in orders:
                order((1, 1), PLAN)
                agent._tick()
                plans.abandon((1, 1))
                agent._tick()
    finally:
        agent.loop.call_at(agent.loop.now(), agent.request_stop)
        agent.run()
    assert told == [False, True] * len(orders)


def test_task_that_ended_as_the_time_to_drain_ran_out_counts_as_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end wakes nobody: it lies there when the loop has come to its end."""
    agent = Agent(AgentConfig(home=str(tmp_path)), lambda plans: (alone(PLAN, plans), ()))
    ends: list[engine.TaskDone] = []
    now_s = agent.loop.now()
    task = agent._ledger.open(owner=1, owner_task=1, model="net", now_s=now_s)

    def take_ends() -> None:
        while ends:
            agent._on_report(ends.pop())

    def run_out() -> None:
        done = engine.TaskDone(task.id, Outcome.COMPLETED, "", "", now_s, now_s, now_s, told=True)
        ends.append(done)
        agent.loop.stop()

    monkeypatch.setattr(agent._engine, "take_ends", take_ends)
    agent.loop.call_at(now_s, run_out)
    agent.run()
    (totals,) = task_totals(agent._ledger)
    assert (totals.completed, totals.failed) == (1, 0)
