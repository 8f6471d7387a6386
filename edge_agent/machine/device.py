"""What this machine is and reports: its device class, under which costs are shared, and telemetry rows."""

import os
import platform
import re
from collections.abc import Callable, Collection, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from stageloom.edge_agent.machine.utilisation import (
    Metric,
    UtilisationChain,
    is_tegra,
    l4t_release,
    text_of,
    this_machine,
)
from stageloom.shared.digest import digest_bytes
from stageloom.shared.messages.telemetry import RowData, Utilisation

_GPU_INFORMATION = "driver/nvidia/gpus"
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "openvino", "torch")
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
    """The processor's model; where the kernel names none, as on 64-bit ARM, the board or the kinds of cores;
    else the architecture."""
    cores: dict[str, None] = {}
    maker = ""
    for line in (text_of(proc / "cpuinfo") or "").splitlines():
        name, _, value = map(str.strip, line.partition(":"))
        if name == "model name":
            return value
        if name == "CPU implementer":
            maker = value
        elif name == "CPU part":
            cores[f"{maker}/{value}"] = None
    board = text_of(proc / "device-tree/model")
    return board or (f"ARM {'+'.join(cores)}" if cores else platform.machine())


def cpu_flags(proc: Path = Path("/proc")) -> frozenset[str]:
    """What the processor can do, in Linux's words; empty where it does not say."""
    try:
        lines = (proc / "cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(flags, ()))


_INSTRUCTIONS: Final = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2")
"""What decides how fast models run, the highest first: a virtual machine may give processors of several
generations one name."""


def has_bf16(flags: Collection[str]) -> bool:
    """Whether the processor computes in bfloat16 itself; `flags` are as Linux calls them."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags)


def driver_version(proc: Path = Path("/proc")) -> str:
    """NVIDIA's kernel driver, or ""."""
    match = _DRIVER.search(text_of(proc / "driver/nvidia/version") or "")
    return match.group(1) if match else ""


def device_class(
    precision: str = "fp32",
    *,
    mode: str | None = None,
    proc: Path = Path("/proc"),
    root: Path = Path("/"),
) -> str:
    """One text: hardware with its Jetson Linux, driver and power mode, runtime versions, precision.

    Of a processor it says the cores and the highest set of instructions. `mode` is the power mode, by default
    the one of now.
    """
    hardware = ", ".join(gpu_names(proc, root)) or _processor(proc)
    driver, release = driver_version(proc), l4t_release(root)
    mode = this_machine().power_mode() if mode is None else mode
    device = ", ".join(
        part for part in (hardware, release and f"L4T {release}", driver and f"driver {driver}", mode) if part
    )
    runtimes = " ".join(f"{name}-{number}" for name, number in installed().items()) or "no-runtime"
    text = f"{device}; {runtimes}; {precision}"
    if len(text) <= _LONGEST:
        return text
    # What is cut off counts, too: a digest stands for it.
    whole = digest_bytes([text.encode()])[:_DIGEST]
    return f"{text[: _LONGEST - _DIGEST - 1]} {whole}"


def _processor(proc: Path) -> str:
    flags = cpu_flags(proc)
    highest = [name for name in _INSTRUCTIONS if name in flags][:1]
    return " ".join((cpu_name(proc), f"x{len(os.sched_getaffinity(0))}", *highest))


_ANY_MODE: Final = "\0"
"""Stands for a power mode where the text around it is wanted."""


class MachineWatch:
    """What the agent reports of its machine; between calls of `look` answers come from the last reading."""

    def __init__(
        self,
        chain: UtilisationChain,
        environment: Callable[[str], str] = lambda mode: device_class(mode=mode),
    ) -> None:
        self._chain = chain
        self._environment = environment
        self._known: set[str] = set()  # metrics that had a value once
        self._looked = False
        self.power_mode = chain.power_mode()

    def look(self) -> list[RowData]:
        """Read the machine. What it has never told is reported once as unsupported and then left out."""
        self._look_at_mode()
        metrics = self._chain.read()
        self._known |= {metric.name for metric in metrics if metric.value is not None}
        rows = _rows(metric for metric in metrics if metric.name in self._known or not self._looked)
        self._looked = True
        return rows

    def clocks(self) -> list[RowData]:
        """Clocks and power limit as they are now, to stand beside a profile."""
        return _rows(metric for metric in self._chain.clocks() if metric.value is not None)

    def environment(self) -> str:
        """The device class in the power mode of now: what a profile of now is filed under."""
        self._look_at_mode()
        return self._environment(self.power_mode)

    def mode_then(self, environment: str) -> str:
        """The other power mode in which this was the environment of the machine as it is.

        Empty where it is the one of now, where more than the mode is another, and where a mode is not known.
        """
        if not self.power_mode:
            return ""
        before, _, after = self._environment(_ANY_MODE).partition(_ANY_MODE)
        mode = environment.removeprefix(before).partition(after[:1] or ";")[0]
        # Made anew in that mode: what of a long text is cut off depends on it, and so does the digest.
        return mode if mode != self.power_mode and self._environment(mode) == environment else ""

    def _look_at_mode(self) -> None:
        """A mode that cannot be read just now has not changed: a change makes the agent plan anew."""
        self.power_mode = self._chain.power_mode() or self.power_mode


def _rows(metrics: Iterable[Metric]) -> list[RowData]:
    return [Utilisation(metric.name, metric.value, metric.unit) for metric in metrics]
