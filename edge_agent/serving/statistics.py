"""What became of the requests for each model, as the protocol counts them.

Of one that succeeded: `compute_input` lasts until the engine has queued its tasks (receiving, splitting and
copying), `queue` until the first of them begins to run, `compute_infer` until the last of them has run, and
`compute_output` until the answer is made.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from stageloom.edge_agent.ingest.client import TaskFuture

_PHASES: Final = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")


@dataclass(slots=True)
class ModelCounts:
    """One model's requests: numbers, and durations in nanoseconds."""

    last_ms: int = 0  # Unix time of the last success
    rows: int = 0
    tasks: int = 0
    phases: dict[str, list[int]] = field(default_factory=lambda: {name: [0, 0] for name in _PHASES})

    def add(self, phase: str, seconds: float) -> None:
        """One more request spent so long there."""
        count_and_ns = self.phases[phase]
        count_and_ns[0] += 1
        count_and_ns[1] += max(round(seconds * 1e9), 0)


class Statistics:
    """All models since the process began, each version by itself; for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: defaultdict[tuple[str, int], ModelCounts] = defaultdict(ModelCounts)

    def succeeded(
        self,
        model: str,
        version: int,
        rows: int,
        futures: Sequence[TaskFuture],
        began_s: float,
        now_s: float,
    ) -> None:
        """A request began and ended at these instants of CLOCK_MONOTONIC; its tasks have ended."""
        queued_s = max(future.queued_at_s for future in futures)
        started_s = max(min(future.started_at_s for future in futures), queued_s)
        ended_s = max(started_s, *(future.ended_at_s for future in futures))
        with self._lock:
            counts = self._models[model, version]
            counts.last_ms = time.time_ns() // 1_000_000
            counts.rows += rows
            counts.tasks += len(futures)
            counts.add("success", now_s - began_s)
            counts.add("compute_input", queued_s - began_s)
            counts.add("queue", started_s - queued_s)
            counts.add("compute_infer", ended_s - started_s)
            counts.add("compute_output", now_s - ended_s)

    def failed(self, model: str, version: int, seconds: float) -> None:
        """A request for a model that is served came to nothing."""
        with self._lock:
            self._models[model, version].add("fail", seconds)

    def of(self, model: str, version: int) -> dict[str, Any]:
        """One version's of a model, in the protocol's form."""
        with self._lock:
            counts = self._models.get((model, version)) or ModelCounts()
            durations = {name: {"count": count, "ns": ns} for name, (count, ns) in counts.phases.items()}
        return {
            "name": model,
            "version": str(version),
            "last_inference": counts.last_ms,
            "inference_count": counts.rows,
            "execution_count": counts.tasks,
            "inference_stats": durations,
            "batch_stats": [],
        }
