"""A device for sessions without hardware: its memory is the host's, its sessions compute on the processor.

Memory that was never given is never touched unnoticed: an address must lie inside a piece that is allocated,
and a piece is given back once.
"""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from stageloom.edge_agent.executor.cuda.device import PROFILING, Launch
from stageloom.edge_agent.executor.onnx_cuda.executor import OnnxCudaExecutor
from tests.executor.simulated_streams import SimulatedStream, SimulatedStreams

_ALIGNMENT = 256


class SimulatedSessionDevice(SimulatedStreams):
    """As `SessionDevice`; see the module's text."""

    kind = "cpu"
    number = 0
    handle_bytes = 1 << 20

    def __init__(self, seed: int = 0, *, ignore_waits: int = 0, engine_builder: str = "") -> None:
        super().__init__(seed, ignore_waits=ignore_waits)
        self.engine_builder = engine_builder
        self.engines: list[tuple[str, Path, Path]] = []  # precision and folders, as engines were asked for
        self._streams = [SimulatedStream(f"stream-{number}") for number in range(PROFILING + 1)]
        self._pieces: dict[int, tuple[np.ndarray, int]] = {}
        self._pinned: dict[int, np.ndarray] = {}
        self.closed = False
        self.tf32: set[bool] = set()  # what sessions were made with
        self.used: set[SimulatedStream] = set()  # streams that something was launched on
        self.most_ahead = 0  # entries that were held back at once

    def every_stream(self) -> Sequence[SimulatedStream]:
        return self._streams

    def provider(self, stream: SimulatedStream, *, tf32: bool) -> tuple[str, Mapping[str, str]]:
        self.tf32.add(tf32)
        return "CPUExecutionProvider", {}

    def engine_provider(
        self, stream: SimulatedStream, *, precision: str, engine: Path, timings: Path
    ) -> tuple[str, Mapping[str, str]]:
        self.engines.append((precision, engine, timings))
        return "CPUExecutionProvider", {}

    def launch(self, stream: SimulatedStream, work: object) -> None:
        assert callable(work)
        self.used.add(stream)
        super().launch(stream, work)
        self.most_ahead = max(self.most_ahead, sum(len(s.queue) for s in self._streams))

    def copying(self, stream: SimulatedStream, target: int, source: int, nbytes: int) -> Launch:
        for address in (target, source):
            assert self._holds(address, nbytes), "a copy leaves the memory that was allocated"
        return lambda: ctypes.memmove(target, source, nbytes)

    def _holds(self, address: int, nbytes: int) -> bool:
        pieces = [(begin, size) for begin, (_, size) in self._pieces.items()]
        pieces += [(begin, piece.nbytes) for begin, piece in self._pinned.items()]
        return any(begin <= address and address + nbytes <= begin + size for begin, size in pieces)

    def allocate(self, nbytes: int) -> int:
        room = np.zeros(nbytes + _ALIGNMENT, np.uint8)
        address = -(-room.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        self._pieces[address] = (room, nbytes)
        return address

    def free(self, address: int) -> None:
        del self._pieces[address]

    @property
    def held(self) -> int:
        """Bytes that are allocated."""
        return sum(size for _, size in self._pieces.values())

    def host_bytes(self, nbytes: int) -> np.ndarray:
        piece = np.empty(nbytes, np.uint8)
        self._pinned[piece.ctypes.data] = piece
        return piece

    def free_host(self, piece: np.ndarray) -> None:
        del self._pinned[piece.ctypes.data]

    @property
    def pinned(self) -> int:
        """Bytes of host memory."""
        return sum(piece.nbytes for piece in self._pinned.values())

    def close(self) -> None:
        assert not self.held, "the memory of a plan is left"
        with self._lock:
            while any(stream.queue for stream in self._streams):
                self._step()
        self._pinned.clear()
        self.closed = True


def simulated(seed: int = 0, *, ignore_waits: int = 0) -> OnnxCudaExecutor:
    """`onnx_cuda` without CUDA."""
    return OnnxCudaExecutor(SimulatedSessionDevice(seed, ignore_waits=ignore_waits))


def device_of(executor: OnnxCudaExecutor) -> SimulatedSessionDevice:
    """The device behind an executor."""
    device = executor._on
    assert isinstance(device, SimulatedSessionDevice)
    return device
