"""Convolutions over one to three spatial dimensions."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as functional
from torch import Tensor

from stageloom.edge_agent.lowering.errors import Unsupported
from stageloom.edge_agent.lowering.node import Kernel, Node
from stageloom.edge_agent.lowering.registry import Lowered, operator

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True, slots=True)
class Window:
    """How a kernel slides: per spatial dimension; `begin` and `end` are the padding on either side."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def symmetric(self) -> bool:
        """Whether both sides are padded alike, as torch's kernels want it."""
        return self.begin == self.end and all(p >= 0 for p in self.begin)

    @property
    def borders(self) -> list[int]:
        """The padding as `functional.pad` wants it: last dimension first."""
        return [p for pair in zip(reversed(self.begin), reversed(self.end), strict=True) for p in pair]


def window_of(node: Node, size: Sequence[int]) -> Window:
    """The window of a convolution or a pool with a kernel of `size`; the input shape resolves `auto_pad`.

    Raises:
        Unsupported: the padding has another length or name than ONNX allows.
    """
    rank = len(size)
    stride = tuple(node.integers("strides") or [1] * rank)
    dilation = tuple(node.integers("dilations") or [1] * rank)
    mode = node.text("auto_pad", "NOTSET")
    pads = node.integers("pads") or [0] * (2 * rank)
    begin, end = tuple(pads[:rank]), tuple(pads[rank:])
    if mode == "VALID":
        begin = end = (0,) * rank
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        begin, end = _same(node.shape(0)[2:], size, stride, dilation, upper=mode == "SAME_UPPER")
    elif mode != "NOTSET" or len(pads) != 2 * rank:
        raise Unsupported(f"{node.kind} with auto_pad {mode}")
    return Window(tuple(size), stride, dilation, begin, end)


def _same(
    space: Sequence[int], size: Sequence[int], stride: Sequence[int], dilation: Sequence[int], *, upper: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Padding for an output of ceil(input / stride); what cannot be halved goes to the end if `upper`."""
    begin, end = [], []
    for extent, k, s, d in zip(space, size, stride, dilation, strict=True):
        total = max((ceil(extent / s) - 1) * s + (k - 1) * d + 1 - extent, 0)
        small, large = total // 2, total - total // 2
        begin.append(small if upper else large)
        end.append(large if upper else small)
    return tuple(begin), tuple(end)


def spatial_rank(node: Node, index: int = 0) -> int:
    """1, 2 or 3.

    Raises:
        Unsupported: another number of spatial dimensions.
    """
    rank = node.rank(index) - 2
    if rank not in (1, 2, 3):
        raise Unsupported(f"{node.kind} over {rank} spatial dimensions")
    return rank


def _weight(node: Node) -> Tensor | None:
    """The kernel, in the memory order of what it reads; None if it is computed at run time."""
    order = CHANNELS_LAST.get(node.rank(1)) if node.spec(0).channels_last else None
    if order is None:
        return node.take(1)
    return node.derive(1, "channels last", lambda w: w.contiguous(memory_format=order))


@operator("Conv")
def conv(node: Node) -> Lowered:
    rank = spatial_rank(node)
    window = window_of(node, node.shape(1)[2:])
    groups = node.integer("group", 1)
    weight, bias = _weight(node), node.take(2)
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    padding = window.begin if window.symmetric else (0,) * rank
    borders = None if window.symmetric else window.borders

    def run(x: Tensor, w: Tensor | None, b: Tensor | None = None) -> Tensor:
        if borders is not None:
            x = functional.pad(x, borders)
        w, b = (weight if w is None else w), (bias if b is None else b)
        assert w is not None
        return function(x, w, b, window.stride, padding, window.dilation, groups)

    if weight is None or (bias is None and node.has(2)):
        return run
    return Kernel(run, detail=ConstantConv(weight, bias, window, groups))


@dataclass(frozen=True, slots=True)
class ConstantConv:
    """A convolution whose weights are known, for kernels that do more than it alone."""

    weight: Tensor
    bias: Tensor | None
    window: Window
    groups: int


@operator("ConvTranspose")
def conv_transpose(node: Node) -> Lowered:
    rank = spatial_rank(node)
    size = node.shape(1)[2:]
    stride = node.integers("strides") or [1] * rank
    dilation = node.integers("dilations") or [1] * rank
    groups = node.integer("group", 1)
    extra = node.integers("output_padding") or [0] * rank
    begin, end = _transposed_padding(node, size, stride, dilation, extra)
    weight, bias = _weight(node), node.take(2)
    function = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[
        rank - 1
    ]
    # The full result of a kernel of size k over n positions has (n - 1) * stride + (k - 1) * dilation + 1;
    # padding cuts it, negative padding and output_padding extend it by zeros (plus the bias).
    cut = [-p for p in begin], [e - p for e, p in zip(extra, end, strict=True)]
    borders = [p for pair in zip(reversed(cut[0]), reversed(cut[1]), strict=True) for p in pair]
    along = (1, -1, *[1] * rank)

    def run(x: Tensor, w: Tensor | None, b: Tensor | None = None) -> Tensor:
        w, b = (weight if w is None else w), (bias if b is None else b)
        assert w is not None
        full = function(x, w, None, stride, 0, 0, groups, dilation)
        if any(borders):
            full = functional.pad(full, borders)
        return full if b is None else full + b.view(along)

    return run


def _transposed_padding(
    node: Node, size: Sequence[int], stride: Sequence[int], dilation: Sequence[int], extra: Sequence[int]
) -> tuple[list[int], list[int]]:
    rank = len(size)
    mode = node.text("auto_pad", "NOTSET")
    wanted = node.integers("output_shape")
    full = [
        s * (n - 1) + (k - 1) * d + 1 + e
        for n, k, s, d, e in zip(node.shape(0)[2:], size, stride, dilation, extra, strict=True)
    ]
    if wanted is None and mode in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(node.shape(0)[2:], stride, strict=True)]
    if wanted is None:
        pads = [0] * (2 * rank) if mode == "VALID" else node.integers("pads") or [0] * (2 * rank)
        return pads[:rank], pads[rank:]
    begin, end = [], []
    for have, want in zip(full, wanted[-rank:], strict=True):
        total = have - want
        small, large = total // 2, total - total // 2
        upper = mode != "SAME_UPPER"  # as the operator's text has it: NOTSET and SAME_LOWER share a branch
        begin.append(large if upper else small)
        end.append(small if upper else large)
    return begin, end
