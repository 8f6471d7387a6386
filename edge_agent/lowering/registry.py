"""Which function lowers which ONNX operator.

A lowering function takes a `Node` and returns a `Kernel`, or simply what to run. It runs once per node
while a model is lowered, reads attributes and constants there, and closes over what it computed from them:

    @operator("LeakyRelu")
    def leaky_relu(node: Node) -> Lowered:
        slope = node.number("alpha", 0.01)
        return lambda x: functional.leaky_relu(x, slope)

It must be a plain function of its arguments: no state between runs, no dependence on values for a shape. What
it cannot do it says with `Unsupported`. One file per family lies in `families/`.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TypeAlias

import torch
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import UNSIGNED
from stageloom.edge_agent.lowering.errors import Unsupported
from stageloom.edge_agent.lowering.node import Kernel, Known, Made, Node

Lowered: TypeAlias = Kernel | Known | Callable[..., Made]
Lowering: TypeAlias = Callable[[Node], Lowered]

FAMILIES = (
    "activation", "attention", "convolution", "elementwise", "indexing", "matmul", "normalisation", "padding",
    "pooling", "quantise", "recurrent", "reduction", "resize", "shape", "signal",
)  # fmt: skip

_STANDARD_DOMAINS = ("", "ai.onnx")
_registered: dict[str, tuple[Lowering, bool]] = {}


def operator(*kinds: str, wide: bool = False) -> Callable[[Lowering], Lowering]:
    """Register a function for operator types.

    `wide`: torch computes nothing in uint16, uint32 and uint64; such values pass as int64 and are cut back to
    their own bits. Sums, differences and products come out right; comparisons, quotients and orders of uint64
    values of 2^63 and more do not.
    """

    def add(function: Lowering) -> Lowering:
        for kind in kinds:
            if kind in _registered:
                raise ValueError(f"{kind} is lowered twice")
            _registered[kind] = (function, wide)
        return function

    return add


def operators() -> tuple[str, ...]:
    """Every operator type that is lowered, in alphabetical order."""
    _load()
    return tuple(sorted(_registered))


def lower_node(node: Node, domain: str) -> Kernel | Known:
    """The kernel of a node, or its values where they follow from shapes alone.

    Raises:
        Unsupported: nothing lowers this operator, or not with these attributes and constants.
    """
    _load()
    if domain not in _STANDARD_DOMAINS:
        raise Unsupported(f"{domain}.{node.kind}")
    if node.kind not in _registered:
        raise Unsupported(node.kind)
    function, wide = _registered[node.kind]
    lowered = function(node)
    if isinstance(lowered, Known):
        return lowered
    kernel = lowered if isinstance(lowered, Kernel) else Kernel(lowered)
    if any(i is not None and i.spec.dtype in UNSIGNED for i in node.inputs):
        return Kernel(widened(kernel.run)) if wide else Kernel(kernel.run)
    return kernel


def widened(run: Callable[..., Made]) -> Callable[..., Made]:
    """`run` over int64 where its arguments have types that torch does not compute with."""

    def over_int64(*args: Tensor | None) -> Made:
        own = next(a.dtype for a in args if a is not None and a.dtype in UNSIGNED)
        wide = [a.to(torch.int64) if a is not None and a.dtype in UNSIGNED else a for a in args]
        made = run(*wide)
        if isinstance(made, Tensor):
            return _narrow(made, own)
        return tuple(None if one is None else _narrow(one, own) for one in made)

    return over_int64


def _narrow(value: Tensor, own: torch.dtype) -> Tensor:
    return value.to(own) if value.dtype == torch.int64 else value


@cache
def _load() -> None:
    """Families register themselves when they are imported, which the first node that is lowered causes."""
    for family in FAMILIES:
        import_module(f"stageloom.edge_agent.lowering.families.{family}")
