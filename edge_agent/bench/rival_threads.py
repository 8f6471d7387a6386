"""Threads that take tasks from queues and run them: what an application writes around a runtime."""

import heapq
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from stageloom.edge_agent.bench.contestant import Ended, TimedTask
from stageloom.edge_agent.bench.model_files import Feeds


class TaskOrder(Enum):
    """Which task a thread takes next."""

    ARRIVAL = "arrival"  # the oldest
    DEADLINE = "deadline"  # the one that must be done first


class Runtime(Protocol):
    """Loaded models."""

    def run(self, worker: int, model: int, feeds: Feeds) -> object:
        """Run a model for one thread, and return when its outputs are there."""


class RivalQueue:
    """Tasks that wait, in order; one that is too late to begin is given up when its turn comes."""

    def __init__(self, order: TaskOrder, ended: Ended) -> None:
        self._by_deadline = order is TaskOrder.DEADLINE
        self._ended = ended
        self._heap: list[tuple[float, int, TimedTask, Feeds]] = []
        self._changed = threading.Condition()
        self._closed = False

    def put(self, task: TimedTask, feeds: Feeds) -> None:
        """Add a task and wake a thread."""
        key = task.due_s if self._by_deadline else task.arrived_s
        with self._changed:
            heapq.heappush(self._heap, (key, task.number, task, feeds))
            self._changed.notify()

    def take(self, ready: Callable[[], object] | None = None) -> tuple[TimedTask, Feeds] | None:
        """Wait for a task that can still be in time; None once the queue is closed.

        `ready` is called while a task waits, before it is chosen: it may block until there is room.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._heap or self._closed)
            if ready is not None and not self._closed:
                ready()
            with self._changed:
                if self._closed:
                    return None
                if not self._heap:  # another thread was quicker
                    continue
                _, _, task, feeds = heapq.heappop(self._heap)
            if not task.expired:
                return task, feeds
            self._ended(task, False)

    def close(self) -> None:
        """Wake every thread and let it end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class TaskErrors:
    """What contestants of threads inherit: the first exception that ended a task, from any thread."""

    def __init__(self) -> None:
        self.problem = ""
        self.plan = ""

    def note_error(self, error: BaseException) -> None:
        """Keep it if it is the first."""
        self.problem = self.problem or f"{type(error).__name__}: {str(error)[:200]}"


class ThreadedRival(TaskErrors):
    """A runtime's models served by threads: `workers` for all models together, or one for each model."""

    def __init__(
        self, load: Callable[[], Runtime], models: int, *, workers: int, order: TaskOrder = TaskOrder.ARRIVAL
    ) -> None:
        self._load = load
        self._models = models
        self._workers = workers  # 0: one for each model
        super().__init__()
        self._order = order
        self._queues: list[RivalQueue] = []
        self._threads: list[threading.Thread] = []

    def start(self, ended: Ended) -> None:
        """Load the models and start the threads."""
        runtime = self._load()
        shared = bool(self._workers)
        self._queues = [RivalQueue(self._order, ended) for _ in range(1 if shared else self._models)]
        for worker in range(self._workers or self._models):
            queue = self._queues[0 if shared else worker]
            thread = threading.Thread(target=_serve, args=(queue, runtime, worker, ended, self), daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self, task: TimedTask, feeds: Feeds) -> None:
        """Put a task into its queue."""
        self._queues[task.model % len(self._queues)].put(task, feeds)

    def stop(self) -> None:
        """End the threads."""
        for queue in self._queues:
            queue.close()
        _join(self._threads)


def _serve(queue: RivalQueue, runtime: Runtime, worker: int, ended: Ended, errors: TaskErrors) -> None:
    while (taken := queue.take()) is not None:
        task, feeds = taken
        try:
            runtime.run(worker, task.model, feeds)
        except Exception as error:  # runtimes' exceptions share no base class
            errors.note_error(error)
            ended(task, False)
        else:
            ended(task, True)


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join(timeout=10.0)


class AsynchronousModel(Protocol):
    """A loaded model with requests of its own that run in the background."""

    def wait_for_room(self) -> object:
        """Block until a request is idle."""

    def begin(self, feeds: Feeds, done: Callable[[], None]) -> None:
        """Start an idle request; `done` is called from any thread when its outputs are there."""


class AsynchronousRival(TaskErrors):
    """Models whose runtime has a queue of requests each; a thread per model keeps them busy."""

    def __init__(self, load: Callable[[], Sequence[AsynchronousModel]]) -> None:
        super().__init__()
        self._load = load
        self._queues: list[RivalQueue] = []
        self._threads: list[threading.Thread] = []

    def start(self, ended: Ended) -> None:
        """Load the models and start the threads."""
        for model in self._load():
            queue = RivalQueue(TaskOrder.ARRIVAL, ended)
            tasks = OpenTasks(ended)
            thread = threading.Thread(target=_feed, args=(queue, model, tasks, self), daemon=True)
            self._queues.append(queue)
            self._threads.append(thread)
            thread.start()

    def submit(self, task: TimedTask, feeds: Feeds) -> None:
        """Put a task into its model's queue."""
        self._queues[task.model].put(task, feeds)

    def stop(self) -> None:
        """End the threads."""
        for queue in self._queues:
            queue.close()
        _join(self._threads)


class OpenTasks:
    """Tasks whose requests were begun; each ends once, from any thread."""

    def __init__(self, ended: Ended) -> None:
        self._ended = ended
        self._open: set[TimedTask] = set()
        self._lock = threading.Lock()

    def add(self, task: TimedTask) -> None:
        """Its request is about to begin."""
        with self._lock:
            self._open.add(task)

    def end(self, task: TimedTask, completed: bool) -> None:
        """Tell of its end, unless that was told."""
        with self._lock:
            if task not in self._open:
                return
            self._open.remove(task)
        self._ended(task, completed)

    def give_up(self) -> None:
        """End all of them without a result."""
        with self._lock:
            left = tuple(self._open)
        for task in left:
            self.end(task, False)


def _feed(queue: RivalQueue, model: AsynchronousModel, tasks: OpenTasks, errors: TaskErrors) -> None:
    """Keep a model's requests busy. A queue of requests that raised once does so for ever, and which of its
    requests failed nobody knows: what is open and all that follows is given up."""
    try:
        while (taken := queue.take(model.wait_for_room)) is not None:
            task, feeds = taken
            tasks.add(task)
            model.begin(feeds, lambda task=task: tasks.end(task, True))  # type: ignore[misc]
    except Exception as error:  # runtimes' exceptions share no base class
        errors.note_error(error)
        tasks.give_up()
        while (taken := queue.take()) is not None:
            tasks.add(taken[0])
            tasks.give_up()
