"""Threads inside an operator on the processor: torch keeps their number by the thread that calls it."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from queue import SimpleQueue

import torch

from stageloom.edge_agent.executor.cuda.recipe import BoundProgram
from stageloom.edge_agent.executor.torch.cpu import Border, TorchCpuExecutor
from stageloom.shared.engine.steps import InstanceId, PlanKey
from stageloom.shared.plan import ExecutorOptions, Member
from tests.executor.contract.schedules import StepMaker, plan_of
from tests.executor.drive import load, run
from tests.executor.models import artifact_of, random_inputs


class Noting(TorchCpuExecutor):
    """Notes on how many threads its items run."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def _run_item(self, program: BoundProgram, index: int, slots: Mapping[int, Border]) -> None:
        self.threads.append(torch.get_num_threads())
        super()._run_item(program, index, slots)


def test_steps_of_two_plans_run_on_the_threads_of_their_own_in_one_lane() -> None:
    """Both are loaded by another thread than the lane's, which has computed before the second one came."""
    model = artifact_of("squeezenet")
    executor, counts = Noting(), (1, 3)
    makers: list[StepMaker] = []

    def load_next() -> None:
        options = ExecutorOptions(name="torch_cpu", intra_op_threads=counts[len(makers)])
        plan = plan_of([model], [()], [[Member(0, 0, 0)]])
        key = PlanKey(len(makers))
        makers.append(StepMaker(key, load(executor, replace(plan, executor=options), [model], key)))

    asked: SimpleQueue[int | None] = SimpleQueue()
    ended: SimpleQueue[set[int]] = SimpleQueue()

    def lane() -> None:
        while (number := asked.get()) is not None:
            executor.threads.clear()
            one = InstanceId(1)
            step = makers[number].step(0, {0: (one, 1)})
            run(executor, step, {one: [random_inputs(model.graph, 1)]})
            ended.put(set(executor.threads))

    thread = threading.Thread(target=lane)
    thread.start()
    found = []
    for number in (0, 1, 0):
        if number == len(makers):
            load_next()
        asked.put(number)
        found.append(ended.get(timeout=60))
    asked.put(None)
    thread.join()
    executor.close()
    assert found == [{1}, {3}, {1}]
