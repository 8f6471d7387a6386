"""Artifacts: round trip, golden bytes, and files that are something else."""

from pathlib import Path
from random import Random

import pytest

from stageloom.shared.artifact import (
    MAGIC,
    MAX_GRAPH_BYTES,
    file_digest,
    open_artifact,
    pack_artifact,
    write_artifact,
)
from stageloom.shared.digest import canonical, digest_bytes
from stageloom.shared.errors import DecodeError, ModelError
from stageloom.shared.graph import graph_to_wire
from tests.shared.randoms import random_graph
from tests.shared.test_graph import chain

GOLDEN = Path(__file__).parents[1] / "data/golden"
ONNX = b"\x08\x0a not really a model \x00\xff"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "artifact"


def write(path: Path, head: bytes, onnx: bytes = ONNX, *, length: int | None = None) -> Path:
    size = len(head) if length is None else length
    path.write_bytes(MAGIC + size.to_bytes(4, "big") + head + onnx)
    return path


@pytest.mark.parametrize("seed", range(20))
def test_an_artifact_gives_back_its_graph_and_its_onnx_bytes(seed: int, path: Path) -> None:
    random = Random(seed)
    graph, onnx = random_graph(random, random.randint(1, 12)), random.randbytes(random.randint(0, 200))
    digest, blob = pack_artifact(graph, onnx)
    path.write_bytes(blob)
    artifact = open_artifact(path, digest)
    assert (artifact.graph, artifact.onnx_bytes()) == (graph, onnx)
    assert (artifact.digest, artifact.size) == (digest, len(blob))
    assert digest == file_digest(path) == digest_bytes([blob])


@pytest.mark.promise("message-type-telemetry-row")
def test_golden_bytes_of_version_2_stay_readable(path: Path) -> None:
    head = (GOLDEN / "graph_2.bin").read_bytes()
    assert canonical(graph_to_wire(chain(3))) == head
    assert chain(3).digest == (GOLDEN / "graph_2.digest").read_text().strip()
    assert open_artifact(write(path, head)).graph == chain(3)
    assert path.read_bytes() == pack_artifact(chain(3), ONNX)[1]


def test_a_file_with_another_digest_is_refused(path: Path) -> None:
    digest, blob = pack_artifact(chain(3), ONNX)
    path.write_bytes(blob[:-1] + b"\x00")
    with pytest.raises(DecodeError, match="fetch it again"):
        open_artifact(path, digest)


def test_every_truncation_is_refused_or_cuts_only_the_onnx_part(path: Path) -> None:
    _, blob = pack_artifact(chain(2), b"")
    for size in range(len(blob)):
        path.write_bytes(blob[:size])
        with pytest.raises(DecodeError):
            open_artifact(path)


@pytest.mark.parametrize("seed", range(10))
def test_flipped_bits_are_refused_or_another_graph(seed: int, path: Path) -> None:
    random, head = Random(seed), canonical(graph_to_wire(chain(3)))
    for _ in range(60):
        flipped = bytearray(head)
        flipped[random.randrange(len(head))] ^= 1 << random.randrange(8)
        try:
            graph = open_artifact(write(path, bytes(flipped))).graph
        except DecodeError as error:
            assert len(str(error)) < 400
        else:
            assert canonical(graph_to_wire(graph)) == flipped


def test_another_encoding_of_the_same_graph_is_refused(path: Path) -> None:
    head = canonical(graph_to_wire(chain(3)))
    assert head[:2] == b"\x99\x02"
    with pytest.raises(DecodeError, match="canonical"):
        open_artifact(write(path, b"\x99\xcc\x02" + head[2:]))


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xc0",
        b"\x80",
        b"\x81\xa1a\x01",
        b"\x91" * 2_000_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc1",
        b"\xa2\xff\xff",
    ],
)
def test_bytes_that_are_no_graph_are_refused(head: bytes, path: Path) -> None:
    with pytest.raises(DecodeError):
        open_artifact(write(path, head))


def test_a_graph_that_claims_too_much_or_ends_early_is_refused(path: Path) -> None:
    head = canonical(graph_to_wire(chain(3)))
    with pytest.raises(DecodeError, match="claims"):
        open_artifact(write(path, head, length=MAX_GRAPH_BYTES + 1))
    with pytest.raises(DecodeError, match="ends inside"):
        open_artifact(write(path, head, b"", length=len(head) + 1))
    with pytest.raises(DecodeError, match="is not an artifact"):
        path.write_bytes(b"ONNX" * 10)
        open_artifact(path)


def test_a_graph_that_could_not_be_read_again_is_not_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stageloom.shared.artifact.MAX_GRAPH_BYTES", len(canonical(graph_to_wire(chain(3)))))
    write_artifact(path, chain(3), ONNX)
    open_artifact(path)
    path.unlink()
    with pytest.raises(ModelError, match="graph of 4 operators"):
        write_artifact(path, chain(4), ONNX)
    assert not path.exists()
