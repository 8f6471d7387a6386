"""Where the tensors of instances lie between their blocks: by memory node, arrays by reference.

Executors of one plan share a store. On one memory node tensors pass from block to block, and from executor to
executor, without a copy; another node has copies of its own, which a transfer makes.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeAlias

from stageloom.shared.engine.steps import InstanceId
from stageloom.shared.ids import TensorId

if TYPE_CHECKING:
    import numpy

Values: TypeAlias = "dict[TensorId, numpy.ndarray]"
"""Tensors of one instance, each with its batch along axis 0. [bucket, ...]"""

Transfer: TypeAlias = "Callable[[numpy.ndarray], numpy.ndarray]"
"""Copies a tensor from one memory node to another, on the calling thread."""

HOST: Final = 0
"""The node of inputs and outputs."""


def host_copy(array: "numpy.ndarray") -> "numpy.ndarray":
    """A copy, in pages that the calling thread touches first."""
    return array.copy()


class SlotStore:
    """Tensors by instance and memory node. Steps and copies of one instance come one after another."""

    def __init__(self, transfer: Transfer = host_copy) -> None:
        self.transfer = transfer
        self._of: dict[InstanceId, dict[int, Values]] = {}

    def __len__(self) -> int:
        """Instances that have tensors here."""
        return len(self._of)

    def put(self, instance: InstanceId, node: int, values: Values) -> None:
        """Keep new tensors on a node."""
        self._of.setdefault(instance, {}).setdefault(node, {}).update(values)

    def read(self, instance: InstanceId, node: int, tensors: Iterable[TensorId]) -> Values:
        """Tensors on a node; those that are not there are copied now and kept there.

        Raises:
            KeyError: the instance has no such tensor.
        """
        nodes = self._of[instance]
        here = nodes.get(node)
        if here is None:
            here = nodes[node] = {}
        found: Values = {}
        for tensor in tensors:
            array = here.get(tensor)
            if array is None:
                array = here[tensor] = self.transfer(_anywhere(nodes, tensor))
            found[tensor] = array
        return found

    def peek(self, instance: InstanceId, tensors: Iterable[TensorId]) -> Values:
        """Tensors from whatever node has them.

        Raises:
            KeyError: the instance has no such tensor.
        """
        nodes = self._of[instance]
        return {tensor: _anywhere(nodes, tensor) for tensor in tensors}

    def keep(self, instance: InstanceId, tensors: Iterable[TensorId]) -> None:
        """Forget all but these, on every node."""
        wanted = set(tensors)
        for values in self._of[instance].values():
            for tensor in values.keys() - wanted:
                del values[tensor]

    def drop(self, instance: InstanceId) -> None:
        """Forget an instance; one that is unknown is ignored."""
        self._of.pop(instance, None)


def _anywhere(nodes: dict[int, Values], tensor: TensorId) -> "numpy.ndarray":
    for values in nodes.values():
        if tensor in values:
            return values[tensor]
    raise KeyError(tensor)
