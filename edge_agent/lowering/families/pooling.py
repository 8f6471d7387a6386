"""Pools over one to three spatial dimensions, and global ones."""

from math import ceil, floor

import torch
import torch.nn.functional as functional
from torch import Tensor

from stageloom.edge_agent.lowering.errors import Unsupported
from stageloom.edge_agent.lowering.families.convolution import Window, spatial_rank, window_of
from stageloom.edge_agent.lowering.node import Kernel, Node
from stageloom.edge_agent.lowering.registry import Lowered, operator


def _outputs(node: Node, window: Window) -> tuple[int, ...]:
    """Positions per dimension; with `ceil_mode` the last window begins in the input or its first padding."""
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


def _exact(node: Node, window: Window) -> Window:
    """The window with the end padding that makes a pool without `ceil_mode` give the same positions."""
    ends = tuple(
        (count - 1) * s + (k - 1) * d + 1 - n - b
        for count, n, k, s, d, b in zip(
            _outputs(node, window), node.shape(0)[2:], window.size, window.stride, window.dilation,
            window.begin, strict=True,
        )
    )  # fmt: skip
    return Window(window.size, window.stride, window.dilation, window.begin, ends)


def _fits_torch(window: Window, node: Node) -> bool:
    """torch pads both sides alike, by at most half the kernel; what the end has less is never read."""
    out = _outputs(node, window)
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
    function = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[rank - 1]
    if node.dtype(0) in (torch.int8, torch.uint8):
        return _max_pool_of_integers(node, window)
    if node.wants(1):
        return _max_pool_with_indices(node, window)
    exact = _exact(node, window)
    plain = _fits_torch(window, node)
    size, stride, dilation, begin = window.size, window.stride, window.dilation, window.begin
    borders = exact.borders

    def run(x: Tensor) -> Tensor:
        if plain:
            return function(x, size, stride, begin, dilation)
        return function(functional.pad(x, borders, value=-torch.inf), size, stride, 0, dilation)

    return run


def _max_pool_of_integers(node: Node, window: Window) -> Lowered:
    """float32 holds 8-bit numbers exactly."""
    rank, exact, dtype = len(window.size), _exact(node, window), node.dtype(0)
    if node.wants(1):
        raise Unsupported("MaxPool of integers with indices")
    function = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[rank - 1]

    def run(x: Tensor) -> Tensor:
        padded = functional.pad(x.float(), exact.borders, value=-torch.inf)
        return function(padded, exact.size, exact.stride, 0, exact.dilation).to(dtype)

    return run


def _max_pool_with_indices(node: Node, window: Window) -> Lowered:
    """Indices count over the whole unpadded input, row major or column major in space (`storage_order`)."""
    rank, exact = len(window.size), _exact(node, window)
    space = node.shape(0)[2:]
    batch, channels = node.shape(0)[:2]
    column_major = bool(node.integer("storage_order", 0))
    volume = 1
    for n in space:
        volume *= n
    function = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[rank - 1]
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


def _strides(space: tuple[int, ...], *, column_major: bool) -> list[int]:
    strides, step = [0] * len(space), 1
    for axis in range(len(space)) if column_major else reversed(range(len(space))):
        strides[axis] = step
        step *= space[axis]
    return strides


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

    def into(out: Tensor, x: Tensor) -> None:
        torch.ops.aten.avg_pool2d.out(x, size, stride, begin, False, count_pads, None, out=out)

    return Kernel(lambda x: functional.avg_pool2d(x, size, stride, begin, False, count_pads), into)


def _reaches_past_end(node: Node, window: Window) -> bool:
    """Whether a window reads padding at the end that the file does not have, so that torch would count it."""
    exact = _exact(node, window)
    return any(e > own for e, own in zip(exact.end, window.end, strict=True)) or window.end != window.begin


def _average_by_count(node: Node, window: Window, *, count_pads: bool) -> Lowered:
    """Sum over each window by a convolution with ones, over the elements that count."""
    rank, exact = len(window.size), _exact(node, window)
    channels = node.shape(0)[1]
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    space = node.shape(0)[2:]
    ones = torch.ones((1, 1, *space))
    counted_pads = [
        p for pair in zip(reversed(window.begin), reversed(window.end), strict=True) for p in pair
    ]
    counted = functional.pad(ones, counted_pads, value=1.0 if count_pads else 0.0)
    total = [n + b + e for n, b, e in zip(space, exact.begin, exact.end, strict=True)]
    rest = [t - c for t, c in zip(total, counted.shape[2:], strict=True)]
    counted = functional.pad(counted, [p for r in reversed(rest) for p in (0, r)])
    kernel = torch.ones((1, 1, *window.size))
    counts = node.made(function(counted, kernel, None, exact.stride, 0, exact.dilation).to(node.dtype(0)))
    summing = node.made(kernel.to(node.dtype(0)).expand(channels, 1, *window.size).contiguous())
    borders = exact.borders

    def run(x: Tensor) -> Tensor:
        padded = functional.pad(x, borders)
        return function(padded, summing, None, exact.stride, 0, exact.dilation, channels) / counts

    return run


@operator("LpPool")
def lp_pool(node: Node) -> Lowered:
    rank = spatial_rank(node)
    window = window_of(node, node.integers("kernel_shape") or [])
    exact = _exact(node, window)
    power = node.number("p", 2)
    channels = node.shape(0)[1]
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    summing = node.made(torch.ones((channels, 1, *window.size), dtype=node.dtype(0)))
    borders = exact.borders

    def run(x: Tensor) -> Tensor:
        padded = functional.pad(x.abs().pow(power), borders)
        return function(padded, summing, None, exact.stride, 0, exact.dilation, channels).pow(1.0 / power)

    return run


def _space(node: Node) -> list[int]:
    return list(range(2, node.rank(0)))


@operator("GlobalAveragePool")
def global_average_pool(node: Node) -> Lowered:
    axes = _space(node)
    return Kernel(
        lambda x: x.mean(axes, keepdim=True), lambda out, x: torch.mean(x, axes, keepdim=True, out=out)
    )


@operator("GlobalMaxPool")
def global_max_pool(node: Node) -> Lowered:
    axes = _space(node)
    return Kernel(
        lambda x: x.amax(axes, keepdim=True), lambda out, x: torch.amax(x, axes, keepdim=True, out=out)
    )


@operator("GlobalLpPool")
def global_lp_pool(node: Node) -> Lowered:
    axes, power = _space(node), node.number("p", 2)
    return lambda x: x.abs().pow(power).sum(axes, keepdim=True).pow(1.0 / power)
