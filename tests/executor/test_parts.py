"""Sub-models written from a mapped artifact equal those that the importer extracts in memory."""

import os
import random

import onnx
import pytest

from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.shared.errors import ModelError
from stageloom.shared.ids import OpId
from stageloom.shared.importer.encoded import take_apart
from stageloom.shared.importer.subgraph import ModelSource
from tests.executor.models import artifact_of


def _written(parts: ModelParts, ops: tuple[int, ...], batch: int) -> onnx.ModelProto:
    fd = os.memfd_create("test")
    try:
        parts.write(fd, ops, batch)
        return onnx.ModelProto.FromString(os.pread(fd, os.fstat(fd).st_size, 0))
    finally:
        os.close(fd)


@pytest.mark.parametrize("name", ["squeezenet", "googlenet", "resnet50"])
@pytest.mark.parametrize("batch", [1, 4])
def test_parts_equal_the_importers_extraction(name: str, batch: int) -> None:
    artifact = artifact_of(name)
    parts, source = ModelParts(artifact), ModelSource.open(artifact)
    count = len(artifact.graph.operators)
    rng = random.Random(name)
    ranges = [sorted(rng.sample(range(count + 1), 2)) for _ in range(8)]
    for start, stop in [*ranges, [0, count], [0, 1]]:
        ops = tuple(range(start, stop))
        got = _written(parts, ops, batch)
        wanted = onnx.ModelProto.FromString(source.extract(map(OpId, ops), batch=batch).onnx_bytes)
        if len(ops) == count and batch == 1:
            wanted = onnx.ModelProto.FromString(artifact.onnx_bytes())
        assert got == wanted


@pytest.mark.parametrize("batch", [1, 4])
def test_a_sub_model_in_memory_is_the_importers_with_its_weights(batch: int) -> None:
    artifact = artifact_of("googlenet")
    wanted = ModelSource.open(artifact).extract(map(OpId, range(3, 9)), batch=batch)
    got = ModelParts(artifact).sub_model(range(3, 9), batch)
    assert onnx.ModelProto.FromString(got.onnx_bytes) == onnx.ModelProto.FromString(wanted.onnx_bytes)
    assert (got.inputs, got.outputs) == (wanted.inputs, wanted.outputs)
    weights = {weight.name: weight for weight in ModelParts(artifact).weights()}
    whole = onnx.ModelProto.FromString(artifact.onnx_bytes())
    assert weights == {weight.name: weight for weight in whole.graph.initializer}


def test_a_model_taken_apart_holds_no_weights_and_loses_none() -> None:
    artifact = artifact_of("squeezenet")
    model = artifact.onnx_bytes()
    skeleton, weights = take_apart(memoryview(model))
    whole = onnx.ModelProto.FromString(model)
    assert len(onnx.ModelProto.FromString(skeleton).graph.initializer) == 0
    assert {w.name: w.SerializeToString() for w in whole.graph.initializer} == {
        name: bytes(view) for name, view in weights.items()
    }


@pytest.mark.parametrize("broken", [b"\x3a", b"\x3a\x05\x2a", b"\x3b", b"\xff" * 12, b"\x3a\x02\x2a\x7f"])
def test_bytes_that_are_no_model_are_an_error_of_ours(broken: bytes) -> None:
    with pytest.raises(ModelError):
        take_apart(memoryview(broken))
