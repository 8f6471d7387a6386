"""NVML, where its Python binding (nvidia-ml-py) and a driver are there. Nothing here changes a setting.

Every figure is asked for by itself: a driver that does not support one (MIG, vGPU, consumer cards) raises for
that one, and it is None while the others are told.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from stageloom.edge_agent.utilisation.reading import (
    GPU,
    GPU_CLOCK,
    GPU_MEMORY,
    MEMORY_CLOCK,
    POWER,
    POWER_LIMIT,
)

_log = logging.getLogger(__name__)
_MILLI: Final = 1e-3


class Nvml:
    """One GPU. `library` is the module pynvml, or a stand-in."""

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
        """The limit in force."""
        return self._positive(lambda: self._library.nvmlDeviceGetEnforcedPowerLimit(self._handle), _MILLI)

    def memory_bytes(self) -> int | None:
        """Of the device."""
        found = self._ask(lambda: self._library.nvmlDeviceGetMemoryInfo(self._handle))
        return None if found is None else int(found.total)

    def throttle_reasons(self) -> int | None:
        """NVML's bit mask of why the clocks are not higher; 1 is idle, 4 the power limit."""
        nvml = self._library
        found = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        return None if found is None else int(found)

    def power_mode(self) -> str:
        """The power limit: what a desktop or data-centre card has in place of modes."""
        limit_w = self.power_limit_w()
        return "" if limit_w is None else f"{limit_w:.0f} W"

    def _positive(self, ask: Callable[[], Any], scale: float) -> float | None:
        """Neither a clock nor a power is ever 0: a driver that says so does not know."""
        found = self._ask(ask)
        return float(found) * scale if found else None

    def _ask(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except self._library.NVMLError as error:
            _log.debug("NVML: %s", error)
            return None


def open_nvml(*, uuid: str | None = None, library: Any = None) -> Nvml | None:
    """The first GPU, or the one of that UUID; None without binding, driver or device."""
    try:
        nvml = library or import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        find = nvml.nvmlDeviceGetHandleByUUID if uuid else nvml.nvmlDeviceGetHandleByIndex
        return Nvml(nvml, find(uuid or 0))
    except nvml.NVMLError as error:
        _log.debug("NVML: %s", error)
        return None
