"""A device without hardware: it holds every launch back and runs what it holds in a random legal order.

Legal is what streams, events and captured graphs allow, and nothing more. So whatever the executor forgot to
order happens in both orders sooner or later. It also refuses what CUDA forbids: to use a stream that is being
captured for anything else, to end a capture that has not joined, to replay graphs of one pool at once.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edge_agent.executor.torch.device import Launch

MAX_RUNNING, MAX_PREPARING = 32, 17


class SimulatedEvent:
    """A point in a stream; while captured, the node that it stands for."""

    def __init__(self, timed: bool) -> None:
        self.timed = timed
        self.recorded = 0  # how often it was put into a stream
        self.come = 0  # how often it has come
        self.at_s = 0.0
        self.node: int | None = None
        self.owner: SimulatedGraph | None = None


@dataclass(slots=True)
class _Work:
    run: Launch


@dataclass(slots=True)
class _Record:
    event: SimulatedEvent


@dataclass(slots=True)
class _Wait:
    event: SimulatedEvent
    count: int


@dataclass(slots=True)
class _Replay:
    graph: "SimulatedGraph"


@dataclass
class SimulatedGraph:
    """Nodes with the nodes that come before them."""

    pool: object
    nodes: list[Launch] = field(default_factory=list)
    before: list[set[int]] = field(default_factory=list)
    running: set[int] | None = None  # the nodes still to run, while it is replayed
    replays: int = 0


class SimulatedStream:
    """What was put into a stream and has not happened."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[_Work | _Record | _Wait | _Replay] = deque()
        self.capture: SimulatedGraph | None = None
        self.tail: set[int] = set()  # while captured: what the next node comes after


class SimulatedDevice:
    """See the module's text. `ignore_waits` and `ignore_captured` leave out every n-th wait between streams,
    outside and inside captures: defects that must be found."""

    def __init__(self, seed: int, *, ignore_waits: int = 0, ignore_captured: int = 0) -> None:
        self.torch_device = torch.device("cpu")
        self.rng = random.Random(seed)
        self.captures: list[SimulatedGraph] = []
        self.replays = 0
        self.eager_launches = 0
        self.waits = 0
        self.sleeps = 0
        self.free = 1 << 40
        self.most_ahead = 0  # replays that were issued and had not begun, at most
        self.tf32: bool | None = None
        self.capturers: set[int] = set()  # threads
        self._ignore_waits = ignore_waits
        self._ignore_captured = ignore_captured
        self._captured_waits = 0
        self._running = [SimulatedStream(f"run-{i}") for i in range(MAX_RUNNING)]
        self._preparing = [SimulatedStream(f"prepare-{i}") for i in range(MAX_PREPARING)]
        self._favourite = self._running[0]
        self._capturing: SimulatedGraph | None = None
        self._capturer = 0
        self._lock = threading.RLock()
        self._preparer = threading.Lock()
        self._now_s = 0.0

    # Streams

    def lane_streams(self, first: int, count: int) -> Sequence[SimulatedStream]:
        assert 0 <= first and first + count <= MAX_RUNNING, "P15: a lane has streams that there are not"
        return self._running[first : first + count]

    def capture_streams(self, count: int) -> Sequence[SimulatedStream]:
        assert count <= 8
        return self._preparing[:count]

    def profiling_streams(self, count: int) -> Sequence[SimulatedStream]:
        assert count <= 8
        return self._preparing[8 : 8 + count]

    def moving_stream(self) -> SimulatedStream:
        return self._preparing[16]

    def launch(self, stream: SimulatedStream, work: Launch) -> None:
        with self._lock:
            if stream.capture is not None:
                self._add_node(stream, work)
            else:
                self._not_while_capturing(stream)
                self.eager_launches += 1
                stream.queue.append(_Work(work))

    def record(
        self, stream: SimulatedStream, *, timed: bool = False, external: bool = False
    ) -> SimulatedEvent:
        with self._lock:
            event = SimulatedEvent(timed)
            if stream.capture is None:
                self._not_while_capturing(stream)
                event.recorded += 1
                stream.queue.append(_Record(event))
            elif external:
                self._add_node(stream, lambda: self._come(event))
                event.recorded = 1
            else:
                event.owner = stream.capture
                event.node = self._add_node(stream, lambda: None)
            return event

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        with self._lock:
            if event.owner is None:
                self.waits += 1
                if self._ignore_waits and self.waits % self._ignore_waits == 0:
                    return
            else:
                self._captured_waits += 1
                assert event.owner is self._capturing, "an event of one capture is waited for in another"
                assert event.node is not None
                if stream.capture is None:
                    assert not stream.queue, "a stream joins a capture with work of its own"
                    stream.capture, stream.tail = event.owner, set()
                if not self._ignore_captured or self._captured_waits % self._ignore_captured:
                    stream.tail.add(event.node)
                return
            assert stream.capture is None, "a capture waits for something outside"
            stream.queue.append(_Wait(event, event.recorded))

    def _add_node(self, stream: SimulatedStream, work: Launch) -> int:
        graph = stream.capture
        assert graph is not None and self._capturer == threading.get_ident()
        graph.nodes.append(work)
        graph.before.append(set(stream.tail))
        stream.tail = {len(graph.nodes) - 1}
        return len(graph.nodes) - 1

    def _not_while_capturing(self, stream: SimulatedStream) -> None:
        """A stream that belongs to the capture thread takes nothing else meanwhile."""
        if self._capturing is not None and self._capturer == threading.get_ident():
            raise AssertionError(f"a launch on {stream.name} is left out of the capture")

    # Graphs

    def new_pool(self) -> object:
        return object()

    def capture(
        self, pool: object, streams: Sequence[SimulatedStream], body: Callable[[], None]
    ) -> SimulatedGraph:
        with self._lock:
            assert self._capturing is None, "two captures at once"
            graph = SimulatedGraph(pool)
            streams[0].capture, streams[0].tail = graph, set()
            self._capturing, self._capturer = graph, threading.get_ident()
            self.capturers.add(self._capturer)
        try:
            body()
            assert self._joined(graph, streams[0]), "a stream has not joined the capture's first one"
        finally:
            with self._lock:
                self._capturing = None
                for stream in self._preparing + self._running:
                    stream.capture, stream.tail = None, set()
        self.captures.append(graph)
        return graph

    def _joined(self, graph: SimulatedGraph, stream: SimulatedStream) -> bool:
        seen: set[int] = set()
        todo = list(stream.tail)
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += graph.before[node]
        return len(seen) == len(graph.nodes)

    def replay(self, stream: SimulatedStream, graph: SimulatedGraph) -> None:
        with self._lock:
            self.replays += 1
            graph.replays += 1
            stream.queue.append(_Replay(graph))
            waiting = sum(isinstance(op, _Replay) for s in self._running for op in s.queue)
            self.most_ahead = max(self.most_ahead, waiting)

    # Running

    def synchronize(self, event: SimulatedEvent) -> None:
        with self._lock, torch.inference_mode():
            while event.come < event.recorded:
                self._step()
            for _ in range(self.rng.randint(0, 8)):
                if not self._step(idle=True):
                    break

    def _step(self, *, idle: bool = False) -> bool:
        """Let one thing happen that may happen; False if nothing can."""
        able = [s for s in self._running + self._preparing if s.queue and self._can(s.queue[0])]
        if not able:
            assert idle, "the device hangs: an event is waited for that never comes"
            return False
        stream = self._choose(able)
        head = stream.queue[0]
        self._now_s += 1e-6
        if isinstance(head, _Replay):
            if not self._advance(head.graph):
                return True
        elif isinstance(head, _Work):
            head.run()
        elif isinstance(head, _Record):
            self._come(head.event)
        stream.queue.popleft()
        return True

    def _choose(self, able: list[SimulatedStream]) -> SimulatedStream:
        """One stream stays ahead of the others for a while: fair choices would hide what is missing."""
        if self._favourite not in able or self.rng.random() < 0.02:
            self._favourite = self.rng.choice(able)
        return self._favourite if self.rng.random() < 0.9 else self.rng.choice(able)

    def _can(self, head: _Work | _Record | _Wait | _Replay) -> bool:
        return not isinstance(head, _Wait) or head.event.come >= head.count

    def _advance(self, graph: SimulatedGraph) -> bool:
        """Run one node of a graph; True if that was its last."""
        if graph.running is None:
            for other in self.captures:
                clash = other is not graph and other.pool is graph.pool and other.running is not None
                assert not clash, "P2: two graphs of one pool run at once"
            graph.running = set(range(len(graph.nodes)))
        ready = [node for node in graph.running if not graph.before[node] & graph.running]
        node = self.rng.choice(ready)
        graph.nodes[node]()
        graph.running.discard(node)
        if graph.running:
            return False
        graph.running = None
        return True

    def _come(self, event: SimulatedEvent) -> None:
        event.come += 1
        event.at_s = self._now_s

    def settle(self) -> None:
        pass

    def elapsed_s(self, first: SimulatedEvent, second: SimulatedEvent) -> float:
        assert first.timed and second.timed and first.come and second.come
        return second.at_s - first.at_s

    # The rest

    def host_bytes(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def sleep(self, stream: SimulatedStream, seconds: float) -> None:
        with self._lock:
            self.sleeps += 1
            for _ in range(self.rng.randint(0, 5)):
                self.launch(stream, lambda: None)

    def preparing(self) -> threading.Lock:
        return self._preparer

    @contextmanager
    def searching(self) -> Iterator[None]:
        yield

    def use_tf32(self, on: bool) -> None:
        self.tf32 = on

    def reserved_bytes(self) -> int:
        return len(self.captures) << 20

    def free_bytes(self) -> int:
        return self.free
