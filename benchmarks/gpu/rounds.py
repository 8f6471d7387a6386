"""Interleaved rounds: in each, every variant runs one window, in an order drawn anew.

Slow drifts (clocks, temperature, neighbours) then touch all variants alike, and two variants are compared
round by round. Every subject's baseline takes part twice, so that the spread of a variant against itself is
known. A window at another clock than its variant's usual one (by more than 3 %) is dropped.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Final

from benchmarks.gpu.device import Device, Work
from benchmarks.runner import percentile

CLOCK_TOLERANCE: Final = 0.03
_BACK_TO_BACK: Final = 0.6  # of a window; in the rest every run is waited for


@dataclass(frozen=True)
class Variant:
    """One way to run one subject (a model or a mix). A run is `units` images, or rounds of the mix."""

    subject: str
    name: str
    run: Work
    units: int = 1
    precision: str = "fp16"
    error: float = 0.0  # of its results, relative to float32 on the CPU

    @property
    def key(self) -> tuple[str, str]:
        return self.subject, self.name


@dataclass(frozen=True, slots=True)
class Sample:
    subject: str
    variant: str
    round: int
    device_us: float  # per unit, back to back, by device events
    host_us: float  # the same by the host's clock
    alone_us: tuple[float, ...]  # per run, issued and waited for, by the host's clock
    sm_mhz: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """One variant over its rounds; times in microseconds."""

    subject: str
    variant: str
    rounds: int
    dropped: int
    device_us: float
    device_p95_us: float
    host_us: float
    alone_us: float
    alone_p95_us: float
    sm_mhz: float | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster one variant is than another, round by round: median, 16th and 84th percentile."""

    value: float
    low: float
    high: float
    rounds: int

    @property
    def text(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass
class Rounds:
    """Runs windows and keeps their samples."""

    device: Device
    rng: Random
    samples: list[Sample] = field(default_factory=list)
    clock: Callable[[], float] = time.perf_counter

    def measure(
        self,
        variants: Sequence[Variant],
        *,
        rounds: int,
        window_s: float,
        until: Callable[[], bool],
        on_failure: Callable[[Variant, Exception], None] | None = None,
    ) -> int:
        """Up to `rounds` rounds while `until()` is false; how many were whole.

        A variant that raises is told to `on_failure` and takes no further part; without that it ends all.
        """
        once_s: dict[tuple[str, str], float] = {}
        running = list(variants)
        for number in range(rounds):
            order = list(running)
            self.rng.shuffle(order)
            for variant in order:
                if until():
                    return number
                try:
                    if variant.key not in once_s:
                        once_s[variant.key] = self._once_s(variant)
                    self.samples.append(self._window(variant, number, window_s, once_s[variant.key]))
                except Exception as error:  # a driver's, a library's, a child process's
                    if on_failure is None:
                        raise
                    on_failure(variant, error)
                    running.remove(variant)
        return rounds

    def _once_s(self, variant: Variant) -> float:
        taken = []
        for _ in range(5):
            began_s = self.clock()
            variant.run()
            self.device.synchronize()
            taken.append(self.clock() - began_s)
        return max(median(taken), 1e-7)

    def _window(self, variant: Variant, number: int, window_s: float, once_s: float) -> Sample:
        device = self.device
        runs = max(2, round(_BACK_TO_BACK * window_s / once_s))
        first, last = device.event(timing=True), device.event(timing=True)
        variant.run()  # the caches are this variant's again
        device.synchronize()
        began_s = self.clock()
        first.record(device.current())
        for _ in range(runs):
            variant.run()
        last.record(device.current())
        device.synchronize()
        host_s = self.clock() - began_s
        device_s = device.elapsed_s(first, last)
        sm_mhz = device.sm_clock_mhz()  # right after the work, before the clock falls
        alone = []
        for _ in range(max(2, round((1 - _BACK_TO_BACK) * window_s / once_s))):
            began_s = self.clock()
            variant.run()
            device.synchronize()
            alone.append((self.clock() - began_s) * 1e6)
        per_unit = 1e6 / (runs * variant.units)
        return Sample(
            variant.subject,
            variant.name,
            number,
            device_s * per_unit,
            host_s * per_unit,
            tuple(alone),
            sm_mhz,
        )


def kept(samples: Iterable[Sample]) -> list[Sample]:
    """The samples at their variant's usual clock, which is the median of those known."""
    found = list(samples)
    usual: dict[tuple[str, str], float] = {}
    for key in {(one.subject, one.variant) for one in found}:
        known = [one.sm_mhz for one in found if (one.subject, one.variant) == key and one.sm_mhz]
        if known:
            usual[key] = median(known)

    def fits(one: Sample) -> bool:
        clock = usual.get((one.subject, one.variant))
        return clock is None or not one.sm_mhz or abs(one.sm_mhz / clock - 1) <= CLOCK_TOLERANCE

    return [one for one in found if fits(one)]


def summarise(samples: Sequence[Sample], subject: str, variant: str) -> Summary | None:
    """Over the samples that are kept; None where there are none."""
    own = [one for one in samples if (one.subject, one.variant) == (subject, variant)]
    used = kept(own)
    if not used:
        return None
    alone = [one_us for one in used for one_us in one.alone_us]
    clocks = [one.sm_mhz for one in used if one.sm_mhz]
    return Summary(
        subject,
        variant,
        len(used),
        len(own) - len(used),
        median(one.device_us for one in used),
        percentile([one.device_us for one in used], 95),
        median(one.host_us for one in used),
        median(alone),
        percentile(alone, 95),
        median(clocks) if clocks else None,
    )


def faster(samples: Sequence[Sample], subject: str, than: str, variant: str) -> Ratio | None:
    """`than`'s time over `variant`'s: above 1, `variant` is faster. None without a common round."""
    used = kept(samples)
    times = {(one.variant, one.round): one.device_us for one in used if one.subject == subject}
    ratios = [
        times[than, number] / device_us
        for (name, number), device_us in times.items()
        if name == variant and (than, number) in times
    ]
    if not ratios:
        return None
    return Ratio(median(ratios), percentile(ratios, 16), percentile(ratios, 84), len(ratios))


def shape_of_rounds(variants: int, seconds: float) -> tuple[int, float]:
    """Rounds and their window: 30 of 200 ms if they fit, else shorter windows, then fewer rounds."""
    wanted, window_s, least_s = 30, 0.2, 0.02
    overhead = 1.25  # what comes between windows
    each_s = seconds / max(variants * overhead, 1e-9)
    window_s = min(window_s, each_s / wanted)
    if window_s >= least_s:
        return max(wanted, min(int(each_s / window_s), 100)), window_s
    return max(3, int(each_s / least_s)), least_s
