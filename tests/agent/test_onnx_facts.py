"""What doctor says of onnxruntime's CUDA provider, from the files that it reads."""

from pathlib import Path

import pytest

from stageloom.edge_agent.machine.doctor import onnx_cuda_check
from stageloom.edge_agent.machine.executors import OnnxFacts, has_cuda


def test_the_provider_is_there_if_its_library_is(tmp_path: Path) -> None:
    assert not has_cuda(tmp_path)
    (tmp_path / "capi").mkdir()
    (tmp_path / "capi/libonnxruntime_providers_shared.so").touch()
    assert not has_cuda(tmp_path)
    (tmp_path / "capi/libonnxruntime_providers_cuda.so").touch()
    assert has_cuda(tmp_path)


@pytest.mark.promise("nothing-takes-place-onnxruntime")
@pytest.mark.parametrize(
    ("facts", "gpus", "result", "said"),
    [
        (OnnxFacts(), [], "ok", "no onnxruntime: plans for onnx_cuda cannot run"),
        (OnnxFacts(True), ["NVIDIA H100"], "ok", "no CUDAExecutionProvider: plans for onnx_cuda cannot run"),
        (OnnxFacts(True, True), ["NVIDIA H100"], "warn", "cuda-bindings is not"),
        (OnnxFacts(True, True, "13.5.0"), [], "ok", "onnx_cuda has no GPU"),
        (OnnxFacts(True, True, "13.5.0"), ["NVIDIA H100"], "ok", "onnx_cuda can run on NVIDIA H100"),
    ],
)
def test_doctor_says_what_onnx_cuda_lacks(facts: OnnxFacts, gpus: list[str], result: str, said: str) -> None:
    check = onnx_cuda_check(facts, gpus)
    assert check.result == result
    assert said in check.detail
    assert bool(check.remedy) == (not facts.bindings)
