"""The chain: sysfs on a Jetson, NVML elsewhere, and the processor beside either."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from stageloom.edge_agent.utilisation.cpu import Cpu
from stageloom.edge_agent.utilisation.nvml import Nvml, open_nvml
from stageloom.edge_agent.utilisation.reading import (
    CPU_CLOCK,
    GPU_CLOCK,
    MEMORY_CLOCK,
    POWER_LIMIT,
    UNITS,
    Metric,
    text_of,
)
from stageloom.edge_agent.utilisation.tegra import Tegra, ask_nvpmodel

CLOCKS = (GPU_CLOCK, MEMORY_CLOCK, CPU_CLOCK, POWER_LIMIT)
"""What a measurement is worth nothing without."""


def is_tegra(proc: Path = Path("/proc"), root: Path = Path("/")) -> bool:
    """Whether the GPU is a Jetson's, by the device tree or by NVIDIA's release file."""
    model = (text_of(proc / "device-tree/model") or "").lower()
    return "jetson" in model or "tegra" in model or (root / "etc/nv_tegra_release").exists()


class UtilisationChain:
    """Reads this machine. The sources are found once; a machine does not change them while it runs."""

    def __init__(
        self,
        *,
        sysfs: Path = Path("/sys"),
        proc: Path = Path("/proc"),
        root: Path = Path("/"),
        nvml: Callable[[], Nvml | None] = open_nvml,
        ask: Callable[[], str] = ask_nvpmodel,
    ) -> None:
        self._cpu = Cpu(sysfs, proc)
        self._tegra: Tegra | None = None
        self._nvml: Nvml | None = None
        self._asked_mode = ""
        if is_tegra(proc, root):
            self._tegra = Tegra(sysfs, root)
            if not self._tegra.power_mode():
                self._asked_mode = ask()
        else:
            self._nvml = nvml()
        self._limited = self._nvml is not None and self._nvml.power_mode() != ""

    @property
    def source(self) -> str:
        """Where the GPU's figures come from."""
        return "sysfs" if self._tegra else "nvml" if self._nvml else "none"

    def read(self) -> tuple[Metric, ...]:
        """Every metric that there is, None where this machine cannot tell it."""
        found = self._cpu.read()
        gpu = self._tegra or self._nvml
        if gpu is not None:
            found |= gpu.read()
        return tuple(Metric(name, found.get(name)) for name in UNITS)

    def clocks(self) -> tuple[Metric, ...]:
        """The clocks and the power limit alone, for the record of a measurement."""
        return tuple(metric for metric in self.read() if metric.name in CLOCKS)

    def power_mode(self) -> str:
        """nvpmodel's mode on a Jetson, else the GPU's power limit, else the governor; "" where none is known.

        Costs with the same text were measured alike. Where NVML has told a limit once, one that it cannot
        tell now is unknown and not the governor: that would be another mode.
        """
        if self._tegra is not None:
            return self._tegra.power_mode() or self._asked_mode
        if self._nvml is not None and self._limited:
            return self._nvml.power_mode()
        return self._cpu.governor()


@cache
def this_machine() -> UtilisationChain:
    """The chain of this process: NVML is opened once."""
    return UtilisationChain()
