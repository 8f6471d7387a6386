"""`shared` and `edge_agent` run on Python 3.10 (JetPack 6): grammar, and nothing the library got later."""

import ast

import pytest

from tests.architecture.sources import modules, source_of

LATER_MODULES = {
    "tomllib",
    "wsgiref.types",
    "compression",
    "annotationlib",
    "concurrent.interpreters",
    "string.templatelib",
}
LATER_BUILTINS = {"ExceptionGroup", "BaseExceptionGroup", "PythonFinalizationError"}
LATER_METHODS = {"add_note"}
LATER = {
    "asyncio": {"TaskGroup", "timeout", "timeout_at", "Timeout", "Runner", "Barrier", "BrokenBarrierError"},
    "contextlib": {"chdir"},
    "copy": {"replace"},
    "datetime": {"UTC"},
    "enum": {
        "StrEnum",
        "ReprEnum",
        "EnumCheck",
        "FlagBoundary",
        "verify",
        "member",
        "nonmember",
        "property",
        "global_enum",
        "EnumType",
        "STRICT",
        "CONFORM",
        "EJECT",
        "KEEP",
        "show_flag_values",
    },
    "hashlib": {"file_digest"},
    "inspect": {"getmembers_static", "BufferFlags", "markcoroutinefunction"},
    "itertools": {"batched"},
    "logging": {"getLevelNamesMapping", "getHandlerByName", "getHandlerNames"},
    "math": {"cbrt", "exp2", "sumprod", "fma"},
    "operator": {"call", "is_none", "is_not_none"},
    "os": {"process_cpu_count", "unshare", "setns"},
    "queue": {"ShutDown"},
    "re": {"NOFLAG"},
    "sys": {"exception", "monitoring"},
    "threading": {"setprofile_all_threads", "settrace_all_threads"},
    "types": {"get_original_bases", "CapsuleType"},
    "typing": {
        "Self",
        "Never",
        "LiteralString",
        "assert_never",
        "assert_type",
        "reveal_type",
        "Required",
        "NotRequired",
        "Unpack",
        "TypeVarTuple",
        "dataclass_transform",
        "override",
        "TypeAliasType",
        "ReadOnly",
        "TypeIs",
        "NoDefault",
        "get_overloads",
        "clear_overloads",
        "get_protocol_members",
        "is_protocol",
    },
    "warnings": {"deprecated"},
}

EDGE = [*modules("shared"), *modules("edge_agent")]


def later_than_310(source: str) -> list[str]:
    """What a source uses that Python 3.10 has not."""
    tree = ast.parse(source, feature_version=(3, 10))
    found = []
    modules_by_alias = {
        (alias.asname or alias.name): alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if _later_module(a.name)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module] if _later_module(node.module) else []
            later = LATER.get(node.module, set())
            found += [f"{node.module}.{a.name}" for a in node.names if a.name in later]
        elif isinstance(node, ast.Attribute):
            module = modules_by_alias.get(node.value.id, "") if isinstance(node.value, ast.Name) else ""
            if node.attr in LATER.get(module, set()):
                found.append(f"{module}.{node.attr}")
            if node.attr in LATER_METHODS:
                found.append(node.attr)
        elif isinstance(node, ast.Name) and node.id in LATER_BUILTINS:
            found.append(node.id)
    return found


def _later_module(name: str) -> bool:
    return any(name == later or name.startswith(later + ".") for later in LATER_MODULES)


@pytest.mark.parametrize(
    "source",
    [
        "import tomllib",
        "from tomllib import loads",
        "from typing import Self",
        "import typing as t\nx = t.Self",
        "from enum import StrEnum",
        "import enum\nclass A(enum.StrEnum): pass",
        "raise ExceptionGroup('', [])",
        "import asyncio\nasyncio.TaskGroup()",
        "from datetime import UTC",
        "error.add_note('x')",
        "import hashlib\nhashlib.file_digest",
    ],
)
def test_the_check_sees_what_came_after_310(source: str) -> None:
    assert later_than_310(source)


@pytest.mark.promise("run-path-loads-heavy")
def test_the_grammar_check_refuses_the_syntax_of_311() -> None:
    with pytest.raises(SyntaxError):
        later_than_310("try:\n    pass\nexcept* ValueError:\n    pass\n")


@pytest.mark.parametrize(
    "source", ["from stageloom.shared.artifact import file_digest", "x.override", "def Self(): pass"]
)
def test_names_of_our_own_are_no_findings(source: str) -> None:
    assert later_than_310(source) == []


@pytest.mark.promise("run-path-loads-heavy")
@pytest.mark.parametrize("module", EDGE)
def test_the_edge_uses_nothing_that_python_310_has_not(module: str) -> None:
    assert later_than_310(source_of(module).read_text(encoding="utf-8")) == []
