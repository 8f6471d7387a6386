"""Tasks of a recording as spans: each with what it waited and what it ran."""

from collections.abc import Iterable

from stageloom.edge_agent.worker.recorder import TaskEntry
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.spans import RecordedSpan


def task_spans(tasks: Iterable[TaskEntry], wall_us: int, monotonic_s: float) -> list[RecordedSpan]:
    """A trace per task. `wall_us` and `monotonic_s` are one instant on both clocks."""

    def at_us(seconds: float) -> int:
        return wall_us + round((seconds - monotonic_s) * 1e6)

    spans = []
    for task in tasks:
        queued_us, ended_us = at_us(task.queued_s), at_us(task.ended_s)
        parts = [("queue", queued_us, ended_us)]
        if task.began_s is not None:
            began_us = at_us(task.began_s)
            parts = [("queue", queued_us, began_us), ("run", began_us, ended_us)]
        spans.append(
            RecordedSpan(
                name="task",
                began_us=queued_us,
                ended_us=ended_us,
                attributes={
                    "stageloom.model": ",".join(task.models),
                    "stageloom.task": task.task,
                    "stageloom.outcome": task.outcome,
                },
                failed=task.outcome if task.outcome != Outcome.COMPLETED.value else "",
                children=tuple(
                    RecordedSpan(name=name, began_us=begin, ended_us=end) for name, begin, end in parts
                ),
            )
        )
    return spans
