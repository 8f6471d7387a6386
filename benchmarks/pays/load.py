"""The load: this process as an application of the agent, and a foreign process that takes a core."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final

import numpy as np

from benchmarks.processes import DemoFailed
from stageloom import Client
from stageloom.edge_agent.bench.contestant import Ended, TimedTask
from stageloom.edge_agent.bench.load import WindowResult, judge, mixed_models, poisson_window
from stageloom.edge_agent.bench.model_files import Feeds, ModelUnderTest
from stageloom.edge_agent.bench.window_run import WindowRunner
from stageloom.shared.errors import StageloomError, TaskExpired, TaskRefused

OUTSTANDING: Final = 8  # more than any plan runs at once
_INPUTS: Final = 4  # different ones for each model
_SPIN: Final = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


class Application:
    """Tasks for an agent, and how they ended.

    `submitted` counts all; `outcomes` completed, expired, refused and lost ones.
    """

    def __init__(
        self, client: Client, models: Sequence[ModelUnderTest], deadlines_s: Sequence[float]
    ) -> None:
        self.submitted = 0
        self.outcomes: Counter[str] = Counter()
        self.deadlines_s = deadlines_s
        self._client = client
        self._models = models
        self.feeds = [model.feeds(_INPUTS) for model in models]
        self._runner = WindowRunner(self.feeds)
        self._ended: Ended = self._runner.ended
        self._lock = threading.Lock()  # outcomes come from the client's thread and from this one

    def start(self, ended: Ended) -> None:
        """From now on tell somebody else of tasks that end."""
        self._ended = ended

    def stop(self) -> None:
        """Nothing to stop."""

    def submit(self, task: TimedTask, feeds: Feeds) -> None:
        """Hand a task over."""
        self.submitted += 1
        left_s = task.due_s - time.monotonic()
        if left_s <= 0.0:
            self._count(task, "expired")
            return
        try:
            future = self._client.submit(
                self._models[task.model].name, feeds, deadline_s=left_s if np.isfinite(left_s) else None
            )
        except StageloomError as error:
            self._count(task, outcome_of(error))
            return
        future.add_done_callback(lambda done: self._done(task, done))

    def phase(self, weights: Sequence[float], rate_per_s: float, seconds: float, seed: int) -> WindowResult:
        """Poisson arrivals for so long; returns when every task has ended. A task that never does is lost."""
        window = poisson_window(weights, rate_per_s, seconds, self.deadlines_s, seed)
        before = self.outcomes.total()
        ended_s = self._runner.open_loop(self, window)
        self.outcomes["lost"] += before + window.tasks - self.outcomes.total()
        return judge(window, ended_s)

    def warm_up(self, weights: Sequence[float], seconds: float = 1.0) -> None:
        """Keep some tasks open for so long: sessions, caches and clocks are warm then."""
        self._runner.keep_open(self, mixed_models(weights, 0), OUTSTANDING, seconds)

    def saturated_per_s(self, weights: Sequence[float], seconds: float) -> float:
        """Tasks a second while some are always open, models drawn by the weights; see `closed_loop`.

        Raises:
            DemoFailed: tasks had no result, or did not turn over in a minute.
        """
        carried = self._runner.closed_loop(self, mixed_models(weights, 0), OUTSTANDING, seconds)
        if carried.without_result or not carried.per_s:
            raise DemoFailed(
                f"the device is no measure of a load: of tasks that are always open {carried.without_result} "
                "had no result, or they did not turn over in a minute; see the agent's log"
            )
        return carried.per_s

    def _done(self, task: TimedTask, future: "Future[Any]") -> None:
        self._count(task, outcome_of(future.exception()))

    def _count(self, task: TimedTask, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1
        self._ended(task, outcome == "completed")


def outcome_of(error: BaseException | None) -> str:
    """The word for how a task ended; anything that nobody promised is lost."""
    if error is None:
        return "completed"
    if isinstance(error, TaskExpired):
        return "expired"
    return "refused" if isinstance(error, TaskRefused) else "lost"


@contextlib.contextmanager
def core_taken(taken: bool) -> Iterator[None]:
    """While the block runs, a process computes on the first core, if one is to."""
    if not taken:
        yield
        return
    core = min(os.sched_getaffinity(0))
    process = subprocess.Popen([sys.executable, "-c", _SPIN, str(core)])
    try:
        yield
    finally:
        process.kill()
        process.wait()
