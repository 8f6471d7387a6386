"""NVIDIA's integrated GPUs, by sysfs and by nvpmodel's files.

NVML initialises on an Orin and then answers "not supported" or zeros, so it is not asked here. The driver's
`load` counts in thousandths; which node it belongs to differs between generations (gpu.0 on TX2, Nano and
Xavier, 17000000.ga10b or 17000000.gpu on Orin). The share in which the memory controller was busy needs two
files of the kernel's activity monitor; the newer kernels let only root read them.
"""

import re
import subprocess
from pathlib import Path
from typing import Final

from stageloom.edge_agent.utilisation.reading import (
    GPU,
    GPU_CLOCK,
    GPU_MEMORY,
    MEMORY_CLOCK,
    first_number,
    text_of,
)

_NODES: Final = ("17000000.ga10b", "17000000.gpu", "17000000.gv11b", "17000000.gp10b", "57000000.gpu")
_LOAD: Final = (
    "devices/gpu.0/load",
    "devices/platform/gpu.0/load",
    *(f"devices/platform/{node}/load" for node in _NODES),
    *(f"devices/platform/bus@0/{node}/load" for node in _NODES),
    *(f"class/devfreq/{node}/device/load" for node in _NODES),
)
_GPU_CLOCK: Final = tuple(f"class/devfreq/{node}/cur_freq" for node in _NODES)
_EMC_ACTIVITY: Final = ("kernel/actmon_avg_activity/mc_all", "kernel/debug/cactmon/mc_all")
_EMC_CLOCK: Final = ("kernel/debug/clk/emc/clk_rate", "kernel/debug/bpmp/debug/clk/emc/rate")
_MODE = re.compile(r"\bpmode:\s*0*(\d+)")
_MODEL = re.compile(r"^\s*<\s*POWER_MODEL\s+ID=0*(\d+)\s+NAME=(\S+?)\s*>", re.MULTILINE)
_NAMED = re.compile(r"^NV Power Mode:\s*(\S+)", re.MULTILINE)
_ASK_S: Final = 2.0


class Tegra:
    """One Jetson. `sysfs` is /sys, `root` the file system that nvpmodel's files lie in."""

    def __init__(self, sysfs: Path = Path("/sys"), root: Path = Path("/")) -> None:
        self._sysfs = sysfs
        self._root = root

    def read(self) -> dict[str, float | None]:
        """Loads in percent, clocks in MHz."""
        load = first_number(self._sysfs, _LOAD)
        clock_hz = first_number(self._sysfs, _GPU_CLOCK)
        emc_hz = first_number(self._sysfs, _EMC_CLOCK)
        active_khz = first_number(self._sysfs, _EMC_ACTIVITY)
        emc = None
        if active_khz is not None and emc_hz:  # a memory clock of 0 is no clock
            emc = min(active_khz * 1e3 / emc_hz * 100.0, 100.0)
        return {
            GPU: None if load is None else min(load / 10.0, 100.0),
            GPU_MEMORY: emc,
            GPU_CLOCK: clock_hz / 1e6 if clock_hz else None,
            MEMORY_CLOCK: emc_hz / 1e6 if emc_hz else None,
        }

    def power_mode(self) -> str:
        """nvpmodel's mode by name; by number where its table does not name it; "" where neither is known."""
        status = text_of(self._root / "var/lib/nvpmodel/status")
        number = mode_number(status or "")
        if number is None:
            return ""
        return mode_names(text_of(self._root / "etc/nvpmodel.conf") or "").get(number, f"mode {number}")


def mode_number(status: str) -> int | None:
    """The number in nvpmodel's status file, such as `pmode:0002`."""
    found = _MODE.search(status)
    return int(found.group(1)) if found else None


def mode_names(table: str) -> dict[int, str]:
    """Names by number, from lines of /etc/nvpmodel.conf such as `< POWER_MODEL ID=2 NAME=MODE_15W >`."""
    return {int(number): name for number, name in _MODEL.findall(table)}


def queried_mode(answer: str) -> str:
    """The mode in what `nvpmodel -q` prints; "" where it names none."""
    found = _NAMED.search(answer)
    return found.group(1) if found else ""


def ask_nvpmodel() -> str:
    """What `nvpmodel -q` says, for a machine that keeps no status file; "" where it cannot be asked.

    Takes up to two seconds, so it is asked once and not on a running agent's loop.
    """
    try:
        done = subprocess.run(["nvpmodel", "-q"], capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return queried_mode(done.stdout)
