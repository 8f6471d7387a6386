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
from typing import Any, Final

from benchmarks.gpu.device import Device, Work, repeat
from benchmarks.runner import percentile

CLOCK_TOLERANCE: Final = 0.03
_BACK_TO_BACK: Final = 0.6  # of a window; in the rest every run is waited for
_ROUNDS: Final = 30
_WINDOW_S: Final = 0.2
_LEAST_WINDOW_S: Final = 0.02
_BETWEEN_WINDOWS: Final = 1.25  # what a window takes with what comes before and after it


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

    @property
    def key(self) -> tuple[str, str]:
        return self.subject, self.variant


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
        until: Callable[[], bool] = lambda: False,
        on_failure: Callable[[Variant, Exception], None] | None = None,
    ) -> int:
        """Up to `rounds` rounds while `until()` is false; how many were whole.

        A variant that raises is told to `on_failure` and takes no further part; without that it ends all.
        """
        once_s: dict[tuple[str, str], float] = {}
        running = list(variants)
        for number in range(rounds):
            for variant in self.rng.sample(running, len(running)):
                if until():
                    return number
                try:
                    if variant.key not in once_s:
                        once_s[variant.key] = median(self._alone_s(variant) for _ in range(5))
                    self.samples.append(self._window(variant, number, window_s, once_s[variant.key]))
                except Exception as error:  # a driver's, a library's, a child process's
                    if on_failure is None:
                        raise
                    on_failure(variant, error)
                    running.remove(variant)
        return rounds

    def _alone_s(self, variant: Variant) -> float:
        began_s = self.clock()
        variant.run()
        self.device.synchronize()
        return max(self.clock() - began_s, 1e-7)

    def _window(self, variant: Variant, number: int, window_s: float, once_s: float) -> Sample:
        device = self.device
        runs = max(2, round(_BACK_TO_BACK * window_s / once_s))
        self._alone_s(variant)  # the caches are this variant's again
        began_s = self.clock()
        device_s = device.timed_s(lambda: repeat(variant.run, runs))
        host_s = self.clock() - began_s
        sm_mhz = device.sm_clock_mhz()  # right after the work, before the clock falls
        alone = max(2, round((1 - _BACK_TO_BACK) * window_s / once_s))
        per_unit = 1e6 / (runs * variant.units)
        return Sample(
            variant.subject,
            variant.name,
            number,
            device_s * per_unit,
            host_s * per_unit,
            tuple(self._alone_s(variant) * 1e6 for _ in range(alone)),
            sm_mhz,
        )


def kept(samples: Iterable[Sample]) -> list[Sample]:
    """The samples at their variant's usual clock, which is the median of those known."""
    samples = list(samples)
    clocks: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        if sample.sm_mhz:
            clocks.setdefault(sample.key, []).append(sample.sm_mhz)
    usual = {key: median(known) for key, known in clocks.items()}
    return [
        sample
        for sample in samples
        if not sample.sm_mhz or abs(sample.sm_mhz / usual[sample.key] - 1) <= CLOCK_TOLERANCE
    ]


def summarise(samples: Sequence[Sample], subject: str, variant: str) -> dict[str, Any]:
    """A variant's columns of the table, over the samples that are kept; empty where there are none."""
    own = [sample for sample in samples if sample.key == (subject, variant)]
    used = kept(own)
    if not used:
        return {}
    device_us = [sample.device_us for sample in used]
    alone_us = [taken_us for sample in used for taken_us in sample.alone_us]
    clocks = [sample.sm_mhz for sample in used if sample.sm_mhz]
    return {
        "device_us": median(device_us),
        "device_p95_us": percentile(device_us, 95),
        "host_us": median(sample.host_us for sample in used),
        "alone_us": median(alone_us),
        "alone_p95_us": percentile(alone_us, 95),
        "rounds": len(used),
        "dropped": len(own) - len(used),
        "sm_mhz": median(clocks) if clocks else None,
    }


def faster(samples: Sequence[Sample], subject: str, than: str, variant: str) -> Ratio | None:
    """`than`'s time over `variant`'s: above 1, `variant` is faster. None without a common round."""
    times = {
        (sample.variant, sample.round): sample.device_us
        for sample in kept(samples)
        if sample.subject == subject
    }
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
    each_s = seconds / max(variants * _BETWEEN_WINDOWS, 1e-9)
    window_s = min(_WINDOW_S, each_s / _ROUNDS)
    if window_s >= _LEAST_WINDOW_S:
        return max(_ROUNDS, min(int(each_s / window_s), 100)), window_s
    return max(3, int(each_s / _LEAST_WINDOW_S)), _LEAST_WINDOW_S
