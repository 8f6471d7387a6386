"""Operators that OpenVINO 2026.4 loads and computes differently than onnxruntime, and so are refused.

Found by the node tests of the onnx package, by the importer's classes of files and by comparison with
onnxruntime (`tests/executor/openvino/test_operators.py`). Most have an attribute that OpenVINO's reader of
ONNX files does not look at, or integers of few bits, which wrap around in one and saturate in the other. Of
onnxruntime's own operators only those are taken that were compared. What OpenVINO cannot load it says itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import onnx
from onnx import helper

from stageloom.edge_agent.executor.onnx.parts import ModelParts

Attributes: TypeAlias = Mapping[str, Any]
Misread: TypeAlias = Callable[[onnx.NodeProto, Attributes, ModelParts], bool]

_ONNX: Final = ("", "ai.onnx")
_ONNXRUNTIME: Final = "com.microsoft"
_PEEPHOLES: Final = 7  # the place of an LSTM's input P


def _batch_first(node: onnx.NodeProto, given: Attributes, source: ModelParts) -> bool:
    return bool(given.get("layout", 0))


def _lstm(node: onnx.NodeProto, given: Attributes, source: ModelParts) -> bool:
    return _batch_first(node, given, source) or any(node.input[_PEEPHOLES:])


def _attention(node: onnx.NodeProto, given: Attributes, source: ModelParts) -> bool:
    """A window, or the product of queries and keys as an output."""
    return any("window" in name for name in given) or len(node.output) > 3


def _resize(node: onnx.NodeProto, given: Attributes, source: ModelParts) -> bool:
    """Scales that give no whole number of pixels move the corners that are to be aligned."""
    if given.get("antialias", 0) or given.get("exclude_outside", 0):
        return True
    if given.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        return True
    if given.get("coordinate_transformation_mode") != b"align_corners":
        return False
    if len(node.input) < 3 or not node.input[2]:
        return False
    scales = source.array(node.input[2])
    return scales is None or any(scale != int(scale) for scale in scales.tolist())


def _always(node: onnx.NodeProto, given: Attributes, source: ModelParts) -> bool:
    return True


def _small_integers(node: onnx.NodeProto, given: Attributes, source: ModelParts) -> bool:
    """Sums and products of few bits, which wrap around in ONNX."""
    return any(source.dtype(name) in _SMALL_INTEGERS for name in (*node.input, *node.output) if name)


_SMALL_INTEGERS: Final = ("int8", "uint8", "int16", "uint16")

_MISREAD: Final[Mapping[str, Misread]] = {
    "Add": _small_integers,
    "Attention": _attention,
    "DFT": _always,
    "GRU": _batch_first,
    "LSTM": _lstm,
    "Mul": _small_integers,
    "RNN": _batch_first,
    "Resize": _resize,
    "RoiAlign": lambda node, given, source: given.get("mode") == b"max",
    "SpaceToDepth": lambda node, given, source: given.get("mode", b"DCR") != b"DCR",
    "Sub": _small_integers,
}
"""Of ONNX's own operators."""

COMPARED: Final = frozenset(
    {
        "Attention", "BiasGelu", "DequantizeLinear", "FastGelu", "FusedConv", "FusedGemm", "FusedMatMul",
        "GatherND", "Gelu", "MatMulIntegerToFloat", "MatMulNBits", "MultiHeadAttention", "Pad",
        "QLinearSigmoid", "QuantizeLinear", "QuickGelu", "RotaryEmbedding", "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization", "Trilu",
    }
)  # fmt: skip
"""Operators of onnxruntime that OpenVINO computes as onnxruntime does."""


def misread(nodes: Iterable[onnx.NodeProto], source: ModelParts) -> str:
    """The type of the first node that would be computed differently; empty where there is none."""
    for node in _everywhere(nodes):
        if node.domain == _ONNXRUNTIME:
            differs = node.op_type not in COMPARED
        else:
            found = _MISREAD.get(node.op_type)
            differs = found is not None and node.domain in _ONNX and found(node, _attributes(node), source)
        if differs:
            return str(node.op_type)
    return ""


def _attributes(node: onnx.NodeProto) -> Attributes:
    return {given.name: helper.get_attribute_value(given) for given in node.attribute}


def _everywhere(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes and those of the graphs inside them."""
    for node in nodes:
        yield node
        for given in node.attribute:
            for inner in (*given.graphs, given.g):
                yield from _everywhere(inner.node)
