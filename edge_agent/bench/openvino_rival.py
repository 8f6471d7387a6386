"""OpenVINO as its documentation has it: compiled models with requests, or with its queue of requests."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from stageloom.edge_agent.bench.model_files import Feeds, ModelUnderTest
from stageloom.edge_agent.bench.runtime_options import RuntimeOptions


def properties_of(options: RuntimeOptions) -> Mapping[str, Any]:
    """What a model is compiled with: a hint alone, or threads without OpenVINO's pinning.

    Pinned, two single-thread models would share one core.
    """
    precision = {"INFERENCE_PRECISION_HINT": "f32"} if options.float32 else {}
    if options.hint:
        return {"PERFORMANCE_HINT": options.hint, **precision}
    return {
        "INFERENCE_NUM_THREADS": options.threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
        **precision,
    }


def compiled_call(path: Path, properties: Mapping[str, Any]) -> Callable[[Feeds], object]:
    """A request of a model of its own; inputs are passed without a copy.

    Raises:
        Exception: OpenVINO does not take the model.
    """
    request = _core().compile_model(str(path), "CPU", dict(properties)).create_infer_request()
    return partial(request.infer, share_inputs=True)


class RequestQueue:
    """A model compiled for throughput, with as many requests as OpenVINO finds best."""

    def __init__(self, path: Path, properties: Mapping[str, Any]) -> None:
        openvino = _openvino()
        compiled = _core().compile_model(str(path), "CPU", dict(properties))
        self._requests = openvino.AsyncInferQueue(compiled)
        self._requests.set_callback(lambda request, done: done())

    def wait_for_room(self) -> object:
        """Block until a request is idle."""
        return self._requests.get_idle_request_id()

    def begin(self, feeds: Feeds, done: Callable[[], None]) -> None:
        """Start an idle request."""
        self._requests.start_async(feeds, done, share_inputs=True)


def load_queues(options: RuntimeOptions, models: Sequence[ModelUnderTest]) -> list[RequestQueue]:
    """A queue of requests for each model, compiled as the options say.

    Raises:
        Exception: OpenVINO does not take a model.
    """
    return [RequestQueue(model.path, properties_of(options)) for model in models]


def _openvino() -> Any:
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type] # importing it would connect
    return importlib.import_module("openvino")


@cache
def _core() -> Any:
    return _openvino().Core()
