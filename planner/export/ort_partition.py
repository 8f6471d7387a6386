"""A model's streams as onnxruntime's partition file (`session.node_partition_config_file`).

The file lists nodes of the model per logic stream, and the type of device of each stream. Without it
onnxruntime uses a stream per device. With parallel execution the streams of one device overlap.

Source: `DeviceBasedPartitioner` in onnxruntime/core/framework/allocation_planner.cc; what it reads and writes
was tried with 1.31 (tests/planner/test_export.py).
"""

from collections.abc import Sequence
from typing import Any, Final

from stageloom.shared.bound import BoundPlan
from stageloom.shared.errors import InputError

_CPU: Final = "0"
_GPU: Final = "1"
"""`OrtDevice`'s types."""


def partition(bound: BoundPlan, model: int, node_names: Sequence[str]) -> dict[str, Any]:
    """The JSON document for the normalised ONNX file of one model of the plan, in its first replica.

    `node_names`: of that file's nodes, in its order. Stream i holds what the plan's blocks run on their
    stream i, in the order of blocks; nodes of no operator are on stream 0, behind all.

    Raises:
        InputError: the model is split: both halves are the same nodes, which can be on one stream only.
    """
    if bound.models[model].origins:
        raise InputError(
            f"the plan splits operators of {bound.models[model].plan.name}, and onnxruntime's partition file "
            "has no halves of nodes",
            remedy="export a plan without splits",
        )
    graph = bound.models[model].graph
    streams: dict[tuple[str, int], list[str]] = {}
    placed: set[int] = set()
    for block in range(len(bound.models[model].blocks)):
        index, position = next(
            where
            for member, where in bound.home.items()
            if (member.model, member.replica, member.block) == (model, 0, block)
        )
        combined = bound.combined[index]
        device = _GPU if bound.executor_of(index).name.endswith("_cuda") else _CPU
        first = combined.graph.starts[position] - combined.graph.offsets[position]
        for item in bound.launches(index, 1 << position):
            nodes = [node for op in item.ops for node in graph.operators[first + op].nodes]
            streams.setdefault((device, item.stream), []).extend(node_names[node] for node in nodes)
            placed.update(nodes)
    rest = [name for node, name in enumerate(node_names) if node not in placed]
    if rest:
        streams.setdefault(min(streams, default=(_CPU, 0)), []).extend(rest)
    return {
        "type": "DeviceBasedPartitioner",
        "streams": [nodes for _, nodes in sorted(streams.items())],
        "devices": [device for device, _ in sorted(streams)],
    }
