"""A resource that is slower by the same factor on every machine and in every run: for tests and benchmarks.

It computes as the executor that it wraps does and then waits (k - 1) times as long, and what crosses between
it and other executors of a plan waits for a bus. The core is free meanwhile, so it is not for claims about
what two busy cores do to each other.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from stageloom.edge_agent.executor.base import StepFeeds
from stageloom.edge_agent.executor.host import NO_SLOT
from stageloom.edge_agent.executor.onnx.cache import SessionKey, Values, ValuesSession
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.onnx.session_executor import SessionExecutor
from stageloom.shared.engine.residency import Bus
from stageloom.shared.engine.steps import InstanceId, Step, StepMember


@dataclass(frozen=True, slots=True)
class PacedSession:
    """A session that takes `slow` times as long."""

    session: ValuesSession
    slow: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def run(self, values: Values) -> None:
        """Compute, then wait."""
        began_s = self.clock()
        self.session.run(values)
        self.sleep((self.slow - 1) * (self.clock() - began_s))


class PacedExecutor(SessionExecutor):
    """Sessions of another executor, `slow` times slower, behind a bus. Plans call it `paced`.

    A slot that another executor keeps is copied over before the step that reads it begins, or when `fetch`
    asks for it earlier; one that another executor takes from here is copied back.
    """

    name = "paced"

    def __init__(
        self,
        inner: SessionExecutor,
        *,
        slow: float = 3.0,
        bus: Bus | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        self._inner = inner
        self._slow = slow
        self._bus = bus or Bus()
        self._clock = clock
        self._sleep = sleep

    def _open(self, key: SessionKey, source: ModelParts) -> ValuesSession:
        return PacedSession(self._inner._open(key, source), self._slow, self._clock, self._sleep)

    def fetch(self, instance: InstanceId) -> bool:
        """Copy the instance's tensors here, on this thread; whether another executor had them.

        The step that made them must have ended.
        """
        slot = NO_SLOT if self.elsewhere is None else self.elsewhere(instance)
        if slot is NO_SLOT:
            return False
        assert isinstance(slot, dict)
        self._wait_for_copy(slot)
        self._slots[instance] = slot
        return True

    def _gather(self, step: Step, member: StepMember, feeds: StepFeeds) -> Values:
        if member.member.block and member.instance not in self._slots:
            self.fetch(member.instance)
        return super()._gather(step, member, feeds)

    def give_away(self, instance: InstanceId) -> object:
        """The instance's slot, once it is copied."""
        slot = super().give_away(instance)
        if isinstance(slot, dict):
            self._wait_for_copy(slot)
        return slot

    def _wait_for_copy(self, values: Values) -> None:
        self._sleep(self._bus.copy_s(array.nbytes for array in values.values()))
