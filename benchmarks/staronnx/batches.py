"""The batch for a rate, where batches pay: small networks, whose kernels cost more than their arithmetic."""

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import zoo
from stageloom.edge_agent.executor.onnx.cache import SessionKey
from stageloom.edge_agent.executor.onnx.executor import open_session
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.shared.artifact import Artifact
from stageloom.shared.search.batching import batch_for_rate, first_item_s, fitted

LARGEST = 32
FITTED = (1, 2, 4, 8, 16, 32)
RATES = 40
CLOSE = 1.05

NETWORKS = (("squeezenet", 0.25, 64), ("resnet50", 0.25, 32))
"""With the share of their channels, and the side of their image in pixels."""


def measured_s(network: str, width: float, side: int, folder: Path, repeats: int) -> dict[int, float]:
    """What batches of every size take, on one thread; sizes take turns, and the median counts."""
    artifact = zoo.artifacts([network], folder, width=width, size=side)[network]
    sessions = {batch: _session(artifact, batch) for batch in range(1, LARGEST + 1)}
    taken: dict[int, list[float]] = {batch: [] for batch in sessions}
    for _ in range(repeats + 2):
        for batch, (session, values) in sessions.items():
            began_s = time.perf_counter()
            session.run(dict(values))
            taken[batch].append(time.perf_counter() - began_s)
    return {batch: median(seconds[2:]) for batch, seconds in taken.items()}


def _session(artifact: Artifact, batch: int) -> tuple[Any, dict[Any, np.ndarray]]:
    graph = artifact.graph
    key = SessionKey(artifact.digest, tuple(range(len(graph.operators))), batch, 1)
    feeds = zoo.noise_for(artifact)
    values = {t: np.concatenate([feeds[graph.tensors[t].name]] * batch) for t in graph.inputs}
    return open_session(key, ModelParts(artifact)), values


def judged(times_s: dict[int, float]) -> dict[str, float]:
    """How good the batch is that is chosen from a fit to a few sizes, over rates up to what all sizes carry.

    `close`: the share of rates at which its first item waits at most 5 % longer than at the best size;
    `larger`: of those at which that size exceeds 1.
    """
    line = fitted({batch: times_s[batch] for batch in FITTED})
    most = max(batch / seconds for batch, seconds in times_s.items())
    rates = [most * (number + 0.5) / RATES for number in range(RATES)]
    close = larger = 0
    for rate in rates:
        waits = {batch: first_item_s(batch, rate, times_s.__getitem__) for batch in times_s}
        best = min((wait, batch) for batch, wait in waits.items() if wait is not None)
        chosen = batch_for_rate(rate, line, largest=LARGEST)
        wait = None if chosen is None else waits[chosen]
        close += wait is not None and wait <= CLOSE * best[0]
        larger += best[1] > 1
    return {"close": close / RATES, "larger": larger / RATES, "per_s": most}
