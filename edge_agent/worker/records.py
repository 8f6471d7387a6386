"""What the driver remembers of tasks and lanes, and small helpers around them. Private to the driver."""

import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from stageloom.edge_agent.worker.tasks import TaskEnd, TaskIO
from stageloom.shared.bound import BoundModel
from stageloom.shared.engine.steps import FinishTask, Step
from stageloom.shared.errors import StageloomError

if TYPE_CHECKING:
    import numpy

log = logging.getLogger(__name__)

Ends: TypeAlias = list[tuple[TaskIO, TaskEnd]]
"""Answers to give once the lock is released."""


@dataclass(slots=True)
class Entry:
    """A task that has not ended."""

    io: TaskIO
    models: tuple[str, ...]
    queued_s: float
    started_s: float | None = None
    delivering: int = 0  # lanes that are writing its outputs: the answer waits for them
    problem: str = ""  # why its outputs could not be written
    finish: FinishTask | None = None


def held_lock() -> threading.Lock:
    """A lock that whoever acquires it next sleeps on."""
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(slots=True)
class Lane:
    """One lane's issued steps and the lock that its thread sleeps on."""

    wake: threading.Lock = field(default_factory=held_lock)
    pending: deque[tuple[Step, str | None]] = field(default_factory=deque)  # with why it was not issued
    idle: bool = False


def write_outputs(entry: Entry, model: str, row: "Mapping[str, numpy.ndarray]") -> None:
    """Deliver one task's outputs; what its owner raises becomes the task's problem."""
    try:
        entry.io.deliver(model, row)
    except Exception as error:  # the owner's; its task fails and the engine goes on
        entry.problem = one_line(error)


def zero_inputs(model: BoundModel) -> "Mapping[str, numpy.ndarray]":
    """Inputs for an instance whose tasks have all ended and that travels on."""
    import numpy

    tensors = [model.graph.tensors[t] for t in model.graph.inputs]
    return {tensor.name: numpy.zeros(tensor.shape, tensor.dtype) for tensor in tensors}


def one_line(error: Exception) -> str:
    """One line for whoever asked; what is no error of ours leaves its traceback in the log."""
    if isinstance(error, StageloomError):
        return str(error)
    log.error("the executor failed", exc_info=error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
