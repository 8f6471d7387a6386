"""Reductions along axes, running sums, and the largest elements."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import UNSIGNED, unhalved
from stageloom.edge_agent.lowering.node import Kernel, Lowered, Node, operator

_AXES_AS_INPUT_SINCE = {"ReduceSum": 13}
_OTHERS_SINCE = 18


_WITH_OUT: tuple[Callable[..., Tensor], ...] = (torch.sum, torch.mean, torch.amax, torch.amin)


def reduce_into(
    function: Callable[..., Tensor], out: Tensor, x: Tensor, axes: list[int], *, keep: bool
) -> None:
    """`out` = `function(x, axes, keep)`.

    Through a copy for half precision on the processor: `torch.mean` of torch 2.5 leaves `out` as it was.
    """
    if out.device.type == "cpu" and out.itemsize < 4:
        out.copy_(function(x, axes, keep))
        return
    function(x, axes, keep, out=out)


def reduced_axes(node: Node) -> list[int] | None:
    """Return the axes, an attribute or an input by opset; None where no axis is reduced."""
    if node.opset < _AXES_AS_INPUT_SINCE.get(node.kind, _OTHERS_SINCE):
        axes = node.integers("axes")
    else:
        axes = node.constant_list(1)
    rank = node.rank(0)
    if axes:
        return sorted({a % rank for a in axes})
    return None if node.integer("noop_with_empty_axes", 0) else list(range(rank))


def _reduction(
    node: Node,
    function: Callable[..., Tensor],
    before: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[Tensor], Tensor] | None = None,
) -> Lowered:
    """Apply `before` to every element, `function(x, axes, keepdim)` over the node's axes, `after` to that."""
    axes, keep = reduced_axes(node), bool(node.integer("keepdims", 1))
    dtype = node.dtype(0)

    def run(x: Tensor, _: Tensor | None = None) -> Tensor:
        x = x if before is None else before(x)
        if axes is not None and len(axes) > 0:
            x = function(x, axes, keep)
        return (x if after is None else after(x)).to(dtype)

    plain = before is None and after is None
    if plain and axes and dtype.is_floating_point and function in _WITH_OUT:
        return Kernel(run, lambda out, x, _=None: reduce_into(function, out, x, axes, keep=keep))
    return run


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in reversed(axes):
        x = x.prod(axis, keep)
    return x


def _norm(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    wide = x if x.is_floating_point() else x.double()
    norm: Tensor = torch.linalg.vector_norm(wide, 2, axes, keep)
    return norm


def _square(x: Tensor) -> Tensor:
    return unhalved(x).square()


_REDUCTIONS: dict[str, tuple[Any, ...]] = {
    "ReduceSum": (torch.sum,), "ReduceProd": (_product,), "ReduceL1": (torch.sum, torch.abs),
    "ReduceL2": (_norm, torch.abs), "ReduceSumSquare": (torch.sum, _square),
}  # fmt: skip

"""Per operator the arguments of `_reduction`."""

_LOGARITHMS: dict[str, tuple[Any, ...]] = {
    "ReduceLogSum": (torch.sum, None, torch.log), "ReduceLogSumExp": (torch.logsumexp,),
}  # fmt: skip


@operator(*_REDUCTIONS, wide=True)
def reduce_elements(node: Node) -> Lowered:
    return _reduction(node, *_REDUCTIONS[node.kind])


@operator(*_LOGARITHMS)
def reduce_to_logarithm(node: Node) -> Lowered:
    return _reduction(node, *_LOGARITHMS[node.kind])


@operator("ReduceMean")
def reduce_mean(node: Node) -> Lowered:
    if not node.dtype(0).is_floating_point:
        return _reduction(node, lambda x, axes, keep: x.double().mean(axes, keep))
    return _reduction(node, torch.mean)


@operator("ReduceMax", "ReduceMin", wide=True)
def reduce_extreme(node: Node) -> Lowered:
    """Over no elements the maximum is the least value of the type, the minimum the greatest."""
    axes, largest = reduced_axes(node), node.kind == "ReduceMin"
    if axes is None or all(node.shape(0)[a] for a in axes):
        return _reduction(node, torch.amin if largest else torch.amax)
    dtype, keep = node.dtype(0), bool(node.integer("keepdims", 1))
    if dtype == torch.bool:
        empty: float = int(largest)
    elif dtype.is_floating_point:
        empty = torch.inf if largest else -torch.inf
    else:
        empty = torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min
    return lambda x, _=None: torch.full_like(x.sum(axes, keep), empty, dtype=dtype)


@operator("ArgMax", "ArgMin")
def arg_extreme(node: Node) -> Lowered:
    """Compare with the extreme: torch does not promise which of equal elements it returns."""
    axis, keep = node.axis("axis", 0), bool(node.integer("keepdims", 1))
    last = bool(node.integer("select_last_index", 0))
    extent = node.shape(0)[axis]
    extreme = torch.amax if node.kind == "ArgMax" else torch.amin
    along = [1] * node.rank(0)
    along[axis] = extent
    places = node.made(torch.arange(extent).view(along))

    def run(x: Tensor) -> Tensor:
        hit = x == extreme(x, axis, True)
        if x.dtype.is_floating_point:
            hit = hit | x.isnan()  # which the extreme then is, and equal to nothing
        if last:
            return torch.where(hit, places, -1).amax(axis, keep)
        return torch.where(hit, places, extent).amin(axis, keep)

    return run


@operator("Hardmax")
def hardmax(node: Node) -> Lowered:
    """One at the first maximum along the axis; before opset 13 all from the axis on is one dimension."""
    shape = node.shape(0)
    axis = node.axis("axis", -1 if node.opset >= 13 else 1)
    flat = shape if node.opset >= 13 else (*shape[:axis], -1)

    def run(x: Tensor) -> Tensor:
        rows = x.reshape(flat)
        first = (rows == rows.amax(axis, True)).to(torch.int32)
        chosen = (first.cumsum(axis) == 1) & (first == 1)
        return chosen.to(x.dtype).reshape(shape)

    return run


@operator("CumSum", "CumProd", wide=True)
def cumulative(node: Node) -> Lowered:
    axis = int(node.scalar(1)) % node.rank(0)
    exclusive, reverse = bool(node.integer("exclusive", 0)), bool(node.integer("reverse", 0))
    summing = node.kind == "CumSum"
    function: Callable[..., Tensor] = torch.cumsum if summing else torch.cumprod
    neutral = 0 if summing else 1
    extent = node.shape(0)[axis]

    def run(x: Tensor, _: Tensor | None = None) -> Tensor:
        x = x.flip(axis) if reverse else x
        if exclusive:
            start = torch.full_like(x.narrow(axis, 0, 1), neutral)
            x = torch.cat([start, x.narrow(axis, 0, extent - 1)], axis)
        made = function(x, axis, dtype=x.dtype)
        return made.flip(axis) if reverse else made

    return run


@operator("TopK")
def top_k(node: Node) -> Lowered:
    """A stable sort: of equal elements the one with the lower index comes first, as ONNX asks."""
    axis = node.axis("axis", -1)
    count = node.integer("k", 0) if node.opset < 10 else int(node.scalar(1))
    largest = bool(node.integer("largest", 1))

    def run(x: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
        values, indices = torch.sort(x, dim=axis, descending=largest, stable=True)
        return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)

    dtype = node.dtype(0)
    if dtype not in UNSIGNED:
        return run

    def run_wide(x: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if dtype == torch.uint64:
            x = x.view(torch.int64) ^ torch.iinfo(torch.int64).min  # unsigned order as signed order
            values, indices = run(x)
            return (values ^ torch.iinfo(torch.int64).min).view(dtype), indices
        values, indices = run(x.to(torch.int64))
        return values.to(dtype), indices

    return run_wide
