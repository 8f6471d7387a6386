"""A merge stage in ONNX: one convolution over stacked kernels, and what follows it in every one of its parts.

`stageloom.shared.merge` says which operators may merge and where each kernel lies in the common one (IOS,
section 3.2).
"""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper

from stageloom.shared.merge import MergedConvolution


def merged_nodes(
    merge: MergedConvolution, first: Sequence[onnx.NodeProto], source: str, prefix: str
) -> list[onnx.NodeProto]:
    """The common convolution, and the nodes behind the first operator's, which follow all of them.

    It reads `source`, `PREFIX.kernels` and `PREFIX.biases`; the last node makes the result of all.
    """
    convolution = merge.convolution
    nodes = [
        helper.make_node(
            "Conv",
            [source, f"{prefix}.kernels", f"{prefix}.biases"],
            [f"{prefix}.0"],
            kernel_shape=convolution.kernel,
            strides=convolution.strides,
            dilations=convolution.dilations,
            pads=convolution.pads,
        )
    ]
    renamed = {first[0].output[0]: f"{prefix}.0"}
    for number, node in enumerate(first[1:], 1):
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        renamed[node.output[0]] = f"{prefix}.{number}"
        copy.input[:] = [renamed.get(name, name) for name in node.input]
        copy.output[:] = [f"{prefix}.{number}"]
        nodes.append(copy)
    return nodes


def stacked_weights(
    merge: MergedConvolution, kernels: Sequence[np.ndarray], biases: Sequence[np.ndarray | None]
) -> tuple[np.ndarray, np.ndarray]:
    """All kernels, zeros around the smaller ones [sum of filters, channels, *kernel], and all biases."""
    padded, added = [], []
    for offset, kernel, bias in zip(merge.offsets, kernels, biases, strict=True):
        common = np.zeros((*kernel.shape[:2], *merge.convolution.kernel), kernel.dtype)
        taps = [slice(first, first + size) for first, size in zip(offset, kernel.shape[2:], strict=True)]
        common[(slice(None), slice(None), *taps)] = kernel
        padded.append(common)
        added.append(np.zeros(len(kernel), kernel.dtype) if bias is None else bias)
    return np.concatenate(padded), np.concatenate(added)
