"""Operators that OpenVINO 2026.4 loads and computes differently than ONNX says, and so are refused.

Found by the node tests of the onnx package and the importer's classes of files: most have an attribute that
its reader of ONNX files does not look at. What it cannot load it says itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import onnx
from onnx import helper

from stageloom.edge_agent.executor.onnx.parts import ModelParts

Attributes: TypeAlias = Mapping[str, Any]
Misread: TypeAlias = Callable[[onnx.NodeProto, Attributes, ModelParts], bool]

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
    scales = source.array(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    return scales is not None and any(scale != int(scale) for scale in scales.tolist())


def _always(node: onnx.NodeProto, given: Attributes, source: ModelParts) -> bool:
    return True


_MISREAD: Final[Mapping[tuple[str, str], Misread]] = {
    ("", "RNN"): _batch_first,
    ("", "GRU"): _batch_first,
    ("", "LSTM"): _lstm,
    ("", "Attention"): _attention,
    ("", "Resize"): _resize,
    ("", "DFT"): _always,
    ("", "RoiAlign"): lambda node, given, source: given.get("mode") == b"max",
    ("", "SpaceToDepth"): lambda node, given, source: given.get("mode", b"DCR") != b"DCR",
    # Its sum is taken in the inputs' own 8 bits, and wraps around.
    ("com.microsoft", "QLinearAdd"): _always,
    ("com.microsoft", "QLinearMul"): _always,
}


def misread(nodes: Iterable[onnx.NodeProto], source: ModelParts) -> str:
    """The type of the first node that would be computed differently; empty where there is none."""
    for node in _everywhere(nodes):
        found = _MISREAD.get((node.domain.removeprefix("ai.onnx"), node.op_type))
        if found is not None and found(node, _attributes(node), source):
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
