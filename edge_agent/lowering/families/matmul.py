"""Matrix products."""

import torch
from torch import Tensor

from stageloom.edge_agent.lowering.node import Kernel, Node
from stageloom.edge_agent.lowering.registry import Lowered, operator


@operator("MatMul")
def matmul(node: Node) -> Lowered:
    if not node.dtype(0).is_floating_point:
        return _integer_matmul(node)
    weight = node.take(1)

    def run(x: Tensor, w: Tensor | None) -> Tensor:
        return torch.matmul(x, weight if w is None else w)  # type: ignore[arg-type]

    def into(out: Tensor, x: Tensor, w: Tensor | None) -> None:
        torch.matmul(x, weight if w is None else w, out=out)  # type: ignore[arg-type]

    return Kernel(run, into)


def _integer_matmul(node: Node) -> Lowered:
    """CUDA has no integer product; float64 holds sums of int32 products below 2^53 exactly."""
    dtype = node.dtype(0)
    return lambda x, y: torch.matmul(x.double(), y.double()).to(dtype)


@operator("Gemm")
def gemm(node: Node) -> Lowered:
    """alpha * A' B' + beta * C."""
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    left, right = bool(node.integer("transA", 0)), bool(node.integer("transB", 0))
    weight, bias = node.take(1), node.take(2)
    integral = not node.dtype(0).is_floating_point
    dtype = node.dtype(0)
    if integral:

        def run_integers(x: Tensor, w: Tensor | None, b: Tensor | None = None) -> Tensor:
            w, b = (weight if w is None else w), (bias if b is None else b)
            assert w is not None
            x, w = (x.T if left else x).double(), (w.T if right else w).double()
            made = alpha * (x @ w)
            return (made if b is None else made + beta * b).to(dtype)

        return run_integers

    def run(x: Tensor, w: Tensor | None, b: Tensor | None = None) -> Tensor:
        w, b = (weight if w is None else w), (bias if b is None else b)
        assert w is not None
        x, w = (x.T if left else x), (w.T if right else w)
        if b is None:
            return torch.mm(x, w) if alpha == 1.0 else alpha * torch.mm(x, w)
        return torch.addmm(b, x, w, beta=beta, alpha=alpha)

    def into(out: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None = None) -> None:
        w, b = (weight if w is None else w), (bias if b is None else b)
        assert w is not None
        x, w = (x.T if left else x), (w.T if right else w)
        if b is not None:
            torch.addmm(b, x, w, beta=beta, alpha=alpha, out=out)
            return
        torch.mm(x, w, out=out)
        if alpha != 1.0:
            out.mul_(alpha)

    return Kernel(run, into)


@operator("Einsum")
def einsum(node: Node) -> Lowered:
    equation = node.text("equation", "").replace(" ", "")
    return lambda *args: torch.einsum(equation, *args)
