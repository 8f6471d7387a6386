"""Pad in its four modes; negative padding crops."""

from math import inf

import torch
import torch.nn.functional as functional
from torch import Tensor

from stageloom.edge_agent.lowering.errors import Unsupported
from stageloom.edge_agent.lowering.node import Node
from stageloom.edge_agent.lowering.registry import Lowered, operator


@operator("Pad")
def pad(node: Node) -> Lowered:
    """Padding is attributes up to opset 10, inputs since; `axes` since 18."""
    if node.opset < 11:
        pads = node.integers("pads") or node.integers("paddings") or []
        fill: float = node.number("value", 0.0)
        axes = list(range(node.rank(0)))
    else:
        pads = node.constant_list(1) or []
        fill = node.constant(2).item() if node.has(2) and node.constant(2).size else 0
        axes = node.constant_list(3) if node.has(3) else None  # type: ignore[assignment]
        axes = list(range(node.rank(0))) if axes is None else [a % node.rank(0) for a in axes]
    before, after = [0] * node.rank(0), [0] * node.rank(0)
    for place, axis in enumerate(axes):
        before[axis], after[axis] = pads[place], pads[place + len(axes)]
    if node.dtype(0).is_floating_point and fill not in (inf, -inf):
        top = torch.finfo(node.dtype(0)).max  # float16 cannot hold what a float32 model may pad with
        fill = min(max(fill, -top), top)
    mode = node.text("mode", "constant")
    if mode == "constant":
        borders = [p for pair in zip(reversed(before), reversed(after), strict=True) for p in pair]
        return lambda x, *_: functional.pad(x, borders, value=fill)
    if mode not in ("reflect", "edge", "wrap"):
        raise Unsupported(f"Pad with mode {mode}")
    places = [
        (axis, node.made(_places(n, before[axis], after[axis], mode)))
        for axis, n in enumerate(node.shape(0))
        if before[axis] or after[axis]
    ]

    def run(x: Tensor, *_: Tensor | None) -> Tensor:
        for axis, index in places:
            x = x.index_select(axis, index)
        return x

    return run


def _places(extent: int, before: int, after: int, mode: str) -> Tensor:
    """Which element stands at each position of the padded dimension. [before + extent + after]"""
    positions = torch.arange(-before, extent + after)
    if mode == "edge":
        return positions.clamp(0, extent - 1)
    if mode == "wrap":
        return positions.remainder(extent)
    period = max(2 * (extent - 1), 1)  # reflect: 0 1 .. n-1 n-2 .. 1 and again
    folded = positions.remainder(period)
    return torch.where(folded < extent, folded, period - folded)
