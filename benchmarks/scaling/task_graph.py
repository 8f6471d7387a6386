"""How long independent tasks take on many workers behind one driver: the task graph, simulated. Pure.

The driver hands tasks out one at a time and takes their results; whatever it computes for a task itself, as a
learner does, is part of that. A task goes to the worker that has been free longest.
"""

import heapq
from collections.abc import Sequence


def makespan_s(groups: Sequence[Sequence[float]], workers: int, handover_s: float) -> float:
    """Seconds until all tasks have ended. `groups`: seconds of tasks by group, in the order of handing out;
    none of a group begins before all of the one before have ended. `handover_s`: the driver's, per task.

    O(tasks * log workers).
    """
    driver_s = 0.0
    for group in groups:
        free_s = [driver_s] * min(workers, len(group))
        for task_s in group:
            driver_s = max(driver_s, heapq.heappop(free_s)) + handover_s
            heapq.heappush(free_s, driver_s + task_s)
        driver_s = max(free_s, default=driver_s)
    return driver_s


def speed_up(groups: Sequence[Sequence[float]], workers: int, handover_s: float) -> float:
    """How many times as fast as on one worker."""
    return makespan_s(groups, 1, handover_s) / makespan_s(groups, workers, handover_s)
