"""Work too slow for the main loop (hashing, checking a plan), on a thread of its own, one at a time."""

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from stageloom.edge_agent.loop import READ, Loop

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Background:
    """Runs functions elsewhere and hands their results to the loop's thread."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[Callable[[], Callable[[], None]] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        loop.watch(self._wake_read, READ, self._deliver)
        self._thread = threading.Thread(target=self._work, name="background", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Call `then(work())`, `work` on the thread and `then` on the loop. `work` must not raise."""

        def job() -> Callable[[], None]:
            result = work()
            return lambda: then(result)

        self._jobs.put(job)

    def close(self) -> None:
        """Finish what is running and stop."""
        self._jobs.put(None)
        self._thread.join(5.0)
        self._loop.watch(self._wake_read, 0, self._deliver)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._results.put(job())
            except Exception:
                _log.exception("background work failed; its result never comes")
                continue
            os.write(self._wake_write, b"\0")

    def _deliver(self, events: int) -> None:
        os.read(self._wake_read, 4096)
        while not self._results.empty():
            self._results.get()()
