"""The agent on a CPU: ingest, what a task costs beside its inference, and what the agent weighs.

    python -m benchmarks.agent_cpu [--quick] [--json] [--only PART]...

`ingest`: `ingest_*_us` is from an application's call of `submit` to the instant the engine queued the task,
on the clock that all processes share; copying the tensor (3x224x224 float32) into shared memory is part of
it. The application is this process, the agent two others. The executor is `null`, so that nothing else uses
the processor; tasks come one at a time (each waits for the one before), and in a second series at fixed pace.

`memory`: `agent_rss_mib` is what both processes of a joined agent take before a backend loads. A page of a
file that both hold counts once, and whole although this process may hold it, too.

`tasks`: processor time of a task in all processes, client included, by thread, and how often each thread went
to sleep for it. Whole models, a step a task, two replicas in two lanes pinned to their cores, by deadline; at
Poisson arrivals and with some tasks always open. Beside it the same load on what an application writes
itself: two threads in its own process that take tasks in the order of their deadlines and call onnxruntime
with one thread. `beyond_cpu_us.MODEL.LOAD` and `beyond_sleeps...` are the differences; of the load `idle`, on
which no task comes, they are for each second. The model `null` is not computed by either; `small` is two
convolutions of some milliseconds.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.runner import Report, percentile, progress, resident_mib, run
from stageloom import Client
from stageloom.edge_agent.bench.contestant import Contestant
from stageloom.edge_agent.bench.load import poisson_window
from stageloom.edge_agent.bench.model_files import ModelUnderTest, prepare
from stageloom.edge_agent.bench.rival_threads import Runtime, TaskOrder, ThreadedRival
from stageloom.edge_agent.bench.runtime_options import RuntimeOptions
from stageloom.edge_agent.bench.runtimes import LoadedModels, load_runtime
from stageloom.edge_agent.bench.stageloom_contestant import AgentSetting, own_plan
from stageloom.edge_agent.bench.window_run import WindowRunner
from stageloom.edge_agent.config import AgentConfig, ModelFile, encode_config
from stageloom.edge_agent.ingest.channel import socket_of
from stageloom.edge_agent.link.connection import Membership, new_keys, save_membership
from stageloom.edge_agent.link.factory import KEY_NAME, MEMBERSHIP_NAME
from stageloom.edge_agent.reporting.status import AgentStatus, ask_status
from stageloom.edge_agent.worker.messages import WorkerConfig
from stageloom.shared.errors import UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.keyfile import write_keys
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.token import Endpoints

SHAPE = (1, 3, 224, 224)
PARTS = ("ingest", "tasks", "memory")
RATE_PER_S = 400.0
OPEN = 8
DEADLINE_S = 1.0
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


def agent_rss_mib() -> dict[str, float]:
    """MiB of the `main` and the `engine` process of a joined agent and of `both`, before a backend loads."""
    with tempfile.TemporaryDirectory(prefix="stageloom-") as folder:
        home = Path(folder)
        _pretend_joined(home)
        with _agent(AgentConfig(home=str(home), log_level="ERROR")) as process:
            status = _wait(process, socket_of(home), lambda found: found.engine.up)
            assert status.engine.pid is not None
            time.sleep(2.0)  # a few reports and reconnects, so that what they allocate is counted
            main, engine = [status.pid], [status.engine.pid]
            of = {"main": main, "engine": engine, "both": main + engine}
            return {name: resident_mib(pids) for name, pids in of.items()}


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
    home: Path, model: onnx.ModelProto, *, executor: str, scheduler: str = "sequential", **more: Any
) -> Iterator[Path]:
    """An agent that serves one model as `probe`, alone; its socket. `more`: further settings."""
    file = home / "probe.onnx"
    onnx.save(model, file)
    config = AgentConfig(
        home=str(home),
        models=(ModelFile(path=str(file), name="probe"),),
        executor=executor,
        scheduler=scheduler,
        replicas=1,
        log_level="ERROR",
        **more,
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


# What a task costs


@dataclass(frozen=True)
class Spent:
    """Of one thread so far."""

    cpu_us: float
    sleeps: int


def spent_by(pid: int) -> dict[str, Spent]:
    """Of all threads of a process, by name; those without a name of their own together."""
    found: dict[str, Spent] = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        name = "main" if folder.name == str(pid) else (folder / "comm").read_text().strip()
        before = found.get(name, Spent(0.0, 0))
        cpu_us = int((folder / "schedstat").read_text().split()[0]) / 1e3
        status = (folder / "status").read_text().splitlines()
        sleeps = next(int(line.split()[1]) for line in status if line.startswith("voluntary"))
        found[name] = Spent(before.cpu_us + cpu_us, before.sleeps + sleeps)
    return found


def _process_tree() -> dict[str, int]:
    """This process, and the agent's two where there is one, by what they are."""
    tree, pid = {}, os.getpid()
    for name in ("client", "agent", "engine"):
        tree[name] = pid
        children = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
        pids = [int(child) for file in children for child in file.read_text().split()]
        if not pids:
            break
        pid = pids[0]
    return tree


@contextlib.contextmanager
def counted(
    rows: list[dict[str, Any]], about: Mapping[str, Any], tasks: Callable[[], float]
) -> Iterator[None]:
    """Add a row per thread: what it took while the context was open, for each of `tasks()`."""
    tree = _process_tree()
    before = {process: spent_by(pid) for process, pid in tree.items()}
    yield
    number = tasks()
    for process, pid in tree.items():
        for thread, after in spent_by(pid).items():
            begun = before[process].get(thread, Spent(0.0, 0))
            taken_us, sleeps = (after.cpu_us - begun.cpu_us) / number, (after.sleeps - begun.sleeps) / number
            if taken_us >= 1.0:
                row = {"process": process, "thread": thread, "cpu_us": taken_us, "sleeps": sleeps}
                rows.append({**about, **row})


def small_model() -> onnx.ModelProto:
    """Two convolutions, some milliseconds on one thread."""
    rng = np.random.default_rng(0)
    sizes = {"first": (48, 3, 3, 3), "second": (48, 48, 3, 3)}
    weights = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    nodes = [
        helper.make_node("Conv", ["input", "first"], ["wide"], strides=[4, 4], pads=[1] * 4),
        helper.make_node("Conv", ["wide", "second"], ["mixed"], pads=[1] * 4),
        helper.make_node("GlobalAveragePool", ["mixed"], ["output"]),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, SHAPE)],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, (1, 48, 1, 1))],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def task_costs(report: Report, quick: bool) -> None:
    seconds = 4.0 if quick else 10.0
    with tempfile.TemporaryDirectory(prefix="stageloom-") as folder:
        for name in ("null", "small"):
            file = Path(folder) / f"{name}.onnx"
            onnx.save(small_model(), file)
            model = prepare(name, file, {}, Path(folder) / name)
            known = {ExecutorOptions(name="null" if name == "null" else "onnx"): 0.001}
            plan = own_plan([model], {name: known})
            options = RuntimeOptions(workers=plan.lanes, threads=1)
            load = partial(_runtime, name == "null", options, model)
            pool = ThreadedRival(load, 1, workers=plan.lanes, order=TaskOrder.DEADLINE)
            own = AgentSetting("stageloom", plan.wire).make([model])
            rows: list[dict[str, Any]] = []
            for contestant, server in (("pool", pool), ("stageloom", own)):
                progress(f"tasks: {name} on {contestant}")
                _run_loads(rows, {"model": name, "contestant": contestant}, server, model, seconds)
            report.add({f"{kind}.{name}.{load}": value for (kind, load), value in _beyond(rows)}, rows)


def _beyond(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[str, str], float]]:
    """What Stageloom's rows come to beyond the pool's: by kind and load."""
    for load in dict.fromkeys(row["load"] for row in rows):
        for kind in ("cpu_us", "sleeps"):
            sums = {
                who: sum(row[kind] for row in rows if (row["contestant"], row["load"]) == (who, load))
                for who in ("pool", "stageloom")
            }
            yield (f"beyond_{kind}", load), sums["stageloom"] - sums["pool"]


def _runtime(nothing: bool, options: RuntimeOptions, model: ModelUnderTest) -> Runtime:
    if nothing:
        return LoadedModels([[lambda feeds: None]] * options.workers)
    return load_runtime(options, [model])


def _run_loads(
    rows: list[dict[str, Any]],
    about: Mapping[str, Any],
    contestant: Contestant,
    model: ModelUnderTest,
    seconds: float,
) -> None:
    runner = WindowRunner([model.feeds(4)])
    contestant.start(runner.ended)
    try:
        runner.keep_open(contestant, [0], OPEN, 1.0)  # warms caches, pages and branches
        window = poisson_window([1.0], RATE_PER_S, seconds, [DEADLINE_S], seed=1)
        with counted(rows, {**about, "load": "paced"}, lambda: window.tasks):
            runner.open_loop(contestant, window)
        with counted(rows, {**about, "load": "saturated"}, lambda: runner.completed):
            runner.keep_open(contestant, [0], OPEN, seconds)
        with counted(rows, {**about, "load": "idle"}, lambda: seconds):  # so these are for each second
            time.sleep(seconds)
    finally:
        contestant.stop()


def ingest(report: Report, quick: bool) -> None:
    tasks = 300 if quick else 3000
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
    report.add(figures, rows)


def measure(report: Report, options: argparse.Namespace) -> None:
    sys.setswitchinterval(WorkerConfig().switch_interval_s)
    parts, quick = options.only or PARTS, options.quick
    if "ingest" in parts:
        ingest(report, quick)
    if "tasks" in parts:
        task_costs(report, quick)
    if "memory" in parts:
        progress("agent: memory of both processes")
        weights = agent_rss_mib()
        rows = [{"process": name, "rss_mib": weight} for name, weight in weights.items()]
        report.add({"agent_rss_mib": weights["both"]}, rows)


if __name__ == "__main__":
    only = {"action": "append", "choices": PARTS, "help": "measure this part; repeat for more"}
    packages = ("onnxruntime", "numpy", "msgspec", "msgpack")
    sys.exit(run(measure, packages, options={"--only": only}))
