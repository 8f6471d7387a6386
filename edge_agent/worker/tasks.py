"""A task as the driver sees it: where its tensors come from, where they go, and how it ended."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.ids import TaskId

if TYPE_CHECKING:
    import numpy


class TaskIO:
    """A task's tensors and its owner; subclasses say where they lie."""

    def inputs(self, model: str) -> "Mapping[str, numpy.ndarray]":
        """The model's inputs by the graph's names, each with its batch-1 shape."""
        raise NotImplementedError

    def deliver(self, model: str, outputs: "Mapping[str, numpy.ndarray]") -> None:
        """The model's outputs, before `ended` says that the task completed. Runs on a lane's thread."""
        raise NotImplementedError

    def ended(self, end: "TaskEnd") -> None:
        """The task is over, in exactly one way. Nothing is delivered afterwards."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """How and when a task ended; seconds on the driver's clock."""

    task: TaskId
    outcome: Outcome
    code: str
    reason: str
    queued_s: float
    started_s: float | None  # when its first step began to run; None if it never did
    ended_s: float
    parts: tuple[tuple[str, Outcome], ...] = ()  # of a task for several models: how it ended in each
    plan: PlanKey | None = None  # whose step ended it, where one did
