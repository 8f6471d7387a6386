"""Who takes commands: a lane between two steps, a few at a time, before the core chooses what comes next."""

import os
import threading

from stageloom.edge_agent.executor.base import StepResult
from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.edge_agent.worker.channel import Channel, channel_pair
from stageloom.edge_agent.worker.messages import CancelTask, TaskDone, WorkerConfig, encode
from stageloom.edge_agent.worker.process import EngineProcess
from stageloom.edge_agent.worker.runtime import EngineRuntime
from stageloom.edge_agent.worker.tasks import EngineTask
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import bind
from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.ids import StepId, TaskId
from stageloom.shared.plan import QueuePlan, QueueRule
from stageloom.shared.search.compose import ModelChoice, compose
from tests.executor.models import artifact_of, random_inputs

_TASKS = 6


class _Task(EngineTask):
    """The last answer sets `done`."""

    def __init__(
        self, number: int, model: Artifact, log: list[str], done: threading.Event, *, priority: int = 0
    ) -> None:
        super().__init__(id=TaskId(number), models=(model.graph.name,), nbytes=1, priority=priority)
        self._inputs = random_inputs(model.graph, 1)
        self._log, self._done = log, done

    def inputs(self, model: str) -> object:  # type: ignore[override]
        return self._inputs

    def deliver(self, model: str, outputs: object) -> None: ...

    def answer(self, done: TaskDone) -> None:
        assert done.outcome is Outcome.COMPLETED
        self._log.append(f"answer {self.id}")
        if len(self._log) - self._log.count("take") == _TASKS:
            self._done.set()


class _Commands:
    """Nobody is woken for a command; the first step's end finds what `waiting` holds."""

    def __init__(self, log: list[str]) -> None:
        self._event = os.eventfd(0)
        self._log = log
        self.driver: EngineRuntime | None = None
        self.waiting: list[_Task] = []

    def fileno(self) -> int:
        return self._event

    def take(self) -> None:
        raise AssertionError("no command woke anybody")

    def take_some(self) -> None:
        assert self.driver is not None
        self._log.append("take")
        while self.waiting:
            self.driver.submit(self.waiting.pop())

    def close(self) -> None:
        os.close(self._event)


class _Gated(NullExecutor):
    """Steps end only while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def wait(self, step: StepId) -> StepResult:
        assert self.gate.wait(60.0)
        return super().wait(step)


def test_what_came_during_a_step_competes_for_the_next_one() -> None:
    log: list[str] = []
    done = threading.Event()
    commands, executor, model = _Commands(log), _Gated(), artifact_of("squeezenet")
    driver = commands.driver = EngineRuntime(executor, commands=commands)
    queue = QueuePlan(rule=QueueRule.PRIORITY)
    choice = ModelChoice(name=model.graph.name, artifact=model.digest, graph=model.graph, queue=queue)
    plan = compose([choice], lanes=1)
    driver.load(PlanKey(1), bind(plan, {model.digest: model.graph}), {model.digest: model})
    driver.activate(PlanKey(1))
    for number in range(1, _TASKS):
        driver.submit(_Task(number, model, log, done))
    commands.waiting = [_Task(_TASKS, model, log, done, priority=9)]
    executor.gate.set()
    assert done.wait(60.0)
    driver.close()
    commands.close()
    assert log[0] == "take"
    assert log.index(f"answer {_TASKS}") < log.index(f"answer {_TASKS - 1}")


def test_a_lane_takes_a_few_commands_of_a_flood_and_leaves_the_rest() -> None:
    ours, theirs = channel_pair()
    aside, ends = channel_pair()
    channel = Channel(theirs)
    process = EngineProcess(channel, Channel(ends), WorkerConfig())
    for number in range(20):
        ours.send(encode(CancelTask(TaskId(number))))
    process.take_some()
    left = sum(1 for _ in iter(channel.receive, None))
    assert 0 < left < 20
    for number in range(20):
        ours.send(encode(CancelTask(TaskId(number))))
    process.take()
    assert channel.receive() is None
    for one in (ours, theirs, aside, ends):
        one.close()
