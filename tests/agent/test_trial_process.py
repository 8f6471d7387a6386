"""Trials on real agents: a plan of one session per convolution against one session for the whole chain."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from stageloom import Client
from stageloom.edge_agent.lifecycle.attempts import structure_of
from stageloom.edge_agent.lifecycle.statefile import load_state
from stageloom.edge_agent.lifecycle.states import RunnablePlan
from stageloom.edge_agent.link.factory import STATE_NAME
from stageloom.shared.artifact import Artifact
from stageloom.shared.engine.interval_guard import GuardConfig
from stageloom.shared.engine.trial import TrialConfig
from stageloom.shared.errors import AgentRestarted, TaskRefused
from stageloom.shared.messages.control import Activation, DeviceState
from stageloom.shared.plan import QueuePlan
from tests.agent.models import import_file, plan_for, write_state
from tests.agent.process import AgentProcess
from tests.e2e.networks import reference, rows, write_chain

COARSE = TrialConfig(
    shortest_window_s=0.1,
    gain=0.3,  # far from what two busy cores do to a plan against itself
    guard=10.0,
    brake_age_s=60.0,
    limit_s=20.0,
    timing_s=5.0,
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chain")
    write_chain(folder / "chain.onnx", 1)
    return folder


@pytest.fixture(scope="module")
def chain(library: Path) -> Artifact:
    return import_file(library / "chain.onnx", library)


@pytest.fixture
def home(tmp_path: Path, library: Path, chain: Artifact) -> Path:
    (tmp_path / "home/artifacts").mkdir(parents=True)
    os.link(library / chain.digest, tmp_path / "home/artifacts" / chain.digest)
    return tmp_path / "home"


def fast(chain: Artifact) -> RunnablePlan:
    return plan_for({"chain": chain})


def slow(chain: Artifact) -> RunnablePlan:
    return plan_for({"chain": chain}, partition="base")


class Load:
    """Tasks without a pause; every one must end, with the right output if it completed."""

    def __init__(self, agent: AgentProcess, library: Path) -> None:
        self._given = rows(8)
        session = reference(library / "chain.onnx")
        self._expected = [session.run(None, {"input": row})[0] for row in self._given]
        self._stop = threading.Event()
        self.submitted = self.completed = 0
        self.restarted = 0
        self.problems: list[str] = []
        self._client = Client(agent.socket)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                futures = [self._client.submit("chain", {"input": row}) for row in self._given]
            except TaskRefused:
                continue  # the engine starts again
            self.submitted += len(futures)
            for future, expected in zip(futures, self._expected, strict=True):
                error = future.exception(60)
                if error is None:
                    self.completed += 1
                    if not np.allclose(future.result()["output"], expected, rtol=1e-3, atol=1e-4):
                        self.problems.append("wrong output")
                elif isinstance(error, AgentRestarted | TaskRefused):
                    self.restarted += 1
                else:
                    self.problems.append(str(error))

    def end(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self._client.close()
        assert not self.problems, self.problems[:3]
        assert self.submitted == self.completed + self.restarted


@contextmanager
def under_load(agent: AgentProcess, library: Path) -> Iterator[Load]:
    agent.until_ready()
    load = Load(agent, library)
    try:
        yield load
    finally:
        load.end()


def until_verdict(agent: AgentProcess) -> str:
    verdicts = ("committed", "rejected", "no_gain", "rolled_back")
    return agent.until(lambda s: s.link.desired_state in verdicts, "a verdict").link.desired_state


@pytest.mark.more
@pytest.mark.promise("real-processes-worse-rejected")
def test_worse_plan_is_rejected_under_load_and_no_task_is_lost(
    home: Path, library: Path, chain: Artifact
) -> None:
    write_state(home, good=fast(chain), desired=slow(chain))
    with AgentProcess(home, trial=COARSE) as agent:
        with under_load(agent, library) as load:
            agent.until(lambda s: s.trial and s.trial.pairs >= 2, "the status shows pairs")
            assert until_verdict(agent) == "rejected"
            status = agent.until(lambda s: s.plan and s.plan.digest == fast(chain).ref.digest, "the old plan")
            served = load.completed
            agent.until(lambda _: load.completed > served + 50, "the incumbent keeps serving")
        assert load.restarted == 0
        assert "worse" in status.link.reason
        assert status.trial is None


@pytest.mark.more
@pytest.mark.promise("real-processes-worse-rejected")
def test_plan_against_itself_gives_no_gain(home: Path, library: Path, chain: Artifact) -> None:
    twin = plan_for({"chain": chain}, queue=QueuePlan(max_tasks=200))  # the same steps, another digest
    write_state(home, good=fast(chain), desired=twin)
    settings = TrialConfig(shortest_window_s=0.1, gain=0.5, guard=10.0, brake_age_s=60.0, limit_s=3.0)
    with AgentProcess(home, trial=settings) as agent, under_load(agent, library) as load:
        assert until_verdict(agent) == "no_gain"
    assert load.restarted == 0


@pytest.mark.promise("real-processes-worse-rejected")
def test_better_plan_commits_and_is_proven_from_then_on(home: Path, library: Path, chain: Artifact) -> None:
    """What is proven needs no trial.

    1. A better plan wins its trial and is committed; a restart of the agent changes nothing about it.
    2. The plan before is desired with an order, and committed: no trial.
    3. The better one is desired again: it is proven, so it runs at once, on an idle device too.
    """
    write_state(home, good=slow(chain), desired=fast(chain))
    with AgentProcess(home, trial=COARSE, probation_s=0.2) as agent:
        with under_load(agent, library) as load:
            assert until_verdict(agent) == "committed"
        assert load.restarted == 0
        agent.kill()
    state, _ = load_state(home / STATE_NAME)
    assert [one.structure for one in state.proven] == [structure_of(fast(chain))]

    write_state(home, good=fast(chain), desired=slow(chain), activation=Activation.NOW, proven=state.proven)
    with AgentProcess(home, trial=COARSE, probation_s=0.2) as agent:
        assert until_verdict(agent) == "committed"
    state, _ = load_state(home / STATE_NAME)

    write_state(home, good=slow(chain), desired=fast(chain), proven=state.proven)
    with AgentProcess(home, trial=COARSE, probation_s=0.2, guard=GuardConfig(length_s=0.3)) as agent:
        assert until_verdict(agent) == "committed"
    state, _ = load_state(home / STATE_NAME)
    assert state.way == "proven"
    assert [one.structure for one in state.proven] == [structure_of(fast(chain))], "an order proves nothing"


@pytest.mark.promise("plans-different-executors-run")
@pytest.mark.full
def test_plan_on_another_executor_is_tried_against_the_one_that_runs(
    home: Path, library: Path, chain: Artifact
) -> None:
    other = plan_for({"chain": chain}, executor="torch_cpu")
    write_state(home, good=fast(chain), desired=other)
    with AgentProcess(home, trial=COARSE, probation_s=0.2) as agent:
        with under_load(agent, library) as load:
            agent.until(lambda s: s.trial and s.trial.pairs >= 2, "the status shows pairs")
            verdict = until_verdict(agent)
        assert load.restarted == 0
        status = agent.now()
        assert verdict in ("committed", "rejected", "no_gain")
        assert status.plan is not None
        assert status.plan.digest == (other if verdict == "committed" else fast(chain)).ref.digest


@pytest.mark.more
@pytest.mark.promise("real-processes-worse-rejected")
@pytest.mark.parametrize("victim", ["engine", pytest.param("agent", marks=pytest.mark.full)])
def test_plan_under_which_a_process_dies_is_rejected_and_never_tried_again_at_boot(
    home: Path, library: Path, chain: Artifact, victim: str
) -> None:
    """The engine process crashes in a window of the candidate, or the whole agent is killed there."""
    good, candidate = fast(chain), slow(chain)
    write_state(home, good=good, desired=candidate)
    long = TrialConfig(shortest_window_s=3.0, limit_s=600.0)
    with AgentProcess(home, trial=long) as agent:
        with under_load(agent, library):
            in_window = agent.until(
                lambda s: s.plan and s.plan.digest == candidate.ref.digest, "the candidate runs"
            )
            assert in_window.link.desired_state == "trial"
            assert in_window.engine.pid is not None
            if victim == "engine":
                os.kill(in_window.engine.pid, signal.SIGSEGV)
                assert until_verdict(agent) == "rejected"
                status = agent.until(lambda s: s.ready, "it serves again")
                assert status.plan is not None
                assert status.plan.digest == good.ref.digest
                assert "signal 11" in status.link.reason
            else:
                agent.process.kill()
        agent.kill()
    with AgentProcess(home, trial=long) as again:
        with under_load(again, library) as load:
            again.until(lambda _: load.completed > 50, "it serves")
            status = again.now()
        assert status.link.desired_state == "rejected"
        assert status.plan is not None
        assert status.plan.digest == good.ref.digest
        assert status.trial is None
    state, _ = load_state(home / STATE_NAME)
    assert state.state is DeviceState.REJECTED
    assert state.trial is None


BETWEEN = 850_000
"""Bytes: either plan fits (about 140 and 780 kB are stated), both do not."""


def test_plans_that_do_not_fit_together_are_not_compared(home: Path, chain: Artifact) -> None:
    write_state(home, good=fast(chain), desired=slow(chain))
    with AgentProcess(home, trial=COARSE, memory_bytes=BETWEEN) as agent:
        assert until_verdict(agent) == "rejected"
        status = agent.now()
        assert "both plans need" in status.link.reason
        assert "plan push --now" in status.link.reason
        assert status.ready


@pytest.mark.promise("plans-admitted-memory-they")
def test_ordered_plan_takes_the_place_of_one_that_it_does_not_fit_beside_and_tasks_wait(
    home: Path, library: Path, chain: Artifact
) -> None:
    write_state(home, good=fast(chain), desired=slow(chain), activation=Activation.NOW)
    with AgentProcess(home, trial=COARSE, memory_bytes=BETWEEN, probation_s=0.2) as agent:
        with under_load(agent, library) as load:
            assert until_verdict(agent) == "committed"
            served = load.completed
            agent.until(lambda _: load.completed > served + 20, "the new plan serves")
        status = agent.now()
        assert load.restarted == 0
        assert status.last_pause_ms is not None
        assert status.last_pause_ms > 0
        assert any("swap_pause" in problem for problem in status.problems)


@pytest.mark.promise("plans-admitted-memory-they")
def test_plan_that_does_not_fit_at_all_is_rejected_with_its_size(home: Path, chain: Artifact) -> None:
    write_state(home, good=fast(chain), desired=slow(chain), activation=Activation.NOW)
    with AgentProcess(home, memory_bytes=500_000) as agent:
        assert until_verdict(agent) == "rejected"
        status = agent.now()
        assert "there are 500000 for plans" in status.link.reason
        assert status.ready
