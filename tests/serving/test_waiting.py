"""One coroutine, on an event loop and as an ordinary call."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any, cast

import pytest

from stageloom.edge_agent.ingest.client import TaskFuture
from stageloom.edge_agent.serving.waiting import InThread, OnLoop, ServiceWaiting, blocking
from stageloom.shared.errors import TaskFailed


def _tasks(count: int) -> list[TaskFuture]:
    return [cast(TaskFuture, Future[Any]()) for _ in range(count)]


async def _waits(waiting: ServiceWaiting, tasks: list[TaskFuture]) -> tuple[str, list[Any]]:
    name = await waiting.call(lambda: threading.current_thread().name)
    return name, await waiting.results(tasks)


@pytest.mark.parametrize("count", [1, 3])
def test_both_give_the_results_in_the_order_of_the_tasks(count: int) -> None:
    tasks = _tasks(count)
    for number, task in reversed(list(enumerate(tasks))):
        task.set_result(number)
    name, results = blocking(_waits(InThread(), tasks))
    assert (name, results) == (threading.current_thread().name, list(range(count)))
    name, results = asyncio.run(_waits(OnLoop(), tasks))
    assert name != threading.current_thread().name
    assert results == list(range(count))


@pytest.mark.parametrize("waiting", [InThread(), OnLoop()])
def test_the_first_error_ends_the_wait_while_others_run(waiting: ServiceWaiting) -> None:
    tasks = _tasks(3)
    tasks[2].set_exception(TaskFailed("it failed"))
    with pytest.raises(TaskFailed, match="it failed"):
        if isinstance(waiting, InThread):
            blocking(waiting.results(tasks))
        else:
            asyncio.run(asyncio.wait_for(waiting.results(tasks), 20.0))


def test_what_waits_on_an_event_loop_is_no_ordinary_call() -> None:
    with pytest.raises(RuntimeError, match="event loop"):
        blocking(asyncio.sleep(1.0))
