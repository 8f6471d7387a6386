"""What doctor says of a GPU: its system, and whether libraries reach it; remedies keep a vendor's wheel."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageloom.edge_agent.executor.executors import make_executor
from stageloom.edge_agent.machine import doctor, jetson
from stageloom.edge_agent.machine.device import gpu_names
from stageloom.edge_agent.machine.doctor import (
    Check,
    executors_check,
    gpu_check,
    gpu_state_check,
    onnx_cuda_check,
    runtime_check,
    torch_check,
)
from stageloom.edge_agent.machine.executors import OnnxFacts, TorchFacts, problems_of
from stageloom.edge_agent.machine.gpu_trial import GpuTrial, has_kernels, run_trial
from stageloom.edge_agent.machine.jetson import how_to_install, jetpack, toolkit_version
from stageloom.shared.errors import ExecutorError
from tests.agent.test_utilisation import chain

WHEEL = TorchFacts("2.5.0a0+872d972e41.nv24.08", "12.6")
ORIN = ["NVIDIA Jetson Orin NX"]


@pytest.mark.parametrize(
    ("architectures", "capability", "tegra", "runs"),
    [
        ("sm_80 sm_86 sm_90", (8, 9), False, True),  # of one major number, later
        ("sm_80 sm_86 sm_90", (8, 7), True, False),  # a card's kernels on a Jetson
        ("sm_72 sm_87", (8, 7), True, True),
        ("sm_80 compute_80", (8, 7), True, True),  # translated when it is loaded
        ("sm_80 sm_90 sm_100 sm_110 sm_120", (11, 0), True, True),
        ("sm_80 sm_90 sm_100 sm_120", (11, 0), True, False),
        ("sm_90a", (9, 0), False, True),
        ("sm_90a compute_90a", (10, 0), False, False),  # a letter binds
        ("sm_90", (8, 0), False, False),
        ("compute_90", (8, 9), False, False),
        ("something else", (9, 0), False, False),
    ],
)
def test_kernels_run_on_their_architecture_and_where_cuda_lets_them(
    architectures: str, capability: tuple[int, int], tegra: bool, runs: bool
) -> None:
    assert has_kernels(architectures.split(), capability, tegra=tegra) is runs


def _said(trial: GpuTrial, gpus: list[str] = ORIN, facts: TorchFacts = WHEEL) -> Check:
    return torch_check(facts, gpus, trial=lambda: trial)


def test_doctor_allocates_a_tensor_and_compares_the_wheels_architectures_with_the_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "is_tegra", lambda: True)
    good = GpuTrial("2.5.0", ("sm_87",), (8, 7), worked=True)
    found = _said(good)
    assert found.result == "ok" and found.remedy == ""
    assert "kernels for sm_87, the GPU is sm_87, a tensor was allocated: torch_cuda" in found.detail
    found = _said(GpuTrial("2.11.0", ("sm_80", "sm_90"), (8, 7), error="RuntimeError: no kernel image"))
    assert (found.result, "no kernels for sm_87" in found.detail) == ("warn", True)
    found = _said(GpuTrial("2.5.0", ("sm_87",), None, error="RuntimeError: no NVIDIA driver"))
    assert (found.result, "could be allocated: RuntimeError: no NVIDIA driver" in found.detail) == (
        "warn",
        True,
    )


def test_doctor_runs_a_kernel_by_onnxruntime() -> None:
    facts = OnnxFacts(True, True, "12.9.10")
    found = onnx_cuda_check(facts, ORIN, trial=lambda: GpuTrial("1.23.0", worked=True))
    assert found.result == "ok" and "a kernel ran: onnx_cuda can run on NVIDIA Jetson Orin NX" in found.detail
    found = onnx_cuda_check(facts, ORIN, trial=lambda: GpuTrial("1.23.0", error="a library is missing"))
    assert (found.result, "a library is missing" in found.detail) == ("warn", True)


def test_without_a_gpu_nothing_is_tried() -> None:
    def never() -> GpuTrial:
        raise AssertionError("a trial needs a GPU")

    assert torch_check(WHEEL, [], trial=never).result == "ok"
    assert onnx_cuda_check(OnnxFacts(True, True, "13.0"), [], trial=never).result == "ok"


@pytest.fixture
def on_a_jetson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A root of a Jetson with JetPack 6."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text("# R36 (release), REVISION: 4.3, GCID: 38968081\n")
    monkeypatch.setattr(jetson.how_to_install, "__defaults__", (tmp_path, tmp_path))
    monkeypatch.setattr(jetson.jetpack, "__defaults__", (tmp_path,))
    monkeypatch.setattr(doctor, "is_tegra", lambda: True)
    yield tmp_path


@pytest.mark.parametrize("extra", ["onnx", "onnx-gpu", "torch"])
def test_on_a_jetson_nothing_names_a_command_that_replaces_nvidias_wheels(
    extra: str, on_a_jetson: Path
) -> None:
    assert how_to_install(extra) == ("take NVIDIA's wheel for JetPack 6 (docs/operations.md, On a Jetson)")
    assert how_to_install("openvino").startswith("pip install")
    checks = [
        runtime_check({}),
        gpu_check(ORIN, {}),
        executors_check({"onnx": "no"}, [0]),
        torch_check(TorchFacts(), ORIN),
        torch_check(TorchFacts("2.11.0+cpu"), ORIN),
        _said(GpuTrial("2.11.0", ("sm_80",), (8, 7))),
        _said(GpuTrial(error="no answer")),
        onnx_cuda_check(OnnxFacts(), ORIN),
        onnx_cuda_check(OnnxFacts(True), ORIN),
        onnx_cuda_check(OnnxFacts(True, True), ORIN),
        onnx_cuda_check(OnnxFacts(True, True, "12.9"), ORIN, trial=lambda: GpuTrial()),
    ]
    told = [check.remedy for check in checks]
    told += problems_of(OnnxFacts(), TorchFacts(), ORIN, twice=False, openvino=True).values()
    for text in told:
        assert "pip" not in text or "cuda-bindings==12.*" in text, text
        assert "stageloom[" not in text


def test_elsewhere_the_command_is_given() -> None:
    assert (
        how_to_install("torch", Path("/nowhere"), Path("/nowhere")) == "pip install 'stageloom[edge,torch]'"
    )


def test_an_executor_without_its_package_says_how_to_get_it(
    on_a_jetson: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "stageloom.edge_agent.executor.torch.cpu", raising=False)
    with pytest.raises(ExecutorError, match="take NVIDIA's wheel for JetPack 6"):
        make_executor("torch_cpu")


def test_the_gpus_state_names_release_toolkit_mode_clocks_and_memory(tmp_path: Path) -> None:
    machine = chain(tmp_path, "thor")
    (tmp_path / "usr/local/cuda").mkdir(parents=True)
    (tmp_path / "usr/local/cuda/version.json").write_text(json.dumps({"cuda": {"version": "13.2.1"}}))
    (tmp_path / "proc/meminfo").write_text("MemTotal: 128000000 kB\nMemAvailable: 64000000 kB\n")
    found = gpu_state_check(["NVIDIA Thor"], machine, tmp_path / "proc", tmp_path)
    assert (found.result, found.detail) == (
        "ok",
        "L4T 39.2.0 (JetPack 7), CUDA toolkit 13.2.1, power mode 120W, gpu_clock 1386 MHz, "
        "memory 122.1 GiB, 61.0 available",
    )
    assert gpu_state_check([]).detail == "no GPU"
    assert toolkit_version(tmp_path / "nowhere") == "" and jetpack(tmp_path) == "7"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('print(\'{"version": "1", "worked": true}\')', ""),
        ("import os; os.abort()", "it ended with code -6"),
        ("print('not what is asked for')", "it ended with code 0"),
        ("raise SystemExit('libcudart.so.12: cannot open shared object file')", "cannot open shared object"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_a_library_that_hangs_or_dies_is_an_answer_too(script: str, said: str) -> None:
    found = run_trial("torch", (sys.executable, "-c", script), limit_s=30.0 if "sleep" not in script else 1.0)
    assert (found.worked, said in found.error) == (not said, True)


@pytest.mark.parametrize("library", ["torch", "onnxruntime"])
@pytest.mark.more
def test_the_trial_of_an_installed_library_says_what_it_is_and_why_it_has_no_gpu(library: str) -> None:
    module = pytest.importorskip(library)
    if gpu_names():
        pytest.skip("there is a GPU")
    found = run_trial(library)
    assert found.version == module.__version__
    assert not found.worked and found.error
