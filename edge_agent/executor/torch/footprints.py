"""What the kernels of captured work need of a multiprocessor, read from the graph's nodes by cuda-bindings.

Opara (Chen et al. 2023, section 3.2) reads these off a profiler. A profiler in a process that serves slows
down every launch while it listens; a captured launch says the same of itself, and runs nothing.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

from stageloom.edge_agent.utilisation.kernels import BlockNeeds


def driver() -> ModuleType | None:
    """CUDA's driver API; None where cuda-bindings is not installed."""
    try:
        return import_module("cuda.bindings.driver")
    except ImportError:
        return None


def block_needs(cuda: Any, graph: int) -> tuple[BlockNeeds, ...]:
    """Of every kernel node of a captured graph, which is given by its handle.

    Raises:
        RuntimeError: a call of the driver failed.
    """
    handle = cuda.CUgraph(graph)
    _, count = _checked(cuda, cuda.cuGraphGetNodes(handle, 0))
    nodes, _ = _checked(cuda, cuda.cuGraphGetNodes(handle, count))
    kernel = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    return tuple(
        _needs(cuda, node) for node in nodes if _checked(cuda, cuda.cuGraphNodeGetType(node))[0] == kernel
    )


def _needs(cuda: Any, node: Any) -> BlockNeeds:
    (launch,) = _checked(cuda, cuda.cuGraphKernelNodeGetParams(node))
    function = launch.func
    if not int(function):  # a kernel of a library that no context has loaded yet
        (function,) = _checked(cuda, cuda.cuKernelGetFunction(launch.kern))
    attribute = cuda.CUfunction_attribute
    registers, static = (
        _checked(cuda, cuda.cuFuncGetAttribute(which, function))[0]
        for which in (attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
    )
    threads = launch.blockDimX * launch.blockDimY * launch.blockDimZ
    return BlockNeeds(int(registers), int(static) + int(launch.sharedMemBytes), int(threads))


def _checked(cuda: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *results = answer
    if error != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"reading a captured graph failed: {error}")
    return tuple(results)
