"""What compiles the kernels, and where the machine code is kept.

numba keeps compiled code beside the source, or looks only at the file of the function that is called to tell
whether it is still good. The kernels call each other across files, and an installed package may lie where its
user cannot write: so the code is kept in the user's cache, in a folder named by a digest of all their text.
"""

import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, TypeVar

import numba

KERNELS: Final = ("layout", "slots", "choice", "board", "device", "ledger", "engine")
"""The files that are compiled, or hold constants of what is; each uses only those before it."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def cache_folder() -> Path:
    """Where compiled kernels are kept: under `NUMBA_CACHE_DIR`, else `XDG_CACHE_HOME`, else `~/.cache`."""
    named = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    root = Path(named) if named else Path.home() / ".cache"
    digest = blake2b(digest_size=8)
    for kernel in KERNELS:
        digest.update(Path(__file__).with_name(f"{kernel}.py").read_bytes())
    return root / "stageloom" / "kernels" / digest.hexdigest()


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
