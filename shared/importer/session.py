"""onnxruntime sessions of the importer: built for a run or two, and what they say when they fail."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime

from stageloom.shared.importer.process import speaks_of_memory

_ERROR_CHARS = 300


def one_line(error: Exception, scratch: Path | None = None) -> str:
    """A library's message on one line of bounded length, without our scratch folder's name."""
    text = " ".join(str(error).split())
    return (text if scratch is None else text.replace(f"{scratch}/", ""))[:_ERROR_CHARS]


def quiet_options(level: onnxruntime.GraphOptimizationLevel) -> onnxruntime.SessionOptions:
    """Options of a session that is built for a run or two: little memory, one thread."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def open_session(path: Path, level: onnxruntime.GraphOptimizationLevel) -> onnxruntime.InferenceSession:
    """A session on the CPU, which is where an import runs."""
    return onnxruntime.InferenceSession(str(path), quiet_options(level), providers=["CPUExecutionProvider"])


def require_memory(error: Exception) -> None:
    """The answer must not depend on the memory an import was given: too little is an error of its own."""
    if speaks_of_memory(f"{type(error).__name__} {error}"):
        raise MemoryError from error


def attempt(
    session: onnxruntime.InferenceSession, names: Sequence[str], feeds: Mapping[str, Any]
) -> list[Any] | Exception:
    """The named outputs, or the error of onnxruntime.

    Raises:
        MemoryError: the run needs more memory than this process may use.
    """
    try:
        found: list[Any] = session.run(names, feeds)
        return found
    except Exception as error:  # onnxruntime's exceptions share no base class
        require_memory(error)
        return error
