"""`onnx`: onnxruntime's kernels on the processor.

Its sessions draw from one arena of the process and keep no threads of their own unless asked to: a lane's
thread computes.
"""

import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime

from stageloom.edge_agent.executor.base import one_line
from stageloom.edge_agent.executor.onnx.cache import SessionKey, session_borders
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.onnx.session_executor import SessionExecutor
from stageloom.edge_agent.executor.slot_store import Values
from stageloom.shared.errors import BackendUnavailable, ExecutorError, ModelError, Unsplittable
from stageloom.shared.ids import TensorId

_NO_MEMORY: Final = re.compile(r"out of memory|bad_alloc|MemoryError|ALLOC_FAILED|allocate memory")
"""What onnxruntime and the libraries under it say where memory is wanting."""


class OnnxExecutor(SessionExecutor):
    """Sessions of onnxruntime."""

    name = "onnx"

    def _open(self, key: SessionKey, source: ModelParts) -> "OnnxSession":
        return open_session(key, source)


@dataclass(frozen=True, slots=True)
class OnnxSession:
    """A session with the tensors it reads and makes."""

    session: Any
    inputs: tuple[tuple[TensorId, str], ...]
    outputs: tuple[TensorId, ...]
    names: tuple[str, ...]  # of the outputs

    def run(self, values: Values) -> None:
        """Read inputs from `values` and put outputs there; arrays pass by reference both ways."""
        feeds = {name: values[tensor] for tensor, name in self.inputs}
        values.update(zip(self.outputs, self.session.run(self.names, feeds), strict=True))

    def run_into(self, values: Values, outs: Mapping[TensorId, np.ndarray]) -> None:
        """Read inputs from `values` and write outputs into `outs`, C-ordered arrays of their shapes."""
        binding = self.session.io_binding()
        held = [
            np.ascontiguousarray(values[tensor]) for tensor, _ in self.inputs
        ]  # a binding keeps addresses
        for (_, name), array in zip(self.inputs, held, strict=True):
            binding.bind_cpu_input(name, array)
        for tensor, name in zip(self.outputs, self.names, strict=True):
            out = outs[tensor]
            binding.bind_output(name, "cpu", 0, out.dtype, out.shape, out.ctypes.data)
        self.session.run_with_iobinding(binding)


def open_session(key: SessionKey, source: ModelParts) -> OnnxSession:
    """Make a session.

    Raises:
        ExecutorError: onnxruntime cannot build it.
    """
    _share_arena()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = key.intra_op_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what it would print, it raises
    options.add_session_config_entry("session.use_env_allocators", "1")
    # A pool that spins between operators takes the core that another lane computes on.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return session_from(key, source, options, ["CPUExecutionProvider"])


def session_from(
    key: SessionKey,
    source: ModelParts,
    options: Any,
    providers: Sequence[Any],
    file: Path | None = None,
) -> OnnxSession:
    """A session with these options and providers; its model is read from `file`, else from memory.

    Raises:
        ExecutorError: onnxruntime cannot build it; `BackendUnavailable` for want of memory.
    """
    try:
        graph, inputs, outputs = session_borders(key, source)
        session = (
            _from_memory_file(source, key, options, providers)
            if file is None
            else _from_file(file, source, key, options, providers)
        )
    except (ModelError, Unsplittable) as error:
        raise ExecutorError(str(error)) from error
    except Exception as error:  # onnxruntime's exceptions share no base class
        kind = BackendUnavailable if _NO_MEMORY.search(one_line(error)) else ExecutorError
        raise kind(
            f"onnxruntime cannot load {len(key.ops)} operators of model {source.artifact.graph.name!r}: "
            f"{one_line(error)}",
            remedy="import the model again or use another executor",
        ) from error
    return OnnxSession(
        session=session,
        inputs=tuple((t, graph.tensors[t].name) for t in inputs),
        outputs=outputs,
        names=tuple(graph.tensors[t].name for t in outputs),
    )


def _from_memory_file(source: ModelParts, key: SessionKey, options: Any, providers: Sequence[Any]) -> Any:
    """A session of a model that lies in memory.

    Given as bytes, the session would keep them for its whole life: weights would be there twice.
    """
    fd = os.memfd_create("stageloom-model", os.MFD_CLOEXEC)
    try:
        source.write(fd, key.ops, key.batch, merge=key.merge, half=key.half)
        return onnxruntime.InferenceSession(
            f"/proc/self/fd/{fd}", options, providers=list(providers), enable_fallback=0
        )
    finally:
        os.close(fd)


def _from_file(
    file: Path, source: ModelParts, key: SessionKey, options: Any, providers: Sequence[Any]
) -> Any:
    """A session of a model under a name that is the same next time. The file is gone afterwards."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        source.write(fd, key.ops, key.batch, merge=key.merge, half=key.half)
        return onnxruntime.InferenceSession(str(file), options, providers=list(providers), enable_fallback=0)
    finally:
        os.close(fd)
        file.unlink()


_arena_lock = threading.Lock()
_arena: list[bool] = []


def _share_arena() -> None:
    """Give all sessions of the process one arena that grows by what is asked for, not by powers of two."""
    with _arena_lock:
        if _arena:
            return
        memory = onnxruntime.OrtMemoryInfo(
            "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
        )
        settings: Mapping[str, int] = {"arena_extend_strategy": 1}
        onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg(dict(settings)))
        _arena.append(True)
