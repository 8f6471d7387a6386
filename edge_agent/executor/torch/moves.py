"""Instances that go over to a new plan, on executors that run steps on the host.

A move comes in issue order while steps that it must follow may still run, and before steps that touch the
same slots; those name the former among their own. So a move is carried out by whoever first finds, at the
begin or the end of a step, that all it waits for has ended.
"""

import threading
from collections.abc import Callable

from stageloom.shared.engine.steps import MoveInstance
from stageloom.shared.ids import StepId


class PendingMoves:
    """Moves in issue order until they are carried out. Thread-safe."""

    def __init__(self, carry_out: Callable[[MoveInstance], None]) -> None:
        self._carry_out = carry_out
        self._pending: list[MoveInstance] = []
        self._lock = threading.Lock()

    def add(self, action: MoveInstance, running: Callable[[StepId], bool]) -> None:
        """Take in a move; it happens at once if nothing is in its way."""
        with self._lock:
            self._pending.append(action)
        self.advance(running)

    def advance(self, running: Callable[[StepId], bool]) -> None:
        """Carry out the moves whose steps have ended; an instance that moves twice does so in order."""
        if not self._pending:
            return
        with self._lock:
            waiting: list[MoveInstance] = []
            held = set()
            for action in self._pending:
                if action.instance in held or any(running(step) for step in action.after):
                    held.add(action.instance)
                    waiting.append(action)
                else:
                    self._carry_out(action)
            self._pending = waiting
