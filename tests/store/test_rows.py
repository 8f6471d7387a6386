"""What is shown of rows that nobody can read."""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct

import stageloom.planner.store as store_package
from stageloom.planner.store.rows import blank_of
from stageloom.shared.digest import digest_bytes

NAMES = {"device": "nano", "plan": "whole", "scheduler": "greedy", "digest": digest_bytes([b"plan"])}
"""Who a row is about is always known, as it must be."""


def blanks() -> list[tuple[Any, set[str]]]:
    """The types that the store leaves empty, and the fields that it knows of each."""
    found = []
    for path in sorted(Path(store_package.__path__[0]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "blank_of":
                kind, known = node.args[0], {keyword.arg or "" for keyword in node.keywords}
                if isinstance(kind, ast.Name):
                    module = import_module(f"{store_package.__name__}.{path.stem}")
                    found.append((getattr(module, kind.id), known))
    return found


def test_what_is_shown_of_any_row_that_nobody_can_read_is_a_message() -> None:
    assert {kind.__name__ for kind, _ in blanks()} >= {"DeviceInfo", "PlanInfo", "PolicyInfo", "HistoryEntry"}
    for kind, known in blanks():
        made = blank_of(kind, **{name: value for name, value in NAMES.items() if name in known})
        assert msgspec.convert(msgspec.to_builtins(made), kind) == made


def test_a_field_is_as_by_default_where_it_has_one_and_else_empty() -> None:
    class Inner(Struct):
        share: float
        chosen: int = 3

    class Outer(Struct):
        inner: Inner
        name: str

    assert blank_of(Outer, name="x") == Outer(Inner(0.0, 3), "x")


def test_a_type_that_nothing_stands_for_is_found() -> None:
    class Odd(Struct):
        of: set[int]

    with pytest.raises(KeyError):
        blank_of(Odd)
