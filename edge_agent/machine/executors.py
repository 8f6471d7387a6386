"""What this machine can run plans with: cores, and executors as far as the installed files tell.

Nothing heavy is imported: versions come from metadata and files, so a broken package is named and not run.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from stageloom.edge_agent.executor.executors import EXECUTORS, added_executors
from stageloom.edge_agent.machine.control_groups import usable_cores
from stageloom.edge_agent.machine.device import driver_version, gpu_names, installed
from stageloom.edge_agent.machine.jetson import how_to_install
from stageloom.shared.messages.telemetry import CoreRange, ExecutorFact, MachineFacts
from stageloom.shared.search.arrangements import ON_GPU

_LIBRARIES = re.compile(r"nvidia-(cudnn|cublas|cuda-runtime)(-cu\d+)?$")


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """Versions; empty where there is none."""

    torch: str = ""
    cuda: str = ""  # that torch was built for
    libraries: tuple[str, ...] = ()  # that pip brought along: `cudnn 9.10.2`
    driver: str = ""


def torch_facts(proc: Path = Path("/proc")) -> TorchFacts:
    """What torch this interpreter would import, read from files: importing it takes a second and may fail."""
    spec = find_spec("torch")
    text = ""
    if spec is not None and spec.origin is not None:
        try:
            text = (Path(spec.origin).parent / "version.py").read_text(errors="replace")
        except OSError:
            text = "__version__ = 'unknown'"
    facts = version_facts(text)
    driver = driver_version(proc) or ("unknown" if (proc / "driver/nvidia/version").exists() else "")
    return TorchFacts(facts.torch, facts.cuda, _libraries() if facts.cuda else (), driver)


def version_facts(text: str) -> TorchFacts:
    """What torch's `version.py` says of itself."""
    number = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda(?:: [^=]+)? = '([^']+)'", text, re.MULTILINE)
    return TorchFacts(number[1] if number else "", cuda[1] if cuda else "")


def _libraries() -> tuple[str, ...]:
    names = {}
    for distribution in distributions():
        found = _LIBRARIES.match(distribution.metadata["Name"] or "")
        if found:
            names[found[1]] = f"{found[1]} {distribution.version}"
    return tuple(names[name] for name in sorted(names))


_CUDA_LIBRARIES = ("libonnxruntime_providers_cuda.so", "onnxruntime_providers_cuda.dll")


@dataclass(frozen=True, slots=True)
class OnnxFacts:
    """What the executor onnx_cuda would find."""

    present: bool = False
    cuda: bool = False  # the CUDA provider's library came along
    bindings: str = ""  # the version of cuda-bindings


def onnx_facts() -> OnnxFacts:
    """What onnxruntime this interpreter would import, read from files."""
    spec = find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return OnnxFacts()
    bindings = installed(("cuda-bindings",)).get("cuda-bindings", "")
    return OnnxFacts(True, has_cuda(Path(spec.origin).parent), bindings)


def has_cuda(package: Path) -> bool:
    """Whether an installed onnxruntime brought CUDAExecutionProvider along."""
    return any((package / "capi" / name).is_file() for name in _CUDA_LIBRARIES)


_MOST_RANGES: Final = 64  # that a telemetry row holds
_MOST_EXECUTORS: Final = 16  # likewise
_MOST_PROBLEM: Final = 160  # characters of a row


def executor_problems() -> dict[str, str]:
    """Per executor that computes, why plans cannot name it here; empty where they can."""
    runtimes = installed(("onnxruntime", "onnxruntime-gpu"))
    return problems_of(
        onnx_facts(),
        torch_facts(),
        gpu_names(),
        twice=len(runtimes) > 1,
        openvino=find_spec("openvino") is not None,
    )


def usable_on_gpu() -> tuple[str, ...]:
    """Executors on a GPU that plans can name here, as far as the installed files tell."""
    if not gpu_names():
        return ()
    problems = executor_problems()
    return tuple(name for name in ON_GPU if not problems[name])


def problems_of(
    onnx: OnnxFacts, torch: TorchFacts, gpus: list[str], *, twice: bool, openvino: bool
) -> dict[str, str]:
    """`executor_problems` of what was found; `twice`: onnxruntime is installed with a GPU and without."""
    gpu = "" if gpus else "there is no GPU"
    no_torch = "" if torch.torch else f"torch is not installed, {how_to_install('torch')}"
    no_onnx = "" if onnx.present else f"onnxruntime is not installed, {how_to_install('onnx')}"
    if twice:
        no_onnx = "onnxruntime and onnxruntime-gpu are both installed and break each other"
    provider = "" if onnx.cuda else "this onnxruntime has no CUDAExecutionProvider"
    bindings = "" if onnx.bindings else "cuda-bindings is not installed"
    return {
        "onnx": no_onnx,
        "openvino": "" if openvino else "openvino is not installed, pip install 'stageloom[openvino]'",
        "torch_cpu": no_torch,
        "onnx_cuda": no_onnx or provider or bindings or gpu,
        "torch_cuda": no_torch or ("" if torch.cuda else "this torch has no CUDA") or gpu,
    }


def added_problems() -> dict[str, str]:
    """The same of executors that other distributions add. They are found and not imported, so one that does
    not load shows when a plan names it."""
    added = added_executors()
    found = {
        name: "" if one.is_there else f"the package of {one.distribution} is not there"
        for name, one in added.usable.items()
    }
    broken = {name: str(error) for name, error in added.problems.items() if name not in EXECUTORS}
    return found | broken


def core_ranges(cores: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending runs of neighbours, both ends included."""
    found: list[tuple[int, int]] = []
    for core in sorted(cores):
        if found and core == found[-1][1] + 1:
            found[-1] = (found[-1][0], core)
        else:
            found.append((core, core))
    return found


def machine_facts(usual: str, intra_op_threads: int) -> MachineFacts:
    """What the planner is told of this machine; `usual`: the executor that the agent is set to."""
    problems = executor_problems()
    problems |= added_problems()
    names = list(dict.fromkeys([usual, *problems, "null"]))[:_MOST_EXECUTORS]
    return MachineFacts(
        cores=tuple(CoreRange(*span) for span in core_ranges(usable_cores())[:_MOST_RANGES]),
        executors=tuple(ExecutorFact(name, problems.get(name, "")[:_MOST_PROBLEM]) for name in names),
        intra_op_threads=intra_op_threads,
    )
