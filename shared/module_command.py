"""The command line of a module that runs in a process of its own."""

import sys
from typing import Final

_HAS_SAFE_PATH: Final = sys.version_info >= (3, 11)  # the option -P

_WITHOUT_FOLDER: Final = (
    "import sys; sys.path[0] or sys.path.pop(0); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""In the place of -P: the current folder is the first entry, an empty path."""


def module_command(module: str, *arguments: str) -> list[str]:
    """`python -m module arguments`, which imports nothing from the folder that it is started in.

    A user's queue.py there would else take the place of the standard library's.
    """
    if _HAS_SAFE_PATH:
        return [sys.executable, "-P", "-m", module, *arguments]
    return [sys.executable, "-c", _WITHOUT_FOLDER, module, *arguments]
