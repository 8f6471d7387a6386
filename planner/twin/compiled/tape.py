"""The arrivals of all sources in one order, drawn as far as they were asked for; branches share it."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from stageloom.planner.twin.arrivals import ArrivalStream, Process


class Tape:
    """Times and sources of all tasks, ascending; of equal times the first source's come first."""

    def __init__(self, arrivals: Mapping[str, Process], seed: int) -> None:
        self._streams = [
            ArrivalStream(process, np.random.default_rng([seed, index]))
            for index, process in enumerate(arrivals.values())
        ]
        self._times: npt.NDArray[np.float64] = np.empty(0)
        self._sources: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._drawn = 0
        self._until_s = 0.0

    def between(self, first: int, until_s: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Times and sources of the tasks from number `first` on that come before `until_s`."""
        if until_s > self._until_s:
            self._draw(until_s)
        last = int(np.searchsorted(self._times[: self._drawn], until_s, side="left"))
        return self._times[first:last], self._sources[first:last]

    def _draw(self, until_s: float) -> None:
        drawn = [stream.until(until_s) for stream in self._streams]
        times = np.concatenate([*drawn, np.empty(0)])
        sources = np.repeat(np.arange(len(drawn)), [len(one) for one in drawn])
        order = np.argsort(times, kind="stable")
        self._keep(times[order], sources[order])
        self._until_s = until_s

    def _keep(self, times: npt.NDArray[np.float64], sources: npt.NDArray[np.int64]) -> None:
        """Append; room doubles, so that a long run copies each arrival a few times at most."""
        total = self._drawn + len(times)
        if total > len(self._times):
            room = max(2 * len(self._times), total, 1024)
            self._times = np.concatenate((self._times[: self._drawn], np.empty(room - self._drawn)))
            self._sources = np.concatenate(
                (self._sources[: self._drawn], np.empty(room - self._drawn, np.int64))
            )
        self._times[self._drawn : total] = times
        self._sources[self._drawn : total] = sources
        self._drawn = total
