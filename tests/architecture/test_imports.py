"""Who imports whom: the import contracts, and what a fresh interpreter has loaded after each module."""

import json
import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT, below, modules

pytestmark = pytest.mark.more

CHOSEN_LATER = ("onnx", "onnxruntime", "openvino", "torch")  # backends load when an executor is chosen
PRINTING = ("typer", "click", "rich")
HTTP = ("starlette", "uvicorn", "httptools", "grpc", "prometheus_client")
PLANNER_ONLY = ("ray", "sqlalchemy", "alembic", *HTTP, "stageloom.planner", "stageloom.migrations")

SHARED = [m for m in modules("shared") if not below(m, "stageloom.shared.importer")]
SERVING = [
    m
    for m in modules("edge_agent")
    if below(m, "stageloom.edge_agent.serving", "stageloom.edge_agent.metrics")
]
"""Processes of their own, but for what starts them there and counts for them."""

STARTS_SERVING = [
    *(f"stageloom.edge_agent.serving.{name}" for name in ("keeper", "settings")),
    *(f"stageloom.edge_agent.metrics.{name}" for name in ("counting", "settings")),
]
AGENT = [
    m
    for m in modules("edge_agent")
    if not below(m, "stageloom.edge_agent.cli")
    and not m.endswith("__main__")
    and (m not in SERVING or m in STARTS_SERVING)
]
WITH_TORCH = [
    m for m in AGENT if m.startswith(("stageloom.edge_agent.executor.torch", "stageloom.edge_agent.lowering"))
]
AGENT_RUN_PATH = [  # `verify` is a command of its own: it compares with the backend
    m
    for m in AGENT
    if m not in WITH_TORCH
    and not m.startswith(("stageloom.edge_agent.executor.onnx", "stageloom.edge_agent.executor.openvino"))
    and not below(m, "stageloom.edge_agent.verify")
]
AGENT_CLI = [
    m for m in modules("edge_agent") if below(m, "stageloom.edge_agent.cli") and not m.endswith("__main__")
]
PLANNER = [m for m in modules("planner") if not m.endswith("__main__")]
PLANNER_LIGHT = [
    m for m in PLANNER if not below(m, "stageloom.planner.learning", "stageloom.planner.cluster")
]

COMMANDS = [
    m
    for m in PLANNER
    if below(
        m,
        "stageloom.planner.cli",
        "stageloom.planner.schema",
        *(f"stageloom.planner.api.{name}" for name in ("client", "problem", "route", "routes")),
    )
]
"""What a command imports before it asks the planner: it must not spend longer on that than on the answer."""

PROBE = """
import importlib, json, sys
names, forbidden = json.loads(sys.argv[1])
guilty = {}
for name in names:
    importlib.import_module(name)
    for package in forbidden:
        if package in sys.modules:
            guilty.setdefault(package, name)
print(json.dumps(guilty))
"""


def loaded_by(names: list[str], forbidden: tuple[str, ...]) -> dict[str, str]:
    """Per forbidden package that a fresh interpreter loads, the first of `names` that made it."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([names, forbidden])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    guilty: dict[str, str] = json.loads(done.stdout)
    return guilty


@pytest.mark.promise("run-path-loads-heavy")
def test_the_import_contracts_are_kept() -> None:
    run = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_probe_names_the_module_that_loads_a_forbidden_package() -> None:
    names = ["stageloom.shared.digest", "stageloom.shared.ids"]
    assert loaded_by(names, ("hashlib", "msgpack", "onnx")) == {
        "hashlib": "stageloom.shared.digest",
        "msgpack": "stageloom.shared.digest",
    }


@pytest.mark.parametrize(
    ("names", "forbidden"),
    [
        pytest.param(
            SHARED,
            (
                "onnx",
                "onnxruntime",
                "numpy",
                "zmq",
                "torch",
                *PRINTING,
                "stageloom.edge_agent",
                *PLANNER_ONLY,
            ),
            id="shared",
        ),
        pytest.param(
            ["stageloom.shared.importer"], (*CHOSEN_LATER, "numpy"), id="importer, before it is called"
        ),
        pytest.param(
            [m for m in AGENT if m not in WITH_TORCH], (*PRINTING, *PLANNER_ONLY, "torch"), id="agent"
        ),
        pytest.param(WITH_TORCH, (*PRINTING, *PLANNER_ONLY), id="agent, with the torch executor"),
        pytest.param(AGENT_RUN_PATH, CHOSEN_LATER, id="agent, before an executor is chosen"),
        pytest.param(
            AGENT_CLI, (*CHOSEN_LATER, "rich", "numpy", "zmq", *PLANNER_ONLY), id="agent's command line"
        ),
        pytest.param(
            PLANNER_LIGHT,
            ("ray", "torch", "stageloom.edge_agent"),
            id="planner, without learning and cluster",
        ),
        pytest.param(
            COMMANDS,
            ("numpy", "sqlalchemy", "alembic", "zmq", "rich", "asyncio", *CHOSEN_LATER, *HTTP),
            id="planner's command line, before it asks",
        ),
        pytest.param([m for m in PLANNER if below(m, "stageloom.planner.store")], HTTP, id="planner's store"),
        pytest.param(PLANNER, ("stageloom.edge_agent", "onnxruntime"), id="planner"),
    ],
)
def test_importing_every_module_loads_nothing_that_is_kept_out(
    names: list[str], forbidden: tuple[str, ...]
) -> None:
    assert len(names) > 0
    assert loaded_by(names, forbidden) == {}
