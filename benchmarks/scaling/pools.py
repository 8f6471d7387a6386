"""The pools that are compared: processes, a Ray of this machine, and a Ray cluster of nodes here."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from stageloom.planner.cluster.interface import SearchPool
from stageloom.planner.cluster.processes import ProcessPool
from stageloom.planner.cluster.ray_pool import OBJECT_STORE_BYTES, RayPool
from stageloom.planner.twin.compiled.compile_cache import is_compiled
from stageloom.shared.errors import UnavailableError

_RAY: Final = "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; main()"
_START_S: Final = 120.0
_STOP_S: Final = 30.0
_COMPILE_S: Final = 300.0
_ROOT: Final = Path(__file__).parents[2]


@contextmanager
def process_pool(workers: int) -> Iterator[SearchPool]:
    """Processes that stay."""
    pool = ProcessPool(workers, idle_s=None)
    try:
        yield pool
    finally:
        pool.close()


@contextmanager
def ray_pool(workers: int, address: str = "") -> Iterator[SearchPool]:
    """A Ray of this machine, or the cluster at an address.

    Raises:
        UnavailableError: Ray does not run.
    """
    pool = RayPool(workers, address=address)
    try:
        if not pool.wait(_START_S):
            raise pool.error or UnavailableError(f"Ray does not start within {_START_S:.0f} s")
        yield pool
    finally:
        pool.close()


@contextmanager
def cluster_pool(nodes: int) -> Iterator[SearchPool]:
    """A Ray cluster of so many nodes of one processor each, on this machine, joined as any other is.

    Its nodes have compiled the twin's kernels by then, which takes the first planner that joins a minute.

    Raises:
        UnavailableError: it does not come up.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address, state = f"127.0.0.1:{port}", tempfile.mkdtemp(prefix="ray")
    head = ["--head", f"--port={port}", f"--temp-dir={state}", "--include-dashboard=false"]
    words = [head, *[[f"--address={address}"]] * (nodes - 1)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for own in words:
            started.append(_node(own, state))
            _await(port)
        with ray_pool(nodes, address) as pool:
            _await_nodes(pool, started)
            _await_kernels(pool)
            yield pool
    finally:
        for node in reversed(started):
            node.terminate()
        for node in started:
            with suppress(subprocess.TimeoutExpired):
                node.wait(_STOP_S)
            node.kill()
        shutil.rmtree(state, ignore_errors=True)


def _node(words: list[str], state: str) -> "subprocess.Popen[bytes]":
    sizes = ("--num-cpus=1", f"--object-store-memory={OBJECT_STORE_BYTES}")
    paths = os.pathsep.join((str(_ROOT), os.environ.get("PYTHONPATH", "")))
    return subprocess.Popen(
        [sys.executable, "-c", _RAY, "start", "--block", "--node-ip-address=127.0.0.1", *sizes, *words],
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": paths},
        cwd=state,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def alive_nodes() -> int:
    """On a node: how many nodes the cluster has."""
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes())


def _await_nodes(pool: SearchPool, started: "list[subprocess.Popen[bytes]]") -> None:
    until_s = time.monotonic() + _START_S
    while (alive := pool.submit(alive_nodes).result()) < len(started):
        ended = [node.returncode for node in started if node.poll() is not None]
        if ended or time.monotonic() > until_s:
            why = f"a node ended with code {ended[0]}" if ended else f"none joined within {_START_S:.0f} s"
            raise UnavailableError(f"the Ray cluster has {alive} of {len(started)} nodes: {why}")
        time.sleep(0.5)


def _await_kernels(pool: SearchPool) -> None:
    until_s = time.monotonic() + _COMPILE_S
    while not pool.submit(is_compiled).result():
        if time.monotonic() > until_s:
            raise UnavailableError(f"the cluster's nodes compile no kernels within {_COMPILE_S:.0f} s")
        time.sleep(1.0)


def _await(port: int) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.2)
    raise UnavailableError(f"the Ray cluster's head does not listen within {_START_S:.0f} s")
