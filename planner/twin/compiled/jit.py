"""What compiles the kernels."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

from stageloom.planner.twin.compiled.compile_cache import cache_folder

_Function = TypeVar("_Function", bound=Callable[..., Any])


def jit(function: _Function) -> _Function:
    """Compile a kernel that others call, when the first of them is compiled. Python cannot call it."""
    compiled: _Function = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return compiled


def jit_entry(function: _Function) -> _Function:
    """Compile a kernel that Python calls, when it is called first; the machine code is kept."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(cache_folder())
    try:
        compiled: _Function = numba.njit(cache=True)(function)
    finally:
        numba.config.CACHE_DIR = before
    return compiled


def compile_for(entry: Any, *arguments: Any) -> None:
    """Compile an entry for arguments of these types, or load what is kept of that; nothing is run."""
    entry.compile(tuple(map(numba.typeof, arguments)))
