"""Streams without hardware: every launch is held back, and what is held happens in a random legal order.

Legal is what streams and events allow, and nothing more. So whatever an executor forgot to order happens in
both orders sooner or later.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class SimulatedEvent:
    """A point in a stream."""

    def __init__(self, timed: bool) -> None:
        self.timed = timed
        self.recorded = 0  # how often it was put into a stream
        self.come = 0  # how often it has come
        self.at_s = 0.0


def _always() -> bool:
    return True


@dataclass(slots=True)
class Entry:
    """Something in a stream: `happen` says whether that was all of it."""

    happen: Callable[[], bool]
    can: Callable[[], bool] = _always


class SimulatedStream:
    """What was put into a stream and has not happened."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Entry] = deque()


class SimulatedStreams:
    """See the module's text. `ignore_waits` leaves out every n-th wait between streams: a defect that must
    be found."""

    def __init__(self, seed: int, *, ignore_waits: int = 0) -> None:
        self.rng = random.Random(seed)
        self.launches = 0
        self.waits = 0
        self.sleeps = 0
        self.free_now = 1 << 40
        self._ignore_waits = ignore_waits
        self._favourite: SimulatedStream | None = None
        self._lock = threading.RLock()
        self._now_s = 0.0

    def every_stream(self) -> Sequence[SimulatedStream]:
        """All streams of the device."""
        raise NotImplementedError

    def stream(self, number: int) -> SimulatedStream:
        """A number is one stream for ever."""
        return self.every_stream()[number]

    def launch(self, stream: SimulatedStream, work: Callable[[], object]) -> None:
        """Hold it back."""

        def happen() -> bool:
            work()
            return True

        with self._lock:
            self.launches += 1
            stream.queue.append(Entry(happen))

    def record(
        self, stream: SimulatedStream, *, timed: bool = False, external: bool = False
    ) -> SimulatedEvent:
        """A point in the stream."""
        event = SimulatedEvent(timed)

        def happen() -> bool:
            self.come(event)
            return True

        with self._lock:
            event.recorded += 1
            stream.queue.append(Entry(happen))
        return event

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        """What follows in the stream comes after the event."""
        count = event.recorded
        with self._lock:
            self.waits += 1
            if self._ignore_waits and self.waits % self._ignore_waits == 0:
                return
            stream.queue.append(Entry(_always, lambda: event.come >= count))

    def synchronize(self, event: SimulatedEvent) -> None:
        """Let things happen until the event has come, and some more."""
        with self._lock:
            while event.come < event.recorded:
                self._step()
            for _ in range(self.rng.randint(0, 8)):
                if not self._step(idle=True):
                    break

    def _step(self, *, idle: bool = False) -> bool:
        """Let one thing happen that may happen; False if nothing can."""
        able = [s for s in self.every_stream() if s.queue and s.queue[0].can()]
        if not able:
            assert idle, "the device hangs: an event is waited for that never comes"
            return False
        stream = self._choose(able)
        self._now_s += 1e-6
        if stream.queue[0].happen():
            stream.queue.popleft()
        return True

    def _choose(self, able: list[SimulatedStream]) -> SimulatedStream:
        """One stream stays ahead of the others for a while: fair choices would hide what is missing."""
        if self._favourite not in able or self.rng.random() < 0.02:
            self._favourite = self.rng.choice(able)
        assert self._favourite is not None
        return self._favourite if self.rng.random() < 0.9 else self.rng.choice(able)

    def come(self, event: SimulatedEvent) -> None:
        """The event comes now."""
        event.come += 1
        event.at_s = self._now_s

    def elapsed_s(self, first: SimulatedEvent, second: SimulatedEvent) -> float:
        """Simulated time between two events."""
        assert first.timed and second.timed and first.come and second.come
        return second.at_s - first.at_s

    def sleep(self, stream: SimulatedStream, seconds: float) -> None:
        """Nothing, several times."""
        with self._lock:
            self.sleeps += 1
            for _ in range(self.rng.randint(0, 5)):
                self.launch(stream, lambda: None)

    def free_bytes(self) -> int:
        """As the test says."""
        return self.free_now
