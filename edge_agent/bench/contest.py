"""Contestants on one load, in windows that take turns: capacities, latencies, saturated throughput."""

import math
import os
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from stageloom.edge_agent.bench.capacity import (
    CapacitySearch,
    Estimate,
    WindowCounts,
    capacity_estimate,
    capacity_per_s,
)
from stageloom.edge_agent.bench.contestant import ContestantSetting
from stageloom.edge_agent.bench.contestant_process import ClosedLoop, ContestantError, ContestantProcess
from stageloom.edge_agent.bench.load import WindowResult, mixed_models, poisson_window, rate_index, rate_per_s
from stageloom.edge_agent.bench.model_files import ModelUnderTest

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ContestLoad:
    """What arrives: per model its weight and its deadline in seconds; a window's length, and the seed."""

    weights: Sequence[float]
    deadlines_s: Sequence[float]
    window_s: float = 2.0
    seed: int = 0


@dataclass
class CapacityFound:
    """A contestant's samples by place on the grid, and what they say.

    `first_per_s`: where the search begins for this one; None: where it does for all.
    """

    samples: dict[int, list[WindowCounts]] = field(default_factory=dict)
    first_per_s: float | None = None

    @property
    def per_s(self) -> float:
        """The largest rate that holds, in tasks a second."""
        return capacity_per_s(self.samples)

    @property
    def estimate(self) -> Estimate | None:
        """By bootstrap over the windows, in tasks a second; None from too few of them."""
        return capacity_estimate(self.samples)


class Contest:
    """Started contestants.

    Those that cannot serve the models, or died while they were measured, are in `absent`, with the reason;
    `problems` has the first error of those that failed at a task, `plans` the digests of those that serve a
    plan.

    Args:
        needed: those without which nothing is worth knowing: that one cannot serve, or dies, is raised.
    """

    def __init__(
        self,
        models: Sequence[ModelUnderTest],
        load: ContestLoad,
        progress: Progress,
        *,
        needed: Collection[str] = (),
    ) -> None:
        self.models = models
        self.load = load
        self.absent: dict[str, str] = {}
        self.problems: dict[str, str] = {}
        self.plans: dict[str, str] = {}
        self._needed = needed
        self._progress = progress
        self._processes: dict[str, ContestantProcess] = {}
        self._starting: list[ContestantProcess] = []
        self._interrupted = False
        self._rng = random.Random(load.seed)

    def __enter__(self) -> "Contest":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(self.names)

    def enter(self, settings: Iterable[ContestantSetting]) -> None:
        """Start contestants: those that measure while they start one by one, then one on each core.

        Where that is interrupted, those that are still starting are killed.

        Raises:
            ContestantError: a needed contestant cannot serve the models.
        """
        wanted = list(settings)
        pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))  # Ctrl-C cuts none of its threads short
        try:
            for setting in wanted:
                if setting.measures:
                    pool.submit(self._start, setting).result()
            list(pool.map(self._start, (setting for setting in wanted if not setting.measures)))
        except BaseException:
            self._interrupted = True
            for process in tuple(self._starting):
                process.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        order = {one.name: number for number, one in enumerate(wanted)}
        here = sorted(self._processes, key=lambda name: order.get(name, -1))  # not as they became ready
        self._processes = {name: self._processes[name] for name in here}

    def _start(self, setting: ContestantSetting) -> None:
        process = ContestantProcess(setting, self.models)
        self._starting.append(process)
        if self._interrupted:  # after whoever kills them has looked, perhaps
            process.kill()
        try:
            process.wait_ready()
            self._processes[setting.name] = process
            self._note(process)
        except ContestantError as error:
            if not self._interrupted:
                if setting.name in self._needed:
                    raise
                self.absent[setting.name] = str(error)
                self._progress(f"  absent: {error}")
        finally:
            self._starting.remove(process)

    def leave(self, names: Iterable[str]) -> None:
        """End contestants that are no longer needed; where that is interrupted, kill the rest of them."""
        rest = list(names)
        try:
            while rest:
                self._processes[rest[0]].stop()
                del self._processes[rest.pop(0)]
        except BaseException:  # a suspended process would be waited for as long as it stays, at Python's exit
            for name in rest:
                self._processes[name].kill()
            raise

    @property
    def names(self) -> list[str]:
        """Those that are here."""
        return list(self._processes)

    def group(self, name: str) -> int:
        """The process group of a contestant."""
        return self._processes[name].group

    def capacities(
        self,
        found: MutableMapping[str, CapacityFound],
        search: CapacitySearch,
        first_per_s: float,
        until_s: float = math.inf,
        *,
        wanted: Callable[[], Collection[str]] | None = None,
    ) -> None:
        """Search the capacity of each contestant in `found`, beginning at a rate, and add the samples there.

        `wanted` names, before each round, those that are still worth a window; without it all are.

        A round gives every contestant that is not done one window, in shuffled order. The windows of a rate
        are numbered, and a number has the same arrivals for all. No round begins after `until_s` on the
        monotonic clock. A contestant that dies is absent from then on, and leaves `found`.

        Raises:
            ContestantError: a needed contestant has died.
        """
        while turn := [
            (name, place)
            for name in (found if wanted is None else wanted())
            if (one := found.get(name)) is not None
            and (place := search.next_index(one.samples, rate_index(one.first_per_s or first_per_s)))
            is not None
        ]:
            if time.monotonic() >= until_s and all(one.samples for one in found.values()):
                return
            self._rng.shuffle(turn)
            for name, place in turn:
                number = len(found[name].samples.get(place, ()))
                with self._losing(name, found):
                    counts = WindowCounts.of(self.window(name, rate_per_s(place), number), len(self.models))
                    found[name].samples.setdefault(place, []).append(counts)

    @contextmanager
    def _losing(self, name: str, found: MutableMapping[str, Any]) -> Iterator[None]:
        """What is asked of a contestant: one that dies is absent from then on and leaves `found`; the death
        of a needed one is raised."""
        try:
            yield
        except ContestantError as error:
            if name in self._needed:
                raise
            self.absent[name] = str(error)
            self._progress(f"  absent from now on: {error}")
            self.leave([name])
            del found[name]

    def settle(
        self,
        found: MutableMapping[str, CapacityFound],
        chosen: Callable[[], Iterable[str]],
        searches: Sequence[CapacitySearch],
        first_per_s: float,
        until_s: float,
    ) -> None:
        """Measure closely whom `chosen` names, by each search in turn; where the figure of one falls, also
        who is named then.

        What looked best in one window often is not; the next one has to be measured as closely before
        anybody is compared with it. Arguments and errors are those of `capacities`.
        """
        again: dict[str, CapacityFound] = {}
        left = list(searches)
        self._drop_absent(found)
        while time.monotonic() < until_s:
            if fresh := {name: found[name] for name in chosen() if name in found and name not in again}:
                self._progress(f"measuring {', '.join(fresh)} again at that load, in turns")
                again |= fresh
            elif len(left) > 1:
                del left[0]
            else:
                return
            self.capacities(again, left[0], first_per_s, until_s)
            self._drop_absent(found)

    def _drop_absent(self, found: MutableMapping[str, CapacityFound]) -> None:
        for name in found.keys() & self.absent.keys():
            del found[name]

    def window(self, name: str, rate_per_s: float, number: int) -> WindowResult:
        """One window of a contestant at a rate.

        Raises:
            ContestantError: the contestant has died.
        """
        load = self.load
        seed = load.seed + number
        arrivals = poisson_window(load.weights, rate_per_s, load.window_s, load.deadlines_s, seed)
        process = self._processes[name]
        result = process.window(arrivals)
        self._note(process)
        return result

    def _note(self, process: ContestantProcess) -> None:
        if process.plan:
            self.plans[process.name] = process.plan
        if process.problem and process.name not in self.problems:
            self.problems[process.name] = process.problem
            self._progress(f"  {process.name} failed at a task: {process.problem}")

    def windows_at(
        self, names: Sequence[str], rate_per_s: float, windows: int
    ) -> dict[str, list[WindowResult]]:
        """Some windows of each contestant at one rate, in turns of shuffled order; none of one that dies.

        Raises:
            ContestantError: a needed contestant has died.
        """
        found: dict[str, list[WindowResult]] = {name: [] for name in names}
        for number in range(windows):
            for name in self._rng.sample(list(found), len(found)):
                with self._losing(name, found):
                    found[name].append(self.window(name, rate_per_s, number))
        return found

    def saturated(
        self,
        names: Sequence[str],
        weights: Sequence[float],
        seconds: float,
        rounds: int,
        until_s: float = math.inf,
    ) -> dict[str, list[float]]:
        """Tasks a second of each contestant while eight are always open, once a round; none of one that dies.

        Tasks are of the models by their weights, each round in a seeded order that is the same for all. A
        round in which a task had no result, or whose tasks did not turn over, comes to 0. No round but the
        first begins after `until_s` on the monotonic clock.

        Raises:
            ContestantError: a needed contestant has died.
        """
        found: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds):
            if number and time.monotonic() >= until_s:
                break
            models = tuple(mixed_models(weights, self.load.seed + number))
            wanted = ClosedLoop(models, OUTSTANDING, seconds)
            for name in self._rng.sample(list(found), len(found)):
                with self._losing(name, found):
                    process = self._processes[name]
                    per_s, without_result = process.saturated(wanted)
                    self._note(process)
                    found[name].append(0.0 if without_result else per_s)
        return found


OUTSTANDING = 8
"""Tasks that are always open when contestants are saturated: more than any of them runs at once."""


def p99_ms(results: Iterable[WindowResult]) -> float | None:
    """The 99th percentile of the latencies of all tasks; None where more than one in a hundred has none."""
    latencies = np.concatenate([result.latency_s for result in results])
    slow = np.percentile(np.where(np.isnan(latencies), np.inf, latencies), 99, method="higher")
    return float(slow) * 1e3 if np.isfinite(slow) else None


def share_given_up(results: Iterable[WindowResult]) -> float:
    """Of all tasks, those without a result."""
    return float(np.mean(np.isnan(np.concatenate([result.latency_s for result in results]))))


def share_late(results: Iterable[WindowResult]) -> float:
    """Of all tasks, those without a result before their deadline."""
    return 1.0 - float(np.mean(np.concatenate([result.in_time for result in results])))
