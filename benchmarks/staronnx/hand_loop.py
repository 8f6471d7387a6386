"""What the engine is compared with: heads, copies and slow tails in three threads, written by hand."""

import os
import threading
import time
from queue import SimpleQueue

import numpy as np

from benchmarks.runner import uncollected
from benchmarks.staronnx.models import Machine, Model
from stageloom.edge_agent.executor.onnx.cache import SessionKey
from stageloom.edge_agent.executor.onnx.executor import OnnxSession, open_session
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.slot_store import Values
from stageloom.shared.blocks import split


def _session(model: Model, start: int, stop: int) -> OnnxSession:
    key = SessionKey(model.artifact.digest, tuple(range(start, stop)), 1, 1)
    return open_session(key, ModelParts(model.artifact))


def by_hand_per_s(model: Model, machine: Machine, cut: int, slow: float, at_once: int, batches: int) -> float:
    """Batches a second with every tail on the slow core, so many in flight; without the first tenth.

    A thread per core runs onnxruntime on what the one before hands over, a third one waits for the bus.
    """
    graph = model.artifact.graph
    head, tail = _session(model, 0, cut), _session(model, cut, len(graph.operators))
    border = split(graph, (cut,))[1].live_in
    tickets = threading.Semaphore(at_once)
    made: SimpleQueue[Values | None] = SimpleQueue()
    copied: SimpleQueue[Values | None] = SimpleQueue()
    ends_s: list[float] = []

    def heads() -> None:
        os.sched_setaffinity(0, machine.cores[:1])
        for _ in range(batches):
            tickets.acquire()
            values = {tensor: model.feeds[graph.tensors[tensor].name] for tensor in graph.inputs}
            head.run(values)
            made.put({tensor: values[tensor] for tensor in border})
        made.put(None)

    def copies() -> None:
        while (values := made.get()) is not None:
            for tensor, array in values.items():
                time.sleep(machine.bus.copy_s([array.nbytes]))
                values[tensor] = np.copy(array)
            copied.put(values)
        copied.put(None)

    def tails() -> None:
        os.sched_setaffinity(0, machine.cores[1:])
        while (values := copied.get()) is not None:
            began_s = time.thread_time()
            tail.run(values)
            time.sleep((slow - 1) * (time.thread_time() - began_s))
            ends_s.append(time.monotonic())
            tickets.release()

    threads = [threading.Thread(target=work) for work in (heads, copies, tails)]
    with uncollected():  # as the engine's batches run
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    first = batches // 10
    return (batches - 1 - first) / (ends_s[-1] - ends_s[first])
