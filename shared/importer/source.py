"""Read a model file and its external data, before any library follows a path in it.

onnxruntime follows links and hard links in external data. Here a location must be a relative path of plain
names. Every component is opened without following links, the file must be regular with exactly one name, and
the range must lie inside it. The bytes are embedded, so the bytes that were checked are those that are used.
"""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import onnx
from google.protobuf.message import DecodeError as ProtobufDecodeError
from onnx import AttributeProto, TensorProto

from stageloom.shared.errors import ModelError, NotNow
from stageloom.shared.importer.nodes import nodes_within, tensors_in
from stageloom.shared.importer.process import OF_ONE_PROTOBUF, ImportLimits, require_model_file

_KEEP_DATA_IN_FOLDER = "keep external data in plain files beside the model, or embed it"


def read_model(path: Path, limits: ImportLimits) -> onnx.ModelProto:
    """Parse the file and embed its external data.

    Raises:
        ModelError: it is no ONNX model, or its external data breaks the rules; `NotNow` if it cannot be read.
    """
    require_model_file(path, limits)
    try:
        return _read(path, limits)
    except OSError as error:  # otherwise it would be taken for one of the folder that is written
        raise NotNow(
            f"cannot read {path.name} with its external data: {error.strerror or error}",
            remedy="see that this account may read them, and that their disk works",
        ) from error


def _read(path: Path, limits: ImportLimits) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except (ProtobufDecodeError, ValueError) as error:
        raise ModelError(
            f"{path.name} is truncated or no ONNX file", remedy="export or copy the model again"
        ) from error
    if not model.graph.node and not model.graph.output:
        raise ModelError(f"{path.name} holds no graph", remedy="export or copy the model again")
    _embed_external_data(model, path.parent, path.stat().st_size, limits)
    return model


def tensors_of(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Yield every stored tensor: weights, attributes and sparse parts, also in sub-graphs and functions."""
    graphs = [model.graph]
    nodes = [*nodes_within(model.graph)]
    for function in model.functions:
        for node in function.node:
            nodes.append(node)
            for attribute in node.attribute:
                for graph in (attribute.g, *attribute.graphs):
                    graphs.append(graph)
                    nodes.extend(nodes_within(graph))
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                graphs.append(attribute.g)
            graphs.extend(attribute.graphs)
            yield from tensors_in(attribute)
    for graph in graphs:
        yield from graph.initializer
        for tensor in graph.sparse_initializer:
            yield from (tensor.values, tensor.indices)


def _embed_external_data(model: onnx.ModelProto, folder: Path, used: int, limits: ImportLimits) -> None:
    for tensor in tensors_of(model):
        if tensor.data_location != TensorProto.EXTERNAL and not tensor.external_data:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        data = _read_range(folder, entries, tensor.name, limits.file_bytes - used)
        used += len(data)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.raw_data = data


def _read_range(folder: Path, entries: dict[str, str], name: str, budget: int) -> bytes:
    """Read the bytes that a tensor's external data names."""
    location = entries.get("location", "")
    try:
        offset = int(entries.get("offset", "0") or "0")
        length = int(entries["length"]) if entries.get("length") else None
    except ValueError as error:
        raise _refused(name, location, "its offset or length is no number") from error
    with os.fdopen(_open_beside(folder, location, name), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _refused(name, location, "it is not a regular file")
        if status.st_nlink != 1:
            raise _refused(name, location, f"it is a hard link, the file has {status.st_nlink} names")
        end = status.st_size if length is None else offset + length
        if offset < 0 or end < offset or end > status.st_size:
            raise _refused(name, location, f"bytes {offset} to {end} lie outside its {status.st_size} bytes")
        if end - offset > budget:
            raise ModelError(
                f"model and external data exceed the limit of file_bytes with {location[:80]!r}",
                remedy=OF_ONE_PROTOBUF,
            )
        file.seek(offset)
        data = file.read(end - offset)
    if len(data) != end - offset:
        raise _refused(name, location, "it shrank while it was read")
    return data


def _open_beside(folder: Path, location: str, name: str) -> int:
    """Open `location` inside `folder` without following any link."""
    parts = PurePosixPath(location).parts
    if not location or "\0" in location or "\\" in location:
        raise _refused(name, location, "it is not a plain relative path")
    if location.startswith("/"):
        raise _refused(name, location, "it is an absolute path")
    if ".." in parts or not parts:
        raise _refused(name, location, "it leaves the model's folder")
    # O_PATH: a folder on the way need not be listed, so search permission on it is enough.
    way = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    opened = os.open(folder, way)
    try:
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            # O_NONBLOCK: a fifo must not block the open; its type is refused afterwards.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK if last else way
            inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=opened)
            os.close(opened)
            opened = inner
    except OSError as error:
        os.close(opened)
        # A link fails with ELOOP, one in place of a directory with ENOTDIR.
        linked = error.errno in (errno.ELOOP, errno.ENOTDIR)
        reason = "it goes through a link" if linked else f"it cannot be opened: {error.strerror}"
        raise _refused(name, location, reason) from error
    return opened


def _refused(name: str, location: str, why: str) -> ModelError:
    return ModelError(
        f"external data {location[:120]!r} of tensor {name[:80]!r} is refused: {why}",
        remedy=_KEEP_DATA_IN_FOLDER,
    )
