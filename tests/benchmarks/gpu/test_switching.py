"""The load under plan switches, on an engine that ends every task at once."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from benchmarks.gpu.results import Deadline
from benchmarks.gpu.serving import rate_per_s, switch
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import TaskId


class Engine:
    """Ends tasks on a thread of its own, one after another, under the plan that is active."""

    def __init__(self, loads: Sequence[Callable[[], PlanKey]]) -> None:
        self.submitted = 0
        self._loads = list(loads)
        self._active = PlanKey(0)
        self._tasks: SimpleQueue[Callable[[TaskDone], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def load(self, plan: Any) -> PlanKey:
        return self._loads.pop(0)()

    def submit(self, model: str, on_end: Callable[[TaskDone], None]) -> None:
        self.submitted += 1
        self._tasks.put(on_end)

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()

    def activate(self, key: PlanKey, *, keep: bool = False) -> None:
        self._active = key

    def _work(self) -> None:
        at_s = 0.0
        while (on_end := self._tasks.get()) is not None:
            at_s += 0.01
            on_end(TaskDone(TaskId(0), Outcome.COMPLETED, "", "", at_s, at_s, at_s, plan=self._active))


def _refused() -> PlanKey:
    raise ExecutorError("the plan needs 90 GiB of device memory")


def test_every_switch_is_timed_and_no_task_is_lost() -> None:
    engine: Any = Engine([partial(PlanKey, number) for number in range(4)])
    figures = switch(engine, [None, None], ["a", "b"], 3, 3, Deadline(60.0))  # type: ignore[list-item]
    engine.close()
    assert figures["switches"] == 3 and figures["lost"] == 0
    assert figures["completed"] == engine.submitted


def test_after_a_switch_that_failed_no_task_goes_on_beside_what_is_measured_next() -> None:
    engine: Any = Engine([lambda: PlanKey(1), _refused])
    with pytest.raises(ExecutorError, match="90 GiB"):
        switch(engine, [None, None], ["a", "b"], 3, 3, Deadline(60.0))  # type: ignore[list-item]
    submitted = engine.submitted
    engine.close()  # what is queued is ended first
    assert engine.submitted == submitted


def test_a_rate_depends_neither_on_the_cut_nor_on_tasks_that_end_together() -> None:
    """Tasks of a batch of four run and end together, every 10 ms."""
    ends = [(0.01 * turn, 0.01 * (turn + 1)) for turn in range(100) for _ in range(4)]
    for began_s in (0.1, 0.103, 0.1099):
        assert rate_per_s(ends, began_s, began_s + 0.5) == pytest.approx(400.0)
