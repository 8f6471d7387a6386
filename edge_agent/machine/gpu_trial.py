"""Does a library really reach the GPU? Tried in a process of its own, which may hang or die.

    python -m stageloom.edge_agent.machine.gpu_trial torch|onnxruntime

prints one line of JSON. A version that fits says little: a wheel may have no kernels for this GPU's
architecture, which shows only when one is launched.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec import Struct, ValidationError, convert

from stageloom.shared.module_command import module_command

_LIMIT_S: Final = 90.0  # the first start on a Jetson reads a gigabyte of libraries
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


class GpuTrial(Struct, frozen=True):
    """What a library found."""

    version: str = ""
    architectures: tuple[str, ...] = ()  # that it has kernels for, as `sm_87`; empty where it does not say
    capability: tuple[int, int] | None = None  # of the GPU
    worked: bool = False  # memory was allocated there, and a kernel ran
    error: str = ""


def run_trial(library: str, command: Sequence[str] = (), limit_s: float = _LIMIT_S) -> GpuTrial:
    """Try `torch` or `onnxruntime` in a child process; `command` stands in for it."""
    words = command or module_command(__name__, library)
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return GpuTrial(error=f"no answer within {limit_s:.0f} s")
    except OSError as error:
        return GpuTrial(error=str(error))
    lines = done.stdout.strip().splitlines()
    try:
        return convert(json.loads(lines[-1]), GpuTrial)
    except (IndexError, ValueError, ValidationError):
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return GpuTrial(error=f"it ended with code {done.returncode}: {last[:200]}")


def has_kernels(architectures: Sequence[str], capability: tuple[int, int], *, tegra: bool) -> bool:
    """Whether code for these architectures runs on a GPU of this compute capability.

    Kernels of one major number run on every later minor one, but never between cards and Jetsons; what is
    compiled for `compute_XY` is translated for any later GPU when it is loaded. A letter behind the number
    binds code to that architecture. (CUDA programming guide, binary and PTX compatibility.)
    """
    for name in architectures:
        match = _ARCHITECTURE.fullmatch(name)
        if match is None:
            continue
        of = int(match[2]), int(match[3])
        if of == capability or (not match[4] and match[1] == "compute" and of < capability):
            return True
        if not match[4] and not tegra and of[0] == capability[0] and of < capability:
            return True
    return False


def _torch() -> dict[str, Any]:
    import torch

    calls: Any = torch._C
    found: dict[str, Any] = {"version": torch.__version__}
    if hasattr(calls, "_cuda_getArchFlags"):  # asks no device, unlike torch.cuda.get_arch_list
        found["architectures"] = (calls._cuda_getArchFlags() or "").split()
    try:
        found["capability"] = torch.cuda.get_device_capability()
        total = torch.ones(256, device="cuda").add_(1).sum().item()
    except Exception as error:  # torch's own are of many kinds
        return found | {"error": _line(error)}
    return found | {"worked": total == 512}


def _onnxruntime() -> dict[str, Any]:
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper

    found: dict[str, Any] = {"version": onnxruntime.__version__}
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [256]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "trial", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    provider = "CUDAExecutionProvider"
    try:
        if hasattr(onnxruntime, "preload_dlls"):  # CUDA and cuDNN from wheels
            onnxruntime.preload_dlls()
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=[provider], enable_fallback=0
        )
        if session.get_providers()[0] != provider:
            return found | {
                "error": f"it took {session.get_providers()[0]} in its place: a library is missing"
            }
        (made,) = session.run(None, {"x": -np.ones(256, np.float32)})
    except Exception as error:  # onnxruntime's share no base class
        return found | {"error": _line(error)}
    return found | {"worked": not made.any()}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


_TRIALS: Final[dict[str, Callable[[], dict[str, Any]]]] = {"torch": _torch, "onnxruntime": _onnxruntime}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_TRIALS[sys.argv[1]]()) + "\n")
