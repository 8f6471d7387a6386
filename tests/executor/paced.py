"""A resource that is slower by the same factor on every machine and in every run: for tests and benchmarks.

It computes as the executor that it wraps does and then waits (k - 1) times as long, and what is copied to or
from its memory node waits for a bus. The core is free meanwhile, so it is not for claims about what two busy
cores do to each other.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stageloom.edge_agent.executor.onnx.cache import SessionKey, ValuesSession
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.onnx.session_executor import SessionExecutor
from stageloom.edge_agent.executor.slot_store import Values
from stageloom.shared.engine.residency import Bus


@dataclass(frozen=True, slots=True)
class PacedSession:
    """A session that takes `slow()` times as long."""

    session: ValuesSession
    slow: Callable[[], float]
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def run(self, values: Values) -> None:
        """Compute, then wait."""
        began_s = self.clock()
        self.session.run(values)
        self.sleep((self.slow() - 1) * (self.clock() - began_s))


class PacedExecutor(SessionExecutor):
    """Sessions of another executor, `slow` times slower, which may change. Plans call it `paced`.

    What they compute is taken as processor time of the calling thread, which runs them alone: what else the
    core does meanwhile is not made slower, too.
    """

    name = "paced"

    def __init__(
        self,
        inner: SessionExecutor,
        *,
        slow: float = 3.0,
        clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        self._inner = inner
        self.slow = slow
        self._clock = clock
        self._sleep = sleep

    def _open(self, key: SessionKey, source: ModelParts) -> ValuesSession:
        return PacedSession(self._inner._open(key, source), lambda: self.slow, self._clock, self._sleep)


@dataclass(frozen=True, slots=True)
class PacedTransfer:
    """Copies between memory nodes that wait for a bus: for `SlotStore`."""

    bus: Bus
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """A copy, after what the bus takes for it."""
        self.sleep(self.bus.copy_s([array.nbytes]))
        return array.copy()
