"""The core stays pure: a later twin runs it on a virtual clock."""

import ast
from pathlib import Path

import pytest

from stageloom.shared import engine

SOURCES = sorted(Path(engine.__file__).parent.glob("*.py"))
ALLOWED = {
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "math",
    "msgspec",  # frozen values
    "operator",
    "stageloom.shared",
    "typing",
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_core_imports_no_clock_thread_socket_or_randomness(path: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(".".join(node.module.split(".")[: 1 + node.module.startswith("stageloom.")]))
    assert imported <= ALLOWED
