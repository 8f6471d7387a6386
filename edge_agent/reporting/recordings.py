"""Recordings that applications asked for, from the request to the engine process's answer."""

from collections.abc import Callable
from itertools import count
from typing import Protocol

from stageloom.edge_agent.worker.messages import Record, RecordingEnded


class Engine(Protocol):
    """The engine process, as far as it matters here."""

    def record(self, order: Record, fd: int) -> bool:
        """Record into a file; False if there is no process to do it."""


class Recordings:
    """Every request is answered once: empty when the file is complete, else with why it is not."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = count(1)
        self._waiting: dict[int, Callable[[str], None]] = {}

    def order(self, seconds: float, file: int, ended: Callable[[str], None]) -> None:
        """Record; the descriptor stays the caller's."""
        order = Record(next(self._numbers), seconds)
        if self._engine.record(order, file):
            self._waiting[order.number] = ended
        else:
            ended("the engine process is not running; try again in a moment")

    def ended(self, report: RecordingEnded) -> None:
        """The engine process is done with one."""
        ended = self._waiting.pop(report.number, None)
        if ended is not None:
            ended(report.reason)

    def engine_exited(self) -> None:
        """It is gone, and with it what it was recording."""
        waiting, self._waiting = self._waiting, {}
        for ended in waiting.values():
            ended("the engine process ended while it was recording; try again in a moment")
