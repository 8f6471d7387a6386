"""Latencies of one request at a time over every transport, beside the native client and bare servers."""

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks.runner import Report, progress
from benchmarks.serving.echo import KINDS
from stageloom import Client
from stageloom.edge_agent.config import AgentConfig, ModelFile, encode_config
from stageloom.edge_agent.ingest.channel import socket_of
from stageloom.edge_agent.reporting.status import AgentStatus, ask_status
from stageloom.edge_agent.serving.settings import ServingSettings
from stageloom.shared.errors import UnavailableError

_SHAPE: Final = (1, 3, 224, 224)
_REGION: Final = "stageloom-benchmark"
_START_S: Final = 60.0
_ECHO_OF: Final = {
    f"{kind}{way}": f"echo_{echo}{way}"
    for kind, echo in (("http", "http"), ("grpc", "grpc_threads"))
    for way in ("", "_shared_memory")
}
"""What each way is compared with: the server that it is built on, asked by the same client."""

Call = Callable[[], Any]


def measure_overhead(report: Report, *, quick: bool) -> None:
    """All ways in turn."""
    rounds = 200 if quick else 1500
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        status = stack.enter_context(_agent(Path(folder)))
        assert status.serving is not None
        image = np.random.default_rng(0).random(_SHAPE, dtype=np.float32)
        native = stack.enter_context(Client(socket_of(Path(folder))))
        calls: dict[str, Call] = {"native": lambda: native.run("mean", {"x": image})["y"]}
        calls |= _triton("http", status.serving.http, image, stack)
        calls |= _triton("grpc", status.serving.grpc, image, stack)
        expected = calls["native"]()
        for name, call in calls.items():
            assert np.array_equal(call(), expected), name
        for kind in KINDS:
            address = stack.enter_context(_echo(kind))
            calls |= _triton(kind.partition("_")[0], address, image, stack, echo=kind)
        latencies_ms = _take_turns(calls, rounds)
    _tell(report, latencies_ms)


def _take_turns(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    rng = random.Random(0)
    names = list(calls)
    for number in range(rounds + 20):
        rng.shuffle(names)
        for name in names:
            began_s = time.perf_counter()
            calls[name]()
            if number >= 20:  # the first ones warm up
                found[name].append((time.perf_counter() - began_s) * 1e3)
        if number % 500 == 499:
            progress(f"{number + 1} of {rounds + 20} rounds")
    return found


def _tell(report: Report, latencies_ms: dict[str, list[float]]) -> None:
    p50_ms = {name: median(values) for name, values in latencies_ms.items()}
    for name, values in latencies_ms.items():
        p99_ms = quantiles(values, n=100)[98]
        row = {"way": name, "p50_ms": p50_ms[name], "p99_ms": p99_ms, "requests": len(values)}
        figures = {f"{name}_p50_ms": p50_ms[name]}
        if name in _ECHO_OF:
            beyond_ms = p50_ms[name] - p50_ms["native"]
            figures[f"{name}_beyond_native_ms"] = beyond_ms
            figures[f"{name}_own_part_ms"] = beyond_ms - p50_ms[_ECHO_OF[name]]
        report.add(figures, [{"part": "latency", **row}])


def _triton(
    kind: str, address: str, image: Any, stack: contextlib.ExitStack, *, echo: str = ""
) -> dict[str, Call]:
    """tritonclient with the tensor in the request, and with it in shared memory; `echo`: of a bare server."""
    import tritonclient.grpc
    import tritonclient.http
    import tritonclient.utils.shared_memory as shm

    module: Any = {"http": tritonclient.http, "grpc": tritonclient.grpc}[kind]
    client = module.InferenceServerClient(address)
    stack.callback(client.close)

    def in_request() -> Any:
        given = module.InferInput("x", _SHAPE, "FP32")
        given.set_data_from_numpy(image)
        return client.infer("mean", [given]).as_numpy("y")

    way = f"echo_{echo}" if echo else kind
    name = f"{_REGION}-{way}"
    region = shm.create_shared_memory_region(name, f"/{name}", image.nbytes)
    stack.callback(shm.destroy_shared_memory_region, region)
    if not echo:
        client.register_system_shared_memory(name, f"/{name}", image.nbytes)

    def in_memory() -> Any:
        shm.set_shared_memory_region(region, [image])
        given = module.InferInput("x", _SHAPE, "FP32")
        given.set_shared_memory(name, image.nbytes)
        return client.infer("mean", [given]).as_numpy("y")

    return {way: in_request, f"{way}_shared_memory": in_memory}


@contextlib.contextmanager
def _echo(kind: str) -> Iterator[str]:
    """The address of a bare server."""
    command = [sys.executable, "-m", "benchmarks.serving.echo", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@contextlib.contextmanager
def _agent(home: Path) -> Iterator[AgentStatus]:
    file = home / "mean.onnx"
    node = helper.make_node("GlobalAveragePool", ["x"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, _SHAPE)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 3, 1, 1))
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(helper.make_graph([node], "mean", [x], [y]), opset_imports=opset), file)
    config = AgentConfig(
        home=str(home),
        models=(ModelFile(path=str(file), name="mean"),),
        executor="onnx",
        serving=ServingSettings(http="127.0.0.1:0", grpc="127.0.0.1:0"),
        log_level="WARNING",
    )
    process = subprocess.Popen([sys.executable, "-m", "stageloom.edge_agent.run", encode_config(config)])
    try:
        yield _when_serving(home)
    finally:
        process.terminate()
        process.wait(30)


def _when_serving(home: Path) -> AgentStatus:
    give_up_s = time.monotonic() + _START_S
    while time.monotonic() < give_up_s:
        with contextlib.suppress(UnavailableError):
            status = ask_status(socket_of(home))
            if status.ready and status.serving is not None and status.serving.grpc:
                return status
        time.sleep(0.1)
    raise UnavailableError("the agent does not serve", remedy="look at what it said")
