"""What the executor asks of a device: streams, events, memory, where sessions run. `cuda` is the real one.

Everything asynchronous goes through here, and nothing else does. The tests run the executor on a simulated
device that holds every launch back and carries them out in any order that streams and events allow; sessions
compute on the processor there, bound to memory in the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from stageloom.edge_agent.executor.on_device.streams import MAX_STREAMS

Stream: TypeAlias = Any
"""An order of launches; whatever the device makes of it."""

Event: TypeAlias = Any
"""A point in a stream."""

MOVING = MAX_STREAMS
"""The number of the stream on which instances go over to a new plan."""

PROFILING = MAX_STREAMS + 1
"""The number of the stream on which operators are timed."""


class OrtDevice(Protocol):
    """One device. Streams are asynchronous; `launch`, `copy`, `record` and `wait` return at once."""

    kind: str  # of its memory, as IOBinding calls it: `cuda`, `cpu`
    number: int

    def stream(self, number: int) -> Stream:
        """Streams 0 to PROFILING; a number is one stream for ever."""

    def provider(self, stream: Stream, *, tf32: bool) -> tuple[str, Mapping[str, str]]:
        """onnxruntime's provider for sessions whose kernels go to that stream, with its options."""

    def launch(self, stream: Stream, work: Callable[[], object]) -> None:
        """Call what issues asynchronous work on the stream."""

    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        """Copy between addresses, on the device or of `host_bytes`."""

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """A point in the stream; `timed` is for `elapsed_s`."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What follows in the stream comes after the event."""

    def synchronize(self, event: Event) -> None:
        """Block until the event has come."""

    def elapsed_s(self, first: Event, second: Event) -> float:
        """Device time between two timed events that have come."""

    def sleep(self, stream: Stream, seconds: float) -> None:
        """Hold the stream up."""

    def allocate(self, nbytes: int) -> int:
        """The address of memory on the device, aligned to 256 bytes, all zeros."""

    def free(self, address: int) -> None:
        """Give memory back; nothing on the device uses it any more."""

    def host_bytes(self, nbytes: int) -> np.ndarray:
        """Host memory that the device copies to and from asynchronously. [nbytes], uint8"""

    def free_bytes(self) -> int:
        """Bytes that nobody has taken."""


def streams_of(device: OrtDevice, numbers: Sequence[int]) -> dict[int, Stream]:
    """Several streams by number."""
    return {number: device.stream(number) for number in numbers}
