"""Operators that read or write at computed places; negative indices count from the end."""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import Unsupported
from stageloom.edge_agent.lowering.node import Lowered, Node, operator

_NOWHERE = -(1 << 40)
"""A flat place that no tensor has, whatever is added to it."""


def inside(place: Tensor, extent: int) -> Tensor:
    """Move places that a GPU would look for outside 0..extent - 1 to the nearest inside.

    One wrong place of one task would end all work that the process has there. On the processor torch raises,
    and the task fails.
    """
    return place.clamp(0, extent - 1) if place.is_cuda else place


def _counted(index: Tensor, extent: int) -> Tensor:
    """Return indices counted from the front, as int64; see `inside`."""
    wide = index.to(torch.int64)
    return inside(torch.where(wide < 0, wide + extent, wide), extent)


def _flat_places(index: Tensor, extents: Sequence[int]) -> Tensor:
    """Return row-major places of the coordinates in the last dimension of `index`.

    A coordinate outside its extent leads nowhere: with the others it might name another element.
    """
    place: Tensor | int = 0
    for i, extent in enumerate(extents):
        found = _counted(index[..., i], extent)
        step = found * prod(extents[i + 1 :])
        place = place + (step if found.is_cuda else step.where((found >= 0) & (found < extent), _NOWHERE))
    assert isinstance(place, Tensor)
    return place


@operator("Gather")
def gather(node: Node) -> Lowered:
    axis = node.axis("axis", 0)
    source, shape = node.shape(0), node.shape(1)
    extent = source[axis]
    made = [*source[:axis], *shape, *source[axis + 1 :]]
    if node.is_constant(1) and (node.constant(1) != node.constant(1).clip(-extent, extent - 1)).any():
        raise Unsupported("Gather of constant places that are not there")
    place = int(node.constant(1)) % extent if node.is_constant(1) and not shape else None
    # A constant input's indices from the front, on the device.
    known = node.derive(1, ("counted", extent), lambda value: _counted(value, extent))
    table = node.take(0)

    def run(x: Tensor | None, index: Tensor | None = None) -> Tensor:
        x = table if x is None else x
        assert x is not None
        if place is not None:
            return x.select(axis, place)
        index = known if index is None else _counted(index, extent)
        assert index is not None
        return x.index_select(axis, index.reshape(-1)).reshape(made)

    return run


@operator("GatherElements")
def gather_elements(node: Node) -> Lowered:
    axis = node.axis("axis", 0)
    extent = node.shape(0)[axis]
    return lambda x, index: torch.gather(x, axis, _counted(index, extent))


@operator("GatherND")
def gather_nd(node: Node) -> Lowered:
    """The last dimension of the indices names places in the leading dimensions behind the batch ones."""
    batch = node.integer("batch_dims", 0)
    source, shape = node.shape(0), node.shape(1)
    depth = shape[-1]
    indexed, rest = source[batch : batch + depth], source[batch + depth :]
    rows = prod(source[:batch])
    made = [*shape[:-1], *rest]

    def run(x: Tensor, index: Tensor) -> Tensor:
        flat = x.reshape(rows * prod(indexed), *rest)
        base = torch.arange(rows, device=x.device) * prod(indexed)
        place = _flat_places(index, indexed).reshape(rows, -1) + base[:, None]
        return flat.index_select(0, place.reshape(-1)).reshape(made)

    return run


_REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator("Scatter", "ScatterElements")
def scatter_elements(node: Node) -> Lowered:
    """Where indices repeat without a reduction, ONNX leaves the result open."""
    axis = node.axis("axis", 0)
    extent = node.shape(0)[axis]
    reduction = node.text("reduction", "none")
    if reduction == "none":
        return lambda x, index, update: x.scatter(axis, _counted(index, extent), update)
    mode = _REDUCE[reduction]
    return lambda x, index, update: x.scatter_reduce(axis, _counted(index, extent), update, mode)


@operator("ScatterND")
def scatter_nd(node: Node) -> Lowered:
    source, shape = node.shape(0), node.shape(1)
    depth = shape[-1]
    indexed, rest = source[:depth], source[depth:]
    reduction = node.text("reduction", "none")

    def run(x: Tensor, index: Tensor, update: Tensor) -> Tensor:
        place = _flat_places(index, indexed).reshape(-1, 1).expand(-1, prod(rest))
        flat = x.reshape(prod(indexed), prod(rest))
        update = update.reshape(place.shape)
        if reduction == "none":
            return flat.scatter(0, place, update).reshape(source)
        return flat.scatter_reduce(0, place, update, _REDUCE[reduction]).reshape(source)

    return run


@operator("TensorScatter")
def tensor_scatter(node: Node) -> Lowered:
    """A key-value cache: write rows of `update` from each sample's index on, in a ring if circular."""
    axis = node.axis("axis", -2)
    shape, update_shape = node.shape(0), node.shape(1)
    circular = node.text("mode", "linear") == "circular"
    along = [1] * len(shape)
    along[axis] = update_shape[axis]
    steps = node.made(torch.arange(update_shape[axis]).view(along))
    per_sample = [-1] + [1] * (len(shape) - 1)

    def run(cache: Tensor, update: Tensor, start: Tensor | None = None) -> Tensor:
        place = steps if start is None else steps + start.to(torch.int64).view(per_sample)
        if circular:
            place = place.remainder(shape[axis])
        return cache.scatter(axis, inside(place, shape[axis]).expand(update_shape), update)

    return run


@operator("OneHot")
def one_hot(node: Node) -> Lowered:
    """Indices outside the range give a row of `off`."""
    depth = int(node.scalar(1))
    rank = node.rank(0) + 1
    axis = node.integer("axis", -1) % rank
    along = [1] * rank
    along[axis] = depth
    places = node.made(torch.arange(depth).view(along))

    def run(index: Tensor, _: Tensor | None, values: Tensor) -> Tensor:
        wide = index.to(torch.int64)
        wide = torch.where((wide < 0) & (wide >= -depth), wide + depth, wide)
        return torch.where(wide.unsqueeze(axis) == places, values[1], values[0])

    return run


@operator("Compress")
def compress(node: Node) -> Lowered:
    """The condition decides the shape, so it must be a constant; what is longer than the axis is cut."""
    axis = None if node.attribute("axis") is None else node.axis("axis", 0)
    extent = prod(node.shape(0)) if axis is None else node.shape(0)[axis]
    index = node.made(torch.from_numpy(node.constant(1)[:extent].nonzero()[0].copy()))
    if axis is None:
        return lambda x, _=None: x.reshape(-1).index_select(0, index)
    return lambda x, _=None: x.index_select(axis, index)


@operator("Trilu")
def trilu(node: Node) -> Lowered:
    diagonal = int(node.scalar(1)) if node.has(1) else 0
    function: Callable[..., Tensor] = torch.triu if node.integer("upper", 1) else torch.tril
    return lambda x, _=None: function(x, diagonal)


@operator("ReverseSequence")
def reverse_sequence(node: Node) -> Lowered:
    time, batch = node.integer("time_axis", 0), node.integer("batch_axis", 1)
    if {time, batch} != {0, 1}:
        raise Unsupported("ReverseSequence over other axes than 0 and 1")
    shape = node.shape(0)
    steps = node.made(torch.arange(shape[time]).unsqueeze(batch))
    trailing = [1] * (len(shape) - 2)

    def run(x: Tensor, lengths: Tensor) -> Tensor:
        last = inside(lengths.to(torch.int64) - 1, shape[time]).unsqueeze(time)
        place = torch.where(steps <= last, last - steps, steps)
        place = place.reshape(*place.shape, *trailing).expand(shape)
        return torch.gather(x, time, place)

    return run
