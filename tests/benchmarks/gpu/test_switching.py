"""The load under plan switches, on an engine that ends every task at once."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu.serving import Switching
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import TaskId


class Engine:
    """Ends tasks on a thread of its own, one after another, under the plan that is active."""

    def __init__(self, loads: Sequence[Callable[[], PlanKey]]) -> None:
        self.shell = SimpleNamespace(activate=self._activate)
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

    def _activate(self, key: PlanKey, *, keep: bool = False) -> None:
        self._active = key

    def _work(self) -> None:
        at_s = 0.0
        while (on_end := self._tasks.get()) is not None:
            at_s += 0.01
            on_end(TaskDone(TaskId(0), Outcome.COMPLETED, "", "", at_s, at_s, at_s, plan=self._active))


def _refused() -> PlanKey:
    raise ExecutorError("the plan needs 90 GiB of device memory")


def test_every_switch_is_timed_and_no_task_is_lost() -> None:
    engine = Engine([partial(PlanKey, number) for number in range(4)])
    found = Switching(engine, ["a", "b"], 3).run([None, None], 3, until_s=float("inf"))  # type: ignore[arg-type,list-item]
    engine.close()
    assert len(found.first_task_s) == 3 and found.lost == 0 and found.completed == engine.submitted


def test_after_a_switch_that_failed_no_task_goes_on_beside_what_is_measured_next() -> None:
    engine = Engine([lambda: PlanKey(1), _refused])
    switching = Switching(engine, ["a", "b"], 3)  # type: ignore[arg-type]
    with pytest.raises(ExecutorError, match="90 GiB"):
        switching.run([None, None], 3, until_s=float("inf"))  # type: ignore[list-item]
    submitted = engine.submitted
    engine.close()  # what is queued is ended first
    assert engine.submitted == submitted
