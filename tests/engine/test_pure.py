"""The core stays pure: a later twin runs it on a virtual clock."""

import ast
from pathlib import Path

import pytest

import shared.engine

SOURCES = sorted(Path(shared.engine.__file__).parent.glob("*.py"))
ALLOWED = {
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "math",
    "msgspec",  # frozen values
    "operator",
    "shared",
    "typing",
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_core_imports_no_clock_thread_socket_or_randomness(path: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    assert imported <= ALLOWED
