"""A merge stage as one convolution: padded kernels stacked, one launch, its result split (IOS, section 3.2).

`stageloom.shared.merge` says which operators may merge and where each kernel lies in the common one.
"""

from collections.abc import Sequence

import onnx
import torch
from onnx import helper
from torch import Tensor

from stageloom.edge_agent.lowering.batch import LoweredModel, Parsed, ways
from stageloom.edge_agent.lowering.errors import Unsupported
from stageloom.edge_agent.lowering.program import Program
from stageloom.edge_agent.lowering.unit import Alternative, Unit
from stageloom.edge_agent.lowering.weights import Constant
from stageloom.shared.ids import OpId
from stageloom.shared.merge import MergedConvolution, merged

_WEIGHT, _BIAS = "merged.weight", "merged.bias"


def merged_unit(parsed: Parsed, lowered: LoweredModel, ops: Sequence[OpId]) -> Unit:
    """The unit of operators that may merge; its outputs come in ascending order of the operators.

    `run` returns slices of one tensor; `run_into` writes without a copy where the buffers are neighbours
    along the channels, as inputs of one Concat are.

    Raises:
        ValueError: they may not merge.
        Unsupported: their weights are of a type that torch does not hold.
    """
    one = merged(parsed.graph, ops)
    nodes = [[parsed.model.graph.node[i] for i in parsed.graph.operators[op].nodes] for op in one.ops]
    weight, bias = _stacked(parsed, one, nodes)
    key = ("merged", one.ops)
    trace = parsed.trace(
        lowered.batch, {_WEIGHT: Constant((*key, "weight"), weight), _BIAS: Constant((*key, "bias"), bias)}
    )
    source = parsed.name(one.input)
    trace.add_input(source, lowered.specs[one.input])
    body = _body(one, nodes[0], source)
    traced = [t for node in body if (t := trace.visit(node)) is not None]
    last = body[-1].output[0]
    program = Program(traced, [source], [last], trace)
    return Unit(
        ops=one.ops,
        inputs=(one.input,),
        outputs=one.outputs,
        input_specs=(lowered.specs[one.input],),
        output_specs=tuple(lowered.specs[t] for t in one.outputs),
        alternatives=tuple(_split(way, one) for way in ways(program, traced, [source], [last], trace)),
    )


def _body(one: MergedConvolution, first: Sequence[onnx.NodeProto], source: str) -> list[onnx.NodeProto]:
    """The common convolution, and what follows the first operator's, as it follows all of them."""
    found = one.convolution
    body = [
        helper.make_node(
            "Conv", [source, _WEIGHT, _BIAS], ["merged.0"], kernel_shape=found.kernel, strides=found.strides,
            dilations=found.dilations, pads=found.pads,
        )
    ]  # fmt: skip
    renamed = {first[0].output[0]: "merged.0"}
    for number, node in enumerate(first[1:], 1):
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        renamed[node.output[0]] = f"merged.{number}"
        copy.input[:] = [renamed.get(name, name) for name in node.input]
        copy.output[:] = [f"merged.{number}"]
        body.append(copy)
    return body


def _stacked(
    parsed: Parsed, one: MergedConvolution, nodes: Sequence[Sequence[onnx.NodeProto]]
) -> tuple[Tensor, Tensor]:
    """All kernels [sum of filters, channels, *kernel], zeros around the smaller ones, and all biases."""
    kernels, biases = [], []
    for filters, offset, own in zip(one.filters, one.offsets, nodes, strict=True):
        names = [name for name in own[0].input[1:] if name]
        if any(name not in parsed.constants for name in names):
            raise Unsupported("weights of a type that torch does not hold")
        kernel, *bias = [parsed.constants[name].value for name in names]
        padded = torch.zeros((filters, kernel.shape[1], *one.convolution.kernel), dtype=kernel.dtype)
        taps = [slice(start, start + size) for start, size in zip(offset, kernel.shape[2:], strict=True)]
        padded[(slice(None), slice(None), *taps)] = kernel
        kernels.append(padded)
        biases.append(bias[0] if bias else torch.zeros(filters, dtype=kernel.dtype))
    return torch.cat(kernels), torch.cat(biases)


def _split(way: Alternative, one: MergedConvolution) -> Alternative:
    """The same way with its one result in parts."""
    filters = list(one.filters)

    def run(args: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.split(way.run(args)[0], filters, 1)

    def run_into(args: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        whole = neighbours(outs)
        if whole is not None:
            way.run_into(args, (whole,))
            return
        for out, part in zip(outs, run(args), strict=True):
            out.copy_(part)

    return Alternative(way.name, run, run_into)


def neighbours(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor that the parts make up along axis 1, in the memory where they lie; None if they do not.

    Parts that do not overlap and follow each other by their channels leave no other element in between.
    """
    first = parts[0]
    offset = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.stride() != first.stride() or part.storage_offset() != offset:
            return None
        offset += part.shape[1] * part.stride(1)
    shape = (first.shape[0], sum(part.shape[1] for part in parts), *first.shape[2:])
    return first.as_strided(shape, first.stride(), first.storage_offset())
