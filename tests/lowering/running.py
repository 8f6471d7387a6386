"""How lowered models are run unit by unit."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from stageloom.edge_agent.lowering.batch import LoweredModel
from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.edge_agent.lowering.model import ModelLowering
from stageloom.shared.artifact import Artifact
from stageloom.shared.ids import TensorId

CPU = torch.device("cpu")


def lowered(
    artifact: Artifact,
    *,
    batch: int = 1,
    channels_last: bool = True,
    precision: Precision = Precision.FP32,
    device: torch.device = CPU,
) -> tuple[ModelLowering, LoweredModel]:
    """A model lowered for the CPU, or another device."""
    lowering = ModelLowering(artifact, device=device, precision=precision, channels_last=channels_last)
    return lowering, lowering.at_batch(batch)


Execute = Callable[["LoweredModel", int, list[Tensor]], Sequence[Tensor]]


def by_run(model: LoweredModel, op: int, args: list[Tensor]) -> Sequence[Tensor]:
    """Outputs where torch puts them."""
    return model.units[op].run(args)


def by_run_into(model: LoweredModel, op: int, args: list[Tensor]) -> Sequence[Tensor]:
    """Outputs in buffers of ours, which hold rubbish before."""
    unit = model.units[op]
    outs = [model.allocate(t) for t in unit.outputs]
    for out in outs:
        out.fill_(torch.nan if out.is_floating_point() else 1)
    unit.run_into(args, outs)
    return outs


def run_model(
    artifact: Artifact,
    model: LoweredModel,
    inputs: Mapping[str, np.ndarray],
    execute: Execute = by_run,
) -> dict[str, np.ndarray]:
    """Every tensor of the graph by name, units run one after another; arguments must stay as they were."""
    values: dict[TensorId, Tensor] = {}
    with torch.inference_mode():
        for tensor in artifact.graph.inputs:
            values[tensor] = model.allocate(tensor)
            values[tensor].copy_(torch.from_numpy(inputs[artifact.graph.tensors[tensor].name]))
        for op, unit in enumerate(model.units):
            args = [values[t] for t in unit.inputs]
            before = [a.clone() for a in args]
            made = execute(model, op, args)
            assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True)), unit.ops
            for tensor, value in zip(unit.outputs, made, strict=True):
                assert tuple(value.shape) == model.specs[tensor].shape
                assert value.dtype == model.specs[tensor].dtype
                values[tensor] = value
    return {artifact.graph.tensors[t].name: v.float().cpu().numpy() for t, v in values.items()}
