"""A model lowered to torch: one unit per operator of its graph.

How an executor uses it:

    device = torch.device("cuda")
    lowering = ModelLowering(artifact, device=device, precision=Precision.FP16, channels_last=True)
    lowered = lowering.at_batch(4)          # weights are shared with every other batch
    unit = lowered.units[op]                # per OpId; see `unit.Unit`
    use_tf32(lowering.precision is Precision.TF32)  # for the whole process
    unit.run_into([buffers[t] for t in unit.inputs], [buffers[t] for t in unit.outputs])

`lowered.specs[tensor]` gives shape, type and memory order of every tensor of the graph while running: float16
where the precision says so, channels last where convolutions want it; `lowered.allocate(tensor)` makes one.
Tasks feed and read float32, so an executor converts at the graph's inputs and outputs (`copy_` does).
`lowered.foreign` lists what runs in onnxruntime and why. CPU and CUDA take the same path.

`lowering.joined(batch, ops)` makes one unit of operators that run one after another on one stream: what
lies between them needs no buffer, and one kernel may do Conv, Add and Relu. `lowering.merged(batch, ops)`
makes one unit of a merge stage. Both are units like every other.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import onnx
import torch
from torch import Tensor

from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.lowering.batch import BatchLowering, LoweredModel, Parsed, ways
from stageloom.edge_agent.lowering.dtypes import Precision, Unsupported, numpy_from_tensor, tensor_from_numpy
from stageloom.edge_agent.lowering.node import Constant, WeightStore, known_constant, stored_constant
from stageloom.edge_agent.lowering.program import Alternative, KernelProgram, Unit
from stageloom.shared.artifact import Artifact
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import OpId
from stageloom.shared.importer.subgraph import merged_nodes, stacked_weights
from stageloom.shared.merge import MergedConvolution, merged

_PREFIX = "merged"


def merged_unit(parsed: Parsed, lowered: LoweredModel, ops: Sequence[OpId]) -> Unit:
    """Return operators that may merge as one convolution (IOS, section 3.2), with outputs in ascending order.

    The kernels are padded and stacked, and the result is split.

    `run` returns slices of one tensor; `run_into` writes without a copy where the buffers are neighbours
    along the channels, as inputs of one Concat are.

    Raises:
        ValueError: they may not merge.
        Unsupported: their weights are of a type that torch does not hold.
    """
    merge = merged(parsed.graph, ops)
    nodes = [[parsed.model.graph.node[i] for i in parsed.graph.operators[op].nodes] for op in merge.ops]
    weight, bias = _stacked(parsed, merge, nodes)
    key = ("merged", merge.ops)
    trace = parsed.trace(
        lowered.batch,
        {
            f"{_PREFIX}.kernels": known_constant((*key, "weight"), weight),
            f"{_PREFIX}.biases": known_constant((*key, "bias"), bias),
        },
    )
    source = parsed.name(merge.input)
    trace.add_input(source, lowered.specs[merge.input])
    body = merged_nodes(merge, nodes[0], source, _PREFIX)
    traced = [t for node in body if (t := trace.visit(node)) is not None]
    last = body[-1].output[0]
    program = KernelProgram(traced, [source], [last], trace)
    offered, _ = ways(program, traced, [source], [last], trace)
    return Unit(
        ops=merge.ops,
        inputs=(merge.input,),
        outputs=merge.outputs,
        input_specs=(lowered.specs[merge.input],),
        output_specs=tuple(lowered.specs[t] for t in merge.outputs),
        alternatives=tuple(_split(way, merge) for way in offered),
    )


def _stacked(
    parsed: Parsed, merge: MergedConvolution, nodes: Sequence[Sequence[onnx.NodeProto]]
) -> tuple[Tensor, Tensor]:
    kernels: list[np.ndarray] = []
    biases: list[np.ndarray | None] = []
    for own in nodes:
        names = [name for name in own[0].input[1:] if name]
        if any(name not in parsed.constants for name in names):
            raise Unsupported("weights of a type that torch does not hold")
        kernel, *bias = [numpy_from_tensor(parsed.constants[name].value) for name in names]
        kernels.append(kernel)
        biases.append(bias[0] if bias else None)
    weight, added = stacked_weights(merge, kernels, biases)
    return tensor_from_numpy(weight), tensor_from_numpy(added)


def _split(way: Alternative, merge: MergedConvolution) -> Alternative:
    """Return the alternative with its result split."""
    filters = list(merge.filters)

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
    """Return the tensor that adjacent parts form along axis 1; None if they are not adjacent in memory.

    Parts that do not overlap and follow each other by their channels leave no gap.
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


class ModelLowering:
    """An artifact on one device in one precision, with weights that all batches share. Thread-safe."""

    def __init__(
        self, artifact: Artifact, *, device: torch.device, precision: Precision, channels_last: bool
    ) -> None:
        self.artifact = artifact
        self.precision = precision
        self.channels_last = channels_last
        self.weights = WeightStore(device, precision)
        # The weights are parsed one at a time: on a Jetson they would lie in the device's memory twice more.
        parts = ModelParts(artifact)
        self._parsed = Parsed(
            graph=artifact.graph,
            model=parts.skeleton.model,
            constants=_constants(parts),
            parts=parts,
            store=self.weights,
            channels_last=channels_last,
        )
        self._batches: dict[int, BatchLowering] = {}
        self._several: dict[tuple[str, int, tuple[OpId, ...]], Unit] = {}
        self._lock = threading.RLock()

    def at_batch(self, batch: int) -> LoweredModel:
        """Return the units at this batch; kept for further calls.

        Raises:
            ExecutorError: an operator can neither be lowered nor run in onnxruntime.
            ModelError: the model runs with batch 1 only.
        """
        return self._batch(batch).lowered

    def joined(self, batch: int, ops: Sequence[OpId]) -> Unit:
        """Return operators that run in sequence on one stream as one unit; kept for further calls.

        Raises:
            ExecutorError: one of them runs in onnxruntime.
        """
        return self._made("joined", batch, tuple(sorted(ops)))

    def merged(self, batch: int, ops: Sequence[OpId]) -> Unit:
        """Return the operators of a merge stage as one unit; kept for further calls.

        Raises:
            ValueError: they may not merge.
            ExecutorError: their weights cannot be held.
        """
        return self._made("merged", batch, tuple(sorted(ops)))

    def _batch(self, batch: int) -> BatchLowering:
        with self._lock:
            if batch not in self._batches:
                self._batches[batch] = BatchLowering(self._parsed, batch)
                self._parsed.parts.release_pages()  # which the weights were read from
            return self._batches[batch]

    def _made(self, how: str, batch: int, ops: tuple[OpId, ...]) -> Unit:
        key = (how, batch, ops)
        with self._lock:
            if key not in self._several:
                lowering = self._batch(batch)
                try:
                    if how == "merged":
                        self._several[key] = merged_unit(self._parsed, lowering.lowered, ops)
                    else:
                        self._several[key] = lowering.joined(ops)
                except Unsupported as error:
                    raise ExecutorError(
                        f"operators {list(ops)} of {self.artifact.graph.name!r} cannot be {how}: {error}"
                    ) from error
            return self._several[key]


def _constants(parts: ModelParts) -> dict[str, Constant]:
    """Return the weights that torch can hold; operators that read others are not lowered."""
    constants = {}
    for proto in parts.weights():
        with suppress(Unsupported):
            constants[proto.name] = stored_constant(proto, partial(parts.parsed_weight, proto.name))
    return constants
