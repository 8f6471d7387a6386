"""Reductions along axes, running sums, and the largest elements."""

from collections.abc import Callable

import torch
from torch import Tensor

from stageloom.edge_agent.lowering.errors import Unsupported
from stageloom.edge_agent.lowering.node import Kernel, Node
from stageloom.edge_agent.lowering.registry import Lowered, operator

_AXES_AS_INPUT_SINCE = {"ReduceSum": 13}
_OTHERS_SINCE = 18


def reduced_axes(node: Node) -> list[int] | None:
    """The axes, attribute or input by opset; None where nothing is to be reduced."""
    if node.opset < _AXES_AS_INPUT_SINCE.get(node.kind, _OTHERS_SINCE):
        axes = node.integers("axes")
    else:
        axes = node.constant_list(1)
    rank = node.rank(0)
    if axes:
        return sorted({a % rank for a in axes})
    return None if node.integer("noop_with_empty_axes", 0) else list(range(rank))


def _reduction(
    node: Node, function: Callable[..., Tensor], before: Callable[[Tensor], Tensor] | None = None
) -> Lowered:
    """`function(x, axes, keepdim)` over the node's axes; `before` applies to every element, always."""
    axes, keep = reduced_axes(node), bool(node.integer("keepdims", 1))
    dtype = node.dtype(0)

    def run(x: Tensor, _: Tensor | None = None) -> Tensor:
        x = x if before is None else before(x)
        if axes is not None and len(axes) > 0:
            x = function(x, axes, keep)
        return x.to(dtype)

    if before is None and axes and dtype.is_floating_point and function in _WITH_OUT:
        return Kernel(run, lambda out, x, _=None: function(x, axes, keep, out=out))
    return run


_WITH_OUT: tuple[Callable[..., Tensor], ...] = (torch.sum, torch.mean, torch.amax, torch.amin)


@operator("ReduceSum", wide=True)
def reduce_sum(node: Node) -> Lowered:
    return _reduction(node, torch.sum)


@operator("ReduceMean")
def reduce_mean(node: Node) -> Lowered:
    if not node.dtype(0).is_floating_point:
        return _reduction(node, lambda x, axes, keep: x.double().mean(axes, keep))
    return _reduction(node, torch.mean)


@operator("ReduceMax", wide=True)
def reduce_max(node: Node) -> Lowered:
    return _extreme(node, torch.amax, largest=False)


@operator("ReduceMin", wide=True)
def reduce_min(node: Node) -> Lowered:
    return _extreme(node, torch.amin, largest=True)


def _extreme(node: Node, function: Callable[..., Tensor], *, largest: bool) -> Lowered:
    """Over no elements the maximum is the least value of the type, the minimum the greatest."""
    axes = reduced_axes(node)
    if axes is None or all(node.shape(0)[a] for a in axes):
        return _reduction(node, function)
    dtype, keep = node.dtype(0), bool(node.integer("keepdims", 1))
    if dtype == torch.bool:
        empty: float = int(largest)
    elif dtype.is_floating_point:
        empty = torch.inf if largest else -torch.inf
    else:
        empty = torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min
    return lambda x, _=None: torch.full_like(x.sum(axes, keep), empty, dtype=dtype)


@operator("ReduceProd", wide=True)
def reduce_prod(node: Node) -> Lowered:
    def product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
        for axis in reversed(axes):
            x = x.prod(axis, keep)
        return x

    return _reduction(node, product)


@operator("ReduceL1", wide=True)
def reduce_l1(node: Node) -> Lowered:
    return _reduction(node, torch.sum, torch.abs)


@operator("ReduceL2", wide=True)
def reduce_l2(node: Node) -> Lowered:
    axes, keep = reduced_axes(node), bool(node.integer("keepdims", 1))
    dtype = node.dtype(0)
    wide = dtype if dtype.is_floating_point else torch.float64

    def run(x: Tensor, _: Tensor | None = None) -> Tensor:
        x = x.to(wide)
        x = x.abs() if not axes else torch.linalg.vector_norm(x, 2, axes, keep)
        return x.to(dtype)

    return run


@operator("ReduceSumSquare", wide=True)
def reduce_sum_square(node: Node) -> Lowered:
    return _reduction(node, torch.sum, torch.square)


@operator("ReduceLogSum")
def reduce_log_sum(node: Node) -> Lowered:
    axes, keep = reduced_axes(node), bool(node.integer("keepdims", 1))
    return lambda x, _=None: torch.log(x.sum(axes, keep) if axes else x)


@operator("ReduceLogSumExp")
def reduce_log_sum_exp(node: Node) -> Lowered:
    axes, keep = reduced_axes(node), bool(node.integer("keepdims", 1))
    return lambda x, _=None: torch.logsumexp(x, axes, keep) if axes else x


@operator("ArgMax", "ArgMin")
def arg_extreme(node: Node) -> Lowered:
    """torch does not promise which of equal elements it names: the place of the extreme is asked for."""
    axis, keep = node.axis("axis", 0), bool(node.integer("keepdims", 1))
    last = bool(node.integer("select_last_index", 0))
    extent = node.shape(0)[axis]
    extreme = torch.amax if node.kind == "ArgMax" else torch.amin
    along = [1] * node.rank(0)
    along[axis] = extent
    places = node.made(torch.arange(extent).view(along))

    def run(x: Tensor) -> Tensor:
        hit = x == extreme(x, axis, True)
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
    axis = int(node.constant(1).reshape(())) % node.rank(0)
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
    count = node.integer("k", 0) if node.opset < 10 else int(node.constant(1).reshape(()))
    largest = bool(node.integer("largest", 1))

    def run(x: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
        values, indices = torch.sort(x, dim=axis, descending=largest, stable=True)
        return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)

    if node.dtype(0) in (torch.uint16, torch.uint32, torch.uint64):
        dtype = node.dtype(0)

        def run_wide(x: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
            if dtype == torch.uint64:
                x = x.view(torch.int64) ^ torch.iinfo(torch.int64).min  # order of unsigned as of signed
                values, indices = run(x)
                return (values ^ torch.iinfo(torch.int64).min).view(dtype), indices
            values, indices = run(x.to(torch.int64))
            return values.to(dtype), indices

        return run_wide
    return run


@operator("Det")
def determinant(node: Node) -> Lowered:
    if node.dtype(0) == torch.float16:
        raise Unsupported("Det in float16")
    return lambda x: torch.linalg.det(x)
