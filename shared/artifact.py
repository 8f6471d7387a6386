"""The artifact: one content-addressed blob that holds a model's graph and its normalised ONNX file.

Layout: `MAGIC`, the length of the graph part (4 bytes, big endian), the graph as canonical msgpack, the ONNX
file to the end. The artifact's digest is the digest of the whole blob, so it can be checked while it streams.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import msgpack

from stageloom.shared.digest import canonical, digest_bytes
from stageloom.shared.errors import DecodeError, ModelError
from stageloom.shared.graph import Graph, graph_from_wire, graph_to_wire
from stageloom.shared.ids import Digest
from stageloom.shared.text import counted

MAGIC = b"STGLOOM1"
MAX_GRAPH_BYTES = 8 << 20  # decoding lists costs up to 72 bytes of memory per byte
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Artifact:
    """A model ready to run: what to run (`graph`) and where the normalised ONNX bytes lie inside `path`."""

    digest: Digest
    graph: Graph
    path: Path
    onnx_offset: int
    size: int

    def onnx_bytes(self) -> bytes:
        """The normalised ONNX file."""
        with self.path.open("rb") as file:
            file.seek(self.onnx_offset)
            return file.read()


def pack_artifact(graph: Graph, onnx_bytes: bytes) -> tuple[Digest, bytes]:
    """The blob and its digest.

    Raises:
        ModelError: the graph is too large.
    """
    blob = b"".join([_head(graph), onnx_bytes])
    return digest_bytes([blob]), blob


def write_artifact(path: Path, graph: Graph, onnx_bytes: bytes) -> Digest:
    """Write the blob to `path` without joining it in memory first; returns its digest.

    Raises:
        ModelError: the graph is too large.
    """
    head = _head(graph)
    with path.open("wb") as file:
        file.write(head)
        file.write(onnx_bytes)
        file.flush()
        os.fsync(file.fileno())
    return digest_bytes([head, onnx_bytes])


def require_room(graph: Graph) -> None:
    """Refuse a graph that no artifact can hold, before time goes into it.

    Raises:
        ModelError: it is too large.
    """
    _head(graph)


def _head(graph: Graph) -> bytes:
    part = canonical(graph_to_wire(graph))
    if len(part) > MAX_GRAPH_BYTES:
        raise ModelError(
            f"unsupported: the graph of {counted(len(graph.operators), 'operator')} takes {len(part)} bytes,"
            f" the limit is {MAX_GRAPH_BYTES}",
            remedy="export the model with shorter names of tensors, or split it",
        )
    return b"".join([MAGIC, len(part).to_bytes(4, "big"), part])


def file_digest(path: Path) -> Digest:
    """Digest of a file's bytes, streamed."""
    with path.open("rb") as file:
        return digest_bytes(iter(lambda: file.read(_CHUNK_BYTES), b""))


def open_artifact(path: Path, expected: Digest | None = None) -> Artifact:
    """Read the graph of an artifact file; the ONNX part stays on disk.

    Raises:
        DecodeError: the file is no artifact, its graph is broken or not in canonical form, or its digest is
            not `expected`.
    """
    digest = file_digest(path)
    if expected is not None and digest != expected:
        raise DecodeError(
            f"artifact {expected[:12]} in {path.name} has the digest {digest[:12]}", remedy="fetch it again"
        )
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise DecodeError(f"{path.name} is not an artifact", remedy="import the ONNX file instead")
        length = int.from_bytes(file.read(4), "big")
        if length > MAX_GRAPH_BYTES:
            raise DecodeError(
                f"the graph in {path.name} claims {length} bytes", remedy="import the model again"
            )
        head = file.read(length)
    if len(head) != length:
        raise DecodeError(f"{path.name} ends inside its graph", remedy="fetch it again")
    offset, size = len(MAGIC) + 4 + length, path.stat().st_size
    graph = replace(_decode_graph(head, path.name), file_bytes=size - offset)
    return Artifact(digest, graph, path, offset, size)


def _decode_graph(head: bytes, file_name: str) -> Graph:
    try:
        graph = graph_from_wire(msgpack.unpackb(head, strict_map_key=True, max_map_len=0))
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise DecodeError(f"{file_name}: {str(error)[:200]}", remedy="import the model again") from error
    if canonical(graph_to_wire(graph)) != head:
        raise DecodeError(
            f"the graph in {file_name} is not in canonical form", remedy="import the model again"
        )
    return graph
