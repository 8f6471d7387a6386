"""Requests in JSON and binary data: what is taken, and that nothing else is taken, whatever comes."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.edge_agent.ingest.messages import ModelSignature, TensorInfo
from stageloom.edge_agent.serving.datatypes import NUMPY_NAMES
from stageloom.edge_agent.serving.grpc_form import parse_call
from stageloom.edge_agent.serving.json_form import from_json, parse_request, raw_call
from stageloom.edge_agent.serving.protocol import message
from stageloom.edge_agent.serving.regions import MemoryRegion, RegionTable
from stageloom.edge_agent.serving.request import InferenceCall, check_integers
from stageloom.shared.errors import InputError, StageloomError

BODY = np.arange(4, dtype=np.float32).tobytes()
_LARGEST = float(np.finfo(np.float32).max)


def _request(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    return {"inputs": [tensor | changes]}


def _parse(asked: Any, binary: bytes = BODY, header_length: int | None = -1) -> InferenceCall:
    header = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    length = len(header) if header_length == -1 else header_length
    return parse_request("m", "", memoryview(header + binary), length, _no_region)


def _no_region(name: str) -> MemoryRegion:
    return RegionTable().get(name)


def test_binary_data_is_looked_at_where_it_lies() -> None:
    call = _parse(_request())
    assert call.inputs[0].shape == (1, 4)
    assert np.array_equal(np.asarray(call.inputs[0].elements), [[0, 1, 2, 3]])
    assert not np.asarray(call.inputs[0].elements).flags.owndata


@pytest.mark.parametrize(
    ("changes", "binary", "message"),
    [
        ({"shape": [1, 5]}, BODY, "has 16 bytes, 20 expected"),
        ({"shape": [2**40, 2**40]}, BODY, "has 16 bytes"),
        ({"shape": [-1, -4]}, BODY, "impossible shape"),
        ({"shape": [2**41]}, BODY, "impossible shape"),
        ({"shape": [1] * 33}, BODY, "impossible shape"),
        ({"shape": [1.5]}, BODY, "failed to parse"),
        ({"parameters": {"binary_data_size": 17}}, BODY, "16 bytes are left"),
        ({"parameters": {"binary_data_size": -1}}, BODY, "binary_data_size"),
        ({"parameters": {"binary_data_size": 2**70}}, BODY, "binary_data_size"),
        ({"parameters": {"binary_data_size": True}}, BODY, "binary_data_size"),
        ({"parameters": {"binary_data_size": "16"}}, BODY, "binary_data_size"),
        ({}, BODY + b"x", "1 bytes follow that belong to no input"),
        ({}, b"", "0 bytes are left"),
        ({"parameters": {}}, b"", "in 0 places"),
        ({"data": [1, 2, 3, 4]}, BODY, "in 2 places"),
        ({"datatype": "BYTES"}, BODY, "is none that a model takes"),
        ({"datatype": "float32"}, BODY, "is none that a model takes"),
        (
            {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 16}},
            b"",
            "Unable to find shared memory region: 'r'",
        ),
        ({"parameters": {"shared_memory_region": 7}}, b"", "a name and two whole numbers"),
    ],
)
def test_tensors_that_do_not_fit_their_bytes_are_refused(
    changes: dict[str, Any], binary: bytes, message: str
) -> None:
    with pytest.raises(StageloomError, match=message):
        _parse(_request(**changes), binary)


@pytest.mark.parametrize(
    ("header", "length", "message"),
    [
        (b"", 0, "failed to parse"),
        (b"{}", 2, "inputs"),
        (b'{"inputs": 7}', 13, "failed to parse"),
        (b"[" * 100_000, 100_000, "failed to parse"),
        (b'{"inputs": []}', 99, "is 99, the body has 14 bytes"),
        (b'{"inputs": []}', 7, "failed to parse"),
        (b'{"inputs": [], "parameters": {"timeout": -1}}', None, "'timeout' is no whole number"),
        (b'{"inputs": [], "parameters": {"timeout": 1.5}}', None, "'timeout' is no whole number"),
        (b'{"inputs": [], "parameters": {"priority": "1"}}', None, "'priority' is no whole number"),
        (b'{"inputs": [], "parameters": {"binary_data_output": 1}}', None, "is no boolean"),
        (b'{"inputs": [], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}', None, "no boolean"),
    ],
)
def test_headers_that_are_no_request_are_refused(header: bytes, length: int | None, message: str) -> None:
    with pytest.raises(StageloomError, match=message):
        _parse(header, b"", length)


PINNED = TensorInfo("x", "float32", (1, 4))


def _raw(*inputs: TensorInfo) -> InferenceCall:
    return raw_call(ModelSignature("m", inputs, (PINNED,)), "2", memoryview(BODY))


@pytest.mark.parametrize("info", [PINNED, TensorInfo("x", "float32", (1, 9), (1, 2))])
def test_a_body_without_json_is_the_one_input_in_the_shape_that_its_bytes_leave(info: TensorInfo) -> None:
    call = _raw(info)
    (given_input,) = call.inputs
    assert (given_input.name, given_input.datatype, given_input.shape) == ("x", "FP32", (1, 4))
    assert np.array_equal(np.asarray(given_input.elements), [[0, 1, 2, 3]])
    assert (call.model, call.version, call.outputs, call.binary) == ("m", "2", None, True)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], r"takes \[\]; send JSON before"),
        ([PINNED, PINNED], r"takes \[\[1, 4\], \[1, 4\]\]; send JSON before"),
        ([TensorInfo("x", "float32", (0, 4), (0, 2))], r"takes \[\[0, -1\]\]; send JSON before"),
        ([TensorInfo("x", "float32", (2, 4), (1, 2))], r"takes \[\[-1, -1\]\]; send JSON before"),
        ([TensorInfo("x", "float32", (1, 5))], r"has 16 bytes, 20 expected for FP32 \[1, 5\]"),
        ([TensorInfo("x", "float32", (9, 3), (1, 3))], r"has 16 bytes, 12 expected for FP32 \[1, 3\]"),
    ],
)
def test_a_body_without_json_that_says_no_shape_is_refused(inputs: list[TensorInfo], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _raw(*inputs)


def test_timeout_is_in_microseconds_and_priority_one_is_the_highest() -> None:
    def asked(**parameters: int) -> InferenceCall:
        return _parse(_request() | {"parameters": parameters})

    assert asked(timeout=2_500_000).deadline_s == 2.5
    assert asked(timeout=0).deadline_s is None
    assert asked(timeout=2**64).deadline_s == 1e9
    ranks = [asked(priority=number).priority for number in (1, 2, 3, 2**31, 2**64 - 1)]
    assert ranks == sorted(ranks, reverse=True)
    assert asked(priority=0).priority == asked().priority == 0 <= ranks[-1]


@pytest.mark.parametrize(
    ("datatype", "text", "expected"),
    [
        ("FP32", "[1, 2.5, -0.0, 1e-50]", [1.0, 2.5, -0.0, 0.0]),
        ("FP32", "[3.4028235e38, -3.4028235e38, 3.4028235677e38, 0]", [_LARGEST, -_LARGEST, _LARGEST, 0.0]),
        ("FP32", "[[1, 2], [3, 4]]", [1.0, 2.0, 3.0, 4.0]),
        ("FP64", "[1e308, -1e308, 5e-324, 0]", [1e308, -1e308, 5e-324, 0.0]),
        ("INT64", "[9223372036854775807, -9223372036854775808, 0, 1]", [2**63 - 1, -(2**63), 0, 1]),
        ("UINT64", "[18446744073709551615, 0, 1, 2]", [2**64 - 1, 0, 1, 2]),
        ("INT8", "[127, -128, 0, 1]", [127, -128, 0, 1]),
        ("BOOL", "[true, false, true, true]", [True, False, True, True]),
    ],
)
def test_json_numbers_are_taken_exactly(datatype: str, text: str, expected: list[Any]) -> None:
    found = from_json("x", datatype, (4,), text.encode())
    assert found.dtype == np.dtype(NUMPY_NAMES[datatype])
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("datatype", "text"),
    [
        ("FP32", "[1, 2, 3]"),
        ("FP32", "[1, 2, 3, 4, 5]"),
        ("FP32", "[3.5e38, 0, 0, 0]"),
        ("FP32", "[0, 0, 0, -3.4028236e38]"),
        ("FP32", "[1e999, 0, 0, 0]"),
        ("FP32", "[NaN, 0, 0, 0]"),
        ("FP32", '["1", 0, 0, 0]'),
        ("FP32", "[true, 0, 0, 0]"),
        ("FP32", "[null, 0, 0, 0]"),
        ("FP32", "[[1, 2], 3, 4]"),
        ("FP32", "[[1, 2], [3]]"),
        ("FP32", '{"a": 1}'),
        ("FP32", "7"),
        ("INT8", "[128, 0, 0, 0]"),
        ("INT32", "[1.5, 0, 0, 0]"),
        ("INT32", "[1.0, 0, 0, 0]"),
        ("INT32", "[true, 0, 0, 0]"),
        ("UINT8", "[-1, 0, 0, 0]"),
        ("UINT64", "[18446744073709551616, 0, 0, 0]"),
        ("BOOL", "[1, 0, 1, 0]"),
        ("FP16", "[1, 2, 3, 4]"),
    ],
)
def test_json_numbers_that_the_type_does_not_hold_are_refused(datatype: str, text: str) -> None:
    with pytest.raises(StageloomError):
        from_json("x", datatype, (4,), text.encode())


@pytest.mark.parametrize(
    ("datatype", "numbers", "holds"),
    [
        ("INT8", [0, 128], "-128 to 127"),
        ("INT8", [-129, 0], "-128 to 127"),
        ("UINT16", [65536], "0 to 65535"),
        ("UINT32", [-1], "0 to 4294967295"),
        ("INT64", [2**63], "-9223372036854775808 to 9223372036854775807"),
        ("UINT64", [10**5000], "0 to 18446744073709551615"),
    ],
)
def test_whole_numbers_are_compared_with_their_type_whatever_numpy_would_make_of_them(
    datatype: str, numbers: list[int], holds: str
) -> None:
    expected = f"input 'x' goes beyond {datatype}, which holds {holds}"
    with pytest.raises(InputError, match=expected):
        check_integers("x", datatype, numbers)


@pytest.mark.parametrize(
    ("datatype", "numbers"), [("INT8", [-128, 127]), ("UINT64", [0, 2**64 - 1]), ("INT32", []), ("BOOL", [2])]
)
def test_numbers_that_a_type_holds_pass_the_comparison(datatype: str, numbers: list[int]) -> None:
    check_integers("x", datatype, numbers)


def test_json_numbers_beyond_their_type_are_refused_with_the_range() -> None:
    with pytest.raises(InputError, match="input 'x' goes beyond UINT8, which holds 0 to 255"):
        from_json("x", "UINT8", (2,), b"[[256], [0]]")


@pytest.mark.parametrize(("datatype", "field", "number"), [("INT8", "int", -129), ("UINT16", "uint", 65536)])
def test_typed_contents_beyond_their_type_are_refused_with_the_range(
    datatype: str, field: str, number: int
) -> None:
    asked = message("ModelInferRequest")(model_name="m")
    tensor = asked.inputs.add(name="x", datatype=datatype, shape=[2])
    getattr(tensor.contents, f"{field}_contents").extend([0, number])
    with pytest.raises(InputError, match=f"input 'x' goes beyond {datatype}, which holds"):
        parse_call(asked, _no_region)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
TENSOR = st.fixed_dictionaries(
    {"name": st.sampled_from(["x", "y"]) | JSON, "shape": st.lists(st.integers(-3, 9), max_size=4) | JSON},
    optional={
        "datatype": st.sampled_from([*NUMPY_NAMES, "BYTES"]) | JSON,
        "data": st.lists(st.integers() | st.floats(), max_size=6) | JSON,
        "parameters": st.dictionaries(
            st.sampled_from(["binary_data_size", "shared_memory_region", "shared_memory_offset"]), JSON
        )
        | st.fixed_dictionaries({"binary_data_size": st.integers(-5, 50)})
        | JSON,
    },
)


@given(
    asked=st.fixed_dictionaries(
        {"inputs": st.lists(TENSOR, max_size=3) | JSON},
        optional={"outputs": st.lists(TENSOR, max_size=2) | JSON, "parameters": JSON, "id": JSON},
    ),
    binary=st.binary(max_size=64),
    shift=st.integers(-4, 4) | st.sampled_from([-(2**70), 2**70, None]),
)
@pytest.mark.promise("serving-parser-refuses")
def test_whatever_comes_is_a_request_or_refused(asked: Any, binary: bytes, shift: int | None) -> None:
    header = msgspec.json.encode(asked)
    length = None if shift is None else len(header) + shift
    try:
        call = parse_request("m", "", memoryview(header + binary), length, _no_region)
    except StageloomError:
        return
    for one in call.inputs:
        array = np.asarray(one.elements)
        assert array.shape == one.shape
        assert array.dtype == np.dtype(NUMPY_NAMES[one.datatype]) or one.datatype == "BF16"


@given(st.binary(max_size=200), st.integers(0, 200))
@pytest.mark.promise("serving-parser-refuses")
def test_bytes_that_are_no_request_are_refused(body: bytes, length: int) -> None:
    with pytest.raises(StageloomError):
        parse_request("m", "", memoryview(body), length, _no_region)
