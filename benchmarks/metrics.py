"""What counting for Prometheus costs an agent.

    python -m benchmarks.metrics [--quick] [--json]

Two agents on the null executor, of which one tells metrics and is scraped once a second. They take turns: the
same tasks go to each, a few always open, and processor time and latencies are read around each turn. Two
agents without metrics differ, too (where their threads come to run decides that, and stays so), so there are
many pairs of new agents. A figure is the median over the pairs of the ratio of the agent with metrics to the
one without: `latency_p50`, and processor time per task of the main process, which counts, and of the engine
process, which does not; `same_..._ratio` is that of two agents without metrics. `counting_us` is one call of
what counts a task; `metrics_pss_mib` is what the process takes that tells.
"""

import argparse
import contextlib
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
from onnx import helper

from benchmarks.agent_cpu import SHAPE, probe_model, serving
from benchmarks.runner import Report, progress, pss_mib, run, spread
from stageloom import Client
from stageloom.edge_agent.ingest.channel import socket_of
from stageloom.edge_agent.metrics.counting import AgentCounters
from stageloom.edge_agent.metrics.settings import MetricsSettings
from stageloom.edge_agent.reporting.status import ask_status

_OPEN: Final = 4
_SCRAPE_S: Final = 1.0
_CALLS: Final = 20_000


@dataclass
class AgentUnderLoad:
    """One of the two agents; `url`: of its metrics, empty without."""

    client: Client
    main: int
    engine: int
    url: str = ""
    scraped_s: float = 0.0

    def turn(self, tasks: int) -> dict[str, float]:
        """The median latency of so many tasks in us, and processor time per task by process in us."""
        image = np.zeros(SHAPE, np.float32)
        before_us = {name: _cpu_us(pid) for name, pid in (("main", self.main), ("engine", self.engine))}
        latencies_us: list[float] = []
        open_ones = deque([self.client.submit("probe", {"input": image}) for _ in range(_OPEN)])
        while open_ones:
            future = open_ones.popleft()
            future.result(30.0)
            latencies_us.append((future.ended_at_s - future.queued_at_s) * 1e6)
            if len(latencies_us) + len(open_ones) < tasks:
                open_ones.append(self.client.submit("probe", {"input": image}))
            self._scrape()
        taken_us = {
            f"{name}_cpu": (_cpu_us(pid) - before_us[name]) / tasks
            for name, pid in (("main", self.main), ("engine", self.engine))
        }
        return {"latency_p50": median(latencies_us), **taken_us}

    def _scrape(self) -> None:
        if self.url and time.monotonic() - self.scraped_s >= _SCRAPE_S:
            self.scraped_s = time.monotonic()
            with urllib.request.urlopen(self.url, timeout=10) as answer:
                answer.read()


def measure(report: Report, options: argparse.Namespace) -> None:
    """Pairs with metrics and pairs without by turns."""
    pairs, turns, tasks = (2, 2, 500) if options.quick else (14, 6, 1500)
    ratios: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    told_mib = []
    for number in range(pairs):
        for metrics in (True, False):
            ratio, mib = _pair(metrics, number % 2 == 0, turns, tasks)
            ratios[metrics].append(ratio)
            told_mib += [mib] if mib is not None else []
        progress(f"pair {number + 1} of {pairs}")
    for metrics, name in ((True, ""), (False, "same_")):
        spreads = {one: spread([ratio[one] for ratio in ratios[metrics]]) for one in ratios[metrics][0]}
        report.add(
            {f"{name}{one}_ratio": values["median"] for one, values in spreads.items()},
            [{"figure": f"{name}{one}_ratio", "pairs": pairs, **values} for one, values in spreads.items()],
        )
    report.add({"counting_us": _counting_us(), "metrics_pss_mib": median(told_mib)})


def _pair(metrics: bool, first: bool, turns: int, tasks: int) -> tuple[dict[str, float], float | None]:
    """Ratios of the second of two new agents, which tells `metrics`, to the first; what telling takes in MiB.

    `first`: the second one starts first.
    """
    with tempfile.TemporaryDirectory(prefix="stageloom-") as folder, contextlib.ExitStack() as stack:
        started = {
            told: stack.enter_context(_agent(Path(folder, str(told)), metrics and told))
            for told in ((True, False) if first else (False, True))
        }
        for agent in started.values():
            agent.turn(tasks)
        found = [
            {told: started[told].turn(tasks) for told in (number % 2 == 0, number % 2 == 1)}
            for number in range(turns)
        ]
        pid = _metrics_pid(Path(folder, "True")) if metrics else None
        mib = pss_mib([pid]) if pid is not None else None
    return {name: median(one[True][name] / one[False][name] for one in found) for name in found[0][True]}, mib


def _counting_us() -> float:
    counters = AgentCounters(tuple)
    began_s = time.perf_counter()
    for number in range(_CALLS):
        counters.task_completed("probe", 1.0, 1.001, 1.001 + number * 1e-6)
    return (time.perf_counter() - began_s) / _CALLS * 1e6


@contextlib.contextmanager
def _agent(home: Path, metrics: bool) -> Iterator[AgentUnderLoad]:
    home.mkdir()
    model = probe_model([helper.make_node("GlobalAveragePool", ["input"], ["output"])], ["output"])
    settings = MetricsSettings(listen="127.0.0.1:0" if metrics else "")
    with serving(home, model, executor="null", metrics=settings) as socket, Client(socket) as client:
        status = ask_status(socket)
        while metrics and not (status.metrics and status.metrics.http):
            time.sleep(0.1)
            status = ask_status(socket)
        assert status.engine.pid is not None
        url = f"http://{status.metrics.http}/metrics" if status.metrics else ""
        yield AgentUnderLoad(client, status.pid, status.engine.pid, url)


def _metrics_pid(home: Path) -> int:
    metrics = ask_status(socket_of(home)).metrics
    assert metrics is not None and metrics.pid is not None
    return metrics.pid


def _cpu_us(pid: int) -> float:
    """Processor time of all threads of a process that live."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e3


if __name__ == "__main__":
    sys.exit(run(measure, ("prometheus_client", "uvicorn", "httptools", "msgspec")))
