"""Executors by name. A backend's packages are imported when its executor is made, and not before."""

from importlib import import_module
from typing import cast

from stageloom.edge_agent.executor.base import Executor
from stageloom.shared.errors import ExecutorError

_WHERE = {
    "null": ("stageloom.edge_agent.executor.null", "NullExecutor", "pip install 'stageloom[edge]'"),
    "onnx": ("stageloom.edge_agent.executor.onnx", "OnnxExecutor", "pip install 'stageloom[edge,onnx]'"),
    "onnx_cuda": (
        "stageloom.edge_agent.executor.onnx_cuda.cuda_executor",
        "OnnxCudaExecutor",
        "pip install 'stageloom[edge,onnx-gpu]'",
    ),
    "torch_cpu": (
        "stageloom.edge_agent.executor.torch.cpu",
        "TorchCpuExecutor",
        "pip install 'stageloom[edge,torch]'",
    ),
    "torch_cuda": (
        "stageloom.edge_agent.executor.torch.cuda_executor",
        "TorchCudaExecutor",
        "pip install 'stageloom[edge,torch]'",
    ),
}

EXECUTORS = tuple(_WHERE)
"""Known names."""


def make_executor(name: str) -> Executor:
    """A new executor.

    Raises:
        ExecutorError: the name is unknown, or a package of the backend is missing.
    """
    if name not in _WHERE:
        raise ExecutorError(f"no executor is called {name!r}", remedy=f"use one of {', '.join(_WHERE)}")
    module, attribute, remedy = _WHERE[name]
    try:
        factory = getattr(import_module(module), attribute)
    except ImportError as error:
        raise ExecutorError(f"executor {name!r} cannot be loaded: {error}", remedy=remedy) from error
    return cast(Executor, factory())
