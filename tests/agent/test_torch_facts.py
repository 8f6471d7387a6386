"""What doctor says of torch, from the files that it reads."""

from pathlib import Path

import pytest

from stageloom.edge_agent.machine.device import driver_version
from stageloom.edge_agent.machine.doctor import torch_check
from stageloom.edge_agent.machine.executors import TorchFacts, torch_facts, version_facts

WHEEL = (
    "from typing import Optional\n__version__ = '2.13.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\n"
)


def test_versions_are_read_from_torchs_own_file() -> None:
    assert version_facts(WHEEL) == TorchFacts("2.13.0+cu130", "13.0")
    without = WHEEL.replace("'13.0'", "None").replace("+cu130", "+cpu")
    assert version_facts(without) == TorchFacts("2.13.0+cpu")
    assert version_facts("cuda = '10.2'\n__version__ = '1.8.0'\n") == TorchFacts("1.8.0", "10.2")


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Tue Aug 26\nGCC version: 12\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n",
    ],
)
def test_the_driver_says_its_version(text: str, tmp_path: Path) -> None:
    assert driver_version(tmp_path) == ""
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text(text)
    assert driver_version(tmp_path) == "580.82.07"


@pytest.mark.parametrize(
    ("facts", "gpus", "result", "said"),
    [
        (TorchFacts(), ["NVIDIA H100"], "ok", "not installed"),
        (TorchFacts("2.13.0+cpu"), [], "ok", "no CUDA: torch_cpu can run, torch_cuda has no GPU"),
        (TorchFacts("2.13.0+cpu", driver="580.1"), ["NVIDIA H100"], "warn", "cannot use NVIDIA H100"),
        (TorchFacts("2.13.0+cu130", "13.0"), ["NVIDIA H100"], "warn", "no NVIDIA driver"),
        (TorchFacts("2.9.0", "12.6"), ["NVIDIA Jetson Orin NX"], "ok", "torch_cuda and torch_cpu can run"),
        (
            TorchFacts("2.13.0+cu130", "13.0", ("cudnn 9.10.2",), "580.1"),
            ["NVIDIA H100"],
            "ok",
            "torch 2.13.0+cu130, CUDA 13.0, cudnn 9.10.2, driver 580.1: torch_cuda and torch_cpu can run",
        ),
    ],
)
def test_doctor_says_what_torch_cuda_lacks(
    facts: TorchFacts, gpus: list[str], result: str, said: str
) -> None:
    check = torch_check(facts, gpus)
    assert check.result == result
    assert said in check.detail
    assert bool(check.remedy) == (result == "warn" or not facts.torch)


def test_facts_of_this_machine_agree_with_torch_itself() -> None:
    torch = pytest.importorskip("torch")
    facts = torch_facts()
    assert facts.torch == torch.__version__
    assert facts.cuda == (torch.version.cuda or "")
