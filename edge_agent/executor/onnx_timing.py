"""Measures every operator of a model alone, on real intermediate tensors, for the planner's costs."""

import time
from collections.abc import Callable

import numpy as np

from edge_agent.executor.base import NOT_TIMED, OperatorTime, TimingRequest
from edge_agent.executor.idle import IdleTime
from edge_agent.executor.onnx_parts import ModelParts
from edge_agent.executor.onnx_sessions import Session, SessionKey, Values, one_line, open_session
from edge_agent.executor.summary import summary as summary
from shared.artifact import Artifact
from shared.errors import ExecutorError
from shared.graph import Graph
from shared.ids import TensorId

_SEED = 7


def time_operators(
    artifact: Artifact, request: TimingRequest, idle: Callable[[], bool]
) -> tuple[OperatorTime, ...]:
    """Time per operator, each run as a session of its own; NOT_TIMED where the time was up.

    Operators run in the model's order on what the ones before them made, so that value-dependent kernels see
    plausible data. Tensors are dropped after their last reader. It asks for an idle moment
    before every run, and keeps no run during which a task came. [num_operators]

    Raises:
        ExecutorError: an operator cannot run alone.
    """
    graph, source = artifact.graph, ModelParts(artifact)
    moments = IdleTime(idle, own_s=request.limit_s, wall_s=request.wall_s)
    values = seeded_inputs(graph, request.batch)
    times: list[OperatorTime] = []
    for op in range(len(graph.operators)):
        if not moments.wait():
            break
        key = SessionKey(artifact.digest, (op,), request.batch, request.intra_op_threads)
        try:
            with moments.spend():
                session = open_session(key, source)
                session.run(values)  # warms caches and makes what later operators read
            times.append(_time_one(session, values, request.repeats, moments))
        except ExecutorError:
            raise
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise ExecutorError(f"operator {op} of {graph.name!r} cannot run: {one_line(error)}") from error
        for tensor in [t for t in values if all(reader <= op for reader in graph.consumers[t])]:
            del values[tensor]
    return (*times, *[NOT_TIMED] * (len(graph.operators) - len(times)))


def _time_one(session: Session, values: Values, repeats: int, moments: IdleTime) -> OperatorTime:
    taken_s: list[float] = []
    while len(taken_s) < repeats and moments.wait():
        with moments.spend():
            began_s = time.perf_counter()
            session.run(values)
            took_s = time.perf_counter() - began_s
        if moments.undisturbed:
            taken_s.append(took_s)
    return summary(taken_s) if taken_s else NOT_TIMED


def seeded_inputs(graph: Graph, batch: int) -> Values:
    """Seeded inputs of the graph's types. [batch, ...]"""
    rng = np.random.default_rng(_SEED)
    values: dict[TensorId, np.ndarray] = {}
    for tensor in graph.inputs:
        described = graph.tensors[tensor]
        shape = described.shape if batch == 1 else (batch, *described.shape[1:])
        dtype = np.dtype(described.dtype)
        if dtype.kind == "f":
            values[tensor] = rng.standard_normal(shape).astype(dtype)
        else:
            values[tensor] = rng.integers(0, 2, shape).astype(dtype)
    return values
