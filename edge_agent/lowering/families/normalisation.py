"""Normalisations and Softmax."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import unhalved
from stageloom.edge_agent.lowering.families.indexing import inside
from stageloom.edge_agent.lowering.node import Kernel, Lowered, Node, operator


@operator("BatchNormalization")
def batch_normalisation(node: Node) -> Lowered:
    """Inference: one multiplication and addition per element, both factors known where the statistics are.

    In training mode the batch's own statistics count, and the running ones are further outputs.
    """
    epsilon, momentum = node.number("epsilon", 1e-5), node.number("momentum", 0.9)
    along = (1, -1, *[1] * (node.rank(0) - 2))
    axes = [a for a in range(node.rank(0)) if a != 1]
    if node.integer("training_mode", 0):

        def train(
            x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            own_mean, own_variance = x.mean(axes), x.var(axes, correction=0)
            made = _scaled_and_shifted(x, scale, bias, own_mean, own_variance, epsilon, along)
            running = (
                old * momentum + new * (1.0 - momentum)
                for old, new in ((mean, own_mean), (variance, own_variance))
            )
            return (made, *running)  # type: ignore[return-value]

        return train
    if (affine := _known_affine(node, epsilon)) is not None:
        factor, shift = (a.view(along) for a in affine)
        return Kernel(
            lambda x, *_: torch.addcmul(shift, x, factor),
            lambda out, x, *_: torch.addcmul(shift, x, factor, out=out),
            detail=ChannelAffine(*affine),
        )

    def run(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return _scaled_and_shifted(x, scale, bias, mean, variance, epsilon, along)

    return run


@dataclass(frozen=True, slots=True)
class ChannelAffine:
    """x * factor + shift per channel. [channels] each"""

    factor: Tensor
    shift: Tensor


def _known_affine(node: Node, epsilon: float) -> tuple[Tensor, Tensor] | None:
    """What a BatchNormalization with constant statistics does to a channel."""

    def factor(scale: Tensor, variance: Tensor) -> Tensor:
        return scale / torch.sqrt(variance + epsilon)

    def shift(scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return bias - mean * factor(scale, variance)

    made = node.derive_all((1, 2, 3, 4), ("shift", epsilon), shift)
    scaled = node.derive_all((1, 4), ("factor", epsilon), factor) if made is not None else None
    return None if made is None or scaled is None else (scaled, made)


def _scaled_and_shifted(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    epsilon: float,
    along: tuple[int, ...],
) -> Tensor:
    factor = scale.float() / torch.sqrt(variance.float() + epsilon)
    shift = bias.float() - mean.float() * factor
    return torch.addcmul(shift.to(x.dtype).view(along), x, factor.to(x.dtype).view(along))


@operator("LRN")
def local_response(node: Node) -> Lowered:
    alpha, beta = node.number("alpha", 1e-4), node.number("beta", 0.75)
    bias, size = node.number("bias", 1.0), node.integer("size", 1)
    return lambda x: functional.local_response_norm(unhalved(x), size, alpha, beta, bias).to(x.dtype)


@operator("Softmax", "LogSoftmax")
def softmax(node: Node) -> Lowered:
    """Before opset 13 everything from `axis` on is one dimension."""
    function: Callable[..., Tensor] = torch.softmax if node.kind == "Softmax" else torch.log_softmax
    axis, shape = node.axis("axis", -1 if node.opset >= 13 else 1), node.shape(0)
    if node.opset >= 13 or all(n == 1 for n in shape[axis + 1 :]):
        return Kernel(lambda x: function(x, axis), lambda out, x: function(x, axis, out=out))
    return lambda x: function(x.reshape(*shape[:axis], -1), axis).reshape(shape)


@operator("LayerNormalization")
def layer_normalisation(node: Node) -> Lowered:
    """Over everything from `axis` on; the mean and the inverse deviation are further outputs."""
    shape, axis, epsilon = node.shape(0), node.axis("axis", -1), node.number("epsilon", 1e-5)
    inner = list(shape[axis:])
    if node.wants(1) or node.wants(2) or not _affine_fits(node, inner):
        return _layer_normalisation_with_statistics(node, axis, epsilon)
    scale, bias = node.take(1), node.take(2)

    def run(x: Tensor, w: Tensor | None, b: Tensor | None = None) -> Tensor:
        w, b = (scale if w is None else w), (bias if b is None else b)
        return functional.layer_norm(x, inner, w, b, epsilon)

    return run


def _affine_fits(node: Node, inner: list[int]) -> bool:
    return all(not node.has(i) or list(node.shape(i)) == inner for i in (1, 2))


def _layer_normalisation_with_statistics(node: Node, axis: int, epsilon: float) -> Lowered:
    axes = list(range(axis, node.rank(0)))
    dtype = node.dtype(0)

    def run(x: Tensor, scale: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        wide = x if dtype == torch.float64 else x.float()
        mean = wide.mean(axes, keepdim=True)
        centred = wide - mean
        inverse = torch.rsqrt(centred.square().mean(axes, keepdim=True) + epsilon)
        made = (centred * inverse).to(dtype) * scale
        return (made if bias is None else made + bias), mean, inverse

    return run


@operator("RMSNormalization")
def rms_normalisation(node: Node) -> Lowered:
    axes = list(range(node.axis("axis", -1), node.rank(0)))
    epsilon, dtype = node.number("epsilon", 1e-5), node.dtype(0)

    def run(x: Tensor, scale: Tensor) -> Tensor:
        wide = x if dtype == torch.float64 else x.float()
        inverse = torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)
        return (wide * inverse).to(dtype) * scale

    return run


@operator("InstanceNormalization")
def instance_normalisation(node: Node) -> Lowered:
    epsilon = node.number("epsilon", 1e-5)
    return lambda x, scale, bias: functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


@operator("GroupNormalization")
def group_normalisation(node: Node) -> Lowered:
    """Scale and bias are per channel since opset 21, per group before."""
    groups, epsilon = node.integer("num_groups", 1), node.number("epsilon", 1e-5)
    per_group = node.shape(0)[1] // groups if node.opset < 21 else 1

    def run(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        scale, bias = scale.repeat_interleave(per_group), bias.repeat_interleave(per_group)
        return functional.group_norm(x, groups, scale, bias, epsilon)

    return run


@operator("LpNormalization")
def lp_normalisation(node: Node) -> Lowered:
    """A vector of length zero stays zero."""
    axis, order = node.axis("axis", -1), node.integer("p", 2)

    def run(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, order, axis, True)
        return torch.where(length == 0, torch.zeros_like(x), x / length)

    return run


@operator("MeanVarianceNormalization")
def mean_variance_normalisation(node: Node) -> Lowered:
    axes = node.integers("axes") or [0, 2, 3]

    def run(x: Tensor) -> Tensor:
        wide = unhalved(x)
        centred = wide - wide.mean(axes, keepdim=True)
        return (centred / (centred.square().mean(axes, keepdim=True).sqrt() + 1e-9)).to(x.dtype)

    return run


@operator("NegativeLogLikelihoodLoss")
def negative_log_likelihood(node: Node) -> Lowered:
    reduction, ignored = node.text("reduction", "mean"), node.attribute("ignore_index")
    return lambda x, target, weight=None: _loss(x, target, weight, reduction, ignored)


@operator("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(node: Node) -> Lowered:
    reduction, ignored = node.text("reduction", "mean"), node.attribute("ignore_index")

    def run(x: Tensor, target: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        likelihood = torch.log_softmax(x, 1)
        return _loss(likelihood, target, weight, reduction, ignored), likelihood

    return run


def _loss(
    likelihood: Tensor, target: Tensor, weight: Tensor | None, reduction: str, ignored: int | None
) -> Tensor:
    """Classes along axis 1. What is ignored weighs nothing, in the mean's divisor too."""
    target = target.to(torch.int64)
    skip = torch.zeros_like(target, dtype=torch.bool) if ignored is None else target == int(ignored)
    place = inside(torch.where(skip, torch.zeros_like(target), target), likelihood.shape[1])
    chosen = -torch.gather(likelihood, 1, place.unsqueeze(1)).squeeze(1)
    weights = torch.ones_like(chosen) if weight is None else weight[place]
    weights = torch.where(skip, torch.zeros_like(weights), weights)
    losses = chosen * weights
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / weights.sum()
