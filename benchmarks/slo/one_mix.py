"""One mix of models: every contestant's capacity, latencies below it, and throughput when saturated."""

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from benchmarks.runner import progress
from stageloom.edge_agent.bench.ablations import ablations
from stageloom.edge_agent.bench.capacity import ROUGHLY, CapacitySearch, lowest_index, ratio_of
from stageloom.edge_agent.bench.contest import (
    CapacityFound,
    Contest,
    ContestLoad,
    p99_ms,
    share_given_up,
    share_late,
)
from stageloom.edge_agent.bench.in_process import is_installed, openvino_reduces
from stageloom.edge_agent.bench.load import deadlines_s, rate_index
from stageloom.edge_agent.bench.model_files import ModelUnderTest
from stageloom.edge_agent.bench.own_models import short_of_time
from stageloom.edge_agent.bench.rival_settings import (
    Family,
    RivalSetting,
    by_deadline,
    rival_settings,
)
from stageloom.edge_agent.bench.runtime_options import RuntimeName
from stageloom.edge_agent.bench.stageloom_contestant import AgentSetting, kept_times, own_plan
from stageloom.edge_agent.bench.times_alone import TimesAlone
from stageloom.edge_agent.machine.control_groups import cpu_quota, usable_cores
from stageloom.shared.engine.windows import PairedLogs
from stageloom.shared.plan import Plan, plan_text

STAGELOOM = "stageloom"
REDUCED = "stageloom_bf16"  # the same where bfloat16 is allowed
_BORDER = 4  # windows at the two rates around the capacity of an ablation: of fewer there is no interval
_SETTLED = 6  # the same of the others at first
_BELOW = 0.7  # of the best rival's capacity, where latencies are compared
_LOOKING = 0.4  # of the time for capacities, then each contestant's is about known
_SETTLING = 0.6  # then those of Stageloom's ablations are told; the finalists have the rest
_SURE = 0.975  # either end of an interval
_LEAST_S = 20.0  # for capacities and for saturation, however long what comes before them took
_FLOAT32 = (Family.NAIVE, Family.ONNXRUNTIME, Family.OPENVINO_DEFAULT, Family.OPENVINO)
_MOST_REST = 0.4  # of a mix's time for what comes after capacities
_BESIDE_A_WINDOW_S = 0.5  # about, until its last task has ended
_TURNING_S = 1.5  # about, more than that in a saturated one of the mix, until its tasks have turned over
_START_S = 12.0  # about, of an agent that serves one model, and its end


@dataclass(frozen=True)
class MixEffort:
    """How much is measured for one mix; seconds."""

    total_s: float
    window_s: float = 2.0
    first_share: float = 0.75  # of all that the cores carry: what carries much is soon bounded from there
    every_setting: bool = True  # of rivals; else one of each runtime
    saturated_only: bool = False  # neither capacities nor latencies
    most_windows: int = 30
    latency_windows: int = 6
    saturated_s: float = 0.6  # a window that chooses the best rival
    saturated_rounds: int = 2
    beside_s: float = 2.0  # one that compares it with the agent
    beside_rounds: int = 5
    highest_per_s: float = 20_000.0  # beyond this rate, handing tasks over would be what is measured

    def rest_s(self, models: int, settings: int) -> float:
        """Latencies and saturation, of the mix and each of its models alone, last so long."""
        looked_s = settings * self.saturated_rounds * (self.saturated_s + _BESIDE_A_WINDOW_S)
        compared_s = 3 * self.beside_rounds * (self.beside_s + _BESIDE_A_WINDOW_S)
        turning_s = _TURNING_S * (settings * self.saturated_rounds + 3 * self.beside_rounds)
        latencies_s = 2 * self.latency_windows * (self.window_s + _BESIDE_A_WINDOW_S)
        return latencies_s + turning_s + (models + 1) * (looked_s + compared_s) + models * _START_S

    def search(self, many: int) -> CapacitySearch:
        """For a capacity within its bounds."""
        lowest = lowest_index(self.window_s)
        return CapacitySearch(few=1, many=many, lowest=lowest, highest=rate_index(self.highest_per_s))

    @property
    def rough_search(self) -> CapacitySearch:
        """For about what it is."""
        return replace(self.search(1), judged_tasks=ROUGHLY)

    @property
    def settling(self) -> list[CapacitySearch]:
        """Ever closer ones, for those that lead."""
        most = self.most_windows
        return [self.search(min(many, most)) for many in (_SETTLED, 2 * _SETTLED, most)]


QUICK = MixEffort(
    20.0,
    0.5,
    0.25,  # there is no time to look below a first rate that is too high
    every_setting=False,
    most_windows=1,
    latency_windows=1,
    saturated_s=0.2,
    saturated_rounds=1,
    beside_s=0.2,
    beside_rounds=2,
)
_QUICK_RIVALS = ("naive", "ort_{cores}x1", "ov_{cores}x1", "by_deadline_{cores}x1")


@dataclass
class MixResult:
    """Figures without the mix's name, and rows."""

    figures: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)


class MixMeasurement:
    """Measures one mix; making it measures the models' service times."""

    def __init__(
        self,
        name: str,
        models: Sequence[ModelUnderTest],
        weights: Sequence[float],
        effort: MixEffort,
        *,
        times_folder: str,
    ) -> None:
        """`times_folder`: where the agents share what they measured."""
        self.name = name
        self._times_folder = times_folder
        self._models = models
        self._weights = weights
        self._effort = effort
        self._began_s = self._started_s = time.monotonic()
        self._families: Mapping[str, Family] = {}
        self.result = MixResult()
        self._bfloat16 = is_installed(RuntimeName.OPENVINO) and openvino_reduces()
        self._services = TimesAlone.measure(models, 0.5, progress, bfloat16=self._bfloat16)
        self.best = {model.name: self._best_of(model.name) for model in models}
        self._deadlines = deadlines_s({model: taken for model, (taken, _) in self.best.items()})

    def _best_of(self, model: str) -> tuple[float, RuntimeName]:
        found = self._services.best(model)
        assert found is not None, f"no runtime takes {model}: {self._services.alone(model)}"
        return found

    def _plan(self, *, whole: bool = False) -> Plan:
        """What the agent has made of what it measured."""
        known = {
            model: {options: taken for options, taken in times.items() if options.precision == "fp32"}
            for model, times in kept_times(self._models, self._times_folder).items()
        }
        return own_plan(self._models, known, whole=whole)

    def _tell_plan(self, served: str) -> list[AgentSetting]:
        """Rows of the plan, by the digest of the one that was served; and that plan without each of its
        parts, none where it is not the one that the agent's measurements give."""
        plan = self._plan()
        if served != plan.digest:
            self._row("plan", plan=served, text=[])
            text = f"the agent served plan {served[:12]}, not {plan.digest[:12]}, which its measurements give"
            self._row("warning", text=f"{text}: it took that one back, or never tried it; no ablations")
            return []
        self._row("plan", plan=served, text=plan_text(plan).splitlines())
        parts = ablations(plan)
        if any(model.cuts for model in plan.models):
            parts["whole"] = self._plan(whole=True)
        return [AgentSetting(f"stageloom_{part}", one.wire) for part, one in parts.items()]

    def run(self) -> MixResult:
        """All of it. Where it raises, `result` has what was measured till then.

        Raises:
            ContestantError: Stageloom does not serve the models, or died.
        """
        for warning in short_of_time(len(os.sched_getaffinity(0)), cpu_quota()):
            self._row("warning", text=warning)
        for model in self._models:
            times = {
                f"{runtime.value}_{threads}_{precision}_ms": _ms(found[model.name])
                for (runtime, threads, precision), found in self._services.taken.items()
            }
            self._row("service", model=model.name, deadline_ms=_ms(self._deadlines[model.name]), **times)
        load = ContestLoad(
            weights=self._weights,
            deadlines_s=[self._deadlines[model.name] for model in self._models],
            window_s=self._effort.window_s,
        )
        with Contest(self._models, load, progress, needed=(STAGELOOM,)) as contest:
            try:
                self._measure(contest)
            finally:
                for name, reason in contest.absent.items():
                    self._row("absent", contestant=name, reason=reason)
                for name, error in contest.problems.items():
                    self._row("problem", contestant=name, error=error)
        return self.result

    def _measure(self, contest: Contest) -> None:
        settings = self._rivals()
        self._families = {setting.name: setting.family for setting in settings}
        own = [AgentSetting(STAGELOOM, times_folder=self._times_folder)]
        if self._effort.saturated_only:
            contest.enter([*(one for one in settings if one.family is not Family.REDUCED), *own])
            self._tell_plan(contest.plans[STAGELOOM])
            self._saturate(contest)
            return
        if self._bfloat16:
            own.append(AgentSetting(REDUCED, precision="bf16", times_folder=self._times_folder))
        contest.enter([*settings, *own])
        contest.enter(self._tell_plan(contest.plans[STAGELOOM]))
        self._started_s = time.monotonic()
        found = {name: CapacityFound() for name in contest.names}
        try:
            self._capacities(contest, found)
        finally:  # what windows there are says something, whatever ended them
            self._tell(found)
        known_s = time.monotonic()
        self._latencies(contest, found)
        self._saturate(contest)
        taken = {"starting_s": self._started_s - self._began_s, "capacities_s": known_s - self._started_s}
        self._row("taken", **taken, rest_s=time.monotonic() - known_s)

    def _rivals(self) -> list[RivalSetting]:
        openvino = is_installed(RuntimeName.OPENVINO)
        chosen = {model: runtime for model, (_, runtime) in self.best.items()}
        cores = len(usable_cores())
        settings = rival_settings(cores, openvino=openvino, bfloat16=self._bfloat16)
        quick = {name.format(cores=cores) for name in _QUICK_RIVALS}
        every = self._effort.every_setting
        return [one for one in (*settings, by_deadline(chosen, cores)) if every or one.name in quick]

    def _first_per_s(self, *precisions: str) -> float:
        """Part of what the cores carry if none is ever idle, in float32 or one of these precisions."""
        busy_s = 0.0
        for weight, model in zip(self._weights, self._models, strict=True):
            known = self._services.of(model.name, *precisions)
            alone_s = (taken for options, taken in known.items() if options.intra_op_threads == 1)
            busy_s += weight * min(self.best[model.name][0], *alone_s)
        return self._effort.first_share * len(usable_cores()) * sum(self._weights) / busy_s

    def _capacities(self, contest: Contest, found: dict[str, CapacityFound]) -> None:
        for name in found:
            if name == REDUCED or self._families.get(name) is Family.REDUCED:
                found[name].first_per_s = self._first_per_s("bf16")  # it may carry several times as much
        first_per_s, rough = self._first_per_s(), self._effort.rough_search
        until_s = self._until_s(_LOOKING)
        contest.capacities(
            found, rough, first_per_s, until_s, wanted=lambda: still_open(found, self._families, rough)
        )
        for name, one in found.items():
            progress(f"  {self.name} {name}: about {one.per_s:.3g}/s")
        border = self._effort.search(min(_BORDER, self._effort.most_windows))
        parts = {name: found[name] for name in parts_of(found, self._families)}
        contest.capacities(parts, border, first_per_s, self._until_s(_SETTLING))

        def chosen() -> list[str]:
            return finalists(found, self._families, rough)

        contest.settle(found, chosen, self._effort.settling, first_per_s, self._until_s(1.0))

    def _until_s(self, share: float) -> float:
        """The instant when this share of the time for capacities, once all are started, is over."""
        left_s = self._effort.total_s - (self._started_s - self._began_s) - self._rest_s
        return self._started_s + share * max(left_s, _LEAST_S)

    @property
    def _rest_s(self) -> float:
        """What comes after capacities."""
        effort = self._effort
        return min(effort.rest_s(len(self._models), len(self._rivals())), _MOST_REST * effort.total_s)

    def _tell(self, found: Mapping[str, CapacityFound]) -> None:
        families = self._families
        for name, one in found.items():
            per_s, low, high = one.estimate or (None, None, None)
            family = families[name].value if name in families else STAGELOOM
            windows = sum(map(len, one.samples.values()))
            most = self._effort.rough_search.most_per_s(one.samples)
            row = {"per_s": per_s, "low": low, "high": high, "windows": windows, "open": most > one.per_s}
            row["grid_per_s"] = one.per_s if one.per_s or not most else None  # none is known yet
            row["above_per_s"] = most if one.per_s < most < math.inf else None
            self._row("capacity", contestant=name, family=family, **row)
        for name in parts_of(found, families):
            value, low, high = ratio_of(found[name].samples, found[STAGELOOM].samples) or (None, None, None)
            self._row("over_full", contestant=name, value=value, low=low, high=high)
        rivals: dict[str, list[Family]] = {
            "naive": [Family.NAIVE],
            "best": [family for family in Family if family is not Family.BY_DEADLINE],
            "best_float32": list(_FLOAT32),
            "by_deadline": [Family.BY_DEADLINE],
        }
        for figure, wanted in rivals.items():
            own = REDUCED if figure == "best" and REDUCED in found else STAGELOOM
            best = best_of(found, families, wanted)
            if best:
                self._ratio(f"over_{figure}", found[own], found[best], best)

    def _ratio(self, figure: str, over: CapacityFound, under: CapacityFound, rival: str) -> None:
        """A figure only where both had enough windows; the row is there all the same."""
        value, low, high = ratio_of(over.samples, under.samples) or (None, None, None)
        if value is not None:
            self.result.figures[figure] = value
        self._row("ratio", figure=figure, rival=rival, value=value, low=low, high=high)

    def _latencies(self, contest: Contest, found: Mapping[str, CapacityFound]) -> None:
        best = best_of(found, self._families, _FLOAT32)
        names = [name for name in (best, STAGELOOM) if name in found]
        rate = _BELOW * found[best].per_s if best else 0.0
        if not rate:
            return
        for name, results in contest.windows_at(names, rate, self._effort.latency_windows).items():
            p99, given_up = p99_ms(results), share_given_up(results)
            row = {"p99_ms": p99, "given_up": given_up, "late": share_late(results)}
            self._row("latency", contestant=name, rate_per_s=rate, **row)
            who = "stageloom" if name == STAGELOOM else "best"
            self.result.figures[f"given_up_{who}"] = given_up
            if p99 is not None:
                self.result.figures[f"p99_{who}_ms"] = p99

    def _saturate(self, contest: Contest) -> None:
        """The mix, and each model alone: there Stageloom's plan is one of that model.

        When the mix's time is over, what is begun has one round of each kind more and no further load begins.
        """
        kept = {STAGELOOM, *(name for name, one in self._families.items() if one is not Family.REDUCED)}
        contest.leave(name for name in contest.names if name not in kept)
        until_s = max(self._began_s + self._effort.total_s, time.monotonic() + _LEAST_S)
        self._saturated(contest, "mix", STAGELOOM, self._weights, until_s)
        for number, model in enumerate(self._models):
            if time.monotonic() >= until_s:
                self._row("left_out", load=model.name, reason="the mix's time was over")
                continue
            own = f"stageloom_{model.name}"
            contest.enter([AgentSetting(own, serves=(model.name,), times_folder=self._times_folder)])
            weights = [float(other == number) for other in range(len(self._models))]
            if own in contest.names:
                self._saturated(contest, model.name, own, weights, until_s)
                contest.leave({own}.intersection(contest.names))

    def _saturated(
        self, contest: Contest, load: str, own: str, weights: Sequence[float], until_s: float
    ) -> None:
        """The best rival is chosen in windows of its own: the best of many noisy figures is too good."""
        effort = self._effort
        names = [name for name in contest.names if name in self._families or name == own]
        found = contest.saturated(names, weights, effort.saturated_s, effort.saturated_rounds, until_s)
        looked = self._looked(load, found)
        rivals = saturated_rivals(looked, self._families)
        turns = [name for name in (*rivals.values(), own) if name in looked]
        beside = contest.saturated(turns, weights, effort.beside_s, effort.beside_rounds, until_s)
        for which, rival in rivals.items():
            both = zip(beside.get(own, ()), beside.get(rival, ()), strict=False)
            pairs = [(ours, theirs) for ours, theirs in both if ours and theirs]
            if len(pairs) < 2:
                self._row("left_out", load=load, rival=rival, reason="too few rounds of both")
                continue
            logs = PairedLogs()
            for ours, theirs in pairs:
                logs.add(math.log(ours / theirs))
            value, low, high = (math.exp(log) for log in (logs.mean, *logs.bounds(_SURE)))
            row = {"value": value, "low": low, "high": high, "rounds": logs.count}
            row |= {"per_s": median(one for one, _ in pairs), "rival_per_s": median(one for _, one in pairs)}
            self._row(f"saturated_over_{which}", load=load, rival=rival, **row)
            self.result.figures[f"auto_over_{which}.{load}"] = value

    def _looked(self, load: str, found: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """The rates of those that came to any."""
        looked: dict[str, list[float]] = {}
        for name, rounds in found.items():
            if rates := [per_s for per_s in rounds if per_s]:
                looked[name] = rates
                self._row("saturated", load=load, contestant=name, per_s=median(rates))
            if len(rates) < len(rounds):
                reason = f"{len(rounds) - len(rates)} of {len(rounds)} rounds came to no rate"
                self._row("left_out", load=load, contestant=name, reason=reason)
        return looked

    def _row(self, part: str, **values: Any) -> None:
        self.result.rows.append({"part": part, "mix": self.name, **values})


def best_of(
    found: Mapping[str, CapacityFound],
    families: Mapping[str, Family],
    wanted: Iterable[Family],
    search: CapacitySearch | None = None,
) -> str:
    """The rival of some families with the largest capacity; empty where none of them is here.

    With a search the one whose capacity may be largest: who is not done with it may carry more than was seen.
    """
    chosen = set(wanted)
    names = [name for name in found if families.get(name) in chosen]

    def rank(name: str) -> float:
        return search.most_per_s(found[name].samples) if search else found[name].per_s

    return max(names, key=rank, default="")


def parts_of(names: Iterable[str], families: Mapping[str, Family]) -> list[str]:
    """Stageloom's ablations: whoever is neither a rival nor serves the whole plan."""
    return [name for name in names if name not in families and name not in (STAGELOOM, REDUCED)]


def saturated_rivals(looked: Mapping[str, Sequence[float]], families: Mapping[str, Family]) -> dict[str, str]:
    """The best setting of a runtime, and the hand-written loop, which has the best runtime of each model; by
    what a figure over them is called."""
    groups = {
        "best_setting": [name for name in looked if families.get(name) not in (None, Family.BY_DEADLINE)],
        "by_deadline": [name for name in looked if families.get(name) is Family.BY_DEADLINE],
    }
    return {
        which: max(names, key=lambda name: median(looked[name])) for which, names in groups.items() if names
    }


_GROUPS = (
    {Family.NAIVE},
    {Family.ONNXRUNTIME},
    {Family.OPENVINO, Family.OPENVINO_DEFAULT},
    {Family.REDUCED},
    {Family.BY_DEADLINE},
)


def finalists(
    found: Mapping[str, CapacityFound], families: Mapping[str, Family], search: CapacitySearch
) -> list[str]:
    """Who is measured with many windows: the naive way, the best of each runtime and precision by what each
    may carry after this search, the hand-written loop, Stageloom."""
    best = [best_of(found, families, group, search) for group in _GROUPS]
    return [name for name in (*best, STAGELOOM, REDUCED) if name in found]


def still_open(
    found: Mapping[str, CapacityFound], families: Mapping[str, Family], search: CapacitySearch
) -> list[str]:
    """Who may yet turn out to be the best of its runtime and precision, and all that are no rivals: a setting
    that failed at a rate which another one of its kind holds is not looked at further."""
    names = [name for name in found if name not in families]
    for group in _GROUPS:
        rivals = [name for name in found if families.get(name) in group]
        held_per_s = max((found[name].per_s for name in rivals), default=0.0)
        names += [
            name
            for name in rivals
            if found[name].per_s == held_per_s or search.most_per_s(found[name].samples) > held_per_s
        ]
    return names


def _ms(taken: float | str) -> float | str:
    return taken if isinstance(taken, str) else taken * 1e3
