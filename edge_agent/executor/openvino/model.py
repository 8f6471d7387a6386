"""Sub-models as OpenVINO reads them, with their weights left where they are: in the artifact's file.

A compiled model keeps the model that it was made from beside its own weights, which lie in the layout that
its kernels want: every weight would be in memory twice. Constants that are views of the mapped artifact cost
pages of a file instead, which are read once and which the system may take back.
"""

import os
from typing import Any, Final

import numpy as np

from stageloom.edge_agent.executor.onnx.cache import SessionKey
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.openvino.backend import import_quietly

openvino = import_quietly()

_LEAST_SHARED_BYTES: Final = 1 << 14
"""Smaller constants stay copies: a view of one costs as much."""


def read_model(core: Any, source: ModelParts, key: SessionKey) -> Any:
    """The model of some operators.

    Raises:
        ModelError: the operators cannot be cut out, or the artifact's ONNX part is broken.
        Unsplittable: there is no such half of them.
        RuntimeError: OpenVINO does not have an operator.
    """
    fd = os.memfd_create("stageloom-model", os.MFD_CLOEXEC)
    try:
        source.write(fd, key.ops, key.batch, merge=key.merge, half=key.half)
        model = core.read_model(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    share_weights(model, source)
    return model


def share_weights(model: Any, source: ModelParts) -> int:
    """Replace constants that equal a weight of the artifact by views of it; the bytes that this frees."""
    shared = 0
    for node in model.get_ops():
        if node.get_type_name() != "Constant" or node.get_byte_size() < _LEAST_SHARED_BYTES:
            continue
        copied = node.data
        weight = source.weight(node.friendly_name, copied.dtype, copied.shape)
        if weight is None or not _same_bytes(weight, copied):
            continue
        view = openvino.op.Constant(weight, shared_memory=True)
        view.friendly_name = node.friendly_name
        for reader in node.output(0).get_target_inputs():
            reader.replace_source_output(view.output(0))
        shared += copied.nbytes
    return shared


def _same_bytes(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
