"""How much load Stageloom's server and other inference servers carry within deadlines: one mix of models."""

import time
from collections.abc import Mapping

from benchmarks.runner import progress
from benchmarks.serving.contestants import STAGELOOM, ServerSetting
from benchmarks.slo.one_mix import MixMeasurement, MixResult
from stageloom.edge_agent.bench.capacity import CapacitySearch
from stageloom.edge_agent.bench.contest import CapacityFound, Contest, ContestLoad

_LOOKING = 0.5  # of the time, then each setting's capacity is about known; the best ones have the rest
_WORKERS = _THREADS = (1, 2)


class ServersMeasurement(MixMeasurement):
    """Measures one mix; `pythons`: of each rival, the interpreter that has it."""

    pythons: Mapping[str, str]

    def run(self) -> MixResult:
        """Capacities, and their ratios to the best setting of each rival."""
        load = ContestLoad(
            weights=self._weights,
            deadlines_s=[self._deadlines[model.name] for model in self._models],
            window_s=self._effort.window_s,
        )
        with Contest(self._models, load, progress, needed=(STAGELOOM,)) as contest:
            contest.enter(self._settings())
            self._began_s = self._started_s = time.monotonic()  # starting nine servers is none of their time
            found = {name: CapacityFound() for name in contest.names}
            self._capacities(contest, found)
            absent = dict(contest.absent)
        self._tell_capacities(found, absent)
        best = {server: best_settings(found, server) for server in (*self.pythons, STAGELOOM)}
        for server in self.pythons:
            if best[server] and best[STAGELOOM]:
                over, under = found[best[STAGELOOM][0]], found[best[server][0]]
                self._ratio(f"in_time_over_{server}", over, under, best[server][0])
        return self.result

    def _capacities(self, contest: Contest, found: dict[str, CapacityFound]) -> None:
        first_per_s, rough = self._first_per_s(), self._effort.rough_search
        contest.capacities(found, rough, first_per_s, self._until_s(_LOOKING))

        def leaders() -> list[str]:
            servers = (*self.pythons, STAGELOOM)
            return [name for server in servers for name in best_settings(found, server, rough)[:1]]

        contest.settle(found, leaders, self._effort.settling, first_per_s, self._until_s(1.0))

    @property
    def _rest_s(self) -> float:
        return 0.0  # nothing comes after capacities

    def _settings(self) -> list[ServerSetting]:
        every = [(workers, threads) for workers in _WORKERS for threads in _THREADS]
        chosen = every if self._effort.every_setting else [(2, 1)]
        latest_s = max(self._deadlines.values())
        rivals = [
            ServerSetting(f"{server}_{workers}x{threads}", server, python, workers, threads, latest_s)
            for server, python in self.pythons.items()
            for workers, threads in chosen
        ]
        return [ServerSetting(STAGELOOM, STAGELOOM, times_folder=self._times_folder), *rivals]

    def _tell_capacities(self, found: Mapping[str, CapacityFound], absent: Mapping[str, str]) -> None:
        for model, deadline_s in self._deadlines.items():
            self._row("deadline", model=model, deadline_ms=deadline_s * 1e3)
        for name, one in found.items():
            per_s, low, high = one.estimate or (None, None, None)
            row = {"per_s": per_s, "low": low, "high": high, "windows": sum(map(len, one.samples.values()))}
            row["open"] = self._effort.rough_search.most_per_s(one.samples) > one.per_s
            self._row("capacity", server=name, grid_per_s=one.per_s, **row)
        for name, reason in absent.items():
            self._row("absent", server=name, reason=reason)


def best_settings(
    found: Mapping[str, CapacityFound], server: str, search: CapacitySearch | None = None
) -> list[str]:
    """The settings of a server that are here, from the one with the largest capacity.

    With a search from the one whose capacity may be largest: of one that is not done not all is known.
    """
    names = [name for name in found if name.partition("_")[0] == server]

    def rank(name: str) -> float:
        return search.most_per_s(found[name].samples) if search else found[name].per_s

    return sorted(names, key=rank, reverse=True)
