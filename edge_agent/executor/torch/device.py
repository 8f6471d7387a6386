"""What the graph executor asks of a device: streams, events, graphs, host memory. `cuda` is the real one.

Everything asynchronous goes through here, and nothing else does. The tests run the executor on a simulated
device that holds every launch back and carries them out in any order that streams and events allow.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from stageloom.edge_agent.utilisation.kernels import BlockNeeds, Multiprocessor

Launch: TypeAlias = Callable[[], object]


Stream: TypeAlias = Any
"""An order of launches; whatever the device makes of it."""

Event: TypeAlias = Any
"""A point in a stream."""

Pool: TypeAlias = Any
"""Memory of graphs that never run at once."""

Graph: TypeAlias = Any
"""Launches with their order, captured once."""


class Device(Protocol):
    """One device. Streams are asynchronous; `launch`, `record`, `wait` and `replay` return at once."""

    torch_device: torch.device

    def lane_streams(self, first: int, count: int) -> Sequence[Stream]:
        """`count` of the 32 streams for running, from number `first` on; a number is one stream for ever."""

    def capture_streams(self, count: int) -> Sequence[Stream]:
        """Streams on which nothing ever runs but what prepares programs, at most 8."""

    def moving_stream(self) -> Stream:
        """The stream on which instances go over to a new plan."""

    def profiling_streams(self, count: int) -> Sequence[Stream]:
        """Streams beside all lanes', at most 8."""

    def launch(self, stream: Stream, work: Launch) -> None:
        """Run `work` with the stream as the current one; what it launches is asynchronous."""

    def record(self, stream: Stream, *, timed: bool = False, external: bool = False) -> Event:
        """A point in the stream. `timed`: for `elapsed_s`; `external`: it stays one when it is captured."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What follows in the stream comes after the event."""

    def synchronize(self, event: Event) -> None:
        """Block until the event has come."""

    def settle(self) -> None:
        """Block until what this thread launched on the default stream has ended: zeros, weights."""

    def elapsed_s(self, first: Event, second: Event) -> float:
        """Device time between two timed events that have come."""

    def new_pool(self) -> Pool:
        """A pool for graphs that never run at once."""

    def capture(self, pool: Pool, streams: Sequence[Stream], body: Callable[[], None]) -> Graph:
        """Capture what `body` issues on these streams; it begins on the first and joins there."""

    def replay(self, stream: Stream, graph: Graph) -> None:
        """Launch a graph on a stream."""

    def block_needs(self, stream: Stream, work: Launch) -> Sequence[BlockNeeds]:
        """Of every kernel that `work` would launch; nothing runs. Empty where the device cannot say."""

    def multiprocessor(self) -> Multiprocessor:
        """What the blocks on one of its multiprocessors share."""

    def host_bytes(self, nbytes: int) -> Tensor:
        """Host memory that the device copies to and from asynchronously. [nbytes], uint8"""

    def sleep(self, stream: Stream, seconds: float) -> None:
        """Hold the stream up."""

    def preparing(self) -> AbstractContextManager[object]:
        """Held by whoever uses the capture streams: a process may have several executors."""

    def searching(self) -> AbstractContextManager[None]:
        """While inside, libraries may search for the fastest kernel of each shape."""

    def use_tf32(self, on: bool) -> None:
        """Whether products of float32 matrices and convolutions may use TF32; for the whole process."""

    def give_back(self) -> None:
        """Return memory that this process has taken and does not use; the whole device may wait for it."""

    def reserved_bytes(self) -> int:
        """Bytes that this process has taken from the device."""

    def free_bytes(self) -> int:
        """Bytes that nobody has taken, with what this process could give back."""
