"""Ingest: from an application's call to the engine's queue, and what both agent processes weigh.

    python -m benchmarks.ingest [--quick] [--json]

The application is this process, the agent two others, the task a 3x224x224 float32 tensor. A task's time runs
from the call of `submit` to the instant the engine queued it, on the clock that all processes share; copying
the tensor into shared memory is part of it. The executor is `null`, so that nothing else uses the processor;
tasks come one at a time (each waits for the one before), and in a second series at fixed pace.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks.report import Report, arguments, emit, progress, pss_mib
from stageloom import Client
from stageloom.edge_agent.config import AgentConfig, ModelFile, encode_config
from stageloom.edge_agent.ingest.channel import socket_of
from stageloom.edge_agent.link.connection import Membership, new_keys, save_membership
from stageloom.edge_agent.link.factory import KEY_NAME, MEMBERSHIP_NAME
from stageloom.edge_agent.reporting.status import AgentStatus, ask_status
from stageloom.shared.errors import UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.keyfile import write_keys
from stageloom.shared.token import Endpoints

SHAPE = (1, 3, 224, 224)
_START_S = 60.0
_PACE_S = 0.005


@dataclass(frozen=True)
class IngestFigures:
    """Microseconds from `submit` to the engine's queue."""

    p50_us: float
    p99_us: float
    tasks: int


def measure_ingest(tasks: int, *, pace_s: float = 0.0) -> IngestFigures:
    """Start an agent on the null executor and submit `tasks` tasks, `pace_s` apart."""
    with (
        tempfile.TemporaryDirectory(prefix="stageloom-") as folder,
        serving(Path(folder), _probe(), executor="null") as socket,
    ):
        return _submit(socket, tasks, pace_s)


def _submit(socket: Path, tasks: int, pace_s: float) -> IngestFigures:
    array = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    taken_us: list[float] = []
    with Client(socket) as client:
        for index in range(tasks + tasks // 10):
            next_s = time.monotonic() + pace_s
            begun_s = time.monotonic()
            future = client.submit("probe", {"input": array})
            future.result(30.0)
            if index >= tasks // 10:  # the first tenth warms caches, pages and branches
                taken_us.append((future.queued_at_s - begun_s) * 1e6)
            time.sleep(max(next_s - time.monotonic(), 0.0) if pace_s else 0.0)
    return IngestFigures(
        float(np.percentile(taken_us, 50)), float(np.percentile(taken_us, 99)), len(taken_us)
    )


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


def _probe() -> onnx.ModelProto:
    """A model of one operator."""
    graph = helper.make_graph(
        [helper.make_node("GlobalAveragePool", ["input"], ["output"])],
        "probe",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, SHAPE)],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, (1, 3, 1, 1))],
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


def figures(*, quick: bool) -> tuple[dict[str, float], list[dict[str, object]]]:
    """`ingest_p50_us`, `ingest_p99_us` and `agent_rss_mib`, with the rows behind them."""
    tasks = 300 if quick else 3000
    progress(f"ingest: {tasks} tasks one at a time")
    busy = measure_ingest(tasks)
    progress(f"ingest: {tasks // 3} tasks every {_PACE_S:g} s")
    paced = measure_ingest(tasks // 3, pace_s=_PACE_S)
    progress("agent: memory of both processes")
    main_mib, engine_mib = agent_pss_mib()
    return {
        "ingest_p50_us": busy.p50_us,
        "ingest_p99_us": busy.p99_us,
        "ingest_paced_p50_us": paced.p50_us,
        "ingest_paced_p99_us": paced.p99_us,
        "agent_rss_mib": main_mib + engine_mib,
    }, [
        {"series": "one at a time", "tasks": busy.tasks},
        {"series": f"every {_PACE_S:g} s", "tasks": paced.tasks},
        {"process": "main", "pss_mib": main_mib},
        {"process": "engine", "pss_mib": engine_mib},
    ]


def part(report: Report, quick: bool) -> None:
    """As one part of a larger benchmark."""
    report.add(*figures(quick=quick))


def main() -> None:
    """Measure and print."""
    options = arguments("Ingest latency and the agent's memory").parse_args()
    report = Report("ingest")
    part(report, options.quick)
    emit(report, as_json=options.json, packages=("stageloom", "numpy", "pyzmq", "msgspec"))


if __name__ == "__main__":
    main()
