"""A device without hardware: it holds every launch back and runs what it holds in a random legal order.

Legal is what streams, events and captured graphs allow, and nothing more. So whatever the executor forgot to
order happens in both orders sooner or later. It also refuses what CUDA forbids: to use a stream that is being
captured for anything else, to end a capture that has not joined, to replay graphs of one pool at once.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stageloom.edge_agent.executor.cuda.device import BlockNeeds, Launch, Multiprocessor
from stageloom.edge_agent.lowering.convolve import searching
from tests.executor.simulated_streams import Entry, SimulatedEvent, SimulatedStream, SimulatedStreams

MAX_RUNNING, MAX_PREPARING = 32, 9 + 2 * 32


class CapturedEvent(SimulatedEvent):
    """A node of the graph that is being captured."""

    def __init__(self, owner: "SimulatedGraph", node: int) -> None:
        super().__init__(timed=False)
        self.owner = owner
        self.node = node


class Replay(Entry):
    """A graph in a stream."""


@dataclass(eq=False)
class SimulatedGraph:
    """Nodes with the nodes that come before them."""

    pool: object
    nodes: list[Launch] = field(default_factory=list)
    before: list[set[int]] = field(default_factory=list)
    running: set[int] | None = None  # the nodes still to run, while it is replayed
    replays: int = 0


class CapturableStream(SimulatedStream):
    """A stream that may be part of a capture."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.capture: SimulatedGraph | None = None
        self.tail: set[int] = set()  # while captured: what the next node comes after


def _as_launched(work: Launch) -> Launch:
    """In the mode of the thread that launches, whoever lets it happen: a device's kernels have none."""
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        with torch.inference_mode(inference):
            work()

    return run


class SimulatedGraphDevice(SimulatedStreams):
    """See the module's text. `ignore_waits` and `ignore_captured` leave out every n-th wait between streams,
    outside and inside captures: defects that must be found."""

    def __init__(self, seed: int, *, ignore_waits: int = 0, ignore_captured: int = 0) -> None:
        super().__init__(seed, ignore_waits=ignore_waits)
        self.torch_device = torch.device("cpu")
        self.most_streams = MAX_RUNNING
        self.events_in_graphs = True
        self.captures = 0
        self.pinned = 0  # pieces of host memory
        self.needs: Callable[[Launch], Sequence[BlockNeeds]] = lambda work: ()  # as the test says
        self.replays = 0
        self.most_ahead = 0  # replays that were issued and had not begun, at most
        self.tf32: bool | None = None
        self.given_back = 0  # times
        self.capturers: set[int] = set()  # threads
        self._ignore_captured = ignore_captured
        self._captured_waits = 0
        self._running = [CapturableStream(f"run-{i}") for i in range(MAX_RUNNING)]
        self._preparing = [CapturableStream(f"prepare-{i}") for i in range(MAX_PREPARING)]
        self._capturing: SimulatedGraph | None = None
        self._capturer = 0
        self._preparer = threading.Lock()
        self._graphs: weakref.WeakSet[SimulatedGraph] = weakref.WeakSet()  # that live
        self._pools: list[object] = []  # that were captured into
        self._broken: list[object] = []  # pools in which a capture failed

    # Streams

    def stream(self, number: int) -> CapturableStream:
        return self.every_stream()[number]

    def every_stream(self) -> Sequence[CapturableStream]:
        return self._running + self._preparing

    def launch(self, stream: SimulatedStream, work: Launch) -> None:
        assert isinstance(stream, CapturableStream)
        work = _as_launched(work)
        with self._lock:
            if stream.capture is not None:
                self._add_node(stream, work)
            else:
                self._not_while_capturing(stream)
                super().launch(stream, work)

    def record(
        self, stream: SimulatedStream, *, timed: bool = False, external: bool = False
    ) -> SimulatedEvent:
        assert isinstance(stream, CapturableStream)
        with self._lock:
            if stream.capture is None:
                self._not_while_capturing(stream)
                return super().record(stream, timed=timed)
            if not external:
                return CapturedEvent(stream.capture, self._add_node(stream, lambda: None))
            event = SimulatedEvent(timed)
            self._add_node(stream, lambda: self.come(event))
            event.recorded = 1
            return event

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        assert isinstance(stream, CapturableStream)
        with self._lock:
            if not isinstance(event, CapturedEvent):
                assert stream.capture is None, "a capture waits for something outside"
                super().wait(stream, event)
                return
            self._captured_waits += 1
            assert event.owner is self._capturing, "an event of one capture is waited for in another"
            if stream.capture is None:
                assert not stream.queue, "a stream joins a capture with work of its own"
                stream.capture, stream.tail = event.owner, set()
            if not self._ignore_captured or self._captured_waits % self._ignore_captured:
                stream.tail.add(event.node)

    def _add_node(self, stream: CapturableStream, work: Launch) -> int:
        graph = stream.capture
        assert graph is not None and self._capturer == threading.get_ident()
        graph.nodes.append(work)
        graph.before.append(set(stream.tail))
        stream.tail = {len(graph.nodes) - 1}
        return len(graph.nodes) - 1

    def _not_while_capturing(self, stream: CapturableStream) -> None:
        """A stream that belongs to the capture thread takes nothing else meanwhile."""
        if self._capturing is not None and self._capturer == threading.get_ident():
            raise AssertionError(f"a launch on {stream.name} is left out of the capture")

    # Graphs

    def new_pool(self) -> object:
        return object()

    def capture(
        self, pool: object, streams: Sequence[CapturableStream], body: Callable[[], None]
    ) -> SimulatedGraph:
        with self._lock:
            assert self._capturing is None, "two captures at once"
            alive = any(graph.pool is pool for graph in self._graphs)
            if not alive and any(known is pool for known in self._pools):
                raise RuntimeError("INTERNAL ASSERT FAILED: a pool of which no graph lives is captured into")
            if any(broken is pool for broken in self._broken):
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            self._pools.append(pool)
            graph = SimulatedGraph(pool)
            streams[0].capture, streams[0].tail = graph, set()
            self._capturing, self._capturer = graph, threading.get_ident()
            self.capturers.add(self._capturer)
        try:
            body()
            assert self._joined(graph, streams[0]), "a stream has not joined the capture's first one"
        except RuntimeError:
            self._broken.append(pool)
            raise
        finally:
            with self._lock:
                self._capturing = None
                for stream in self._preparing + self._running:
                    stream.capture, stream.tail = None, set()
        self.captures += 1
        self._graphs.add(graph)
        return graph

    def _joined(self, graph: SimulatedGraph, stream: CapturableStream) -> bool:
        seen: set[int] = set()
        todo = list(stream.tail)
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += graph.before[node]
        return len(seen) == len(graph.nodes)

    def replay(self, stream: CapturableStream, graph: SimulatedGraph) -> None:
        with self._lock:
            self.replays += 1
            graph.replays += 1
            stream.queue.append(Replay(lambda: self._advance(graph)))
            waiting = sum(isinstance(entry, Replay) for s in self._running for entry in s.queue)
            self.most_ahead = max(self.most_ahead, waiting)

    def block_needs(self, pool: object, stream: CapturableStream, work: Launch) -> Sequence[BlockNeeds]:
        assert any(graph.pool is pool for graph in self._graphs), "a pool for each kernel"
        return self.needs(work)

    def multiprocessor(self) -> Multiprocessor:
        return Multiprocessor()

    def _advance(self, graph: SimulatedGraph) -> bool:
        """Run one node of a graph; True if that was its last."""
        if graph.running is None:
            for other in self._graphs:
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

    def settle(self) -> None:
        pass

    # The rest

    def host_bytes(self, nbytes: int) -> Tensor:
        self.pinned += 1
        return torch.empty(nbytes, dtype=torch.uint8)

    def preparing(self) -> threading.Lock:
        return self._preparer

    @contextmanager
    def searching(self) -> Iterator[None]:
        with searching():
            yield

    def use_tf32(self, on: bool) -> None:
        self.tf32 = on

    def without_tf32(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reserved_bytes(self) -> int:
        return self.captures << 20

    def bytes_of(self, pools: Collection[object]) -> int:
        """What these pools hold: each capture takes 1 MiB, which is free once no graph of its pool lives."""
        live = [graph.pool for graph in self._graphs]
        return sum(pool in pools and pool in live for pool in self._pools) << 20

    def give_back(self) -> None:
        assert self._preparer.locked() and self._capturing is None, "memory is freed during a capture"
        self.given_back += 1
