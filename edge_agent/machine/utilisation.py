"""How busy the machine is, at which clocks, in which power mode: sysfs on a Jetson, NVML elsewhere and for
what sysfs lacks, procfs.

Every value is a number that was read, or None: a source that cannot tell never says 0.
"""

import logging
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

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
        return UNITS[self.name]

    @property
    def text(self) -> str:
        """The value with its unit, for people."""
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


_IDLE, _WAITING = 3, 4  # columns of /proc/stat after the label
_COUNTED = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already


class Cpu:
    """The processor by procfs and sysfs; a load is the share of all cores since the last reading."""

    def __init__(self, sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> None:
        self._sysfs = sysfs
        self._proc = proc
        self._before: tuple[int, int] | None = None

    def read(self) -> dict[str, float | None]:
        """Load in percent, None at the first reading; the mean clock of the processors in MHz."""
        now = spent(text_of(self._proc / "stat") or "")
        before, self._before = self._before, now
        return {CPU: share(before, now), CPU_CLOCK: self._clock_mhz()}

    def governor(self) -> str:
        """What decides the clocks, such as `performance`; "" where nothing does (most virtual machines)."""
        names = {
            text_of(path)
            for path in self._sysfs.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
        }
        return "+".join(sorted(name for name in names if name))

    def _clock_mhz(self) -> float | None:
        files = self._sysfs.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")
        khz = [clock for clock in map(number_of, files) if clock]
        return sum(khz) / len(khz) / 1e3 if khz else None


def spent(stat: str) -> tuple[int, int] | None:
    """Busy and all ticks of all processors since the machine started, from the text of /proc/stat."""
    for line in stat.splitlines():
        label, *columns = line.split()
        if label == "cpu" and len(columns) >= _COUNTED and all(column.isdecimal() for column in columns):
            ticks = [int(column) for column in columns[:_COUNTED]]
            return sum(ticks) - ticks[_IDLE] - ticks[_WAITING], sum(ticks)
    return None


def share(before: tuple[int, int] | None, now: tuple[int, int] | None) -> float | None:
    """Percent busy between two readings; None where there is no time between them."""
    if before is None or now is None or now[1] <= before[1]:
        return None
    return min(max((now[0] - before[0]) / (now[1] - before[1]), 0.0), 1.0) * 100.0


_log = logging.getLogger(__name__)
_MILLI: Final = 1e-3


class Nvml:
    """One GPU by NVML. `library` is the module pynvml, or a stand-in. No setting is changed.

    Every figure is asked for by itself: a driver that does not support one (MIG, vGPU, consumer cards) raises
    for that one, and it is None while the others are told.
    """

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle

    def read(self) -> dict[str, float | None]:
        """Loads in percent over the driver's last sampling period, clocks in MHz, power in W."""
        nvml, handle = self._library, self._handle
        rates = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        return {
            GPU: None if rates is None else float(rates.gpu),
            GPU_MEMORY: None if rates is None else float(rates.memory),
            GPU_CLOCK: self.sm_clock_mhz(),
            MEMORY_CLOCK: self._positive(
                lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM), 1.0
            ),
            POWER: self._positive(lambda: nvml.nvmlDeviceGetPowerUsage(handle), _MILLI),
            POWER_LIMIT: self.power_limit_w(),
        }

    def sm_clock_mhz(self) -> float | None:
        """The clock of the multiprocessors now: alone, since a benchmark reads it between two windows."""
        nvml = self._library
        return self._positive(lambda: nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM), 1.0)

    def power_limit_w(self) -> float | None:
        """The power limit in force."""
        return self._positive(lambda: self._library.nvmlDeviceGetEnforcedPowerLimit(self._handle), _MILLI)

    def memory_bytes(self) -> int | None:
        """Memory of the device in all."""
        memory = self._ask(lambda: self._library.nvmlDeviceGetMemoryInfo(self._handle))
        return None if memory is None else int(memory.total)

    def throttle_reasons(self) -> int | None:
        """NVML's bit mask of why the clocks are not higher; 1 is idle, 4 the power limit."""
        nvml = self._library
        reasons = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        return None if reasons is None else int(reasons)

    def power_mode(self) -> str:
        """The power limit: what a desktop or data-centre card has in place of modes."""
        limit_w = self.power_limit_w()
        return "" if limit_w is None else f"{limit_w:.0f} W"

    def _positive(self, ask: Callable[[], Any], scale: float) -> float | None:
        """Neither a clock nor a power is ever 0: a driver that says so does not know."""
        value = self._ask(ask)
        return float(value) * scale if value else None

    def _ask(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except self._library.NVMLError as error:
            _log.debug("NVML: %s", error)
            return None


def open_nvml(
    *, uuid: str | None = None, library: Any = None, environment: Mapping[str, str] = os.environ
) -> Nvml | None:
    """CUDA's first GPU, or the one of that UUID; None without binding, driver or device."""
    try:
        nvml = library or import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else _first_of_cuda(nvml, environment)
        return Nvml(nvml, handle)
    except nvml.NVMLError as error:
        _log.debug("NVML: %s", error)
        return None


def _first_of_cuda(nvml: Any, environment: Mapping[str, str]) -> Any:
    """The GPU that the environment gives CUDA as its first; NVML's first where it does not tell.

    NVML counts in the order of the bus, and CUDA only where CUDA_DEVICE_ORDER says so.
    """
    wanted = environment.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    if wanted.isdecimal() and environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return nvml.nvmlDeviceGetHandleByIndex(int(wanted))
    if wanted.startswith("GPU-"):  # CUDA takes the beginning of one, too
        for number in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            if (uuid.decode() if isinstance(uuid, bytes) else uuid).startswith(wanted):
                return handle
    return nvml.nvmlDeviceGetHandleByIndex(0)


_NODES: Final = (
    "17000000.ga10b",
    "17000000.gpu",
    "17000000.gv11b",
    "17000000.gp10b",
    "57000000.gpu",
    "gpu-gpc-0",  # Thor
)
_LOAD: Final = (
    "devices/gpu.0/load",
    "devices/platform/gpu.0/load",
    *(f"devices/platform/{node}/load" for node in _NODES),
    *(f"devices/platform/bus@0/{node}/load" for node in _NODES),
    *(f"class/devfreq/{node}/device/load" for node in _NODES),
)
_GPU_CLOCK, _LEAST_CLOCK, _MOST_CLOCK = (
    tuple(f"class/devfreq/{node}/{which}_freq" for node in _NODES) for which in ("cur", "min", "max")
)
_EMC_ACTIVITY: Final = ("kernel/actmon_avg_activity/mc_all", "kernel/debug/cactmon/mc_all")
_EMC_CLOCK: Final = ("kernel/debug/clk/emc/clk_rate", "kernel/debug/bpmp/debug/clk/emc/rate")
_MODE = re.compile(r"\bpmode:\s*0*(\d+)")
_MODEL = re.compile(r"^\s*<\s*POWER_MODEL\s+ID=0*(\d+)\s+NAME=(\S+?)\s*>", re.MULTILINE)
_NAMED = re.compile(r"^NV Power Mode:\s*(\S+)", re.MULTILINE)
_RELEASE = re.compile(r"^#\s*R(\d+)\s*\(release\),\s*REVISION:\s*([\d.]+)", re.MULTILINE)
_ASK_S: Final = 2.0


class Tegra:
    """One Jetson, by sysfs and by nvpmodel's files. `root` is the file system that these lie in.

    NVML initialises on an Orin and then answers "not supported" or zeros; a Thor has no `load`, and NVML
    knows it there (jetson_stats issue 885), so it is asked where that file is missing. The driver's `load`
    counts in thousandths; which node it belongs to differs between generations (gpu.0 on TX2, Nano and
    Xavier, 17000000.ga10b or 17000000.gpu on Orin). The share in which the memory controller was busy needs
    two files of the kernel's activity monitor; the newer kernels let only root read them.
    """

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

    @property
    def has_load(self) -> bool:
        """Whether the driver has a file for the load, readable or not."""
        return any(self._sysfs.joinpath(path).exists() for path in _LOAD)

    @property
    def clocks_locked(self) -> bool:
        """Whether the GPU's least clock is its highest, which `jetson_clocks` sets beside the power mode."""
        least, most = first_number(self._sysfs, _LEAST_CLOCK), first_number(self._sysfs, _MOST_CLOCK)
        return least is not None and least == most

    def power_mode(self) -> str:
        """nvpmodel's mode by name; by number where its table does not name it; "" where neither is known."""
        status = text_of(self._root / "var/lib/nvpmodel/status")
        number = mode_number(status or "")
        if number is None:
            return ""
        return mode_names(text_of(self._root / "etc/nvpmodel.conf") or "").get(number, f"mode {number}")


def l4t_release(root: Path = Path("/")) -> str:
    """The release of Jetson Linux, such as `36.4.3` (JetPack 6) or `39.2.0` (JetPack 7.2); "" elsewhere."""
    match = _RELEASE.search(text_of(root / "etc/nv_tegra_release") or "")
    return ".".join(match.groups()) if match else ""


def mode_number(status: str) -> int | None:
    """The number in nvpmodel's status file, such as `pmode:0002`."""
    match = _MODE.search(status)
    return int(match.group(1)) if match else None


def mode_names(table: str) -> dict[int, str]:
    """Names by number, from lines of /etc/nvpmodel.conf such as `< POWER_MODEL ID=2 NAME=MODE_15W >`."""
    return {int(number): name for number, name in _MODEL.findall(table)}


def queried_mode(answer: str) -> str:
    """The mode in what `nvpmodel -q` prints; "" where it names none."""
    match = _NAMED.search(answer)
    return match.group(1) if match else ""


def ask_nvpmodel() -> str:
    """What `nvpmodel -q` says, for a machine that keeps no status file; "" where it cannot be asked.

    Takes up to two seconds, so it is asked once and not on a running agent's loop.
    """
    try:
        done = subprocess.run(["nvpmodel", "-q"], capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return queried_mode(done.stdout)


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
        if self._tegra is None or not self._tegra.has_load:
            self._nvml = nvml()
        self._limited = self._nvml is not None and self._nvml.power_mode() != ""

    @property
    def source(self) -> str:
        """Where the GPU's figures come from."""
        sources = [name for name, known in (("sysfs", self._tegra), ("nvml", self._nvml)) if known]
        return "+".join(sources) or "none"

    def read(self) -> tuple[Metric, ...]:
        """Every metric that there is, None where this machine cannot tell it."""
        found = self._cpu.read()
        if self._nvml is not None:
            told = self._nvml.read()
            # NVML says a load of 0 on Jetsons that it cannot read, where it knows no clock either.
            if self._tegra is None or told[GPU_CLOCK] is not None:
                found |= told
        if self._tegra is not None:
            found |= {name: value for name, value in self._tegra.read().items() if value is not None}
        return tuple(Metric(name, found.get(name)) for name in UNITS)

    def clocks(self) -> tuple[Metric, ...]:
        """The clocks and the power limit alone, for the record of a measurement."""
        return tuple(metric for metric in self.read() if metric.name in CLOCKS)

    def power_mode(self) -> str:
        """nvpmodel's mode on a Jetson, else the GPU's power limit, else the governor; "" where none is known.

        Costs with the same text were measured alike, so that it also says where `jetson_clocks` holds the
        clocks at their highest. Where NVML has told a limit once, one that it cannot
        tell now is unknown and not the governor: that would be another mode.
        """
        if self._tegra is not None:
            mode = self._tegra.power_mode() or self._asked_mode
            return f"{mode} jetson_clocks".strip() if self._tegra.clocks_locked else mode
        if self._nvml is not None and self._limited:
            return self._nvml.power_mode()
        return self._cpu.governor()


@cache
def this_machine() -> UtilisationChain:
    """The chain of this process: NVML is opened once."""
    return UtilisationChain()
