"""Resampling: Resize in all its modes, Upsample, sampling at given places."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, prod

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from stageloom.edge_agent.lowering.convolve import convolve_transposed
from stageloom.edge_agent.lowering.dtypes import Unsupported
from stageloom.edge_agent.lowering.families.shape import pad_list
from stageloom.edge_agent.lowering.node import Lowered, Node, operator


@dataclass(frozen=True, slots=True)
class _Axis:
    """A dimension that changes; coordinates are computed with `scale`."""

    axis: int
    extent: int
    size: int
    scale: float
    roi: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class _Rules:
    mode: str
    place: str  # coordinate_transformation_mode
    nearest: str
    cubic: float
    antialias: bool
    exclude_outside: bool
    fill: float


_OUTWARDS = "ceil where it shrinks"
"""Nearest of a Resize of opset 10: up along dimensions that shrink, down along others."""


@operator("Resize", "Upsample")
def resize(node: Node) -> Lowered:
    """Dimensions are independent: each that changes is one selection or one product with a narrow matrix."""
    rules, axes = _rules(node), _axes(node)
    direct = _direct(node, rules, axes)
    if direct is not None:
        return direct
    steps = [_step(node, rules, axis) for axis in axes]
    dtype = node.dtype(0)

    def run(x: Tensor, *_: Tensor | None) -> Tensor:
        wide = x if dtype.is_floating_point else x.double()
        for step in steps:
            wide = step(wide)
        if dtype.is_floating_point:
            return wide
        info = torch.iinfo(dtype)
        return torch.trunc(wide).clamp(info.min, info.max).to(dtype)

    return run


def _rules(node: Node) -> _Rules:
    old = node.opset < 11
    nearest = _OUTWARDS if node.kind == "Resize" else "floor"  # as onnxruntime has it, older texts are silent
    return _Rules(
        mode=node.text("mode", "nearest"),
        place="asymmetric" if old else node.text("coordinate_transformation_mode", "half_pixel"),
        nearest=nearest if old else node.text("nearest_mode", "round_prefer_floor"),
        cubic=node.number("cubic_coeff_a", -0.75),
        antialias=bool(node.integer("antialias", 0)),
        exclude_outside=bool(node.integer("exclude_outside", 0)),
        fill=node.number("extrapolation_value", 0.0),
    )


def _axes(node: Node) -> list[_Axis]:
    """Return the dimensions that change, with their new sizes."""
    shape = node.shape(0)
    axes = node.integers("axes")
    axes = list(range(len(shape))) if axes is None else [a % len(shape) for a in axes]
    if node.kind == "Upsample" and node.opset < 9:
        scales: list[float] | None = [float(s) for s in node.attribute("scales")]
        sizes = None
    else:
        place = 1 if node.opset < 11 else 2
        scales = [float(s) for s in node.constant(place).reshape(-1)] if node.has(place) else None
        sizes = node.constant_list(3) if node.has(3) else None
    roi = [float(r) for r in node.constant(1).reshape(-1)] if node.opset >= 11 and node.has(1) else []
    if sizes:
        scales, sizes = _by_policy(node, [shape[a] for a in axes], sizes)
    if not scales:
        raise Unsupported(f"{node.kind} without scales or sizes")
    if not sizes:  # as onnxruntime multiplies: 10 * 0.7 is 7 in float32, and less in float64
        sizes = [int(np.float32(shape[a]) * np.float32(s)) for a, s in zip(axes, scales, strict=True)]
    changing = []
    for i, axis in enumerate(axes):
        window = (roi[i], roi[len(axes) + i]) if roi else (0.0, 1.0)
        if sizes[i] != shape[axis] or scales[i] != 1.0 or window != (0.0, 1.0):
            changing.append(_Axis(axis, shape[axis], sizes[i], scales[i], window))
    return changing


def _by_policy(node: Node, extents: list[int], sizes: list[int]) -> tuple[list[float], list[int]]:
    scales = [size / extent for size, extent in zip(sizes, extents, strict=True)]
    policy = node.text("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return scales, sizes
    scale = min(scales) if policy == "not_larger" else max(scales)
    return [scale] * len(sizes), [floor(extent * scale + 0.5) for extent in extents]


def _direct(node: Node, rules: _Rules, axes: list[_Axis]) -> Lowered | None:
    """Return torch's own kernel if it computes the same; None otherwise."""
    exact = all(a.size == a.extent * a.scale or a.scale == a.size / a.extent for a in axes)
    spatial = node.rank(0) == 4 and [a.axis for a in axes] == [2, 3]
    if (
        not (spatial and exact and node.dtype(0).is_floating_point)
        or rules.antialias
        or rules.exclude_outside
    ):
        return None
    size = [a.size for a in axes]
    down = rules.nearest == "floor" or (rules.nearest == _OUTWARDS and all(a.scale >= 1.0 for a in axes))
    if rules.mode == "nearest" and rules.place == "asymmetric" and down:
        return lambda x, *_: functional.interpolate(x, size, mode="nearest")
    if rules.mode == "linear" and rules.place in ("half_pixel", "align_corners"):
        corners = rules.place == "align_corners"
        return lambda x, *_: functional.interpolate(x, size, mode="bilinear", align_corners=corners)
    return None


def _coordinates(rules: _Rules, axis: _Axis) -> Tensor:
    """Return the old coordinate of each new position, as onnxruntime has it. [size] float64"""
    x = torch.arange(axis.size, dtype=torch.float64)
    if rules.place == "align_corners":  # torch agrees; the reference takes scale * extent for the size
        return torch.zeros_like(x) if axis.size == 1 else x * (axis.extent - 1) / (axis.size - 1)
    if rules.place == "asymmetric":
        return x / axis.scale
    if rules.place == "tf_crop_and_resize":
        start, end = axis.roi
        if axis.size == 1:
            return (0.5 * (start + end) * (axis.extent - 1)) + torch.zeros_like(x)
        return start * (axis.extent - 1) + x * (end - start) * (axis.extent - 1) / (axis.size - 1)
    half = (x + 0.5) / axis.scale - 0.5
    if rules.place == "half_pixel":
        return half
    if rules.place == "pytorch_half_pixel":  # the reference takes -0.5: a cubic differs
        return torch.zeros_like(x) if axis.size == 1 else half
    if rules.place == "half_pixel_symmetric":
        return half + axis.extent / 2 * (1 - axis.size / (axis.scale * axis.extent))
    raise Unsupported(f"Resize with {rules.place}")


def _step(node: Node, rules: _Rules, axis: _Axis) -> Callable[[Tensor], Tensor]:
    where = _coordinates(rules, axis)
    outside = (where < 0) | (where > axis.extent - 1)
    fills = rules.place == "tf_crop_and_resize" and bool(outside.any())
    along = [1] * node.rank(0)
    along[axis.axis] = axis.size
    blank = node.made(outside.view(along)) if fills else None
    if rules.mode == "nearest":
        name = rules.nearest
        if name == _OUTWARDS:
            name = "ceil" if axis.scale < 1.0 else "floor"
        index = node.made(_NEAREST[name](where).to(torch.int64).clamp(0, axis.extent - 1))

        def select(x: Tensor) -> Tensor:
            made = x.index_select(axis.axis, index)
            return made if blank is None else made.masked_fill(blank, rules.fill)

        return select
    matrix = _matrix(rules, axis, where)
    dtype = node.dtype(0)
    if not dtype.is_floating_point:
        # onnxruntime cuts off sums in float32: those of 32nds are exact in any order. It has no cubic one
        # of integers, and with antialias it rounds each dimension by itself.
        if rules.mode == "cubic" or rules.antialias or (matrix * 32).frac().any():
            raise Unsupported("Resize of integers of which rounding decides")
        dtype = torch.float64
    matrix = node.made(matrix.to(dtype))

    def product(x: Tensor) -> Tensor:
        made = torch.matmul(x.movedim(axis.axis, -1), matrix.T).movedim(-1, axis.axis)
        return made if blank is None else made.masked_fill(blank, rules.fill)

    return product


_NEAREST: dict[str, Callable[[Tensor], Tensor]] = {
    "round_prefer_floor": lambda where: torch.ceil(where - 0.5),
    "round_prefer_ceil": lambda where: torch.floor(where + 0.5),
    "floor": torch.floor,
    "ceil": torch.ceil,
}


def _matrix(rules: _Rules, axis: _Axis, where: Tensor) -> Tensor:
    """Return in row i the weights of the old positions in new position i; the ends count beyond the ends.

    A kernel with antialiasing is stretched by the reduction. [size, extent] float64
    """
    stretch = min(axis.scale, 1.0) if rules.antialias else 1.0
    reach = 2.0 if rules.mode == "cubic" else 1.0
    span = ceil(reach / stretch)
    base = torch.floor(where)
    offsets = torch.arange(-span, span + 2, dtype=torch.float64)
    places = base[:, None] + offsets  # [size, 2 * span + 2]
    distance = (places - where[:, None]).abs() * stretch
    weights = _cubic(distance, rules.cubic) if rules.mode == "cubic" else (1 - distance).clamp(min=0)
    if rules.exclude_outside:
        weights = torch.where((places < 0) | (places > axis.extent - 1), 0.0, weights)
    if rules.exclude_outside or rules.antialias:
        weights = weights / weights.sum(1, keepdim=True)
    index = places.clamp(0, axis.extent - 1).to(torch.int64)
    return torch.zeros((axis.size, axis.extent), dtype=torch.float64).scatter_add(1, index, weights)


def _cubic(distance: Tensor, a: float) -> Tensor:
    """Keys' kernel (1981)."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))


@operator("GridSample")
def grid_sample(node: Node) -> Lowered:
    names = {"linear": "bilinear", "bilinear": "bilinear", "cubic": "bicubic", "bicubic": "bicubic"}
    mode = names.get(node.text("mode", "linear"), "nearest")
    padding, corners = node.text("padding_mode", "zeros"), bool(node.integer("align_corners", 0))
    return lambda x, grid: functional.grid_sample(x, grid, mode, padding, corners)


@operator("AffineGrid")
def affine_grid(node: Node) -> Lowered:
    size = node.constant_list(1) or []
    corners = bool(node.integer("align_corners", 0))
    return lambda theta, _=None: functional.affine_grid(theta, size, corners)


@operator("Col2Im")
def column_to_image(node: Node) -> Lowered:
    """Sums blocks into an image by a transposed convolution with one-hot kernels."""
    image, block = node.constant_list(1) or [], node.constant_list(2) or []
    rank = len(block)
    dilation = node.integers("dilations") or [1] * rank
    stride = node.integers("strides") or [1] * rank
    pads = node.integers("pads") or [0] * (2 * rank)
    if rank not in (1, 2, 3):
        raise Unsupported(f"Col2Im over {rank} dimensions")
    taps = prod(block)
    batch, channels = node.shape(0)[0], node.shape(0)[1] // taps
    kernel = node.made(torch.eye(taps, dtype=node.dtype(0)).reshape(taps, 1, *block))
    padded = [n + b + e for n, b, e in zip(image, pads[:rank], pads[rank:], strict=True)]
    counts = [
        (n - (k - 1) * d - 1) // s + 1 for n, k, d, s in zip(padded, block, dilation, stride, strict=True)
    ]
    covered = [
        (c - 1) * s + (k - 1) * d + 1 for c, s, k, d in zip(counts, stride, block, dilation, strict=True)
    ]
    borders = pad_list(
        [-p for p in pads[:rank]],
        [n - c - p for n, c, p in zip(padded, covered, pads[rank:], strict=True)],
    )

    def run(x: Tensor, *_: Tensor | None) -> Tensor:
        columns = x.reshape(batch * channels, taps, *counts)
        made = convolve_transposed(columns, kernel, stride, dilation, 1)
        return functional.pad(made, borders).reshape(batch, channels, *image)

    return run
