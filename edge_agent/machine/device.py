"""What this machine is: the device class, under which costs and schedules are shared, and the environment."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stageloom.edge_agent.utilisation.chain import is_tegra, this_machine
from stageloom.edge_agent.utilisation.reading import text_of
from stageloom.shared.digest import digest_bytes

_GPU_INFORMATION = "driver/nvidia/gpus"
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "torch")
_LONGEST, _DIGEST = 128, 12
_DRIVER = re.compile(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", re.MULTILINE)


def installed(names: tuple[str, ...] = _RUNTIMES) -> dict[str, str]:
    """Versions of the distributions that are installed; none of them is imported."""
    versions = ((name, _version(name)) for name in names)
    return {name: number for name, number in versions if number is not None}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def gpu_names(proc: Path = Path("/proc"), root: Path = Path("/")) -> list[str]:
    """NVIDIA GPUs by what the driver says, and the integrated one of a Jetson by its device tree."""
    names = []
    for information in sorted((proc / _GPU_INFORMATION).glob("*/information")):
        lines = information.read_text(errors="replace").splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    model = (text_of(proc / "device-tree/model") or "").rstrip("\0")
    return names or ([model] if model and is_tegra(proc, root) else [])


def cpu_name(proc: Path = Path("/proc")) -> str:
    """The processor's model, else its architecture."""
    try:
        for line in (proc / "cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def driver_version(proc: Path = Path("/proc")) -> str:
    """NVIDIA's kernel driver, or ""."""
    found = _DRIVER.search(text_of(proc / "driver/nvidia/version") or "")
    return found.group(1) if found else ""


def device_class(precision: str = "fp32", *, mode: str | None = None, proc: Path = Path("/proc")) -> str:
    """One text: hardware with its driver and power mode, runtime versions, precision.

    `mode` is the power mode, by default the one of now.
    """
    hardware = ", ".join(gpu_names(proc)) or f"{cpu_name(proc)} x{len(os.sched_getaffinity(0))}"
    driver = driver_version(proc)
    mode = this_machine().power_mode() if mode is None else mode
    device = ", ".join(part for part in (hardware, driver and f"driver {driver}", mode) if part)
    runtimes = " ".join(f"{name}-{number}" for name, number in installed().items()) or "no-runtime"
    text = f"{device}; {runtimes}; {precision}"
    if len(text) <= _LONGEST:
        return text
    # What is cut off counts, too: a digest stands for it.
    whole = digest_bytes([text.encode()])[:_DIGEST]
    return f"{text[: _LONGEST - _DIGEST - 1]} {whole}"
