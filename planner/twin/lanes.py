"""How steps of different lanes share a device: processor sharing with one constant for interference.

A step that runs alone takes t seconds and uses the share u in (0, 1] of the device. While k steps with shares
u_1..u_k run, each of them advances at the rate 1 / s,

    s = least + c (k - least),    least = max(u_1 + ... + u_k, 1),

so that what takes t seconds alone takes t s. `least` is processor sharing (Kleinrock 1967): a device that is
not full slows no step down, a full one is divided. c is the device's interference: 0, steps cost each other
nothing while there is room; 1, they take as long as one after another; more, they are better kept apart. It
is the formula of the groups of a stage (`stageloom.shared.search.costs`), one level up, so a plan is priced
alike wherever it puts its parallelism.

What steps cost each other beyond that does not depend on how long they are: an interpreter's lock that both
need to begin and to end, a driver's queue. Each step is longer by `DeviceFile.beside_s` and, for each item
after its first, by `item_beside_s` for every step that runs in another lane when it begins.

The executors call no helper while each core of a CPU has a thread at work. A step that begins when others
leave it one core takes `StepTime.crowded_s`: its groups come one after another.

Two steps of t seconds at u = 1 and c = 0 that begin d < t apart end at 2t - d and 2t, counted from the first.

The lanes of a simulated device: steps that were issued, those that run, and when each ends.

A lane runs its steps in the order of their issue, one at a time; a step also waits for the steps that it
names (`Step.after`). Running steps share the device as `stageloom.planner.twin.lanes` says. What is left of
each is brought up to date only when the set of running steps changes, so a step that runs alone ends exactly
after its time.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np

from stageloom.planner.twin.device_file import DeviceFile
from stageloom.planner.twin.times import StepTime
from stageloom.shared.engine.steps import Step
from stageloom.shared.ids import StepId


def slowdown(shares: Collection[float], interference: float) -> float:
    """How many times as long each of the running steps takes as alone; 1 where at most one runs."""
    running = len(shares)
    if running < 2:
        return 1.0
    least = max(added_up(shares), 1.0)
    return least + interference * (running - least)


def added_up(values: Iterable[float]) -> float:
    """The sum of floats, one after another, as the kernels of the compiled twin add them.

    Python's own `sum` makes up for rounding from 3.12 on, so its bits depend on the Python.
    """
    total = 0.0
    for value in values:
        total += value
    return total


def crowded_from(device: DeviceFile) -> float:
    """How many steps that run leave another one no core for a helper; infinite on a GPU.

    The executors take a device to have two cores at least (`stageloom.edge_agent.executor.threads`).
    """
    return max(device.cores, 2) - 1 if device.cores else math.inf


NOISE_LENGTH: Final = 4096
"""Step i takes the factor i modulo this many, so that a step's noise depends on nothing but its number."""

_SEED_OF_NOISE: Final = 1 << 32  # apart from the seeds of arrivals


class _Running:
    """A step on the device."""

    __slots__ = ("began_s", "end_s", "left_s", "share", "step")

    def __init__(self, step: Step, seconds: float, share: float, now: float) -> None:
        self.step = step
        self.share = share
        self.left_s = seconds  # alone, as of the last change
        self.began_s = now
        self.end_s = math.inf


class Lanes:
    """Steps in flight, and the two integrals of a window: busy and used seconds."""

    def __init__(self, device: DeviceFile, seed: int = 0) -> None:
        self._interference = device.lanes_interference
        self._beside_s, self._item_beside_s = device.beside_s, device.item_beside_s
        self._crowded = crowded_from(device)
        self._noise = noise_factors(device.noise, seed)
        self._pending: list[deque[tuple[Step, StepTime]]] = []
        self._running: dict[int, _Running] = {}  # by lane
        self._in_flight: set[StepId] = set()
        self._slow = 1.0
        self._changed_s = 0.0  # when the running steps changed last
        self._counted_s = 0.0  # up to when the integrals are
        self._used_rate = 0.0
        self.next_end_s = math.inf
        self._next_lane = -1
        self.busy_s = 0.0
        self.used_s = 0.0

    def make(self, lanes: int) -> None:
        """Have at least so many lanes."""
        while len(self._pending) < lanes:
            self._pending.append(deque())

    def issue(self, step: Step, time: StepTime, now: float) -> None:
        """A step is handed to its lane."""
        self.advance(now)
        self._in_flight.add(step.id)
        self._pending[step.lane].append((step, time))
        if len(self._pending[step.lane]) == 1 and step.lane not in self._running and self._may_begin(step):
            self._begin(step.lane, now)

    def end_next(self) -> tuple[Step, float]:
        """The step that ends at `next_end_s`, and the seconds since it began."""
        now, lane = self.next_end_s, self._next_lane
        self.advance(now)
        self._settle(now)
        ended = self._running.pop(lane)
        self._in_flight.discard(ended.step.id)
        for other, pending in enumerate(self._pending):
            if pending and other not in self._running and self._may_begin(pending[0][0]):
                self._put(other, now)
        self._share_out()
        return ended.step, now - ended.began_s

    def advance(self, now: float) -> None:
        """Count the seconds up to `now`."""
        passed_s = now - self._counted_s
        if passed_s > 0.0:
            if self._in_flight:
                self.busy_s += passed_s
                self.used_s += passed_s * self._used_rate
            self._counted_s = now

    def _may_begin(self, step: Step) -> bool:
        return self._in_flight.isdisjoint(step.after)

    def _begin(self, lane: int, now: float) -> None:
        self._settle(now)
        self._put(lane, now)
        self._share_out()

    def _put(self, lane: int, now: float) -> None:
        step, time = self._pending[lane].popleft()
        factor = self._noise[step.id % NOISE_LENGTH] if self._noise else 1.0
        others = len(self._running)
        seconds, share = time.seconds, time.share
        if others >= self._crowded:
            seconds, share = time.crowded_s, time.crowded_share
        beside_s = self._beside_s + self._item_beside_s * (time.items - 1)
        self._running[lane] = _Running(step, seconds * factor + beside_s * others, share, now)

    def _settle(self, now: float) -> None:
        """Bring what is left of the running steps up to date; their set is about to change."""
        passed_s = now - self._changed_s
        if passed_s > 0.0:
            done_s = passed_s / self._slow
            for step in self._running.values():
                step.left_s = max(step.left_s - done_s, 0.0)
        self._changed_s = now

    def _share_out(self) -> None:
        """Work out anew how fast the running steps are, and which ends first: the oldest of equals."""
        shares = [step.share for step in self._running.values()]
        self._slow = slowdown(shares, self._interference)
        self._used_rate = min(added_up(shares), 1.0)
        first: tuple[float, int, int] = (math.inf, 0, -1)
        for lane, one in self._running.items():
            one.end_s = self._changed_s + one.left_s * self._slow
            first = min(first, (one.end_s, one.step.id, lane))
        self.next_end_s, _, self._next_lane = first


def noise_factors(quantiles: Sequence[tuple[float, float]], seed: int) -> list[float]:
    """What steps' seconds are multiplied with, drawn from the quantiles; empty where there are none."""
    if not quantiles:
        return []
    rng = np.random.default_rng([seed, _SEED_OF_NOISE])
    levels, factors = zip(*quantiles, strict=True)
    drawn: list[float] = np.interp(rng.random(NOISE_LENGTH), levels, factors).tolist()
    return drawn
