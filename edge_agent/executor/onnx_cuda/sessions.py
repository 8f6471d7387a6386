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

from collections.abc import Callable

import onnxruntime

from stageloom.edge_agent.executor.onnx_cuda.device import OrtDevice
from stageloom.edge_agent.executor.onnx_parts import ModelParts
from stageloom.edge_agent.executor.onnx_sessions import Session, SessionKey, session_from, weight_bytes
from stageloom.shared.errors import ExecutorError
from stageloom.shared.graph import Graph

_PROCESSOR = "cpu"
_REFUSED = "fallback to CPU EP has been explicitly disabled"
"""What onnxruntime says where a provider cannot be made, or has no kernel for an operator."""

_LARGEST_TENSORS = 4
"""How many of its largest tensors a session's arena holds at once: input, output and two for scratch."""


def session_bytes(key: SessionKey, graph: Graph) -> int:
    """What a session keeps on the device: weights, and an arena of its own."""
    tensors = {t for op in key.ops for t in (*graph.operators[op].inputs, *graph.operators[op].outputs)}
    largest = max(graph.tensors[t].nbytes for t in tensors)
    return weight_bytes(key, graph) + _LARGEST_TENSORS * key.batch * largest


def opener(device: OrtDevice) -> Callable[[SessionKey, ModelParts], Session]:
    """What makes the sessions of a device."""

    def open_on(key: SessionKey, source: ModelParts) -> Session:
        return open_device_session(device, key, source)

    return open_on


def open_device_session(device: OrtDevice, key: SessionKey, source: ModelParts) -> Session:
    """Make a session whose kernels go to the key's stream.

    Raises:
        ExecutorError: onnxruntime cannot build it, or part of it would run somewhere else.
    """
    assert key.stream is not None
    provider, settings = device.provider(device.stream(key.stream), tf32=key.tf32)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.use_deterministic_compute = True
    if device.kind != _PROCESSOR:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
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
    _check_place(session, provider, device.kind, source)
    return session


def _check_place(session: Session, provider: str, kind: str, source: ModelParts) -> None:
    name = source.artifact.graph.name
    found = session.session.get_providers()
    if found[0] != provider:
        raise ExecutorError(
            f"onnxruntime runs model {name!r} on {found[0]} instead of {provider}",
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
