"""What the protocol says of the server and of each model: metadata and configuration, in JSON's form.

Over gRPC the same values are put into messages of the same fields.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import structs

from stageloom.edge_agent.ingest.messages import ModelSignature, TensorInfo
from stageloom.edge_agent.serving.datatypes import PROTOCOL_NAMES
from stageloom.shared.version import __version__

PLATFORM: Final = "stageloom_plan"
_EXTENSIONS: Final = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
    "system_shared_memory",
)


def as_one(served: str, models: Sequence[ModelSignature]) -> ModelSignature:
    """Models of one name, each with shapes of its own, as one whose dimensions are open where they differ.

    Its version is the newest of theirs.
    """
    if len(models) == 1:
        return structs.replace(models[0], name=served)

    def hull(tensors: Sequence[TensorInfo]) -> TensorInfo:
        shapes = [shape for info in tensors for shape in (info.smallest or info.shape, info.shape)]
        low, high = (tuple(map(end, zip(*shapes, strict=True))) for end in (min, max))
        return TensorInfo(tensors[0].name, tensors[0].dtype, high, low)

    inputs = zip(*(model.inputs for model in models), strict=True)
    outputs = zip(*(model.outputs for model in models), strict=True)
    batchable = all(model.batchable for model in models)
    newest = versions_of(models)[-1]
    return ModelSignature(served, tuple(map(hull, inputs)), tuple(map(hull, outputs)), batchable, newest)


def versions_of(models: Sequence[ModelSignature]) -> list[int]:
    """The versions of models of one name, from the oldest: those of a set of shapes may differ."""
    return sorted({model.version for model in models})


def listed_names(models: Mapping[str, Sequence[ModelSignature]]) -> list[str]:
    """Names in lists of models: several of one name are one, not listed by their own names, too."""
    parts = {one.name for several in models.values() if len(several) > 1 for one in several}
    return sorted(models.keys() - parts)


def server_metadata() -> dict[str, Any]:
    """Name, version and extensions."""
    return {"name": "stageloom", "version": __version__, "extensions": list(_EXTENSIONS)}


def takes_batches(model: ModelSignature) -> bool:
    """Whether requests may have any number of rows: planned for one, and rows do not depend on each other."""
    tensors = (*model.inputs, *model.outputs)
    return model.batchable and all(tensor.shape[:1] == (1,) for tensor in tensors)


def model_metadata(model: ModelSignature) -> dict[str, Any]:
    """Inputs and outputs; -1 is an open dimension, as the first one of a model that takes batches."""
    batches = takes_batches(model)

    def tensor(info: TensorInfo) -> dict[str, Any]:
        shape = [-1, *open_as_minus_1(info)[1:]] if batches else open_as_minus_1(info)
        return {"name": info.name, "datatype": PROTOCOL_NAMES[info.dtype], "shape": shape}

    return {
        "name": model.name,
        "versions": [str(model.version)],
        "platform": PLATFORM,
        "inputs": [tensor(info) for info in model.inputs],
        "outputs": [tensor(info) for info in model.outputs],
    }


def model_config(model: ModelSignature, most_rows: int) -> dict[str, Any]:
    """As Triton would have it in a config.pbtxt: dimensions without the batch's where there is one."""
    batches = takes_batches(model)

    def tensor(info: TensorInfo) -> dict[str, Any]:
        dims = open_as_minus_1(info)[1:] if batches else open_as_minus_1(info)
        return {"name": info.name, "data_type": f"TYPE_{PROTOCOL_NAMES[info.dtype]}", "dims": dims}

    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": "stageloom",
        "version_policy": {"specific": {"versions": [model.version]}},
        "max_batch_size": most_rows if batches else 0,
        "input": [tensor(info) for info in model.inputs],
        "output": [tensor(info) for info in model.outputs],
    }


def open_as_minus_1(info: TensorInfo) -> list[int]:
    """A tensor's dimensions, -1 for those that are open."""
    bounds = zip(info.shape if info.smallest is None else info.smallest, info.shape, strict=True)
    return [high if low == high else -1 for low, high in bounds]
