"""Sessions on a device: each belongs to one stream for ever and never waits for the host.

What is known of onnxruntime and shapes this (versions 1.20 to 1.31):

- A provider that cannot be made is replaced by the processor with nothing but a line in the log. So the
  session is asked afterwards which provider it has.
- A run waits for the device at its end unless `disable_synchronize_execution_providers` is set; with a
  stream of the caller's and everything bound to device memory nothing else does (issue 28539).
- Operators that only the processor can run would wait for the device in the middle of a run, and a binding
  copies what they read when it is made and not when it is run: such a session is refused.
- Every session has an arena of its own. Chunks that were freed on the host may still be in use on the device
  (issue 32342), which is safe on one stream and on no second one: so sessions share no arena.
- Some kernels add up in an order that differs from run to run: they are switched off, so that equal inputs
  give equal bits.
- Runs from ever new threads make a session's arena grow without end (issue 29351): steps are launched on one
  thread, and warmed up on one other.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnxruntime

from stageloom.edge_agent.executor.base import OperatorTime, TimingRequest, one_line
from stageloom.edge_agent.executor.cuda.device import PROFILING, Launch, SessionDevice, Stream
from stageloom.edge_agent.executor.onnx.cache import SessionKey, weight_bytes
from stageloom.edge_agent.executor.onnx.executor import OnnxSession, session_from
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.timing import seeded_values, time_in_order
from stageloom.shared.artifact import Artifact
from stageloom.shared.errors import BackendUnavailable, ExecutorError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import TensorId
from stageloom.shared.importer.values import ELEMENT_TYPES

_PROCESSOR = "cpu"
_REFUSED = "fallback to CPU EP has been explicitly disabled"
"""What onnxruntime says where a provider cannot be made, or has no kernel for an operator."""

_LARGEST_TENSORS = 4
"""How many of its largest tensors a session's arena holds at once: input, output and two for scratch."""


def session_bytes(key: SessionKey, graph: Graph, handle_bytes: int = 0) -> int:
    """What a session keeps on the device: weights, an arena of its own, handles of the libraries."""
    tensors = {t for op in key.ops for t in (*graph.operators[op].inputs, *graph.operators[op].outputs)}
    largest = max(graph.tensors[t].nbytes for t in tensors)
    return weight_bytes(key, graph) + _LARGEST_TENSORS * key.batch * largest + handle_bytes


def open_device_session(device: SessionDevice, key: SessionKey, source: ModelParts) -> OnnxSession:
    """Make a session whose kernels go to the key's stream.

    Raises:
        ExecutorError: onnxruntime cannot build it, or part of it would run somewhere else.
    """
    provider, settings = plain_provider(device, key)
    options = session_options(device)
    try:
        session = session_from(key, source, options, [(provider, dict(settings))])
    except ExecutorError as error:
        if _REFUSED not in str(error):
            raise
        raise ExecutorError(
            f"onnxruntime would run operators of model {source.artifact.graph.name!r} on the processor "
            f"instead of {provider}",
            remedy="see its log for a missing library; if there is none, use torch_cuda for this model",
        ) from error
    check_place(session, provider, device.kind, source)
    return session


def plain_provider(device: SessionDevice, key: SessionKey) -> tuple[str, Mapping[str, str]]:
    """The provider that runs operator by operator, on the key's stream and in its precision."""
    assert key.stream is not None
    return device.provider(device.stream(key.stream), tf32=key.precision == "tf32")


def session_options(device: SessionDevice) -> Any:
    """What all sessions on a device have in common."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.use_deterministic_compute = True
    if device.kind != _PROCESSOR:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return options


def check_place(session: OnnxSession, provider: str, kind: str, source: ModelParts) -> None:
    """Raises:
    ExecutorError: the session has another provider, or wants a tensor in other memory.
    """
    name = source.artifact.graph.name
    providers = session.session.get_providers()
    if providers[0] != provider:
        raise ExecutorError(
            f"onnxruntime runs model {name!r} on {providers[0]} instead of {provider}",
            remedy="see its log for the library that it lacks, or use another executor",
        )
    if not hasattr(session.session, "get_input_memory_infos"):  # onnxruntime < 1.23
        return
    described = (*session.session.get_inputs(), *session.session.get_outputs())
    places = (*session.session.get_input_memory_infos(), *session.session.get_output_memory_infos())
    for tensor, place in zip(described, places, strict=True):
        if not place.name.lower().startswith(kind):
            raise ExecutorError(
                f"onnxruntime wants tensor {tensor.name[:80]!r} of model {name!r} in {place.name} memory",
                remedy="use the executor torch_cuda or onnx for this model",
            )


def run_options() -> onnxruntime.RunOptions:
    """One for all runs: making one takes longer than a launch."""
    options = onnxruntime.RunOptions()
    options.log_severity_level = 3
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def bound_run(
    session: OnnxSession,
    graph: Graph,
    batch: int,
    places: Mapping[TensorId, int],
    device: SessionDevice,
    options: Any,
) -> Launch:
    """One run of a session that reads and writes the given addresses, as a function without arguments."""
    binding = session.session.io_binding()
    outputs = zip(session.outputs, session.names, strict=True)
    for bind, tensors in ((binding.bind_input, session.inputs), (binding.bind_output, outputs)):
        for tensor, name in tensors:
            described = graph.tensors[tensor]
            kind, shape = ELEMENT_TYPES[described.dtype], described.batched(batch)
            bind(name, device.kind, device.number, kind, shape, buffer_ptr=places[tensor])
    return partial(session.session.run_with_iobinding, binding, options)


_RUNS_PER_LAP = 10
"""So many launches between two events that what it costs to issue the first one does not show."""


def warm_up(session: OnnxSession, key: SessionKey, graph: Graph, device: SessionDevice, options: Any) -> None:
    """Run a new session once on memory of its own: kernels load and cudnn searches, which takes long."""
    assert key.stream is not None
    tensors = (*(tensor for tensor, _ in session.inputs), *session.outputs)
    places = {t: device.allocate(max(1, key.batch * graph.tensors[t].nbytes)) for t in tensors}
    try:
        stream = device.stream(key.stream)
        device.launch(stream, bound_run(session, graph, key.batch, places, device, options))
        device.synchronize(device.record(stream))
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise BackendUnavailable(
            f"{len(key.ops)} operators of model {graph.name!r} cannot run: {one_line(error)}"
        ) from error
    finally:
        for place in places.values():
            device.free(place)


def time_operators(
    artifact: Artifact,
    request: TimingRequest,
    idle: Callable[[], bool],
    device: SessionDevice,
    options: Any,
) -> tuple[OperatorTime, ...]:
    """Time per operator by events, each run as a session of its own, as `time_in_order`. [num_operators]

    Raises:
        ExecutorError: an operator cannot run alone.
    """
    graph, source = artifact.graph, ModelParts(artifact)
    places: dict[TensorId, int] = {}

    def begin(op: int) -> Callable[[], float]:
        key = SessionKey(artifact.digest, (op,), request.batch, 1, stream=PROFILING)
        for tensor in graph.operators[op].outputs:
            places[tensor] = device.allocate(max(1, request.batch * graph.tensors[tensor].nbytes))
        session = open_device_session(device, key, source)
        run = bound_run(session, graph, request.batch, places, device, options)
        return partial(lap_s, run, device, device.stream(PROFILING))

    try:
        _fill_inputs(graph, request.batch, device, places)
        return time_in_order(graph, request, idle, begin, lambda tensor: device.free(places.pop(tensor)))
    finally:
        for place in places.values():
            device.free(place)


def _fill_inputs(graph: Graph, batch: int, device: SessionDevice, places: dict[TensorId, int]) -> None:
    for tensor, array in seeded_values(graph, graph.inputs, batch).items():
        places[tensor] = device.allocate(max(1, array.nbytes))
        fill(device, device.stream(PROFILING), places[tensor], array)


def fill(device: SessionDevice, stream: Stream, place: int, array: np.ndarray) -> None:
    """Copy an array to memory of the device, and wait for that."""
    host = device.host_bytes(array.nbytes)
    host[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    device.launch(stream, device.copying(stream, place, host.ctypes.data, array.nbytes))
    device.synchronize(device.record(stream))
    device.free_host(host)


def lap_s(work: Launch, device: SessionDevice, stream: Stream) -> float:
    """Seconds of one run on the device."""
    began = device.record(stream, timed=True)
    for _ in range(_RUNS_PER_LAP):
        device.launch(stream, work)
    ended = device.record(stream, timed=True)
    device.synchronize(ended)
    return device.elapsed_s(began, ended) / _RUNS_PER_LAP
