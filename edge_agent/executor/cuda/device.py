"""What a CUDA executor asks of a device: streams, events, host memory; graphs or memory for sessions on top.

Everything asynchronous goes through a device, and nothing else does. The tests run the executors on simulated
devices that hold every launch back and carry launches out in any order that streams, events and graphs allow.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from stageloom.edge_agent.executor.cuda.streams import MAX_GROUP_STREAMS, MAX_STREAMS
from stageloom.shared.search.streams import OperatorProfile

if TYPE_CHECKING:
    import torch

Launch: TypeAlias = Callable[[], object]
"""Puts work on a stream, which is the current one where the provider has such a thing."""

Stream: TypeAlias = Any
"""An order of launches; whatever the device makes of it."""

Event: TypeAlias = Any
"""A point in a stream."""

Pool: TypeAlias = Any
"""Memory of graphs that never run at once."""

Graph: TypeAlias = Any
"""Launches with their order, captured once."""

MOVING = MAX_STREAMS
"""The number of the stream on which instances go over to a new plan; those below it run steps."""

PROFILING = MOVING + 1
"""The first of up to eight streams on which plans are profiled and operators timed."""

PREPARING = PROFILING + MAX_GROUP_STREAMS
"""The first of those on which nothing runs but what prepares programs, as many as `most_streams`."""

CAPTURING = PREPARING + MAX_STREAMS
"""The first of those on which nothing runs: what serves is captured there; as many."""

_BLOCK_RESERVES_BYTES: Final = 1024  # of shared memory, by the system, since compute capability 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiprocessor:
    """What the blocks on one multiprocessor share."""

    registers: int = 65_536
    shared_bytes: int = 233_472
    threads: int = 2048


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    """What one block of threads of a kernel takes of a multiprocessor."""

    registers: int  # per thread
    shared_bytes: int
    threads: int

    def shares(self, of: Multiprocessor) -> OperatorProfile:
        """As shares of what a multiprocessor has."""
        reserved = _BLOCK_RESERVES_BYTES if self.threads else 0
        return OperatorProfile(
            shared_memory=(self.shared_bytes + reserved) / of.shared_bytes,
            threads=self.threads / of.threads,
            registers=self.registers * self.threads / of.registers,
        )


class StreamDevice(Protocol):
    """One device. Streams are asynchronous; `launch`, `record` and `wait` return at once."""

    def stream(self, number: int) -> Stream:
        """A number is one stream for ever."""

    def launch(self, stream: Stream, work: Launch) -> None:
        """Call what issues asynchronous work on the stream."""

    def record(self, stream: Stream, *, timed: bool = False, external: bool = False) -> Event:
        """A point in the stream. `timed`: for `elapsed_s`; `external`: it stays one when it is captured."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What follows in the stream comes after the event."""

    def synchronize(self, event: Event) -> None:
        """Block until the event has come."""

    def elapsed_s(self, first: Event, second: Event) -> float:
        """Device time between two timed events that have come."""

    def sleep(self, stream: Stream, seconds: float) -> None:
        """Hold the stream up."""

    def host_bytes(self, nbytes: int) -> Any:
        """Host memory that the device copies to and from asynchronously. [nbytes], uint8"""

    def free_bytes(self) -> int:
        """Bytes that nobody has taken, with what this process could give back."""


class GraphDevice(StreamDevice, Protocol):
    """A device whose launches can be captured into graphs. `launch` makes the stream torch's current one."""

    torch_device: "torch.device"
    most_streams: int  # that one program may use
    events_in_graphs: bool  # a captured graph can hold events that are read after a replay

    def settle(self) -> None:
        """Block until what this thread launched on the default stream has ended: zeros, weights."""

    def new_pool(self) -> Pool:
        """A pool for graphs that never run at once."""

    def capture(self, pool: Pool, streams: Sequence[Stream], body: Callable[[], None]) -> Graph:
        """Capture what `body` issues on these streams; it begins on the first and joins there."""

    def replay(self, stream: Stream, graph: Graph) -> None:
        """Launch a graph on a stream, and return at once."""

    def block_needs(self, pool: Pool, stream: Stream, work: Launch) -> Sequence[BlockNeeds]:
        """Of every kernel that `work` would launch; nothing runs. Empty where the device cannot say.

        What the kernels need of memory comes from the pool, and goes back there.
        """

    def multiprocessor(self) -> Multiprocessor:
        """What the blocks on one of its multiprocessors share."""

    def preparing(self) -> AbstractContextManager[object]:
        """Held by whoever uses the preparing streams: a process may have several executors."""

    def searching(self) -> AbstractContextManager[None]:
        """While inside, libraries may search for the fastest kernel of each shape, on this thread."""

    def use_tf32(self, on: bool) -> None:
        """Whether products of float32 matrices and convolutions may use TF32; for the whole process."""

    def without_tf32(self) -> AbstractContextManager[None]:
        """While inside, they may not; then as `use_tf32` was last told by any executor of the process."""

    def reserved_bytes(self) -> int:
        """Bytes that this process has taken from the device."""

    def give_back(self) -> None:
        """Give what is taken and unused back, for which the device waits; to be `preparing` meanwhile."""


class SessionDevice(StreamDevice, Protocol):
    """A device that sessions of onnxruntime run on, each on a stream of its own, bound to addresses."""

    kind: str  # of its memory, as IOBinding calls it: `cuda`, `cpu`
    number: int
    handle_bytes: int  # of the device's memory that the libraries' handles of one session take
    engine_builder: str  # which version would build engines for which device; empty where nothing does

    def provider(self, stream: Stream, *, tf32: bool) -> tuple[str, Mapping[str, str]]:
        """onnxruntime's provider for sessions whose kernels go to that stream, with its options."""

    def engine_provider(
        self, stream: Stream, *, precision: str, engine: Path, timings: Path
    ) -> tuple[str, Mapping[str, str]]:
        """The provider that builds an engine of a whole session, with its options.

        It keeps the engine in the one folder and what it measured of kernels in the other.
        """

    def copying(self, stream: Stream, target: int, source: int, nbytes: int) -> Launch:
        """What copies on that stream between addresses, on the device or of `host_bytes`."""

    def allocate(self, nbytes: int) -> int:
        """The address of memory on the device, aligned to 256 bytes, all zeros."""

    def free(self, address: int) -> None:
        """Give memory back; nothing on the device uses it any more."""

    def free_host(self, piece: Any) -> None:
        """Give back a piece of `host_bytes`; nothing on the device uses it any more."""

    def close(self) -> None:
        """Give back the streams and all of `host_bytes`; no session is left, and nothing is launched."""


def streams_from(device: StreamDevice, first: int, count: int) -> Sequence[Stream]:
    """`count` streams from number `first` on."""
    return [device.stream(number) for number in range(first, first + count)]
