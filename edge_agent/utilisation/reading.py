"""What every source of the chain gives, and how the small files of sysfs and procfs are read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

GPU: Final = "gpu"
GPU_MEMORY: Final = "gpu_memory"  # time in which the memory bus was busy, not bytes in use
CPU: Final = "cpu"
GPU_CLOCK: Final = "gpu_clock"
MEMORY_CLOCK: Final = "memory_clock"
CPU_CLOCK: Final = "cpu_clock"
POWER: Final = "gpu_power"
POWER_LIMIT: Final = "gpu_power_limit"

UNITS: Final = {
    GPU: "%",
    GPU_MEMORY: "%",
    CPU: "%",
    GPU_CLOCK: "MHz",
    MEMORY_CLOCK: "MHz",
    CPU_CLOCK: "MHz",
    POWER: "W",
    POWER_LIMIT: "W",
}
"""Every metric that there is, and its unit."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric at one instant; `value` None: unsupported here, or not to be read just now."""

    name: str
    value: float | None

    @property
    def unit(self) -> str:
        """Of `value`."""
        return UNITS[self.name]

    @property
    def text(self) -> str:
        """For people."""
        return "unsupported" if self.value is None else f"{self.value:.4g} {self.unit}"


def text_of(path: Path) -> str | None:
    """A small file's text; None where it cannot be read. A driver may answer a read with any error."""
    try:
        return path.read_bytes().rstrip(b"\0\n ").decode("utf-8", "replace").strip()
    except OSError:
        return None


def number_of(path: Path) -> float | None:
    """A file of one number that is not negative; None where it is something else."""
    text = text_of(path)
    return float(text) if text is not None and text.isascii() and text.isdecimal() else None


def first_number(root: Path, patterns: tuple[str, ...]) -> float | None:
    """The number in the first file that matches one of the patterns and holds one."""
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            number = number_of(path)
            if number is not None:
                return number
    return None
