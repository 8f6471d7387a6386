"""Names of models that are one to applications: one file pinned to each of a set of shapes.

A plan has them as models of their own, `rec--1x3x48x160` and `rec--1x3x48x320`. A task for `rec` goes to the
one that takes its shapes.
"""

import re
from collections.abc import Iterable
from typing import Final

_DIMS: Final = r"(?:scalar|[0-9]+(?:\.\.[0-9]+)?(?:x[0-9]+(?:\.\.[0-9]+)?)*)"
_SHAPED: Final = re.compile(rf"(.+?)--{_DIMS}(?:-{_DIMS})*")


def shaped_name(served: str, shapes: Iterable[str]) -> str:
    """The name of a model that is pinned to these shapes, each as on a command line."""
    return f"{served}--{'-'.join(shapes)}"


def served_name(name: str) -> str:
    """What applications call a model of a plan."""
    found = _SHAPED.fullmatch(name)
    return found[1] if found else name
