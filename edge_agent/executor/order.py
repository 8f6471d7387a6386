"""Order of steps on executors that run on the host: a step begins after the steps it names have ended."""

import threading

from stageloom.shared.engine.steps import Step
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import StepId


class StepOrder:
    """Tracks steps between issue and end. Every method may be called from any lane's thread.

    Most steps have nothing left to wait for, so a gate is made by whoever must wait: a lock that is held
    until the step ends, which the waiting take and let go at once. Locks cost a tenth of `threading.Event`.
    """

    def __init__(self) -> None:
        self._running: set[StepId] = set()
        self._gates: dict[StepId, threading.Lock] = {}

    def issue(self, step: Step) -> None:
        """Register a step; steps that name it in `after` will wait for it."""
        if step.id in self._running:
            raise ExecutorError(f"step {step.id} was issued twice")
        self._running.add(step.id)

    def begin(self, step: Step) -> None:
        """Block until every step in `step.after` has ended."""
        for before in step.after:
            if before in self._running:
                self._pass(before)

    def _pass(self, step: StepId) -> None:
        made = threading.Lock()
        made.acquire()
        gate = self._gates.setdefault(step, made)
        # `end` takes the step away first and looks for a gate then: seen here, it will open this one.
        if step in self._running:
            with gate:
                pass
        else:
            self._gates.pop(step, None)

    def end(self, step: Step) -> None:
        """The step has ended, well or badly."""
        self._running.remove(step.id)
        if self._gates:
            gate = self._gates.pop(step.id, None)
            if gate is not None:
                gate.release()

    def running(self, step: StepId) -> bool:
        """Issued and not ended."""
        return step in self._running
