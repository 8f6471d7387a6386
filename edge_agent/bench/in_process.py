"""What loads a runtime, asked in a process of its own: the caller stays free of its threads and memory."""

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec

from stageloom.edge_agent.bench.model_files import ModelUnderTest
from stageloom.edge_agent.bench.runtime_options import RuntimeName, RuntimeOptions
from stageloom.edge_agent.bench.runtimes import service_times_s
from stageloom.edge_agent.machine.device import gpu_names
from stageloom.edge_agent.machine.executors import onnx_facts
from stageloom.shared.errors import ExecutorError


def is_installed(runtime: RuntimeName) -> bool:
    """Whether its package is there, and what that computes on; it is not imported."""
    if runtime is RuntimeName.CUDA:
        return onnx_facts().cuda and bool(gpu_names())
    return find_spec(runtime.value) is not None


def measure_service_s(
    models: Sequence[ModelUnderTest], options: RuntimeOptions, seconds: float
) -> Mapping[str, float | str]:
    """Per model the seconds of one run by one worker, or why the runtime does not take it.

    Where their process dies, each model is timed in one of its own: one of them may have ended it.
    """
    try:
        with _process() as pool:
            return pool.submit(service_times_s, tuple(models), options, seconds).result()
    except BrokenProcessPool:
        if len(models) == 1:
            return {models[0].name: "it ended its process"}
    return {
        name: taken
        for model in models
        for name, taken in measure_service_s([model], options, seconds).items()
    }


def openvino_reduces() -> bool:
    """Whether OpenVINO computes in bfloat16 by default on this processor: it is asked, and loads no model.

    Raises:
        ExecutorError: it ended its process.
    """
    try:
        with _process() as pool:
            return pool.submit(_computes_bf16).result()
    except BrokenProcessPool as error:
        raise ExecutorError("OpenVINO ended its process as it was asked for the precisions it has") from error


def _computes_bf16() -> bool:
    from stageloom.edge_agent.executor.openvino.executor import computes_bf16

    return computes_bf16()


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
