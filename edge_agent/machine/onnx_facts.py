"""What onnxruntime this machine has, read from files: importing it takes long and may fail."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from stageloom.edge_agent.machine.device import installed

_CUDA_LIBRARIES = ("libonnxruntime_providers_cuda.so", "onnxruntime_providers_cuda.dll")


@dataclass(frozen=True, slots=True)
class OnnxFacts:
    """What the executor onnx_cuda would find."""

    present: bool = False
    cuda: bool = False  # the CUDA provider's library came along
    bindings: str = ""  # the version of cuda-bindings


def onnx_facts() -> OnnxFacts:
    """As this interpreter would find them."""
    spec = find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return OnnxFacts()
    bindings = installed(("cuda-bindings",)).get("cuda-bindings", "")
    return OnnxFacts(True, has_cuda(Path(spec.origin).parent), bindings)


def has_cuda(package: Path) -> bool:
    """Whether an installed onnxruntime brought CUDAExecutionProvider along."""
    return any((package / "capi" / name).is_file() for name in _CUDA_LIBRARIES)
