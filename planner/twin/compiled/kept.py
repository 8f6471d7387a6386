"""Where the kernels' machine code is kept, and having it there before anyone waits for it. Needs no compiler.

numba keeps compiled code beside the source, or looks only at the file of the function that is called to tell
whether it is still good. The kernels call each other across files, and an installed package may lie where its
user cannot write: so the code is kept in the user's cache, in a folder named by a digest of all their text,
of where and when it was installed, and of the compiler's version.

Compiling takes some 20 s a size of memory (`layout.memory_type`), loading what is kept less than one.
"""

import os
from collections.abc import Sequence
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Final

KERNELS: Final = ("layout", "slots", "choice", "board", "device", "ledger", "engine")
"""The files that are compiled, or hold constants of what is; each uses only those before it."""

SCALES: Final = (1, 4)
"""Sizes of memory that are compiled ahead. Every plan of the papers' models fits into the first."""

_MARK: Final = "compiled"
_LOWEST_PRIORITY: Final = 19


def cache_folder() -> Path:
    """Where compiled kernels are kept: under `NUMBA_CACHE_DIR`, else `XDG_CACHE_HOME`, else `~/.cache`."""
    named = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    root = Path(named) if named else Path.home() / ".cache"
    digest = blake2b(version("numba").encode(), digest_size=8)
    for kernel in KERNELS:
        file = Path(__file__).with_name(f"{kernel}.py")
        digest.update(f"{file} {file.stat().st_mtime_ns}".encode() + file.read_bytes())
    return root / "stageloom" / "kernels" / digest.hexdigest()


def kept() -> bool:
    """Whether the kernels were compiled ahead."""
    return (cache_folder() / _MARK).exists()


def compile_ahead(scales: Sequence[int] = SCALES) -> None:
    """Compile what is not kept yet, in a process of its own, behind all else that the machine does."""
    os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)
    from stageloom.planner.twin.compiled.twin import compile_kernels

    for scale in scales:
        compile_kernels(scale)
    (cache_folder() / _MARK).touch()
