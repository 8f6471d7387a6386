"""Order of steps on executors that run on the host: a step begins after the steps it names have ended."""

import threading

from shared.engine.steps import Step
from shared.errors import ExecutorError
from shared.ids import StepId


class StepOrder:
    """Tracks steps between issue and end. Every method may be called from any lane's thread.

    A gate is a lock that is held until its step ends; whoever waits takes it and lets go at once. Locks cost
    a tenth of `threading.Event`, and most steps have nothing left to wait for.
    """

    def __init__(self) -> None:
        self._gates: dict[StepId, threading.Lock] = {}

    def issue(self, step: Step) -> None:
        """Register a step; steps that name it in `after` will wait for it."""
        if step.id in self._gates:
            raise ExecutorError(f"step {step.id} was issued twice")
        gate = threading.Lock()
        gate.acquire()
        self._gates[step.id] = gate

    def begin(self, step: Step) -> None:
        """Block until every step in `step.after` has ended."""
        for before in step.after:
            gate = self._gates.get(before)
            if gate is not None:
                with gate:
                    pass

    def end(self, step: Step) -> None:
        """The step has ended, well or badly."""
        self._gates.pop(step.id).release()

    def running(self, step: StepId) -> bool:
        """Issued and not ended."""
        return step in self._gates
