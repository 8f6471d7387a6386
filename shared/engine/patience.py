"""When a task counts as due that has no deadline, beside those that have one.

Ranked behind every deadline it would wait for as long as tasks with deadlines keep the lanes busy. So it
counts as due `PATIENCE_S` after its arrival; this is for ranking alone, it never expires and is never given
up. That rule by itself turns against the others once a queue of such tasks is older than the patience: each
would go before every task that is due later than now. Hence a model's turn: its launches of tasks without a
deadline count as due so far apart that they take an equal share of the lanes, of n models on L lanes L / n.
What nobody else wants it takes all the same.

The spacing is that of the total bandwidth server (M. Spuri, G. Buttazzo, *Scheduling aperiodic tasks in
dynamic priority systems*, Real-Time Systems 10, 1996). Deviation: there a task's due time is fixed when it
comes, and a model that used idle time pays for all of it afterwards; here it is fixed at the launch before,
and lies no further ahead than the patience.
"""

import math
from typing import Final

from stageloom.shared.engine.steps import Task

PATIENCE_S: Final = 1.0


def wanted_by_s(task: Task, turn_s: float = -math.inf) -> float:
    """By when a task is wanted: its deadline, or, without one, its patience or its model's turn.

    `turn_s`: from when on the model's tasks without a deadline are within their share.
    """
    return task.deadline_s if task.deadline_s != math.inf else max(task.patient_until_s, turn_s)


def next_turn_s(turn_s: float, now: float, spacing_s: float, patience_s: float) -> float:
    """A model's turn after a launch. `spacing_s`: how long its share of the lanes takes for one launch."""
    return max(now + spacing_s, min(turn_s + spacing_s, now + patience_s))
