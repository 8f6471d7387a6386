"""LitServe over HTTP.

A request is a line of JSON, the model's name and its inputs' names, types and shapes, then the inputs' bytes;
the answer is the outputs' bytes.
"""

import json
from math import prod
from typing import Annotated, Any

import litserve
import numpy as np
import onnxruntime
from fastapi import Body, Response


class OnnxApi(litserve.LitAPI):  # type: ignore[misc]  # not installed where types are checked
    """All models in each worker, whose requests wait in one queue."""

    def __init__(self, models: dict[str, str], threads: int) -> None:
        super().__init__()
        self._models, self._threads = models, threads

    def setup(self, device: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._sessions = {
            name: onnxruntime.InferenceSession(path, options) for name, path in self._models.items()
        }

    def decode_request(self, request: Annotated[bytes, Body()]) -> Any:
        head, _, elements = request.partition(b"\n")
        model, inputs = json.loads(head)
        feeds, begin = {}, 0
        for name, dtype, shape in inputs:
            feeds[name] = np.frombuffer(elements, dtype, prod(shape), begin).reshape(shape)
            begin += feeds[name].nbytes
        return model, feeds

    def predict(self, x: Any) -> Any:
        model, feeds = x
        return self._sessions[model].run(None, feeds)

    def encode_response(self, output: Any) -> Response:
        return Response(b"".join(array.tobytes() for array in output))


def serve(settings: str) -> None:
    """Until it is ended; settings in JSON: `port`, `workers`, `threads`, `latest_s`, and `models` by name."""
    given = json.loads(settings)
    server = litserve.LitServer(
        OnnxApi(given["models"], given["threads"]),
        accelerator="cpu",
        workers_per_device=given["workers"],
        timeout=given["latest_s"],  # what waits longer is given up: no deadline would be met
        fast_queue=True,
    )
    server.run(
        host="127.0.0.1", port=given["port"], generate_client_file=False, access_log=False, log_level="error"
    )
