"""Tensors between the host and a plan's memory: the tasks' inputs, outputs, and what a tap wants to see."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from stageloom.edge_agent.executor.base import Rows
from stageloom.edge_agent.executor.on_device.host_memory import HostMemory, pieces_of
from stageloom.edge_agent.executor.onnx_cuda.device import OrtDevice, Stream
from stageloom.edge_agent.executor.onnx_cuda.memory import PlanMemory
from stageloom.edge_agent.executor.onnx_cuda.recipe import Recipe, Value
from stageloom.shared.bound import BoundModel, BoundPlan
from stageloom.shared.engine.steps import StepMember
from stageloom.shared.ids import TensorId

Lent = list[np.ndarray]
"""Pieces of host memory that a step holds until it has ended."""


@dataclass(frozen=True)
class HostTensors:
    """Copies by way of memory that the device reaches by itself."""

    device: OrtDevice
    pieces: HostMemory[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", HostMemory(self.device.host_bytes))

    def reserve(self, bound: BoundPlan) -> None:
        """Have the memory that a plan's steps need."""
        for size, count in pieces_of(bound).items():
            self.pieces.reserve(size, count)

    def arrive(
        self,
        model: BoundModel,
        memory: PlanMemory,
        member: StepMember,
        bucket: int,
        rows: Rows,
        stream: Stream,
        lent: Lent,
    ) -> None:
        """Copy the tasks' rows to the slot; padding repeats real data, since zeros can be slow."""
        filled = [*rows, *[rows[0]] * (bucket - len(rows))]
        for tensor in model.graph.inputs:
            arrays = [row[model.graph.tensors[tensor].name] for row in filled]
            host = self._array(model, tensor, bucket, lent)
            if bucket == 1:
                np.copyto(host, arrays[0])
            else:
                np.concatenate(arrays, out=host)
            self.device.copy(stream, memory.slot(member.member, tensor), host.ctypes.data, host.nbytes)

    def depart(
        self,
        model: BoundModel,
        memory: PlanMemory,
        member: StepMember,
        recipe: Recipe,
        stream: Stream,
        lent: Lent,
    ) -> dict[str, np.ndarray]:
        """Copy what crosses the border behind the block to the host, by name; it is there with the event."""
        arrays = {}
        for tensor in model.blocks[member.member.block].live_out:
            value = Value(member.position, tensor, in_slot=False)
            if not (member.last and value in recipe.offsets):
                value = value._replace(in_slot=True)
            host = self._array(model, tensor, len(member.tasks), lent)
            self.device.copy(stream, host.ctypes.data, memory.address(recipe, value), host.nbytes)
            arrays[model.graph.tensors[tensor].name] = host
        return arrays

    def _array(self, model: BoundModel, tensor: TensorId, rows: int, lent: Lent) -> np.ndarray:
        """Memory for some rows of a tensor. [rows, ...]"""
        described = model.graph.tensors[tensor]
        piece = self.pieces.take(model.plan.batch * described.nbytes)
        lent.append(piece)
        if model.plan.batch == 1:
            return piece.view(described.dtype).reshape(described.shape)
        used = piece[: rows * described.nbytes]
        return used.view(described.dtype).reshape(rows, *described.shape[1:])

    def give_back(self, lent: Lent) -> None:
        """The step has ended."""
        for piece in lent:
            self.pieces.give(piece.nbytes, piece)
        lent.clear()


def split_rows(model: BoundModel, tasks: int, arrays: Mapping[str, np.ndarray]) -> Rows:
    """Per task its outputs, copied, each with the graph's batch-1 shape."""
    own = {name: array.copy() for name, array in arrays.items()}
    if model.plan.batch == 1:
        return [own]
    return [{name: array[row : row + 1] for name, array in own.items()} for row in range(tasks)]
