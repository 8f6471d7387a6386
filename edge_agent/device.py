"""What this machine is: the device class, under which costs and schedules are shared, and the environment."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_GPU_INFORMATION = "driver/nvidia/gpus"
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "torch")
_LONGEST = 128


def installed(names: tuple[str, ...] = _RUNTIMES) -> dict[str, str]:
    """Versions of the distributions that are installed; none of them is imported."""
    versions = ((name, _version(name)) for name in names)
    return {name: number for name, number in versions if number is not None}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def gpu_names(proc: Path = Path("/proc")) -> list[str]:
    """NVIDIA GPUs by what the driver says, and the integrated one of a Jetson by its device tree."""
    names = []
    for information in sorted((proc / _GPU_INFORMATION).glob("*/information")):
        lines = information.read_text(errors="replace").splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    try:
        model = (proc / "device-tree/model").read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:
        return names
    return names or ([model] if "jetson" in model.lower() or "tegra" in model.lower() else [])


def cpu_name(proc: Path = Path("/proc")) -> str:
    """The processor's model, else its architecture."""
    try:
        for line in (proc / "cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def device_class(precision: str = "fp32") -> str:
    """One text: hardware, runtime versions, precision."""
    hardware = ", ".join(gpu_names()) or f"{cpu_name()} x{len(os.sched_getaffinity(0))}"
    runtimes = " ".join(f"{name}-{number}" for name, number in installed().items()) or "no-runtime"
    return f"{hardware}; {runtimes}; {precision}"[:_LONGEST]
