"""The agent's main loop: one thread, one selector, a few timers, and a thread for work that is too slow.

Every callback must return at once.
"""

import heapq
import itertools
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

_log = logging.getLogger(__name__)

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
_TROUBLE = select.EPOLLHUP | select.EPOLLERR
"""Told unasked; whoever watches finds out what it is by reading or writing."""


class Timer:
    """A call to come; `cancel` is free and may come late."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self._call = None

    def fire(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


class Loop:
    """Calls back on readiness and on time. `last_turn_s` says when it was last seen alive."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.last_turn_s = now()
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[int, Callable[[int], None]]] = {}  # by descriptor
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._running = False

    def watch(self, file: Any, events: int, callback: Callable[[int], None]) -> None:
        """Call `callback(ready events)` whenever `file` is ready for one of `events`; 0 stops that."""
        fd = file if isinstance(file, int) else file.fileno()
        known = self._watched.pop(fd, None)
        if events:
            (self._epoll.register if known is None else self._epoll.modify)(fd, events)
            self._watched[fd] = events, callback
        elif known is not None:
            self._epoll.unregister(fd)

    def call_at(self, when_s: float, call: Callable[[], None]) -> Timer:
        """Call once at an instant of `now`'s clock."""
        timer = Timer(call)
        heapq.heappush(self._timers, (when_s, next(self._order), timer))
        return timer

    def call_every(self, interval_s: float, call: Callable[[], None]) -> None:
        """Call now and then, at least `interval_s` apart; missed turns are not made up for."""

        def again() -> None:
            self.call_at(self.now() + interval_s, again)
            call()

        self.call_at(self.now() + interval_s, again)

    def run(self) -> None:
        """Until `stop`. An exception of one callback is logged; the others go on."""
        self._running = True
        while self._running:
            self.turn(60.0)

    def stop(self) -> None:
        """Return from `run` after this turn."""
        self._running = False

    def turn(self, longest_s: float) -> None:
        """Wait for the next thing, at most `longest_s`, and do all that is due."""
        if self._timers:
            longest_s = min(longest_s, max(self._timers[0][0] - self.now(), 0.0))
        watched = self._watched
        ready = [(fd, watched[fd], events) for fd, events in self._epoll.poll(longest_s, len(watched) or 1)]
        now_s = self.last_turn_s = self.now()
        for fd, watch, events in ready:
            # An earlier callback of this turn may have closed this file.
            if watched.get(fd) is watch:
                asked, callback = watch
                _guarded(callback, asked if events & _TROUBLE else events)
        while self._timers and self._timers[0][0] <= now_s:
            _guarded(heapq.heappop(self._timers)[2].fire)

    def close(self) -> None:
        self._epoll.close()
        self._timers.clear()


def _guarded(call: Callable[..., None], *args: Any) -> None:
    try:
        call(*args)
    except Exception:
        _log.exception("a callback of the main loop failed; the loop goes on")


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
