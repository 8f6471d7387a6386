"""What a contestant is: something that takes tasks and says when each one's result was there."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stageloom.edge_agent.bench.model_files import Feeds, ModelUnderTest


@dataclass(frozen=True, slots=True)
class TimedTask:
    """One task; instants as `time.monotonic` counts them."""

    number: int
    model: int
    arrived_s: float
    due_s: float = float("inf")  # its result is worthless from then on

    @property
    def expired(self) -> bool:
        """Whether it is too late to begin."""
        return time.monotonic() >= self.due_s


Ended = Callable[[TimedTask, bool], None]
"""Called once per task, from any thread, as soon as its result is there (True) or it was given up (False)."""


class Contestant(Protocol):
    """One way to serve the models. It lives in a process of its own, whose threads are all its own."""

    def start(self, ended: Ended) -> None:
        """Load the models; `ended` is told of every task.

        Raises:
            Exception: this way cannot serve these models.
        """

    def submit(self, task: TimedTask, feeds: Feeds) -> None:
        """Take a task without waiting for anything."""

    def stop(self) -> None:
        """End all threads and processes."""


@runtime_checkable
class ReportingContestant(Protocol):
    """A contestant that knows more than how its tasks ended; asked after its start and each window."""

    @property
    def problem(self) -> str:
        """The first error that ended a task; empty where none did."""

    @property
    def plan(self) -> str:
        """The digest of the plan that it serves; empty where it has none."""


class ContestantSetting(Protocol):
    """A contestant to be made in another process."""

    @property
    def name(self) -> str:
        """What results call it."""

    @property
    def measures(self) -> bool:
        """It times something while it starts: nothing else may start beside it, and it gives up by itself
        where it gets no further."""

    def make(self, models: Sequence[ModelUnderTest]) -> Contestant:
        """The contestant, not started. Imports the runtime that it uses."""
