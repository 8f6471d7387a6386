"""Where the kernels' machine code is kept. Imports no compiler.

numba keeps compiled code beside the source, or looks only at the file of the function that is called to tell
whether it is still good. The kernels call each other across files, and an installed package may lie where its
user cannot write: so the code is kept in the user's cache, in a folder named by a digest of all their text,
that of the constants in them too, of where and when it was installed, and of the compiler's version.

Compiling takes about 20 s per size of memory (`layout.memory_type`), loading less than one.
"""

import os
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Final

KERNELS: Final = ("layout", "slots", "board", "ledger", "engine")
"""The files that are compiled, or hold constants of what is; each uses only those before it."""

OUTSIDE: Final = ("planner.twin.compiled.jit", "shared.engine.pace")
"""Further modules that machine code follows from: what compiles it, and constants of the engine in it."""

SCALES: Final = (1, 4)
"""Sizes of memory that are compiled ahead. Every plan of the papers' models fits into the first."""

MARK: Final = "compiled"


def sources() -> list[Path]:
    """The files whose text machine code follows from."""
    package = Path(__file__).parents[3]
    outside = [package.joinpath(*name.split(".")).with_suffix(".py") for name in OUTSIDE]
    return [*(Path(__file__).with_name(f"{kernel}.py") for kernel in KERNELS), *outside]


def cache_folder() -> Path:
    """Where compiled kernels are kept: under `NUMBA_CACHE_DIR`, else `XDG_CACHE_HOME`, else `~/.cache`."""
    named = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    root = Path(named) if named else Path.home() / ".cache"
    digest = blake2b(version("numba").encode(), digest_size=8)
    for file in sources():
        digest.update(f"{file} {file.stat().st_mtime_ns}".encode() + file.read_bytes())
    return root / "stageloom" / "kernels" / digest.hexdigest()


def is_compiled() -> bool:
    """Whether the kernels were compiled ahead."""
    return (cache_folder() / MARK).exists()
