"""The processor's load, clock and frequency governor, from procfs and sysfs."""

from pathlib import Path

from stageloom.edge_agent.utilisation.reading import CPU, CPU_CLOCK, number_of, text_of

_IDLE, _WAITING = 3, 4  # columns of /proc/stat after the label
_COUNTED = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already


class Cpu:
    """Loads are shares of the time since the last reading, over all processors."""

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
        found = {
            text_of(path)
            for path in self._sysfs.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
        }
        return "+".join(sorted(name for name in found if name))

    def _clock_mhz(self) -> float | None:
        files = self._sysfs.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")
        khz = [clock for clock in map(number_of, files) if clock]
        return sum(khz) / len(khz) / 1e3 if khz else None


def spent(stat: str) -> tuple[int, int] | None:
    """Busy and all ticks of all processors since the machine started, from the text of /proc/stat."""
    for line in stat.splitlines():
        label, *columns = line.split()
        if label == "cpu" and len(columns) >= _COUNTED and all(one.isdecimal() for one in columns):
            ticks = [int(one) for one in columns[:_COUNTED]]
            return sum(ticks) - ticks[_IDLE] - ticks[_WAITING], sum(ticks)
    return None


def share(before: tuple[int, int] | None, now: tuple[int, int] | None) -> float | None:
    """Percent busy between two readings; None where there is no time between them."""
    if before is None or now is None or now[1] <= before[1]:
        return None
    return min(max((now[0] - before[0]) / (now[1] - before[1]), 0.0), 1.0) * 100.0
