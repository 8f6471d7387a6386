"""tritonclient as it comes from PyPI, over HTTP and gRPC, against a running agent: one test per call."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from stageloom import Client
from stageloom.shared.version import __version__
from tests.agent.process import AgentProcess
from tests.serving.served import KIND_SHAPE, KINDS, Triton, rows

pytestmark = pytest.mark.promise("open-inference-protocol")


def test_server_is_live(triton: Triton) -> None:
    assert triton.client.is_server_live()


def test_server_is_ready(triton: Triton) -> None:
    assert triton.client.is_server_ready()


def test_server_metadata(triton: Triton) -> None:
    found = triton.json(triton.client.get_server_metadata())
    assert (found["name"], found["version"]) == ("stageloom", __version__)
    assert {"binary_tensor_data", "system_shared_memory", "statistics"} <= set(found["extensions"])


def test_model_metadata(triton: Triton) -> None:
    found = triton.json(triton.client.get_model_metadata("tiny"))
    shapes = [[int(dim) for dim in tensor["shape"]] for tensor in (*found["inputs"], *found["outputs"])]
    assert shapes == [[-1, 3, 8, 8], [-1, 3, 8, 8]]
    assert found["versions"] == ["1"]
    assert [tensor["datatype"] for tensor in found["inputs"]] == ["FP32"]
    fixed = triton.json(triton.client.get_model_metadata("kinds", "1"))
    assert [[int(dim) for dim in one["shape"]] for one in fixed["inputs"]] == [list(KIND_SHAPE)] * len(KINDS)


def test_model_is_ready(triton: Triton) -> None:
    assert triton.client.is_model_ready("tiny")
    assert triton.client.is_model_ready("tiny", "1")
    assert not triton.client.is_model_ready("tiny", "2")
    assert not triton.client.is_model_ready("none")


def test_model_config(triton: Triton) -> None:
    found = triton.json(triton.client.get_model_config("tiny"))
    config = found.get("config", found)
    assert config["max_batch_size"] == 64
    assert config["input"] == [
        {"name": "input", "data_type": "TYPE_FP32", "dims": _as_transport(triton, [3, 8, 8])}
    ]
    fixed = triton.json(triton.client.get_model_config("kinds"))
    assert fixed.get("config", fixed).get("max_batch_size", 0) == 0


def _as_transport(triton: Triton, numbers: list[int]) -> list[Any]:
    """protobuf's JSON has 64-bit numbers as text."""
    return numbers if triton.kind == "http" else [str(number) for number in numbers]


def test_statistics_count_requests_rows_tasks_and_where_their_time_went(triton: Triton) -> None:
    def counts() -> tuple[dict[str, Any], int, int]:
        found = triton.json(triton.client.get_inference_statistics("tiny"))["model_stats"]
        assert [one["name"] for one in found] == ["tiny"]
        rows_and_tasks = (int(found[0].get(name, 0)) for name in ("inference_count", "execution_count"))
        return found[0]["inference_stats"], *rows_and_tasks

    triton.infer(rows(1))
    before, rows_before, tasks_before = counts()
    triton.infer(rows(3))
    with pytest.raises(InferenceServerException):
        triton.infer(rows(1), timeout=1)
    after, rows_after, tasks_after = counts()
    assert (rows_after - rows_before, tasks_after - tasks_before) == (3, 3)
    spent = {}
    for phase in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert int(after[phase]["count"]) == int(before[phase]["count"]) + 1
        spent[phase] = int(after[phase]["ns"]) - int(before[phase].get("ns", 0))
    assert int(after["fail"]["count"]) == int(before["fail"].get("count", 0)) + 1
    assert spent["compute_infer"] > 0
    assert abs(spent.pop("success") - sum(spent.values())) <= 5  # nanoseconds of rounding


def test_statistics_of_all_models(triton: Triton) -> None:
    found = triton.json(triton.client.get_inference_statistics())["model_stats"]
    assert [one["name"] for one in found] == ["divider", "kinds", "tiny"]


def test_repository_index(triton: Triton) -> None:
    found = triton.json(triton.client.get_model_repository_index())
    models = found["models"] if triton.kind == "grpc" else found
    assert [(one["name"], one["version"], one["state"]) for one in models] == [
        ("divider", "3", "READY"),
        ("kinds", "1", "READY"),
        ("tiny", "1", "READY"),
    ]


def test_a_model_is_served_as_the_version_that_it_is_and_as_no_other(triton: Triton) -> None:
    ours, others = "3", "1"
    metadata = triton.json(triton.client.get_model_metadata("divider", ours))
    assert metadata["versions"] == [ours]
    assert triton.client.is_model_ready("divider", ours)
    assert not triton.client.is_model_ready("divider", others)
    one = triton.input("x", np.full((1, 2), 4.0, np.float32))
    for asked in ("", ours):
        result = triton.client.infer("divider", [one], model_version=asked)
        assert triton.json(result.get_response())["model_version"] == ours
    found = triton.json(triton.client.get_inference_statistics("divider", ours))["model_stats"]
    assert [(model["name"], model["version"]) for model in found] == [("divider", ours)]
    with pytest.raises(InferenceServerException, match="'divider' version 1 is not at ready state"):
        triton.client.infer("divider", [one], model_version=others)


def test_load_of_a_model_that_is_served_is_fine(triton: Triton) -> None:
    triton.client.load_model("tiny")
    assert triton.client.is_model_ready("tiny")


def test_load_of_another_model_is_refused_by_what_decides(triton: Triton) -> None:
    with pytest.raises(InferenceServerException, match=r"failed to load 'none'.*plan create"):
        triton.client.load_model("none")
    with pytest.raises(InferenceServerException, match="configuration or files of its own") as caught:
        triton.client.load_model("tiny", config="{}")
    assert caught.value.status() in ("501", "StatusCode.UNIMPLEMENTED")


def test_unload_is_refused_because_the_plan_decides(triton: Triton) -> None:
    with pytest.raises(InferenceServerException, match="unload is not allowed: the active plan") as caught:
        triton.client.unload_model("tiny")
    assert caught.value.status() in ("503", "StatusCode.UNAVAILABLE")
    assert triton.client.is_model_ready("tiny")


def test_infer_gives_what_the_native_client_gives(triton: Triton, native: Client) -> None:
    given = rows(1)
    result = triton.infer(given, request_id="seven")
    assert np.array_equal(result.as_numpy("output"), native.run("tiny", {"input": given})["output"])
    response = triton.json(result.get_response())
    assert (response["id"], response["model_name"], response["model_version"]) == ("seven", "tiny", "1")


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_travels_as_binary_data(kind: str, triton: Triton) -> None:
    values = _every_kind()
    inputs = [triton.input(f"x_{name}", value, _datatype(name)) for name, value in values.items()]
    wanted = [triton.module.InferRequestedOutput(f"y_{kind}")]
    result = triton.client.infer("kinds", inputs, outputs=wanted)
    assert result.as_numpy(f"y_{kind}").dtype == np.dtype(kind)
    assert np.array_equal(result.as_numpy(f"y_{kind}"), np.concatenate([values[kind]] * 2))


def _datatype(name: str) -> str:
    from tritonclient.utils import np_to_triton_dtype

    found: str = np_to_triton_dtype(np.dtype(name))
    return found


def _every_kind() -> dict[str, Any]:
    """Values at the ends of each type's range."""
    values = {}
    for name in KINDS:
        dtype = np.dtype(name)
        if dtype.kind == "b":
            ends: list[Any] = [True, False, True]
        elif dtype.kind == "f":
            ends = [np.finfo(dtype).max, np.finfo(dtype).tiny, -0.5]
        else:
            ends = [np.iinfo(dtype).max, np.iinfo(dtype).min, 1]
        values[name] = np.array([ends, ends[::-1]], dtype)
    return values


def test_every_type_but_float16_travels_as_json_numbers(agent: AgentProcess) -> None:
    values = _every_kind()
    serving = agent.now().serving
    assert serving is not None
    with tritonclient.http.InferenceServerClient(serving.http) as client:
        inputs, outputs = [], []
        for name, value in values.items():
            one = tritonclient.http.InferInput(f"x_{name}", KIND_SHAPE, _datatype(name))
            binary = name == "float16"  # JSON has none
            inputs.append(one.set_data_from_numpy(value, binary_data=binary))
            outputs.append(tritonclient.http.InferRequestedOutput(f"y_{name}", binary_data=binary))
        result = client.infer("kinds", inputs, outputs=outputs)
        for name, value in values.items():
            assert np.array_equal(result.as_numpy(f"y_{name}"), np.concatenate([value] * 2)), name


def test_outputs_can_be_chosen_and_given_as_json(agent: AgentProcess, native: Client) -> None:
    serving = agent.now().serving
    assert serving is not None
    given = rows(1)
    with tritonclient.http.InferenceServerClient(serving.http) as client:
        one = tritonclient.http.InferInput("input", given.shape, "FP32").set_data_from_numpy(given)
        wanted = tritonclient.http.InferRequestedOutput("output", binary_data=False)
        result = client.infer("tiny", [one], outputs=[wanted])
        assert "data" in result.get_output("output")
        assert np.array_equal(result.as_numpy("output"), native.run("tiny", {"input": given})["output"])


def test_typed_contents_over_grpc(agent: AgentProcess) -> None:
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    fields = {
        "bool": "bool_contents",
        "int8": "int_contents",
        "int16": "int_contents",
        "int32": "int_contents",
        "int64": "int64_contents",
        "uint8": "uint_contents",
        "uint16": "uint_contents",
        "uint32": "uint_contents",
        "uint64": "uint64_contents",
        "float32": "fp32_contents",
        "float64": "fp64_contents",
    }
    values = _every_kind()
    values.pop("float16")
    serving = agent.now().serving
    assert serving is not None
    with grpc.insecure_channel(serving.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        asked = service_pb2.ModelInferRequest(model_name="kinds")
        for name, value in values.items():
            one = asked.inputs.add(name=f"x_{name}", datatype=_datatype(name), shape=KIND_SHAPE)
            getattr(one.contents, fields[name]).extend(value.reshape(-1).tolist())
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(asked)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "x_float16" in caught.value.details()
        half = asked.inputs.add(name="x_float16", datatype="FP16", shape=KIND_SHAPE)
        half.contents.fp32_contents.extend([0.0] * 6)
        with pytest.raises(grpc.RpcError, match="send input 'x_float16' raw"):
            stub.ModelInfer(asked)


@pytest.mark.parametrize("count", [1, 2, 5, 64])
def test_batch_is_split_and_joined(count: int, triton: Triton, native: Client) -> None:
    given = rows(count, seed=count)
    alone = [native.run("tiny", {"input": given[i : i + 1]})["output"] for i in range(count)]
    assert np.array_equal(triton.infer(given).as_numpy("output"), np.concatenate(alone))


def test_batch_above_the_limit_is_refused(triton: Triton) -> None:
    with pytest.raises(InferenceServerException, match=r"takes 'input' \[1, 3, 8, 8\] or up to 64 times"):
        triton.infer(rows(65))


def test_batch_of_a_model_whose_rows_depend_on_each_other_is_refused(triton: Triton) -> None:
    values = {name: np.concatenate([value] * 2) for name, value in _every_kind().items()}
    inputs = [triton.input(f"x_{name}", value, _datatype(name)) for name, value in values.items()]
    with pytest.raises(InferenceServerException, match=r"takes 'x_bool' \[2, 3\].*not 'x_bool' \[4, 3\]"):
        triton.client.infer("kinds", inputs)


def test_async_infer(triton: Triton, native: Client) -> None:
    given = [rows(1, seed) for seed in range(8)]
    found: dict[int, Any] = {}
    done = threading.Event()

    def keep(number: int, result: Any, error: Any) -> None:
        found[number] = error or result
        if len(found) == len(given):
            done.set()

    if triton.kind == "http":
        client = tritonclient.http.InferenceServerClient(triton.address, concurrency=4)
        asked = [client.async_infer("tiny", [triton.input("input", one)]) for one in given]
        found = {number: one.get_result() for number, one in enumerate(asked)}
        client.close()
    else:
        for number, one in enumerate(given):

            def callback(result: Any, error: Any, number: int = number) -> None:
                keep(number, result, error)

            triton.client.async_infer("tiny", [triton.input("input", one)], callback=callback)
        assert done.wait(30.0)
    for number, one in enumerate(given):
        expected = native.run("tiny", {"input": one})["output"]
        assert np.array_equal(found[number].as_numpy("output"), expected)


def test_asyncio_clients(triton: Triton, native: Client) -> None:
    module: Any = {"http": tritonclient.http.aio, "grpc": tritonclient.grpc.aio}[triton.kind]

    async def ask() -> list[Any]:
        client = module.InferenceServerClient(triton.address)
        try:
            calls = [client.infer("tiny", [triton.input("input", rows(1, seed))]) for seed in range(6)]
            return list(await asyncio.gather(*calls))
        finally:
            await client.close()

    for seed, result in enumerate(asyncio.run(ask())):
        expected = native.run("tiny", {"input": rows(1, seed)})["output"]
        assert np.array_equal(result.as_numpy("output"), expected)


def test_stream_answers_in_order_and_survives_an_error(agent: AgentProcess, native: Client) -> None:
    serving = agent.now().serving
    assert serving is not None
    found: list[Any] = []
    done = threading.Event()

    def keep(result: Any, error: Any) -> None:
        found.append(error or result)
        if len(found) == 11:
            done.set()

    with tritonclient.grpc.InferenceServerClient(serving.grpc) as client:
        client.start_stream(keep)
        for seed in range(11):
            given = rows(1, seed)
            one = tritonclient.grpc.InferInput("input", given.shape, "FP32").set_data_from_numpy(given)
            client.async_stream_infer("none" if seed == 5 else "tiny", [one], request_id=str(seed))
        assert done.wait(30.0)
        client.stop_stream()
    assert isinstance(found[5], InferenceServerException)
    assert "unknown model: 'none'" in str(found[5])
    for seed in {*range(11)} - {5}:
        assert found[seed].get_response().id == str(seed)
        expected = native.run("tiny", {"input": rows(1, seed)})["output"]
        assert np.array_equal(found[seed].as_numpy("output"), expected)


def test_system_shared_memory_for_inputs_and_outputs(triton: Triton, native: Client) -> None:
    given = rows(2)
    region = shm.create_shared_memory_region("both", f"/stageloom-both-{triton.kind}", 2 * given.nbytes)
    try:
        shm.set_shared_memory_region(region, [given])
        triton.client.register_system_shared_memory(
            "both", f"/stageloom-both-{triton.kind}", 2 * given.nbytes
        )
        status = triton.json(triton.client.get_system_shared_memory_status())
        shown = status["regions"]["both"] if triton.kind == "grpc" else status[0]
        assert (shown["name"], int(shown["byte_size"])) == ("both", 2 * given.nbytes)
        one = triton.module.InferInput("input", list(given.shape), "FP32")
        one.set_shared_memory("both", given.nbytes)
        wanted = triton.module.InferRequestedOutput("output")
        wanted.set_shared_memory("both", given.nbytes, offset=given.nbytes)
        result = triton.client.infer("tiny", [one], outputs=[wanted])
        said = triton.json(result.get_output("output"))["parameters"]["shared_memory_region"]
        assert said in ("both", {"string_param": "both"})
        there = shm.get_contents_as_numpy(region, np.float32, given.shape, offset=given.nbytes)
        expected = [native.run("tiny", {"input": given[i : i + 1]})["output"] for i in range(2)]
        assert np.array_equal(there, np.concatenate(expected))
        with pytest.raises(InferenceServerException, match="already in manager"):
            triton.client.register_system_shared_memory(
                "both", f"/stageloom-both-{triton.kind}", 2 * given.nbytes
            )
        triton.client.unregister_system_shared_memory("both")
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'both'"):
            triton.client.infer("tiny", [one])
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'both'"):
            triton.client.get_system_shared_memory_status("both")
    finally:
        triton.client.unregister_system_shared_memory()
        shm.destroy_shared_memory_region(region)


def test_cuda_shared_memory_is_answered_with_tritons_error(triton: Triton) -> None:
    for call in (
        triton.client.get_cuda_shared_memory_status,
        lambda: triton.client.register_cuda_shared_memory("region", b"aGFuZGxl", 0, 64),
        triton.client.unregister_cuda_shared_memory,
    ):
        with pytest.raises(InferenceServerException, match="CUDA shared memory is not supported") as caught:
            call()
        assert caught.value.status() in ("501", "StatusCode.UNIMPLEMENTED")


def test_trace_settings_are_answered_with_tritons_error(triton: Triton) -> None:
    for call in (
        triton.client.get_trace_settings,
        lambda: triton.client.get_trace_settings("tiny"),
        lambda: triton.client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}),
    ):
        with pytest.raises(InferenceServerException, match="does not support tracing") as caught:
            call()
        assert caught.value.status() in ("501", "StatusCode.UNIMPLEMENTED")


def test_log_settings_are_answered_with_tritons_error(triton: Triton) -> None:
    for call in (
        triton.client.get_log_settings,
        lambda: triton.client.update_log_settings({"log_verbose_level": 1}),
    ):
        with pytest.raises(InferenceServerException, match="does not support dynamic logging") as caught:
            call()
        assert caught.value.status() in ("501", "StatusCode.UNIMPLEMENTED")


def test_timeout_expires_the_task_as_triton_does(triton: Triton) -> None:
    with pytest.raises(InferenceServerException, match=r"Request timeout expired: .*deadline") as caught:
        triton.infer(rows(1), timeout=1)
    assert caught.value.status() in ("503", "StatusCode.UNAVAILABLE")
    assert triton.infer(rows(1), timeout=30_000_000).as_numpy("output") is not None


def test_priority_is_taken(triton: Triton) -> None:
    assert triton.infer(rows(1), priority=1).as_numpy("output") is not None


def test_sequences_and_classification_are_answered_with_tritons_error(triton: Triton) -> None:
    with pytest.raises(InferenceServerException, match="sequences"):
        triton.infer(rows(1), sequence_id=4, sequence_start=True)
    wanted = triton.module.InferRequestedOutput("output", class_count=2)
    with pytest.raises(InferenceServerException, match="classification"):
        triton.infer(rows(1), outputs=[wanted])


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_bodies(algorithm: str, agent: AgentProcess, native: Client) -> None:
    serving = agent.now().serving
    assert serving is not None
    with tritonclient.http.InferenceServerClient(serving.http) as client:
        given = rows(4)
        one = tritonclient.http.InferInput("input", given.shape, "FP32").set_data_from_numpy(given)
        plain = client.infer("tiny", [one]).as_numpy("output")
        packed = client.infer(
            "tiny",
            [one],
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        assert np.array_equal(packed.as_numpy("output"), plain)


def test_compressed_messages_over_grpc(agent: AgentProcess) -> None:
    serving = agent.now().serving
    assert serving is not None
    with tritonclient.grpc.InferenceServerClient(serving.grpc) as client:
        given = rows(4)
        one = tritonclient.grpc.InferInput("input", given.shape, "FP32").set_data_from_numpy(given)
        plain = client.infer("tiny", [one]).as_numpy("output")
        packed = client.infer("tiny", [one], compression_algorithm="gzip").as_numpy("output")
        assert np.array_equal(packed, plain)


def test_wrong_requests_are_answered_with_what_is_wrong(triton: Triton) -> None:
    module = triton.module
    wrong = [
        ("none", "input", (1, 3, 8, 8), "FP32", "unknown model: 'none' is not found.*tiny"),
        ("tiny", "data", (1, 3, 8, 8), "FP32", "expected inputs input for model 'tiny', got data"),
        ("tiny", "input", (1, 3, 8, 9), "FP32", r"takes 'input' \[1, 3, 8, 8\].*not 'input' \[1, 3, 8, 9\]"),
        ("tiny", "input", (0, 3, 8, 8), "FP32", r"takes 'input' \[1, 3, 8, 8\]"),
        ("tiny", "input", (1, 3, 8, 8), "FP64", "input 'input' of model 'tiny' is FP32, not FP64"),
    ]
    for model, name, shape, datatype, message in wrong:
        dtype = {"FP32": np.float32, "FP64": np.float64}[datatype]
        one = triton.input(name, np.zeros(shape, dtype), datatype)
        with pytest.raises(InferenceServerException, match=message):
            triton.client.infer(model, [one])
    one = triton.input("input", rows(1))
    with pytest.raises(InferenceServerException, match="unexpected inference output 'other'"):
        triton.client.infer("tiny", [one], outputs=[module.InferRequestedOutput("other")])
    with pytest.raises(InferenceServerException, match="'tiny' version 2 is not at ready state"):
        triton.client.infer("tiny", [one], model_version="2")
