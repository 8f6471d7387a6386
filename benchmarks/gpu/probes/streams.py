"""How many streams there really are, and how many of them run at once under 8 and under 32 connections."""

import argparse
import json
import os
import subprocess
from typing import Any, Final

import torch

from benchmarks.gpu.compiled import child_command
from benchmarks.gpu.device import STREAMS, Device, fork, join, make_device, per_run_s
from stageloom.edge_agent.executor.cuda.streams import CONNECTIONS

COUNTS: Final = (8, 32)
_CYCLES: Final = 200_000  # about 0.1 ms of one thread that spins
_LINKS: Final = 4
_CHILD_S: Final = 60.0
_cuda: Any = torch.cuda


def first_alias(device: Device) -> int | None:
    """The number of the first stream whose handle an earlier one had; None where the first 64 differ."""
    if device.kind != "cuda":
        return None
    handles: list[int] = []
    kept = []  # a stream that was freed could come again
    for number in range(1, 65):
        stream = _cuda.Stream()
        kept.append(stream)
        if stream.cuda_stream in handles:
            return number
        handles.append(stream.cuda_stream)
    return None


def sleep(device: Device, cycles: int = _CYCLES) -> None:
    """Keep one thread of the device busy on the current stream."""
    if device.kind == "cuda":
        _cuda._sleep(cycles)


def at_once(device: Device, *, streams: int = STREAMS, links: int = _LINKS) -> dict[str, float]:
    """Chains of spinning threads on several streams: how many chains ran at once.

    Issued chain by chain (`depth`), where too few connections put one chain behind another, and link by link
    (`breadth`); and as one captured graph (`graph`).
    """
    used = list(device.streams[:streams])

    def issue(pairs: list[tuple[Any, int]]) -> None:
        fork(device, used)
        for stream, _ in pairs:
            with device.on(stream):
                sleep(device)
        join(device, used)

    by_depth = [(stream, link) for stream in used for link in range(links)]
    by_breadth = [(stream, link) for link in range(links) for stream in used]
    one_s = per_run_s(device, lambda: sleep(device), seconds=0.02)
    found = {}
    graph = device.capture(lambda: issue(by_depth[links:]), stream=used[0])  # the capturing stream is one
    for name, work, chains in (
        ("depth", lambda: issue(by_depth), streams),
        ("breadth", lambda: issue(by_breadth), streams),
        ("graph", graph.replay, streams - 1),
    ):
        found[name] = chains * links * one_s / per_run_s(device, work, seconds=0.05)
    return found


def connections_child(arguments: argparse.Namespace) -> int:
    """One count of connections, in a process of its own: CUDA reads the variable when it starts."""
    device = make_device(arguments.device)
    print(json.dumps(at_once(device)))
    return 0


def with_connections(kind: str, connections: int) -> dict[str, float]:
    """`at_once` in a child under so many connections.

    Raises:
        RuntimeError: the child failed; its last line says why.
    """
    done = subprocess.run(
        child_command("connections", "--device", kind),
        env={**os.environ, CONNECTIONS: str(connections)},
        capture_output=True,
        text=True,
        timeout=_CHILD_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1][:200])
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
