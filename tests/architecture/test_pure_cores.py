"""The cores are pure: no socket, thread, loop, process, file, clock or hidden randomness in their source."""

import ast

import pytest

from tests.architecture.sources import below, modules, source_of

IMPURE_MODULES = {
    "asyncio",
    "concurrent",
    "ctypes",
    "datetime",
    "fcntl",
    "ftplib",
    "glob",
    "http",
    "io",
    "mmap",
    "multiprocessing",
    "os",
    "pathlib",
    "queue",
    "sched",
    "secrets",
    "select",
    "selectors",
    "shelve",
    "shutil",
    "signal",
    "socket",
    "socketserver",
    "sqlite3",
    "ssl",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "urllib",
    "uuid",
    "zmq",
    "_thread",
}
IMPURE_BUILTINS = {"open", "input", "print", "exec", "eval", "__import__", "breakpoint"}
PURE_FROM_RANDOM = {"Random"}  # an argument; the functions of the module share hidden state

SHELLS_IN_SHARED = (
    "stageloom.shared.importer",
    "stageloom.shared.artifact",
    "stageloom.shared.clock",
    "stageloom.shared.durable_file",
    "stageloom.shared.keyfile",
    "stageloom.shared.module_command",
    "stageloom.shared.private_file",
    "stageloom.shared.session_nice",
    "stageloom.shared.failpoint",
    "stageloom.shared.systemd",
    "stageloom.shared.standard_streams",
)
"""The importer runs a child process, artifacts and keys are files, as is what must survive a power cut, the
clock is what shells hand in, a failpoint kills its process, systemd is spoken to and installed into, a
module's process runs by this interpreter, and the standard streams are files."""


CORES_ELSEWHERE = (
    "stageloom.planner.costs.drift",
    "stageloom.planner.dispatch.core",
    "stageloom.edge_agent.replan.alarms",
    "stageloom.edge_agent.replan.drift",
    "stageloom.edge_agent.lifecycle.core",
    "stageloom.edge_agent.lifecycle.engine_view",
    "stageloom.edge_agent.lifecycle.events",
    "stageloom.edge_agent.lifecycle.facts",
    "stageloom.edge_agent.lifecycle.local",
    "stageloom.edge_agent.lifecycle.manager",
    "stageloom.edge_agent.lifecycle.needs",
    "stageloom.edge_agent.lifecycle.probation",
    "stageloom.edge_agent.lifecycle.pursuit",
    "stageloom.edge_agent.lifecycle.session",
    "stageloom.edge_agent.lifecycle.states",
    "stageloom.edge_agent.lifecycle.trial_runner",
    "stageloom.edge_agent.lifecycle.attempts",
)


def pure_modules() -> list[str]:
    shared = [m for m in modules("shared") if not below(m, *SHELLS_IN_SHARED)]
    cores = [m for m in [*modules("edge_agent"), *modules("planner")] if m.startswith(CORES_ELSEWHERE)]
    return shared + cores


def impurities(source: str) -> list[str]:
    """What a source reaches for, with line numbers."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.split(".")[0] in IMPURE_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in IMPURE_MODULES:
                names = [node.module]
            elif node.module == "random":
                names = [f"random.{a.name}" for a in node.names if a.name not in PURE_FROM_RANDOM]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "random" and node.attr not in PURE_FROM_RANDOM and _imports_random(source):
                names = [f"random.{node.attr}"]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_BUILTINS
        ):
            names = [f"{node.func.id}()"]
        elif isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            names = ["async"]
        found += [f"line {getattr(node, 'lineno', 0)}: {name}" for name in names]
    return found


def _imports_random(source: str) -> bool:
    """Whether `random` names the module here, and not an argument of type Random."""
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import)]
    return any(a.name == "random" for node in imports for a in node.names)


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "import os.path",
        "from socket import socket",
        "from concurrent.futures import Future",
        "import random\nx = random.random()",
        "from random import choice",
        "open('x')",
        "print(1)",
        "async def f(): pass",
        "def f():\n    import threading",
        "from pathlib import Path",
        "import sqlite3 as s",
        "import random\nx = random.seed(1)",
        "from datetime import datetime",
    ],
)
def test_the_check_sees_every_kind_of_impurity(line: str) -> None:
    assert impurities(line)


@pytest.mark.parametrize(
    "line",
    [
        "from random import Random",
        "import random\nx = random.Random(1)",
        "def f(random):\n    random.choice([1])",
        "from stageloom.shared.clock import Clock",
        "file.open()",
        "import zlib",
        "import heapq",
    ],
)
def test_the_check_lets_pure_code_pass(line: str) -> None:
    assert impurities(line) == []


@pytest.mark.promise("run-path-loads-heavy")
@pytest.mark.parametrize("module", pure_modules())
def test_a_core_is_pure(module: str) -> None:
    assert impurities(source_of(module).read_text(encoding="utf-8")) == []


def test_the_cores_that_the_design_names_are_among_them() -> None:
    pure = pure_modules()
    for package in ("stageloom.shared.engine", "stageloom.shared.search", "stageloom.shared.messages"):
        assert sum(below(module, package) for module in pure) > 1
    assert {"stageloom.edge_agent.lifecycle.core", "stageloom.planner.dispatch.core"} <= set(pure)


@pytest.mark.parametrize("module", pure_modules())
def test_a_core_is_told_the_time_and_never_reads_the_machines_clock(module: str) -> None:
    assert "SystemClock" not in source_of(module).read_text(encoding="utf-8")
