"""Tasks at a steady pace, each with a deadline, as a camera has them: what is late is dropped.

    python -m examples.application MODEL [--rate 10] [--deadline 0.5] [--seconds 10]

It finds the agent as every application does, by STAGELOOM_AGENT_HOME, sends noise, and prints how its tasks
ended. A restart of the agent costs it the tasks that were open, and nothing else.
"""

import argparse
import time
from collections import Counter
from concurrent.futures import wait
from typing import Any

import numpy as np

from stageloom import Client, TaskFuture
from stageloom.shared.errors import AgentRestarted, StageloomError, TaskExpired, TaskRefused, UnavailableError


def noise(tensors: Any) -> dict[str, Any]:
    """An array for each input of a model, of its type and shape."""
    rng = np.random.default_rng(0)
    return {
        tensor.name: rng.integers(0, 2, tensor.shape).astype(tensor.dtype)
        if np.dtype(tensor.dtype).kind in "iub"
        else rng.random(tensor.shape).astype(tensor.dtype)
        for tensor in tensors
    }


def ending(error: BaseException | None) -> str:
    """How a task ended, in a word."""
    words = ((TaskExpired, "late"), (TaskRefused, "refused"), ((AgentRestarted, UnavailableError), "lost"))
    if error is None:
        return "done"
    return next((word for kind, word in words if isinstance(error, kind)), "failed")


def serve(client: Client, model: str, *, rate: float, deadline_s: float, seconds: float) -> Counter[str]:
    """Submit for so many seconds; how many tasks ended in which way."""
    inputs = noise(client.models()[model].inputs)
    ended: Counter[str] = Counter()
    open_tasks: set[TaskFuture] = set()
    next_s = time.monotonic()
    until_s = next_s + seconds
    while next_s < until_s:
        time.sleep(max(next_s - time.monotonic(), 0.0))
        try:
            open_tasks.add(client.submit(model, inputs, deadline_s=deadline_s))
        except (TaskRefused, UnavailableError) as error:  # no room for it, or no agent: the next frame may do
            ended[ending(error)] += 1
        over = {task for task in open_tasks if task.done()}
        ended.update(ending(task.exception()) for task in over)  # of one that is done: task.result()
        open_tasks -= over
        next_s = max(next_s + 1.0 / rate, time.monotonic())  # frames that came meanwhile are gone
    ended.update(ending(task.exception()) for task in wait(open_tasks, deadline_s + 5.0).done)
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description="Submit tasks with deadlines at a steady pace.")
    parser.add_argument("model")
    parser.add_argument("--rate", type=float, default=10.0, help="tasks a second")
    parser.add_argument("--deadline", type=float, default=0.5, help="seconds that a result may take")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    try:
        with Client() as client:
            if options.model not in client.models():
                raise SystemExit(f"no model {options.model!r} runs here; choose {', '.join(client.models())}")
            ended = serve(
                client,
                options.model,
                rate=options.rate,
                deadline_s=options.deadline,
                seconds=options.seconds,
            )
    except StageloomError as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(", ".join(f"{number} {word}" for word, number in ended.most_common()))


if __name__ == "__main__":
    main()
