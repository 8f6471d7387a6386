"""A model with open dimensions through every client of a running agent."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from stageloom import Client
from stageloom.edge_agent.config import ModelFile
from stageloom.edge_agent.serving.settings import ServingSettings
from stageloom.shared.errors import TaskRefused
from stageloom.shared.importer.model_argument import parse_model
from tests.agent.process import AgentProcess
from tests.importer.open_models import LARGEST, SMALLEST, spans_inputs, write_spans
from tests.serving.served import Triton

NAMES = ("maps", "means", "rows")
SHAPES = [((1, 3, 8, 8), 1), ((4, 3, 64, 64), 16), ((2, 3, 17, 40), 5), ((1, 3, 8, 64), 9)]
RANGES = "1..4x3x8..64x8..64"


def _asked(triton: Triton, inputs: dict[str, Any]) -> list[Any]:
    return [triton.input("x", inputs["x"]), triton.input("ids", inputs["ids"], "INT64")]


def _equal(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(np.array_equal(found[name], wanted[name]) for name in NAMES)


@pytest.mark.promise("open-dimensions")
@pytest.mark.promise("shape-sets")
def test_every_client_gets_the_bits_of_the_file_in_every_shape(tmp_path: Path, shm_file: Path) -> None:
    """1. Shapes in range, natively, HTTP and gRPC. 2. Into shared memory. 3. Others. 4. Sets of sizes."""
    file = write_spans(tmp_path / "spans.onnx")
    plain = onnxruntime.InferenceSession(file)
    spans = ModelFile(path=str(file), name="spans", shapes=LARGEST, smallest=SMALLEST)
    sizes = [
        ModelFile(path=str(file), name=one.called, version=version, shapes=one.largest)
        for version, one in zip(
            (2, 3), parse_model(f"sizes={file}:x={{1,2}}x3x8x{{8,16}},ids=4").each(), strict=True
        )
    ]
    serving = ServingSettings(http="127.0.0.1:0", grpc="127.0.0.1:0")
    with AgentProcess(tmp_path / "home", models=(spans, *sizes), executor="onnx", serving=serving) as agent:
        agent.until(
            lambda status: status.ready and status.serving and status.serving.http and status.serving.grpc,
            "HTTP and gRPC are served",
        )
        addresses = agent.now().serving
        assert addresses is not None
        tritons = [Triton("http", addresses.http), Triton("grpc", addresses.grpc)]
        cases = [spans_inputs(shape, ids, seed) for seed, (shape, ids) in enumerate(SHAPES)]
        wanted = [dict(zip(NAMES, plain.run(None, inputs), strict=True)) for inputs in cases]
        with Client(agent.socket) as native:
            # Twice, and all at once: layouts of other shapes take turns in the same places.
            futures = [native.submit("spans", inputs) for inputs in cases * 2]
            assert all(_equal(f.result(60), w) for f, w in zip(futures, wanted * 2, strict=True))
            for triton in tritons:
                for inputs, made in zip(cases, wanted, strict=True):
                    answer = triton.client.infer("spans", _asked(triton, inputs))
                    assert _equal({name: answer.as_numpy(name) for name in NAMES}, made)
            _answers_json(addresses.http, cases[2], wanted[2])
            _into_shared_memory(tritons[1], shm_file.name, cases[2], wanted[2]["maps"])
            for triton in tritons:
                _refuses_other_shapes(triton)
                _says_what_is_open(triton)
            _routes_by_shape(native, tritons, plain)
            with pytest.raises(TaskRefused, match=f"input 'x' of 'spans' is {RANGES}, not 5x3x8x8"):
                native.run("spans", spans_inputs((5, 3, 8, 8), 1), timeout_s=60)
        for triton in tritons:
            triton.close()


def _routes_by_shape(native: Client, tritons: list[Triton], plain: Any) -> None:
    """Two models of one name: each takes tasks of its own shape, and clients see one with open dimensions."""
    for shape, version in (((1, 3, 8, 8), "2"), ((2, 3, 8, 16), "3")):
        inputs = spans_inputs(shape, 4)
        wanted = dict(zip(NAMES, plain.run(None, inputs), strict=True))
        assert _equal(native.run("sizes", inputs, timeout_s=60), wanted)
        for triton in tritons:
            for asked in ("", version):
                answer = triton.client.infer("sizes", _asked(triton, inputs), model_version=asked)
                assert _equal({name: answer.as_numpy(name) for name in NAMES}, wanted)
                assert triton.json(answer.get_response())["model_version"] == version
            with pytest.raises(InferenceServerException, match=r"model 'sizes--.*' takes"):
                triton.client.infer("sizes", _asked(triton, inputs), model_version="23".replace(version, ""))
            found = triton.json(triton.client.get_inference_statistics("sizes", version))["model_stats"]
            counts = [
                (one["name"], one["version"], int(one["inference_stats"]["success"]["count"]))
                for one in found
            ]
            assert counts == [("sizes", version, 2 if triton.kind == "http" else 4)]
    other = spans_inputs((1, 3, 8, 16), 4)
    with pytest.raises(
        TaskRefused,
        match=r"does not take x 1x3x8x16, ids 4; it takes x: .* 1x3x8x8.* or it takes x: .* 2x3x8x16",
    ):
        native.run("sizes", other, timeout_s=60)
    assert sorted(native.models()) == ["sizes--1x3x8x8", "sizes--2x3x8x16", "spans"]
    for triton in tritons:
        with pytest.raises(InferenceServerException, match=r"\[1, 3, 8, 8\].* or .*\[2, 3, 8, 16\]"):
            triton.client.infer("sizes", _asked(triton, other))
        found = triton.json(triton.client.get_model_metadata("sizes"))
        assert [[int(dim) for dim in one["shape"]] for one in found["inputs"]] == [[-1, 3, 8, -1], [4]]
        assert triton.client.is_model_ready("sizes")
        index = triton.json(triton.client.get_model_repository_index())
        listed = [
            (one["name"], one["version"]) for one in (index["models"] if triton.kind == "grpc" else index)
        ]
        assert listed == [("sizes", "2"), ("sizes", "3"), ("spans", "1")]
        with pytest.raises(InferenceServerException, match="'sizes' version 1 is not at ready state"):
            triton.client.get_model_metadata("sizes", "1")


def _answers_json(address: str, inputs: dict[str, Any], wanted: dict[str, Any]) -> None:
    kinds = {"x": "FP32", "ids": "INT64"}
    given = [
        {"name": name, "shape": array.shape, "datatype": kinds[name], "data": array.ravel().tolist()}
        for name, array in inputs.items()
    ]
    body = json.dumps({"inputs": given}).encode()
    with urllib.request.urlopen(f"http://{address}/v2/models/spans/infer", body, timeout=60) as answer:
        made = {one["name"]: one for one in json.load(answer)["outputs"]}
    for name in NAMES:
        assert made[name]["shape"] == list(wanted[name].shape)
        assert np.array_equal(np.float32(made[name]["data"]), wanted[name].ravel())


def _into_shared_memory(triton: Triton, name: str, inputs: dict[str, Any], wanted: Any) -> None:
    region = shm.create_shared_memory_region("made", f"/{name}", wanted.nbytes)
    triton.client.register_system_shared_memory("made", f"/{name}", wanted.nbytes)
    output = triton.module.InferRequestedOutput("maps")
    output.set_shared_memory("made", wanted.nbytes)
    triton.client.infer("spans", _asked(triton, inputs), outputs=[output])
    assert np.array_equal(shm.get_contents_as_numpy(region, np.float32, wanted.shape), wanted)
    larger = spans_inputs((4, 3, 64, 64), 1)
    with pytest.raises(InferenceServerException, match="output 'maps' has 65536 bytes, its place"):
        triton.client.infer("spans", _asked(triton, larger), outputs=[output])
    triton.client.unregister_system_shared_memory("made")
    shm.destroy_shared_memory_region(region)


def _refuses_other_shapes(triton: Triton) -> None:
    for shape, ids in [((5, 3, 8, 8), 1), ((1, 3, 7, 8), 1), ((1, 4, 8, 8), 1), ((1, 3, 8, 8), 17)]:
        with pytest.raises(InferenceServerException, match=f"takes 'x' {RANGES}, 'ids' 1..16, not"):
            triton.client.infer("spans", _asked(triton, spans_inputs(shape, ids)))


def _says_what_is_open(triton: Triton) -> None:
    found = triton.json(triton.client.get_model_metadata("spans"))
    shapes = {one["name"]: [int(dim) for dim in one["shape"]] for one in found["inputs"] + found["outputs"]}
    assert shapes == {
        "x": [-1, 3, -1, -1],
        "ids": [-1],
        "maps": [-1, 4, -1, -1],
        "means": [-1, 4, 1, 1],
        "rows": [-1, 5],
    }
    config = triton.json(triton.client.get_model_config("spans"))
    dims = [[int(dim) for dim in one["dims"]] for one in config.get("config", config)["input"]]
    assert dims == [[-1, 3, -1, -1], [-1]]
