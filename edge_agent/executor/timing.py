"""Time for measurements on a device that serves: only while nothing waits, and not for ever."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from stageloom.edge_agent.executor.base import NOT_TIMED, OperatorTime, TimingRequest, one_line
from stageloom.shared.errors import ExecutorError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import TensorId

if TYPE_CHECKING:
    import numpy

_POLL_S: Final = 0.005
_SEED: Final = 7


class Idleness:
    """Whether nothing is served, asked by a call, and how many tasks have come so far.

    A task that came and ended between two questions shows in the number alone.
    """

    def __init__(self, idle: Callable[[], bool], arrived: Callable[[], int]) -> None:
        self._idle = idle
        self.arrived = arrived

    def __call__(self) -> bool:
        return self._idle()


class IdleTime:
    """Hands out idle moments until `own_s` of work were spent in them, or `wall_s` have gone by.

    A step of work is not interrupted, so it should be short; whoever asks before each of them yields to a
    task within one. What was measured while a task came is worth nothing: see `undisturbed`, which knows of
    tasks that have ended since where `idle` is an `Idleness`.
    """

    def __init__(
        self,
        idle: Callable[[], bool],
        *,
        own_s: float,
        wall_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._idle = idle
        self._arrived = idle.arrived if isinstance(idle, Idleness) else lambda: 0
        self._before = 0  # tasks that had come when the moment was handed out
        self._own_s = own_s
        self._wall_s = wall_s
        self._clock = clock
        self._sleep = sleep
        self._ends_s = clock() + wall_s
        self._spent_s = 0.0
        self.reason = ""  # why no more time is handed out
        self.too_busy = False  # that is for want of idle moments, and the time limit is not used up

    def wait(self) -> bool:
        """Wait for an idle moment; False when the time is up."""
        while True:
            self._before = self._arrived()  # first: a task that comes after it is seen here or in the number
            if self._spent_s >= self._own_s:
                self.reason = f"the time limit of {self._own_s:g} s was used up"
            elif self._clock() >= self._ends_s:
                self.too_busy = True
                spent = f"{self._spent_s:.1f} s of {self._own_s:g} s in {self._wall_s:g} s"
                self.reason = f"the device was too busy: {spent}"
            elif self._idle():
                return True
            if self.reason:
                return False
            self._sleep(_POLL_S)

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Count what is done inside as spent."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._spent_s += self._clock() - began_s

    @property
    def undisturbed(self) -> bool:
        """Nothing has come since the moment was handed out."""
        return self._idle() and self._arrived() == self._before


def summary(taken_s: Sequence[float]) -> OperatorTime:
    """Of at least one run; the spread is half the distance of the 16th and the 84th percentile."""
    import numpy as np  # the engine process starts without it

    low, middle, high = (float(at) * 1e6 for at in np.percentile(taken_s, (16, 50, 84)))
    return OperatorTime(middle, (high - low) / 2, len(taken_s))


def time_repeats(lap: Callable[[], float], repeats: int, moments: IdleTime) -> OperatorTime:
    """Time of an operator from runs in idle moments; `lap` gives the seconds of one run.

    A run during which a task came is left out. NOT_TIMED where the time was up before the first.
    """
    taken_s: list[float] = []
    while len(taken_s) < repeats and moments.wait():
        with moments.spend():
            took_s = lap()
        if moments.undisturbed:
            taken_s.append(took_s)
    return summary(taken_s) if taken_s else NOT_TIMED


def time_in_order(
    graph: Graph,
    request: TimingRequest,
    idle: Callable[[], bool],
    begin: Callable[[int], Callable[[], float]],
    forget: Callable[[TensorId], object],
) -> tuple[OperatorTime, ...]:
    """Time per operator, each run alone; NOT_TIMED where the time was up. [num_operators]

    Operators run in the model's order on what the ones before them made, so that value-dependent kernels see
    plausible data. It asks for an idle moment before every run, and keeps no run during which a task came.

    `begin(op)` allocates what an operator makes and returns a function that runs it, for the seconds of one
    run; `forget(tensor)` frees a tensor whose last reader has run.

    Raises:
        ExecutorError: an operator cannot run alone.
    """
    moments = IdleTime(idle, own_s=request.limit_s, wall_s=request.wall_s)
    times: list[OperatorTime] = []
    live = set(graph.inputs)
    for op, operator in enumerate(graph.operators):
        if not moments.wait():
            break
        try:
            with moments.spend():
                lap = begin(op)
                lap()  # warms caches and makes what later operators read
            times.append(time_repeats(lap, request.repeats, moments))
        except ExecutorError:
            raise
        except Exception as error:  # a backend's: their exceptions share no base class
            raise ExecutorError(f"operator {op} of {graph.name!r} cannot run: {one_line(error)}") from error
        live.update(operator.outputs)
        for tensor in read_for_the_last_time(graph, op, live):
            live.discard(tensor)
            forget(tensor)
    return (*times, *[NOT_TIMED] * (len(graph.operators) - len(times)))


def read_for_the_last_time(graph: Graph, op: int, live: Iterable[TensorId]) -> list[TensorId]:
    """Those of the live tensors that no operator behind this one reads."""
    return [tensor for tensor in live if all(reader <= op for reader in graph.consumers[tensor])]


def seeded_values(graph: Graph, tensors: Iterable[TensorId], batch: int) -> "dict[TensorId, numpy.ndarray]":
    """Seeded contents for tensors of the graph, of their types. [batch, ...]

    Where dimensions are open it is the middle of their ranges that plans reckon with.
    """
    import numpy as np

    rng = np.random.default_rng(_SEED)
    values: dict[TensorId, np.ndarray] = {}
    for tensor in tensors:
        described = graph.tensors[tensor]
        shape = described.batched(batch) if graph.ranges is None else graph.middle(tensor)
        # numpy has no bfloat16 of its own: whoever takes one converts.
        dtype = np.dtype("float32" if described.dtype == "bfloat16" else described.dtype)
        if dtype.kind == "f":
            values[tensor] = np.asarray(rng.standard_normal(shape), dtype)
        else:
            values[tensor] = np.asarray(rng.integers(0, 2, shape), dtype)
    return values
