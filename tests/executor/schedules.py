"""What the contract's schedules and plans are made with, for tests beside it."""

from benchmarks.contract.schedules import (
    StepMaker,
    bound_of,
    graph_of,
    merged,
    plan_of,
    random_stages,
    random_streams,
    sequential,
)

__all__ = [
    "StepMaker",
    "bound_of",
    "graph_of",
    "merged",
    "plan_of",
    "random_stages",
    "random_streams",
    "sequential",
]
