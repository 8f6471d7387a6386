"""Normalisations and Softmax."""

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from edge_agent.lowering.node import Kernel, Node
from edge_agent.lowering.registry import Lowered, operator


@operator("BatchNormalization")
def batch_normalisation(node: Node) -> Lowered:
    """With constant statistics one multiplication and addition per element."""
    epsilon = node.number("epsilon", 1e-5)
    along = (1, -1, *[1] * (node.rank(0) - 2))

    def run(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        factor = scale.float() / torch.sqrt(variance.float() + epsilon)
        shift = bias.float() - mean.float() * factor
        return torch.addcmul(shift.to(x.dtype).view(along), x, factor.to(x.dtype).view(along))

    return run


@operator("LRN")
def local_response(node: Node) -> Lowered:
    alpha, beta = node.number("alpha", 1e-4), node.number("beta", 0.75)
    bias, size = node.number("bias", 1.0), node.integer("size", 1)
    return lambda x: functional.local_response_norm(x, size, alpha, beta, bias)


@operator("Softmax")
def softmax(node: Node) -> Lowered:
    return _normalised_exponential(node, torch.softmax)


@operator("LogSoftmax")
def log_softmax(node: Node) -> Lowered:
    return _normalised_exponential(node, torch.log_softmax)


def _normalised_exponential(node: Node, function: Callable[..., Tensor]) -> Lowered:
    """Before opset 13 everything from `axis` on is one dimension."""
    if node.opset >= 13:
        axis = node.axis("axis", -1)
        return Kernel(lambda x: function(x, axis), lambda out, x: function(x, axis, out=out))
    axis = node.axis("axis", 1)
    shape = node.shape(0)
    if all(n == 1 for n in shape[axis + 1 :]):
        return Kernel(lambda x: function(x, axis), lambda out, x: function(x, axis, out=out))

    def run(x: Tensor) -> Tensor:
        return function(x.reshape(*shape[:axis], -1), axis).reshape(shape)

    return run
