"""One client process of the demo: seeded Poisson arrivals for one model, every task's end written down.

    python -m examples.demo.load --endpoint SOCKET --model NAME --rate 20 --seconds 30 --out FILE.json

Progress goes to stdout as one JSON object per line; the outcome of every task goes to `--out`, sampled
inputs and outputs beside it as FILE.npz. Asked to end (SIGTERM) it submits no more and waits for what is
open.
"""

import argparse
import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from stageloom import Client
from stageloom.shared.errors import RefusedError, StageloomError, TaskCancelled, TaskExpired, TaskRefused

PROGRESS_S = 0.25
DRAIN_S = 20.0

Arrays = dict[str, Any]
"""By tensor name."""


def arrivals(rng: random.Random, rate_per_s: float, seconds: float) -> Iterator[float]:
    """Seconds after the begin at which tasks arrive: a Poisson process."""
    at_s = rng.expovariate(rate_per_s)
    while at_s < seconds:
        yield at_s
        at_s += rng.expovariate(rate_per_s)


def pattern(seed: int, shape: tuple[int, ...]) -> "np.ndarray[Any, Any]":
    """A low-frequency picture of its own brightness and scale; white noise would average away."""
    rng = np.random.default_rng(seed)
    grid = np.meshgrid(*(np.linspace(0.0, 1.0, size) for size in shape[-2:]), indexing="ij")
    planes = []
    for _ in range(int(np.prod(shape[:-2]))):
        waves = rng.uniform(0.5, 4.0, (4, 2))
        phases = rng.uniform(0.0, 2.0 * np.pi, 4)
        plane = sum(
            np.cos(2.0 * np.pi * (a * grid[0] + b * grid[1]) + phase)
            for (a, b), phase in zip(waves, phases, strict=True)
        )
        planes.append(rng.uniform(0.3, 2.0) * plane + rng.uniform(-1.0, 1.0))
    return np.stack(planes).reshape(shape).astype(np.float32)


class Load:
    """What became of every task; callbacks come from the client's own thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.outcomes: Counter[str] = Counter()
        self.latencies_ms: list[float] = []
        self.submitted = self.open = 0
        self.samples: dict[str, Any] = {}  # arrays by "NUMBER|in or out|TENSOR"

    def ended(self, future: "Future[dict[str, Any]]", began_s: float, index: int, inputs: Arrays) -> None:
        """A task ended. Task 0, 1, 2, 4, 8 and so on are kept: several however soon the load ends."""
        latency_ms = 1000.0 * (time.monotonic() - began_s)
        outcome = outcome_of(future.exception())
        with self.changed:
            self.outcomes[outcome] += 1
            if outcome == "completed":
                self.latencies_ms.append(latency_ms)
                if index & (index - 1) == 0:
                    outputs = {name: np.array(value) for name, value in future.result().items()}
                    for side, arrays in (("in", inputs), ("out", outputs)):
                        self.samples |= {f"{index}|{side}|{name}": array for name, array in arrays.items()}
            self.open -= 1
            self.changed.notify_all()

    def progress(self) -> str:
        with self.changed:
            recent = sorted(self.latencies_ms[-200:])
            found = {
                "submitted": self.submitted,
                "open": self.open,
                **self.outcomes,
                "p50_ms": recent[len(recent) // 2] if recent else None,
                "p99_ms": recent[int(len(recent) * 0.99)] if recent else None,
            }
        return json.dumps(found)


def outcome_of(error: BaseException | None) -> str:
    """The word for how a task ended."""
    words = ((TaskExpired, "expired"), (TaskCancelled, "cancelled"), (TaskRefused, "refused"))
    if error is None:
        return "completed"
    return next((word for kind, word in words if isinstance(error, kind)), "failed")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Submit for `--seconds`, or until asked to end; then wait until every task has ended."""
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    rng = random.Random(options.seed)
    load = Load()
    with Client(options.endpoint) as client:
        inputs = client.models()[options.model].inputs
        pool = [
            {tensor.name: pattern(options.seed * 1000 + 7 * number, tensor.shape) for tensor in inputs}
            for number in range(8)
        ]
        began = reported = time.monotonic()
        for index, at_s in enumerate(arrivals(rng, options.rate, options.seconds)):
            while (now := time.monotonic()) < began + at_s and not ending.is_set():
                if now >= reported + PROGRESS_S:
                    print(load.progress(), flush=True)
                    reported = now
                ending.wait(min(began + at_s - now, PROGRESS_S))
            if ending.is_set():
                break
            _submit(client, options, load, index, rng.choice(pool))
        with load.changed:
            load.changed.wait_for(lambda: load.open == 0, timeout=DRAIN_S)
        ended = time.monotonic()
    print(load.progress(), flush=True)
    np.savez(options.out.with_suffix(".npz"), **load.samples)
    return {
        "model": options.model,
        "rate_per_s": options.rate,
        "began_s": began,
        "seconds": ended - began,
        "submitted": load.submitted,
        "outcomes": dict(load.outcomes),
        "latencies_ms": [round(value, 3) for value in load.latencies_ms],
    }


def _submit(client: Client, options: argparse.Namespace, load: Load, index: int, inputs: Arrays) -> None:
    began_s = time.monotonic()
    with load.changed:
        load.submitted += 1
        load.open += 1
    future: Future[Any]
    try:
        future = client.submit(options.model, inputs, deadline_s=options.deadline)
    except RefusedError as refused:
        future = Future()
        future.set_exception(refused)
    future.add_done_callback(lambda done: load.ended(done, began_s, index, inputs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--endpoint", required=True, help="the agent's socket")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rate", type=float, required=True, help="tasks per second on average")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--deadline", type=float, default=None, help="seconds from submission")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        options.out.write_text(json.dumps(run(options)))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except StageloomError as error:
        raise SystemExit(f"{options.model}: {error}") from error


if __name__ == "__main__":
    main()
