"""Further kernels for a convolution and the nodes behind it, beside one kernel per node.

A chain is a convolution with constant weights, then, each at most once and in this order: a
BatchNormalization (folded into the weights), an Add of another value, a Relu. Which kernel is fastest depends
on the shape (a fused cudnn convolution can be several times slower than its parts), so a unit offers all that
apply:

- `folded`   torch's convolution with folded weights, then Add and Relu in place;
- `gemm`     a pointwise convolution of channels-last pixels as one matrix product, with bias and Relu in its
             epilogue; writes into a slice of a Concat's buffer as it is;
- `cudnn fused`   convolution, bias, Add and Relu in one cudnn kernel; its result is copied where it belongs;
- `cudnn graph 0` and so on   the same straight into the buffer, by a plan of `cudnn_graph`;
- `cudnn graph copied`   the first of those plans into packed memory, then a copy: into a slice some plans
             copy, too, and more slowly.

torch's own convolution into given memory is not among them, for the reason that `cudnn_graph` gives.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stageloom.edge_agent.lowering.convolve import convolve, may_search
from stageloom.edge_agent.lowering.cudnn_graph import PLANS, FusedConvolution, library
from stageloom.edge_agent.lowering.families.convolution import ConstantConv
from stageloom.edge_agent.lowering.families.normalisation import ChannelAffine
from stageloom.edge_agent.lowering.node import WeightStore
from stageloom.edge_agent.lowering.program import Alternative, Run, RunInto
from stageloom.edge_agent.lowering.trace import NodeTracer, TracedNode


@dataclass(frozen=True, slots=True)
class Chain:
    """A convolution and the nodes behind it; `source` and `addend` are indices of the unit's arguments."""

    conv: ConstantConv
    source: int
    addend: int | None
    relu: bool
    folded: bool  # whether the weights are other than the node's

    @property
    def signature(self) -> Hashable:
        """Chains with the same one do the same arithmetic, with weights of their own."""
        conv = self.conv
        return (
            tuple(conv.weight.shape), conv.weight.dtype, conv.bias is None, conv.window, conv.groups,
            self.addend is None, self.relu, self.folded,
        )  # fmt: skip

    @property
    def pointwise(self) -> bool:
        """Whether each output pixel depends on the input pixel at the same place only."""
        w, c = self.conv.window, self.conv
        ones = all(n == 1 for n in (*w.size, *w.stride))
        return ones and not any((*w.begin, *w.end)) and c.groups == 1 and c.weight.ndim == 4


def chain_of(
    traced: Sequence[TracedNode], inputs: Sequence[str], outputs: Sequence[str], store: WeightStore
) -> Chain | None:
    """Return the chain of nodes in run order; None if they are no chain."""
    if not traced or not isinstance(traced[0].kernel.detail, ConstantConv) or len(outputs) != 1:
        return None
    source = traced[0].reads[0]
    if source not in inputs or traced[-1].makes != tuple(outputs):
        return None
    chain = Chain(traced[0].kernel.detail, inputs.index(str(source)), None, relu=False, folded=False)
    previous = traced[0].makes[0]
    for link in traced[1:]:
        longer = _longer(chain, link, previous, inputs, (traced[0].makes[0], link.makes[0]), store)
        if longer is None or sum(previous in t.reads for t in traced) != 1:
            return None
        chain, previous = longer, link.makes[0]
    return chain


def _longer(
    chain: Chain, link: TracedNode, previous: str, inputs: Sequence[str], key: Hashable, store: WeightStore
) -> Chain | None:
    reads = [r for r in link.reads if r is not None]
    kind, detail = link.node.kind, link.kernel.detail
    if kind == "Relu" and not chain.relu:
        return replace(chain, relu=True)
    if isinstance(detail, ChannelAffine) and chain.addend is None and not chain.relu:
        return replace(chain, conv=_folded(chain.conv, detail, key, store), folded=True)
    if kind == "Add" and chain.addend is None and not chain.relu and len(reads) == 2:
        other = reads[1] if reads[0] == previous else reads[0]
        same = link.node.shape(0) == link.node.shape(1)
        if same and isinstance(other, str) and other in inputs:
            return replace(chain, addend=inputs.index(other))
    return None


def _folded(conv: ConstantConv, affine: ChannelAffine, key: Hashable, store: WeightStore) -> ConstantConv:
    """Fold scale and shift of the channels into the weights, in float32."""
    along = (-1, *[1] * (conv.weight.ndim - 1))

    def weight() -> Tensor:
        return (conv.weight.float() * affine.factor.float().view(along)).cpu()

    def bias() -> Tensor:
        own = 0.0 if conv.bias is None else conv.bias.float() * affine.factor.float()
        return (own + affine.shift.float()).cpu()

    return replace(
        conv,
        weight=store.derived(("folded weight", key), weight),  # keeps the memory order
        bias=store.derived(("folded bias", key), bias),
    )


def _is_channels_last(value: Tensor) -> bool:
    return value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last)


def alternatives(
    chain: Chain, trace: NodeTracer, inputs: Sequence[str], device: torch.device
) -> list[Alternative]:
    """Return the further kernels of a chain, the likely faster ones first."""
    source = trace.metas[inputs[chain.source]]
    kernels = []
    if chain.folded and chain.conv.window.symmetric:
        kernels.append(Alternative("folded", *_in_parts(chain)))
    if chain.pointwise and chain.addend is None and _is_channels_last(source):
        kernels.append(Alternative("gemm", *_gemm(chain)))
    if device.type == "cuda" and source.ndim == 4 and chain.conv.window.symmetric:
        if chain.relu:
            kernels.append(Alternative("cudnn fused", *_cudnn_fused(chain)))
        if library() is not None:
            kernels += _cudnn_graphs(chain)
    return kernels


def _copying(run: Run) -> RunInto:
    def run_into(args: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        outs[0].copy_(run(args)[0])

    return run_into


def _in_parts(chain: Chain) -> tuple[Run, RunInto]:
    conv, window = chain.conv, chain.conv.window

    def convolved(args: Sequence[Tensor]) -> Tensor:
        return convolve(
            args[chain.source],
            conv.weight,
            conv.bias,
            window.stride,
            window.begin,
            window.dilation,
            conv.groups,
        )

    def run(args: Sequence[Tensor]) -> tuple[Tensor, ...]:
        made = convolved(args)
        if chain.addend is not None:
            made.add_(args[chain.addend])
        return (made.relu_() if chain.relu else made,)

    def run_into(args: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        made = convolved(args)
        if chain.addend is not None and chain.relu:
            torch.clamp(made.add_(args[chain.addend]), min=0.0, out=outs[0])
        elif chain.addend is not None:
            torch.add(made, args[chain.addend], out=outs[0])
        elif chain.relu:
            torch.clamp(made, min=0.0, out=outs[0])
        else:
            outs[0].copy_(made)

    return run, run_into


def _gemm(chain: Chain) -> tuple[Run, RunInto]:
    filters, channels = chain.conv.weight.shape[:2]
    weight = chain.conv.weight.reshape(filters, channels).t()  # [channels, filters]
    bias = chain.conv.bias

    def run_into(args: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        pixels = args[chain.source].permute(0, 2, 3, 1).reshape(-1, channels)
        rows = outs[0].permute(0, 2, 3, 1)
        into = rows.view(-1, filters) if _rows_are_even(rows) else None
        made = torch.empty((len(pixels), filters), dtype=pixels.dtype, device=pixels.device)
        target = made if into is None else into
        if bias is None:
            torch.mm(pixels, weight, out=target)
            if chain.relu:
                target.relu_()
        elif chain.relu:
            torch.ops.aten._addmm_activation.out(bias, pixels, weight, out=target)
        else:
            torch.addmm(bias, pixels, weight, out=target)
        if into is None:
            rows.copy_(made.view(rows.shape))

    def run(args: Sequence[Tensor]) -> tuple[Tensor, ...]:
        source = args[chain.source]
        n, _, h, w = source.shape
        out = torch.empty(
            (n, filters, h, w), dtype=source.dtype, device=source.device, memory_format=torch.channels_last
        )
        run_into(args, (out,))
        return (out,)

    return run, run_into


def _rows_are_even(rows: Tensor) -> bool:
    """Return whether [n, h, w, channels] can be viewed as [n * h * w, channels]."""
    n, h, w, _ = rows.shape
    step = rows.stride(2) if w > 1 else (rows.stride(1) if h > 1 else rows.stride(0))
    even_h = h == 1 or rows.stride(1) == step * w
    even_n = n == 1 or rows.stride(0) == step * w * h
    return even_h and even_n and rows.stride(3) == 1


def _cudnn_fused(chain: Chain) -> tuple[Run, RunInto]:
    conv, window = chain.conv, chain.conv.window
    weight, groups = conv.weight, conv.groups
    bias = conv.bias
    if bias is None:
        bias = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
    geometry = (window.stride, window.begin, window.dilation, groups)

    def run(args: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if chain.addend is None:
            return (torch.ops.aten.cudnn_convolution_relu(args[chain.source], weight, bias, *geometry),)
        return (
            torch.ops.aten.cudnn_convolution_add_relu(
                args[chain.source], weight, args[chain.addend], 1.0, bias, *geometry
            ),
        )

    return run, _copying(run)


def _cudnn_graphs(chain: Chain) -> list[Alternative]:
    conv, window = chain.conv, chain.conv.window
    fused = FusedConvolution(conv.weight, conv.bias, chain.relu, window.stride, window.begin, window.dilation)
    run, in_parts = _in_parts(chain)

    def addend(args: Sequence[Tensor]) -> Tensor | None:
        return None if chain.addend is None else args[chain.addend]

    def straight(plan: int) -> RunInto:
        def run_into(args: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
            if may_search():
                fused.run_into(plan, args[chain.source], addend(args), outs[0])
            else:  # a thread that serves builds no plans
                in_parts(args, outs)

        return run_into

    def copied(args: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        packed = torch.empty_like(outs[0], memory_format=torch.channels_last)
        straight(0)(args, (packed,))
        outs[0].copy_(packed)

    def in_a_slice(args: Sequence[Tensor], outs: Sequence[Tensor]) -> bool:
        return not _is_channels_last(outs[0])

    return [
        *(Alternative(f"cudnn graph {plan}", run, straight(plan)) for plan in range(PLANS)),
        Alternative("cudnn graph copied", run, copied, in_a_slice),
    ]
