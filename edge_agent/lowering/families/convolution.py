"""Convolutions and pools over one to three spatial dimensions, and global pools."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, prod

import torch
import torch.nn.functional as functional
from torch import Tensor

from stageloom.edge_agent.lowering.convolve import convolve, convolve_transposed
from stageloom.edge_agent.lowering.dtypes import CHANNELS_LAST, Unsupported, unhalved
from stageloom.edge_agent.lowering.families.reduction import reduce_into
from stageloom.edge_agent.lowering.families.shape import pad_list
from stageloom.edge_agent.lowering.node import Kernel, Lowered, Node, operator

_MAX_POOLS = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A sliding kernel, per spatial dimension; `begin` and `end` are the padding on either side."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def symmetric(self) -> bool:
        """Whether both sides are padded alike, as torch's kernels require."""
        return self.begin == self.end and all(p >= 0 for p in self.begin)

    @property
    def borders(self) -> list[int]:
        """Return the padding as `functional.pad` takes it."""
        return pad_list(self.begin, self.end)


def window_of(node: Node, size: Sequence[int]) -> SlidingWindow:
    """Return the window of a convolution or pool with a kernel of `size`, `auto_pad` resolved.

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
    return SlidingWindow(tuple(size), stride, dilation, begin, end)


def _same(
    space: Sequence[int], size: Sequence[int], stride: Sequence[int], dilation: Sequence[int], *, upper: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the padding for an output of ceil(input / stride); an odd element is at the end if `upper`."""
    begin, end = [], []
    for extent, k, s, d in zip(space, size, stride, dilation, strict=True):
        total = max((ceil(extent / s) - 1) * s + (k - 1) * d + 1 - extent, 0)
        small, large = total // 2, total - total // 2
        begin.append(small if upper else large)
        end.append(large if upper else small)
    return tuple(begin), tuple(end)


def spatial_rank(node: Node, index: int = 0) -> int:
    """Return the number of spatial dimensions: 1, 2 or 3.

    Raises:
        Unsupported: another number of spatial dimensions.
    """
    rank = node.rank(index) - 2
    if rank not in (1, 2, 3):
        raise Unsupported(f"{node.kind} over {rank} spatial dimensions")
    return rank


def _weight(node: Node) -> Tensor | None:
    """Return the kernel in the memory order of the input; None if it is computed at run time."""
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
    padding = window.begin if window.symmetric else (0,) * rank
    borders = None if window.symmetric else window.borders

    def run(x: Tensor, w: Tensor | None, b: Tensor | None = None) -> Tensor:
        if borders is not None:
            x = functional.pad(x, borders)
        w, b = (weight if w is None else w), (bias if b is None else b)
        assert w is not None
        return convolve(x, w, b, window.stride, padding, window.dilation, groups)

    if weight is None or (bias is None and node.has(2)):
        return run
    return Kernel(run, detail=ConstantConv(weight, bias, window, groups))


@dataclass(frozen=True, slots=True)
class ConstantConv:
    """A convolution with constant weights, for kernels that run more than it alone."""

    weight: Tensor
    bias: Tensor | None
    window: SlidingWindow
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
    # The full result of a kernel of size k over n positions has (n - 1) * stride + (k - 1) * dilation + 1;
    # padding cuts it, negative padding and output_padding extend it by zeros (plus the bias).
    borders = pad_list([-p for p in begin], [e - p for e, p in zip(extra, end, strict=True)])
    along = (1, -1, *[1] * rank)

    def run(x: Tensor, w: Tensor | None, b: Tensor | None = None) -> Tensor:
        w, b = (weight if w is None else w), (bias if b is None else b)
        assert w is not None
        full = convolve_transposed(x, w, stride, dilation, groups)
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
        # onnxruntime extends no result that is smaller, other than where `output_shape` asks for it
        wanted = [min(f, n * s) for f, n, s in zip(full, node.shape(0)[2:], stride, strict=True)]
    if wanted is None:
        pads = [0] * (2 * rank) if mode == "VALID" else node.integers("pads") or [0] * (2 * rank)
        return pads[:rank], pads[rank:]
    begin, end = [], []
    for have, want in zip(full, wanted[-rank:], strict=True):
        total, missing = max(have - want, 0), max(want - have, 0)  # as onnxruntime extends: at the end alone
        small, large = total // 2, total - total // 2
        upper = mode != "SAME_UPPER"  # as the operator's text has it: NOTSET and SAME_LOWER share a branch
        begin.append(large if upper else small)
        end.append((small if upper else large) - missing)
    return begin, end


def _positions(node: Node, window: SlidingWindow) -> tuple[int, ...]:
    """Return the positions per dimension; with `ceil_mode` no window begins behind the input."""
    up = bool(node.integer("ceil_mode", 0))
    counts = []
    for n, k, s, d, b, e in zip(
        node.shape(0)[2:], window.size, window.stride, window.dilation, window.begin, window.end, strict=True
    ):
        steps = (n + b + e - (k - 1) * d - 1) / s
        count = (ceil(steps) if up else floor(steps)) + 1
        if up and (count - 1) * s >= n + b:
            count -= 1
        counts.append(count)
    return tuple(counts)


def _exact(node: Node, window: SlidingWindow) -> SlidingWindow:
    """Return the window with an end padding that gives the same positions without `ceil_mode`."""
    ends = tuple(
        (count - 1) * s + (k - 1) * d + 1 - n - b
        for count, n, k, s, d, b in zip(
            _positions(node, window), node.shape(0)[2:], window.size, window.stride, window.dilation,
            window.begin, strict=True,
        )
    )  # fmt: skip
    return SlidingWindow(window.size, window.stride, window.dilation, window.begin, ends)


def _fits_torch(window: SlidingWindow, node: Node) -> bool:
    """Return whether torch's equal padding, at most half the kernel, gives the same positions."""
    out = _positions(node, window)
    for n, k, s, d, b, count in zip(
        node.shape(0)[2:], window.size, window.stride, window.dilation, window.begin, out, strict=True
    ):
        if not 0 <= b <= k // 2 or (n + 2 * b - (k - 1) * d - 1) // s + 1 != count:
            return False
    return True


@operator("MaxPool")
def max_pool(node: Node) -> Lowered:
    rank = spatial_rank(node)
    window = window_of(node, node.integers("kernel_shape") or [])
    function = _MAX_POOLS[rank - 1]
    dtype, integers = node.dtype(0), node.dtype(0) in (torch.int8, torch.uint8)
    if node.wants(1):
        if integers:
            raise Unsupported("MaxPool of integers with indices")
        return _max_pool_with_indices(node, window)
    exact = _exact(node, window)
    plain = not integers and _fits_torch(window, node)

    def run(x: Tensor) -> Tensor:
        if plain:
            return function(x, window.size, window.stride, window.begin, window.dilation)
        wide = x.float() if integers else x  # float32 holds 8-bit numbers exactly
        padded = functional.pad(wide, exact.borders, value=-torch.inf)
        return function(padded, exact.size, exact.stride, 0, exact.dilation).to(dtype)

    return run


def _max_pool_with_indices(node: Node, window: SlidingWindow) -> Lowered:
    """Indices count over the whole unpadded input, row major or column major in space (`storage_order`)."""
    rank, exact = len(window.size), _exact(node, window)
    space = node.shape(0)[2:]
    batch, channels = node.shape(0)[:2]
    column_major = bool(node.integer("storage_order", 0))
    volume = prod(space)
    function = _MAX_POOLS[rank - 1]
    padded_space = [n + b + e for n, b, e in zip(space, exact.begin, exact.end, strict=True)]

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        padded = functional.pad(x, exact.borders, value=-torch.inf)
        best, flat = function(padded, exact.size, exact.stride, 0, exact.dilation, return_indices=True)
        place = torch.zeros_like(flat)
        strides = _strides(space, column_major=column_major)
        rest = flat
        for axis in reversed(range(rank)):
            coordinate = rest % padded_space[axis] - exact.begin[axis]
            rest = rest // padded_space[axis]
            place = place + coordinate * strides[axis]
        planes = torch.arange(batch * channels, device=x.device).view(batch, channels, *[1] * rank)
        return best, place + planes * volume

    return run


def _strides(space: Sequence[int], *, column_major: bool) -> list[int]:
    if column_major:
        return [prod(space[:axis]) for axis in range(len(space))]
    return [prod(space[axis + 1 :]) for axis in range(len(space))]


@operator("AveragePool")
def average_pool(node: Node) -> Lowered:
    rank = spatial_rank(node)
    window = window_of(node, node.integers("kernel_shape") or [])
    count_pads = bool(node.integer("count_include_pad", 0))
    size, stride, begin = window.size, window.stride, window.begin
    if (
        any(d != 1 for d in window.dilation)
        or not _fits_torch(window, node)
        or _reaches_past_end(node, window)
    ):
        return _average_by_count(node, window, count_pads=count_pads)
    if rank == 1:
        return lambda x: functional.avg_pool1d(x, size, stride, begin, False, count_pads)
    if rank == 3:
        return lambda x: functional.avg_pool3d(x, size, stride, begin, False, count_pads)

    def run(x: Tensor) -> Tensor:
        return functional.avg_pool2d(x, size, stride, begin, False, count_pads)

    def into(out: Tensor, x: Tensor) -> None:
        if _packed_alike(out, x):
            torch.ops.aten.avg_pool2d.out(x, size, stride, begin, False, count_pads, None, out=out)
        else:
            out.copy_(run(x))

    return Kernel(run, into)


def _packed_alike(out: Tensor, x: Tensor) -> bool:
    """Return whether both are packed in one memory order.

    torch's pool on CUDA does not look at the strides of `out`: it writes packed pixels in the order that it
    takes `x` to have. Where a dimension of `x` is 1 its strides may be read as either order.
    """
    last = x.is_contiguous(memory_format=torch.channels_last)
    order = torch.channels_last if last else torch.contiguous_format
    packed = x.is_contiguous(memory_format=order) and out.is_contiguous(memory_format=order)
    return packed and 1 not in x.shape[1:]


def _reaches_past_end(node: Node, window: SlidingWindow) -> bool:
    """Return whether a window reads padding at the end that the file does not have but torch would count."""
    exact = _exact(node, window)
    return any(e > own for e, own in zip(exact.end, window.end, strict=True)) or window.end != window.begin


def _average_by_count(node: Node, window: SlidingWindow, *, count_pads: bool) -> Lowered:
    """Convolve with ones and divide by the number of elements that count."""
    rank, exact = len(window.size), _exact(node, window)
    channels, unpadded = node.shape(0)[1], (0,) * rank
    space = node.shape(0)[2:]
    ones = torch.ones((1, 1, *space))
    counted = functional.pad(ones, window.borders, value=float(count_pads))
    total = [n + b + e for n, b, e in zip(space, exact.begin, exact.end, strict=True)]
    rest = [t - c for t, c in zip(total, counted.shape[2:], strict=True)]
    counted = functional.pad(counted, pad_list([0] * rank, rest))
    kernel = torch.ones((1, 1, *window.size))
    counting = convolve(counted, kernel, None, exact.stride, unpadded, exact.dilation, 1)
    counts = node.made(counting.to(node.dtype(0)))
    summing = node.made(kernel.to(node.dtype(0)).expand(channels, 1, *window.size).contiguous())
    borders = exact.borders

    def run(x: Tensor) -> Tensor:
        padded = functional.pad(x, borders)
        return convolve(padded, summing, None, exact.stride, unpadded, exact.dilation, channels) / counts

    return run


@operator("LpPool")
def lp_pool(node: Node) -> Lowered:
    rank = spatial_rank(node)
    window = window_of(node, node.integers("kernel_shape") or [])
    exact = _exact(node, window)
    power = node.number("p", 2)
    channels, unpadded = node.shape(0)[1], (0,) * rank
    summing = node.made(unhalved(torch.ones((channels, 1, *window.size), dtype=node.dtype(0))))
    borders = exact.borders

    def run(x: Tensor) -> Tensor:
        padded = functional.pad(unhalved(x).abs().pow(power), borders)
        summed = convolve(padded, summing, None, exact.stride, unpadded, exact.dilation, channels)
        return summed.pow(1.0 / power).to(x.dtype)

    return run


def _space(node: Node) -> list[int]:
    return list(range(2, node.rank(0)))


@operator("GlobalAveragePool", "GlobalMaxPool")
def global_pool(node: Node) -> Lowered:
    axes = _space(node)
    function: Callable[..., Tensor] = torch.mean if node.kind == "GlobalAveragePool" else torch.amax
    return Kernel(
        lambda x: function(x, axes, keepdim=True),
        lambda out, x: reduce_into(function, out, x, axes, keep=True),
    )


@operator("GlobalLpPool")
def global_lp_pool(node: Node) -> Lowered:
    axes, power = _space(node), node.number("p", 2)

    def run(x: Tensor) -> Tensor:
        return unhalved(x).abs().pow(power).sum(axes, keepdim=True).pow(1.0 / power).to(x.dtype)

    return run
