"""The agent on a CPU: ingest, and what the agent weighs.

    python -m benchmarks.agent_cpu [--quick] [--json]

`ingest_*_us` is from an application's call of `submit` to the instant the engine queued the task, on the
clock that all processes share; copying the tensor (3x224x224 float32) into shared memory is part of it. The
application is this process, the agent two others. The executor is `null`, so that nothing else uses the
processor; tasks come one at a time (each waits for the one before), and in a second series at fixed pace.

`agent_rss_mib` is what both processes of a joined agent take before a backend loads.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks.runner import Report, percentile, progress, pss_mib, run
from stageloom import Client
from stageloom.edge_agent.config import AgentConfig, ModelFile, encode_config
from stageloom.edge_agent.ingest.channel import socket_of
from stageloom.edge_agent.link.connection import Membership, new_keys, save_membership
from stageloom.edge_agent.link.factory import KEY_NAME, MEMBERSHIP_NAME
from stageloom.edge_agent.reporting.status import AgentStatus, ask_status
from stageloom.edge_agent.worker.messages import WorkerConfig
from stageloom.shared.errors import UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.keyfile import write_keys
from stageloom.shared.token import Endpoints

SHAPE = (1, 3, 224, 224)
_START_S = 60.0
_PACE_S = 0.005


def ingest_us(tasks: int, *, pace_s: float = 0.0) -> list[float]:
    """Microseconds from `submit` to the queue of an agent on the null executor, of tasks `pace_s` apart."""
    array = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    model = probe_model([helper.make_node("GlobalAveragePool", ["input"], ["output"])], ["output"])
    taken_us: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="stageloom-") as folder,
        serving(Path(folder), model, executor="null") as socket,
        Client(socket) as client,
    ):
        for index in range(tasks + tasks // 10):
            begun_s = time.monotonic()
            future = client.submit("probe", {"input": array})
            future.result(30.0)
            if index >= tasks // 10:  # the first tenth warms caches, pages and branches
                taken_us.append((future.queued_at_s - begun_s) * 1e6)
            time.sleep(max(begun_s + pace_s - time.monotonic(), 0.0) if pace_s else 0.0)
    return taken_us


def agent_pss_mib() -> tuple[float, float]:
    """Proportional set size of the main and the engine process of a joined agent, before a backend loads."""
    with tempfile.TemporaryDirectory(prefix="stageloom-") as folder:
        home = Path(folder)
        _pretend_joined(home)
        with _agent(AgentConfig(home=str(home), log_level="ERROR")) as process:
            status = _wait(process, socket_of(home), lambda found: found.engine.up)
            assert status.engine.pid is not None
            time.sleep(2.0)  # a few reports and reconnects, so that what they allocate is counted
            return pss_mib([status.pid]), pss_mib([status.engine.pid])


def _pretend_joined(home: Path) -> None:
    """A membership whose planner is away: the link runs and looks for it."""
    nowhere = "tcp://127.0.0.1:9"
    write_keys(home / KEY_NAME, new_keys())
    save_membership(
        home / MEMBERSHIP_NAME,
        Membership(
            device=DeviceId("bench"),
            planner_key=new_keys().public,
            endpoints=Endpoints(nowhere, nowhere, nowhere),
        ),
    )


def probe_model(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> onnx.ModelProto:
    """A model of one image, `input`, that makes numbers per channel."""
    pooled = (1, SHAPE[1], 1, 1)
    graph = helper.make_graph(
        nodes,
        "probe",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, SHAPE)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, pooled) for name in outputs],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@contextlib.contextmanager
def serving(
    home: Path, model: onnx.ModelProto, *, executor: str, scheduler: str = "sequential"
) -> Iterator[Path]:
    """An agent that serves one model as `probe`, alone; its socket."""
    file = home / "probe.onnx"
    onnx.save(model, file)
    config = AgentConfig(
        home=str(home),
        models=(ModelFile(path=str(file), name="probe"),),
        executor=executor,
        scheduler=scheduler,
        replicas=1,
        log_level="ERROR",
    )
    with _agent(config) as process:
        _wait(process, socket_of(home), lambda found: found.ready)
        yield socket_of(home)


@contextlib.contextmanager
def _agent(config: AgentConfig) -> "Iterator[subprocess.Popen[bytes]]":
    process = subprocess.Popen([sys.executable, "-m", "stageloom.edge_agent.run", encode_config(config)])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30.0)


def _wait(
    process: "subprocess.Popen[bytes]", socket: Path, condition: Callable[[AgentStatus], bool]
) -> AgentStatus:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            status = ask_status(socket)
            if condition(status):
                return status
        except UnavailableError:
            pass  # not listening yet
        time.sleep(0.05)
    raise RuntimeError(f"the agent was not ready in {_START_S:g} s")


def measure(report: Report, options: argparse.Namespace) -> None:
    sys.setswitchinterval(WorkerConfig().switch_interval_s)
    tasks = 300 if options.quick else 3000
    figures: dict[str, float] = {}
    rows: list[dict[str, object]] = []
    for name, series, count, pace_s in (
        ("ingest", "one at a time", tasks, 0.0),
        ("ingest_paced", f"every {_PACE_S:g} s", tasks // 3, _PACE_S),
    ):
        progress(f"ingest: {count} tasks, {series}")
        taken_us = ingest_us(count, pace_s=pace_s)
        figures |= {f"{name}_p{percent}_us": percentile(taken_us, percent) for percent in (50, 99)}
        rows.append({"series": series, "tasks": len(taken_us)})
    progress("agent: memory of both processes")
    weights = dict(zip(("main", "engine"), agent_pss_mib(), strict=True))
    rows += [{"process": name, "pss_mib": weight} for name, weight in weights.items()]
    report.add({**figures, "agent_rss_mib": sum(weights.values())}, rows)


if __name__ == "__main__":
    sys.exit(run(measure, ("numpy", "msgspec", "msgpack")))
