"""Sessions outside a plan: warmed up, and every operator measured alone for the planner's costs."""

from collections.abc import Callable
from typing import Any

import numpy as np

from stageloom.edge_agent.executor.base import NOT_TIMED, OperatorTime, TimingRequest
from stageloom.edge_agent.executor.idle import IdleTime
from stageloom.edge_agent.executor.onnx_cuda.device import PROFILING, OrtDevice
from stageloom.edge_agent.executor.onnx_cuda.program import Work, bound_run
from stageloom.edge_agent.executor.onnx_cuda.sessions import open_device_session
from stageloom.edge_agent.executor.onnx_parts import ModelParts
from stageloom.edge_agent.executor.onnx_sessions import Session, SessionKey, one_line
from stageloom.edge_agent.executor.onnx_timing import seeded_values
from stageloom.edge_agent.executor.summary import summary
from stageloom.shared.artifact import Artifact
from stageloom.shared.errors import ExecutorError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import TensorId

_RUNS_PER_LAP = 10
"""So many launches between two events that what it costs to issue the first one does not show."""


def warm_up(session: Session, key: SessionKey, graph: Graph, device: OrtDevice, options: Any) -> None:
    """Run a new session once on memory of its own: kernels load and cudnn searches, which takes long."""
    assert key.stream is not None
    tensors = (*(tensor for tensor, _ in session.inputs), *session.outputs)
    places = {t: device.allocate(max(1, key.batch * graph.tensors[t].nbytes)) for t in tensors}
    try:
        stream = device.stream(key.stream)
        device.launch(stream, bound_run(session, graph, key.batch, places, device, options))
        device.synchronize(device.record(stream))
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ExecutorError(
            f"{len(key.ops)} operators of model {graph.name!r} cannot run: {one_line(error)}"
        ) from error
    finally:
        for place in places.values():
            device.free(place)


def time_operators(
    artifact: Artifact,
    request: TimingRequest,
    idle: Callable[[], bool],
    device: OrtDevice,
    options: Any,
) -> tuple[OperatorTime, ...]:
    """Time per operator by events, each run as a session of its own; NOT_TIMED where the time was up.

    Operators run in the model's order on what the ones before them made, so that value-dependent kernels see
    plausible data. It asks for an idle moment before every run, and keeps no run during which a task
    came. [num_operators]

    Raises:
        ExecutorError: an operator cannot run alone.
    """
    graph, source = artifact.graph, ModelParts(artifact)
    moments = IdleTime(idle, own_s=request.limit_s, wall_s=request.wall_s)
    places: dict[TensorId, int] = {}
    times: list[OperatorTime] = []
    try:
        _fill_inputs(graph, request.batch, device, places)
        for op in range(len(graph.operators)):
            if not moments.wait():
                break
            key = SessionKey(artifact.digest, (op,), request.batch, 1, stream=PROFILING)
            for tensor in graph.operators[op].outputs:
                places[tensor] = device.allocate(max(1, request.batch * graph.tensors[tensor].nbytes))
            with moments.spend():
                session = open_device_session(device, key, source)
                work = bound_run(session, graph, request.batch, places, device, options)
                _lap(work, device, 1)  # loads kernels and makes what later operators read
            times.append(_time_one(work, device, request.repeats, moments))
            for tensor in [t for t in places if all(reader <= op for reader in graph.consumers[t])]:
                device.free(places.pop(tensor))
    except ExecutorError:
        raise
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ExecutorError(
            f"operator {len(times)} of {graph.name!r} cannot run: {one_line(error)}"
        ) from error
    finally:
        for place in places.values():
            device.free(place)
    return (*times, *[NOT_TIMED] * (len(graph.operators) - len(times)))


def _fill_inputs(graph: Graph, batch: int, device: OrtDevice, places: dict[TensorId, int]) -> None:
    stream = device.stream(PROFILING)
    for tensor, array in seeded_values(graph, graph.inputs, batch).items():
        places[tensor] = device.allocate(max(1, array.nbytes))
        host = device.host_bytes(array.nbytes)
        host[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        device.copy(stream, places[tensor], host.ctypes.data, array.nbytes)
        device.synchronize(device.record(stream))


def _time_one(work: Work, device: OrtDevice, repeats: int, moments: IdleTime) -> OperatorTime:
    taken_s: list[float] = []
    while len(taken_s) < repeats and moments.wait():
        with moments.spend():
            took_s = _lap(work, device, _RUNS_PER_LAP)
        if moments.undisturbed:
            taken_s.append(took_s)
    return summary(taken_s) if taken_s else NOT_TIMED


def _lap(work: Work, device: OrtDevice, runs: int) -> float:
    """Seconds of one run on the device."""
    stream = device.stream(PROFILING)
    began = device.record(stream, timed=True)
    for _ in range(runs):
        device.launch(stream, work)
    ended = device.record(stream, timed=True)
    device.synchronize(ended)
    return device.elapsed_s(began, ended) / runs
