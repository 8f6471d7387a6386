"""TensorRT's engines of whole blocks, where they are right and faster than onnxruntime's own kernels.

An engine is a session like any other, on the same stream and addresses, whose first provider is TensorRT. It
is built for the session that runs *all* operators of a member's block, which is what a sequential schedule
makes: of groups on several streams there would be an engine a group, each with its workspace. Building takes
minutes, so that a thread of its own does it; until then, and in fallbacks, the plain session runs.

Before an engine may take its place both run on the same seeded inputs. The engine's results must be within
the rounding of the precision, and its median time below the plain session's. float32 has no engines: TensorRT
would round products to TF32, and onnxruntime has no option against it.

Engines are kept on disk in a folder for each session. onnxruntime names an engine by the graph's structure
and not by its weights or shapes (issues 6455 and 32254), so that in one folder two versions of a model would
run each other's engine. What was measured of kernels is shared by all.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from stageloom.edge_agent.executor.base import one_line
from stageloom.edge_agent.executor.cuda.device import Launch, SessionDevice, Stream
from stageloom.edge_agent.executor.onnx.cache import SessionKey
from stageloom.edge_agent.executor.onnx.executor import OnnxSession, session_from
from stageloom.edge_agent.executor.onnx.half import FP16
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.onnx_cuda.sessions import (
    bound_run,
    check_place,
    fill,
    lap_s,
    plain_provider,
    session_options,
)
from stageloom.edge_agent.executor.timing import seeded_values
from stageloom.shared.digest import digest_of
from stageloom.shared.graph import Graph
from stageloom.shared.ids import TensorId

log = logging.getLogger(__name__)

TOLERANCE: Final = {"tf32": 5e-3, FP16: 2e-2}
"""By precision the norm of an engine's error over that of the plain session's result. [relative]"""

_GAIN: Final = 0.98  # of the plain session's time: below it an engine wins
_LAPS: Final = 7


def cache_folder() -> Path:
    """Where engines are kept: below XDG_CACHE_HOME, else ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "stageloom" / "tensorrt"


@dataclass(frozen=True, slots=True)
class EngineTrial:
    """What became of an engine beside the plain session; seconds of one run."""

    error: float  # largest over the outputs
    engine_s: float
    plain_s: float

    def wins(self, precision: str) -> bool:
        """It is right and faster."""
        return self.error <= TOLERANCE[precision] and self.engine_s < _GAIN * self.plain_s


class BlockEngines:
    """Opens engines and remembers which of them won. Not thread-safe: one thread builds."""

    def __init__(self, device: SessionDevice, options: Any, folder: Path | None = None) -> None:
        """`options` are those of all runs; `folder` is by default `cache_folder`."""
        self._device = device
        self._options = options
        self._folder = cache_folder() if folder is None else folder
        self._won: dict[SessionKey, bool] = {}

    def builds(self, precision: str) -> bool:
        """Whether engines can be built here in that precision."""
        return bool(self._device.engine_builder) and precision in TOLERANCE

    def may_win(self, key: SessionKey) -> bool:
        """Whether an engine is built for the session, and has not lost; asked on any thread."""
        return self.builds(key.precision) and self._won.get(key) is not False

    def faster(self, key: SessionKey, plain: OnnxSession, source: ModelParts) -> OnnxSession | None:
        """An engine for the session if it wins; what has lost once is not built again."""
        if not self.may_win(key):
            return None
        name, count = source.artifact.graph.name, len(key.ops)
        try:
            engine = self._open(key, source)
            if key not in self._won:
                trial = self._trial(key, source.artifact.graph, engine, plain)
                self._won[key] = trial.wins(key.precision)
                log.info(
                    "engine model=%s ops=%d batch=%d us=%.1f plain_us=%.1f error=%.2g wins=%s",
                    *(name, count, key.batch, trial.engine_s * 1e6, trial.plain_s * 1e6, trial.error),
                    self._won[key],
                )
        except Exception as error:  # TensorRT's and onnxruntime's share no base class
            log.warning("no engine for %d operators of model %s: %s", count, name, one_line(error))
            self._won[key] = False
        return engine if self._won[key] else None

    def _open(self, key: SessionKey, source: ModelParts) -> OnnxSession:
        """Build the engine, or read it from the disk.

        Raises:
            ExecutorError: it cannot be built.
            OSError: the folder cannot be written.
        """
        assert key.stream is not None
        folder = self._folder / _name(key, self._device.engine_builder)
        folder.mkdir(parents=True, exist_ok=True)
        builder, settings = self._device.engine_provider(
            self._device.stream(key.stream), precision=key.precision, engine=folder, timings=self._folder
        )
        providers = {builder: dict(settings)}
        plain, plain_settings = plain_provider(self._device, key)  # for what the builder leaves
        providers.setdefault(plain, dict(plain_settings))
        options, file = session_options(self._device), folder / "model.onnx"
        # A file, since the engine's name has that of the model's, which would be a number of memory's.
        engine = session_from(key, source, options, list(providers.items()), file)
        check_place(engine, builder, self._device.kind, source)
        return engine

    def _trial(self, key: SessionKey, graph: Graph, engine: OnnxSession, plain: OnnxSession) -> EngineTrial:
        """Both on the same inputs, on memory of their own, by turns."""
        device = self._device
        stream = device.stream(key.stream or 0)
        tensors = [tensor for tensor, _ in plain.inputs]
        values = seeded_values(graph, tensors, key.batch)
        places = {t: device.allocate(max(1, values[t].nbytes)) for t in tensors}
        taken = [*places.values()]
        try:
            for tensor, place in places.items():
                fill(device, stream, place, values[tensor])
            runs: list[Launch] = []
            results: list[dict[TensorId, np.ndarray]] = []
            for session in (engine, plain):
                own = {t: device.allocate(max(1, key.batch * graph.tensors[t].nbytes)) for t in plain.outputs}
                taken += own.values()
                runs.append(bound_run(session, graph, key.batch, places | own, device, self._options))
                device.launch(stream, runs[-1])
                results.append(_read(device, stream, graph, key.batch, own))
            laps = [[lap_s(run, device, stream) for run in runs] for _ in range(_LAPS + 1)][1:]
        finally:
            for place in taken:
                device.free(place)
        engine_s, plain_s = (median(lap[which] for lap in laps) for which in (0, 1))
        return EngineTrial(_error(*results), engine_s, plain_s)


def _name(key: SessionKey, builder: str) -> str:
    """The folder of a session's engine: by its weights and operators, the versions and the device."""
    return digest_of([key.artifact, list(key.ops), key.batch, key.precision, int(key.merge), builder])[:32]


def _read(
    device: SessionDevice, stream: Stream, graph: Graph, batch: int, places: Mapping[TensorId, int]
) -> dict[TensorId, np.ndarray]:
    """Copies of tensors that lie on the device, once the stream has come to its end. [batch, ...]"""
    found = {}
    for tensor, place in places.items():
        described = graph.tensors[tensor]
        host = device.host_bytes(batch * described.nbytes)
        device.launch(stream, device.copying(stream, host.ctypes.data, place, host.nbytes))
        device.synchronize(device.record(stream))
        found[tensor] = host.view(described.dtype).reshape(described.batched(batch)).copy()
        device.free_host(host)
    return found


def _error(found: Mapping[TensorId, np.ndarray], wanted: Mapping[TensorId, np.ndarray]) -> float:
    """The largest relative error over the tensors; infinite where a result is not finite."""
    errors = [_relative(found[tensor], wanted[tensor]) for tensor in wanted]
    return max(errors, default=0.0)


def _relative(found: np.ndarray, wanted: np.ndarray) -> float:
    if wanted.dtype.kind != "f":
        return 0.0 if np.array_equal(found, wanted) else float("inf")
    apart = float(np.linalg.norm((found.astype(np.float64) - wanted).ravel()))
    error = apart / max(float(np.linalg.norm(wanted.astype(np.float64).ravel())), 1e-30)
    return error if np.isfinite(error) else float("inf")
