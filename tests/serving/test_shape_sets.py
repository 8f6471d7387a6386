"""What clients see of models that are pinned to several shapes; pure."""

import pytest

from stageloom.edge_agent.ingest.messages import ModelSignature, TensorInfo
from stageloom.edge_agent.ingest.signature import by_any_name, by_served_name
from stageloom.edge_agent.serving.models import (
    as_one,
    listed_names,
    model_config,
    model_metadata,
    versions_of,
)

pytestmark = pytest.mark.promise("shape-sets")


def _model(name: str, height: int, width: int, *, batchable: bool = True, version: int = 1) -> ModelSignature:
    return ModelSignature(
        name,
        (TensorInfo("x", "float32", (1, 3, height, width)),),
        (TensorInfo("y", "float32", (1, height, 10)),),
        batchable,
        version,
    )


def test_models_of_a_name_are_found_by_it_in_the_plans_order() -> None:
    wide, narrow, other = _model("net--1x3x8x64", 8, 64), _model("net--1x3x8x16", 8, 16), _model("a", 8, 8)
    assert by_served_name([wide, other, narrow]) == {"net": (wide, narrow), "a": (other,)}


def test_dimensions_that_differ_are_open_and_those_that_agree_are_not() -> None:
    sizes = [_model("net--1x3x8x64", 8, 64), _model("net--1x3x8x16", 8, 16)]
    found = model_metadata(as_one("net", sizes))
    assert found["name"] == "net"
    assert [found[side][0]["shape"] for side in ("inputs", "outputs")] == [[-1, 3, 8, -1], [-1, 8, 10]]
    config = model_config(as_one("net", sizes), 64)
    assert config["max_batch_size"] == 64
    assert [config[side][0]["dims"] for side in ("input", "output")] == [[3, 8, -1], [8, 10]]


def test_batches_are_promised_only_where_every_shape_takes_them() -> None:
    sizes = [_model("net--1x3x8x64", 8, 64), _model("net--1x3x8x16", 8, 16, batchable=False)]
    config = model_config(as_one("net", sizes), 64)
    assert config["max_batch_size"] == 0
    assert config["input"][0]["dims"] == [1, 3, 8, -1]


def test_one_of_a_set_is_called_as_the_set() -> None:
    assert as_one("net", [_model("net--1x3x8x8", 8, 8)]).name == "net"


def test_a_model_whose_own_name_looks_like_one_of_a_set_is_served_by_it() -> None:
    lone = _model("yolo--640", 8, 8)
    assert by_any_name([lone]) == {"yolo": (lone,), "yolo--640": (lone,)}


def test_models_that_differ_in_more_than_shapes_are_not_one() -> None:
    one, other = _model("net--1x3x8x8", 8, 8), _model("net--1x3x8x16", 8, 16)
    x, y = one.inputs[0], one.outputs[0]
    for inputs, outputs in (
        ((x, TensorInfo("more", "float32", (1,))), (y,)),
        ((TensorInfo("x", "int8", x.shape),), (y,)),
        ((x,), (TensorInfo("y", "float32", (1, 8)),)),
    ):
        stranger = ModelSignature("net--640", inputs, outputs)
        found = by_any_name([one, stranger, other])
        assert found["net"] == (one, other)
        assert found["net--640"] == (stranger,)
        assert listed_names(found) == ["net", "net--640"]
        assert all(as_one(name, models).name == name for name, models in found.items())


def test_a_set_has_the_version_of_its_models_and_the_newest_where_they_differ() -> None:
    older, newer = _model("net--1x3x8x64", 8, 64, version=2), _model("net--1x3x8x16", 8, 16, version=10)
    assert model_metadata(as_one("net", [older, _model("net--1x3x8x8", 8, 8, version=2)]))["versions"] == [
        "2"
    ]
    assert as_one("net", [newer, older]).version == 10
    assert versions_of([newer, older, newer]) == [2, 10]
