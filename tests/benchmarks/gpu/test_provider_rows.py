"""onnxruntime's rows of the table: what runs, how, and what is said of those that cannot."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import pytest
import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.rivals import (
    CACHE_VARIABLE,
    PROVIDERS,
    Provider,
    engine_options,
    model_bytes,
    options_of,
    provider_variant,
    why_not,
)
from tests.benchmarks.gpu.tiny import subject_of

CPU = Provider("onnxruntime CPU", "CPUExecutionProvider")


class _Cuda(Device):
    """As the rows see CUDA."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.torch = torch.device("cuda", 0)


def test_a_bound_session_answers_as_the_reference_does_and_follows_its_input() -> None:
    subject, device = subject_of("squeezenet"), Device()
    found = provider_variant(device, subject, CPU, "fp32", device.streams[-1])
    assert found.error < 1e-4 and found.key == ("squeezenet", "onnxruntime CPU")
    image, logits = found.run.held  # type: ignore[attr-defined]
    image.zero_()
    found.run()
    assert subject.error_of(logits) > 1e-2, "the binding holds the memory, not what lay there"


def test_half_precision_is_inside_and_costs_no_more_than_it_may() -> None:
    subject, device = subject_of("squeezenet"), Device()
    model = onnx.load_model_from_string(model_bytes(CPU, subject, "fp16"))
    assert {one.data_type for one in model.graph.initializer if one.dims} == {onnx.TensorProto.FLOAT16}
    kinds = [one.type.tensor_type.elem_type for one in (*model.graph.input, *model.graph.output)]
    assert kinds == [onnx.TensorProto.FLOAT] * 2
    error = provider_variant(device, subject, CPU, "fp16", device.streams[-1]).error
    assert 0 < error < 2e-2


def test_a_provider_that_converts_by_itself_gets_the_model_as_it_is() -> None:
    subject = subject_of("squeezenet")
    assert model_bytes(replace(CPU, converts=True), subject, "fp16") == subject.artifact.onnx_bytes()


@pytest.mark.parametrize("provider", PROVIDERS, ids=[one.row for one in PROVIDERS])
def test_every_row_names_its_stream_and_its_precision(provider: Provider) -> None:
    stream: Any = SimpleNamespace(cuda_stream=4711)
    options = {p: options_of(provider, _Cuda(), stream, p) for p in ("fp16", "tf32", "fp32")}
    assert {one["user_compute_stream"] for one in options.values()} == {"4711"}
    assert all(provider.options.items() <= one.items() for one in options.values())
    assert len({tuple(sorted(one.items())) for one in options.values()}) == 2
    assert all(isinstance(value, str) for one in options.values() for value in one.values())


def test_a_row_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, tensorrt = PROVIDERS[0], PROVIDERS[-1]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [cuda.name])
    assert why_not(cuda, Device()) == "needs CUDA"
    assert why_not(cuda, _Cuda()) == ""
    assert why_not(tensorrt, _Cuda()).endswith("was built without TensorrtExecutionProvider")
    monkeypatch.setattr("benchmarks.gpu.rivals.find_spec", lambda name: None)
    assert why_not(cuda, _Cuda()) == "onnxruntime is not installed"


def test_a_provider_that_was_replaced_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime takes the processor where it cannot make a provider, and only its log says so."""
    landed = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *args, **kwargs: landed)
    device = Device()
    with pytest.raises(RuntimeError, match="took CPUExecutionProvider instead of CUDAExecutionProvider"):
        provider_variant(device, subject_of("squeezenet"), PROVIDERS[0], "fp32", device.streams[-1])


def test_tensorrt_keeps_the_engines_of_every_model_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime names them by structure: the engine of other weights would be taken for this one's."""
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    assert engine_options(subject_of("squeezenet")) == {}
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    one, other = (engine_options(subject_of(name)) for name in ("squeezenet", "inception_v3"))
    assert one["trt_engine_cache_path"] != other["trt_engine_cache_path"]
    assert one["trt_timing_cache_path"] == other["trt_timing_cache_path"] == str(tmp_path / "tensorrt")
    given: list[Any] = []

    def session(*args: Any, providers: Any, **kwargs: Any) -> Any:
        given.extend(providers)
        return SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    device = Device()
    with pytest.raises(RuntimeError, match="took CPUExecutionProvider"):
        provider_variant(device, subject_of("squeezenet"), PROVIDERS[-1], "fp32", device.streams[-1])
    ((_, options),) = given
    assert one.items() <= options.items()


def test_logits_of_every_run_land_in_the_same_memory() -> None:
    subject, device = subject_of("squeezenet"), Device()
    found = provider_variant(device, subject, CPU, "fp32", device.streams[-1])
    _, logits = found.run.held  # type: ignore[attr-defined]
    before = logits.clone()
    logits.zero_()
    found.run()
    assert torch.equal(logits, before)
