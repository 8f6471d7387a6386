"""A user's own models under their own load: what the agent carries, and what they would run instead."""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from stageloom.edge_agent.bench import MOST_SECONDS
from stageloom.edge_agent.bench.capacity import ROUGHLY, CapacitySearch, lowest_index, ratio_of
from stageloom.edge_agent.bench.contest import CapacityFound, Contest, ContestLoad
from stageloom.edge_agent.bench.in_process import is_installed, openvino_reduces
from stageloom.edge_agent.bench.load import deadlines_s, rate_index
from stageloom.edge_agent.bench.model_files import ModelUnderTest, prepare
from stageloom.edge_agent.bench.rival_settings import (
    CUDA,
    NAIVE,
    OPENVINO_LATENCY,
    Family,
    RivalSetting,
    openvino_by_core,
    openvino_throughput,
    reduced,
    tuned_onnxruntime,
)
from stageloom.edge_agent.bench.runtime_options import RuntimeName
from stageloom.edge_agent.bench.stageloom_contestant import AgentSetting, kept_times, own_plan
from stageloom.edge_agent.bench.times_alone import TimesAlone
from stageloom.edge_agent.config import Precision
from stageloom.edge_agent.executor_choice import GPU_PRECISIONS
from stageloom.edge_agent.machine.control_groups import (
    WHOLE_CORES,
    cpu_quota,
    quota_warning,
    usable_cores,
)
from stageloom.edge_agent.machine.device import cpu_flags, cpu_name, gpu_names, has_bf16
from stageloom.edge_agent.machine.executors import usable_on_gpu
from stageloom.shared.errors import ExecutorError, InputError, UnpinnedShape
from stageloom.shared.importer.model_argument import ModelArgument, unpinned_in_option
from stageloom.shared.plan import Plan, plan_text
from stageloom.shared.search.arrangements import Times, express_of

OURS: Final = "stageloom"
_SERVICE_S: Final = 0.4
_LEAST_WINDOW_S: Final = 1.5
_DEADLINES_IN_A_WINDOW: Final = 10.0
_WINDOWS_EACH: Final = 12  # that --seconds must afford a contestant, to find its load and to settle it
_WINDOWS: Final = (5, 10, 20, 40)  # at both sides of a border, until the best is looked for anew
_LOOKING: Final = 0.5  # of the time, at most: to find about which load each carries
_HIGHEST: Final = rate_index(20_000.0)  # beyond it, handing tasks over would be what is measured

Progress = Callable[[str], None]

Ratio = tuple[float, float, float]
"""The middle of a ratio's bootstrap, and the ends of its 95 % interval."""


@dataclass(frozen=True, kw_only=True)
class StatedLoad:
    """What a user says of the load: by model tasks a second and a deadline in milliseconds, where known."""

    rates_per_s: Mapping[str, float] = field(default_factory=dict)
    deadlines_ms: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 200.0  # for all of it; more time gives narrower intervals
    precision: Precision = "fp32"  # that is allowed beside float32

    def check(self, names: Sequence[str]) -> None:
        """Raises:
        InputError: it names an unknown model, or rates of some models only; or a number is not positive.
        """
        for option, given in (("--rate", self.rates_per_s), ("--deadline", self.deadlines_ms)):
            if unknown := sorted(given.keys() - set(names)):
                raise InputError(
                    f"{option} names {unknown[0]!r}, and there is no such model",
                    remedy=f"use {', '.join(names)}",
                )
            if wrong := [name for name, value in given.items() if not 0.0 < value < 1e9]:
                raise InputError(f"{option} of {wrong[0]!r} is {given[wrong[0]]}", remedy="give more than 0")
        if missing := sorted(set(names) - self.rates_per_s.keys()) if self.rates_per_s else []:
            raise InputError(
                f"--rate is missing for {missing[0]!r}", remedy="give it for every model, or for none"
            )


@dataclass(frozen=True, kw_only=True)
class OwnResult:
    """What was measured; ratios with the ends of their 95 % intervals."""

    models: tuple[dict[str, Any], ...]
    capacities: tuple[dict[str, Any], ...]
    absent: Mapping[str, str]
    over_naive: Ratio | None
    no_naive: str = ""  # why there is no ratio to it
    over_best: Ratio | None
    best: str
    load_per_s: float  # as given; 0 where it was not
    digest: str  # of the plan that the agent served
    plan: Plan | None  # that plan; None where it is not known
    window_s: float = _LEAST_WINDOW_S
    warnings: Sequence[str] = ()  # what makes figures worth less than they look
    precision: str = "fp32"
    ours_none: bool = False  # the agent was found to carry no load, down to the lowest rate
    rivals_none: bool = False  # nor does anything that it is compared with

    def document(self) -> dict[str, Any]:
        """As one JSON object."""
        return {
            "machine": {
                "processor": cpu_name(),
                "cores": len(os.sched_getaffinity(0)),
                **({"gpu": ", ".join(gpu_names())} if gpu_names() else {}),
            },
            "models": self.models,
            "capacities": self.capacities,
            "absent": dict(self.absent),
            "precision": self.precision,
            "over_naive": self.over_naive and self.over_naive[0],
            "over_naive_interval": self.over_naive and self.over_naive[1:],
            "over_best": self.over_best and self.over_best[0],
            "over_best_interval": self.over_best and self.over_best[1:],
            "best": self.best,
            "load_per_s": self.load_per_s or None,
            "carried_per_s": self.row(OURS)["per_s"],
            "window_s": self.window_s,
            "warnings": list(self.warnings),
            "plan": self.digest,
            "plan_text": plan_text(self.plan).splitlines() if self.plan is not None else [],
            "verdict": self.verdict(),
        }

    def row(self, name: str) -> Mapping[str, Any]:
        """The capacity of a contestant; empty where it has none."""
        return next((row for row in self.capacities if row["contestant"] == name), {})

    def verdict(self) -> str:
        """One sentence."""
        if self.over_best is None:
            return self._without_ratio()
        ratio, low, high = self.over_best
        naive = self.no_naive
        if self.over_naive is not None:
            naive = f"it is {self.over_naive[0]:.1f} times that of a default session per model"
        if low > 1.0:
            return (
                f"{self._use()}: {ratio:.2f} times the load of the best setting, {self.best}, within the "
                f"deadlines; {naive}"
            )
        if high < 1.0:
            return f"no gain: {self.best} carries {1.0 / ratio:.2f} times the load; serve them whole with it"
        return f"no gain over {self.best}, {ratio:.2f} times its load ({low:.2f} to {high:.2f}); {naive}"

    def _without_ratio(self) -> str:
        """The verdict where a side carries nothing, so that there is no ratio, or was measured too little."""
        measured = {row["contestant"] for row in self.capacities if row["low"] is not None}
        if self.ours_none and self.rivals_none:
            return "no verdict: nothing carries a load within the deadlines; give longer ones with --deadline"
        if self.ours_none and self.best in measured:
            return (
                f"no gain: {self.best} carries a load within the deadlines, and the agent's plan none; "
                "serve them whole with it"
            )
        if self.rivals_none and OURS in measured:
            return f"{self._use()}: nothing else carries a load within the deadlines"
        if not self.row(self.best).get("settled", True):
            return f"no verdict: time was up before the load of {self.best} was found; give --seconds more"
        return "no verdict: too few windows, or no load that is carried in time; give --seconds more"

    def _use(self) -> str:
        allowed = "" if self.precision == "fp32" else f" --precision {self.precision}"
        return f"use plan {self.digest[:12]} (`stageloom-agent run{allowed}` makes it)"


def bench(arguments: Sequence[ModelArgument], load: StatedLoad, progress: Progress) -> OwnResult:
    """Compare; takes about `load.seconds` beside importing and starting.

    Raises:
        InputError: the load does not fit the models.
        ModelError: a file cannot be imported, or leaves dimensions open.
        ExecutorError: no backend runs a model, or the agent does not serve them; or it cannot compute in
            that precision here.
    """
    names = [one.called for one in arguments]
    load.check(names)
    with tempfile.TemporaryDirectory(prefix="stageloom-bench-") as folder:
        models = []
        for name, one in zip(names, arguments, strict=True):
            progress(f"importing {one.path}")
            try:
                models.append(prepare(name, Path(one.path), one.pinned("a comparison"), Path(folder)))
            except UnpinnedShape as error:
                raise unpinned_in_option(error, replace(one, name=name), "") from error
        return _Bench(models, load, progress).run()


def settings_for(precision: str, cores: int, *, openvino: bool, cuda: bool = False) -> list[RivalSetting]:
    """What is compared with, the naive one first; where fewer bits are allowed, runtimes in what they make of
    that as well. CUDA's provider has nothing below TF32 for a model in float32."""
    tuned = list(tuned_onnxruntime(cores))
    if openvino:
        by_hand = [OPENVINO_LATENCY, openvino_by_core(cores), openvino_throughput()]
        tuned += [*by_hand, *(map(reduced, by_hand) if precision == "bf16" else ())]
    if cuda:
        return [*CUDA, *(map(reduced, CUDA) if precision in GPU_PRECISIONS else ()), NAIVE, *tuned]
    return [NAIVE, *tuned]


class _Bench:
    """One comparison of prepared models."""

    def __init__(self, models: Sequence[ModelUnderTest], load: StatedLoad, progress: Progress) -> None:
        self._models = models
        self._load = load
        self._progress = progress
        self._on_gpu = usable_on_gpu()
        self._require_precision()
        reduces = load.precision == "bf16"
        self._services = TimesAlone.measure(models, _SERVICE_S, progress, bfloat16=reduces)
        self._alone_s = {model.name: self._shortest_s(model.name) for model in models}
        given = {name: ms * 1e-3 for name, ms in load.deadlines_ms.items()}
        self._deadlines = deadlines_s(self._alone_s, given_s=given)
        self._rivals = settings_for(
            load.precision,
            len(usable_cores()),
            openvino=RuntimeName.OPENVINO in self._services.runtimes,
            cuda=RuntimeName.CUDA in self._services.runtimes,
        )
        self._weights = [load.rates_per_s.get(model.name, 1.0) for model in models]
        contestants = len(self._rivals) + 1
        self._window_s = window_s(self._deadlines.values(), load.seconds, contestants)
        self._warnings = [
            *short_of_time(len(os.sched_getaffinity(0)), cpu_quota()),
            *hopeless_deadlines(self._deadlines, self._services),
            *short_windows(self._window_s, self._deadlines.values(), contestants),
        ]

    def _require_precision(self) -> None:
        if self._load.precision == "fp32":
            return
        if self._load.precision in GPU_PRECISIONS:
            if not self._on_gpu:
                raise ExecutorError(
                    f"executors on a GPU compute in {self._load.precision}, and none is usable here",
                    remedy="`stageloom-agent doctor` says why; or leave --precision out",
                )
            return
        if not is_installed(RuntimeName.OPENVINO):
            raise ExecutorError(
                "OpenVINO is what computes in bf16, and it is not installed",
                remedy="pip install 'stageloom[edge,onnx,openvino]'",
            )
        if not openvino_reduces():
            raise ExecutorError(
                "OpenVINO does not compute in bfloat16 on this processor",
                remedy="leave --precision out",
            )

    def _shortest_s(self, name: str) -> float:
        best = self._services.best(name)
        if best is None:
            times = self._services.alone(name)
            reasons = "; ".join(f"{runtime.value}: {one}" for runtime, one in times.items()) or "none is here"
            raise ExecutorError(
                f"no backend runs model {name!r}: {reasons}",
                remedy="pip install 'stageloom[edge,onnx]', or [edge,onnx,openvino]",
            )
        return best[0]

    def _could_reduce(self) -> bool:
        return RuntimeName.OPENVINO in self._services.runtimes and has_bf16(cpu_flags())

    def _times(self) -> dict[str, Times]:
        return {one.name: self._services.of(one.name, self._load.precision) for one in self._models}

    def run(self) -> OwnResult:
        """All of it."""
        load = ContestLoad(
            weights=self._weights,
            deadlines_s=[self._deadlines[model.name] for model in self._models],
            window_s=self._window_s,
        )
        for warning in self._warnings:
            self._progress(f"warning: {warning}")
        if self._load.precision == "fp32" and self._could_reduce():
            self._progress(
                "this processor has units for bfloat16: `--precision bf16` also compares what they bring, "
                "for results that are approximate"
            )
        with (
            # An agent that was killed may still be writing there.
            tempfile.TemporaryDirectory(prefix="stageloom-bench-", ignore_cleanup_errors=True) as folder,
            Contest(self._models, load, self._progress, needed=(OURS,)) as contest,
        ):
            self._progress("starting the agent and what it is compared with")
            contest.enter([*self._rivals, self._ours(folder)])
            self._require_rivals(contest.names, contest.absent)
            found = self._capacities(contest)
            self._require_rivals(found, contest.absent)
            self._warnings += [f"{name} failed at a task: {one}" for name, one in contest.problems.items()]
            expected = self._plan(folder)
            digest = contest.plans.get(OURS, expected.digest)
            return self._result(found, contest.absent, digest, self._served(digest, expected))

    def _require_rivals(self, names: Iterable[str], absent: Mapping[str, str]) -> None:
        if not _rivals(names):
            reasons = "; ".join(absent.values())
            raise ExecutorError(f"nothing that it could be compared with serves these models: {reasons}")

    def _ours(self, folder: str) -> AgentSetting:
        """On the processor with the plan that it would make; with a GPU an agent that measures by itself."""
        if not self._on_gpu:
            return AgentSetting(OURS, self._plan(folder).wire, folder=folder)
        self._progress("the agent measures the models on its executors first")
        return AgentSetting(OURS, precision=self._load.precision, folder=folder, times_folder=folder)

    def _plan(self, folder: str) -> Plan:
        return own_plan(self._models, kept_times(self._models, folder) if self._on_gpu else self._times())

    def _served(self, digest: str, expected: Plan) -> Plan | None:
        """The plan of that digest, which the agent serves: the one that its times give, or the one before it
        had any; None where it is neither."""
        if digest == expected.digest:
            return expected
        self._warnings.append(
            f"the agent served plan {digest[:12]}, not {expected.digest[:12]}, which its measurements give: "
            "it took that one back, or never tried it"
        )
        first = own_plan(self._models, {model.name: {} for model in self._models})
        return first if digest == first.digest else None

    def _capacities(self, contest: Contest) -> dict[str, CapacityFound]:
        first_per_s = self._one_core_per_s(self._alone_s)
        found = {name: CapacityFound() for name in contest.names}
        if self._load.precision == "bf16":  # it may carry several times as much
            shortest_s = {model.name: self._services.shortest_s(model.name) for model in self._models}
            rivals = {one.name for one in self._rivals if one.family is Family.REDUCED}
            for name in found.keys() & {OURS, *rivals}:
                found[name].first_per_s = self._one_core_per_s(shortest_s)
        self._progress("looking for the load that each carries within the deadlines")
        began_s = time.monotonic()
        looking_s = began_s + _LOOKING * self._load.seconds
        contest.capacities(found, self._rough_search(), first_per_s, looking_s)
        for name, one in found.items():
            self._progress(f"  {name}, tasks a second: {_known_text(*self._known(one))}")
        self._settle(contest, found, first_per_s, began_s + self._load.seconds)
        return found

    def _one_core_per_s(self, taken_s: Mapping[str, float]) -> float:
        busy_s = (weight * taken_s[one.name] for weight, one in zip(self._weights, self._models, strict=True))
        return sum(self._weights) / sum(busy_s)

    def _search(self, many: int) -> CapacitySearch:
        return CapacitySearch(few=1, many=many, lowest=lowest_index(self._window_s), highest=_HIGHEST)

    def _rough_search(self) -> CapacitySearch:
        return replace(self._search(1), judged_tasks=ROUGHLY)

    def _settle(
        self,
        contest: Contest,
        found: MutableMapping[str, CapacityFound],
        first_per_s: float,
        until_s: float,
    ) -> None:
        """Ours, the naive rival, and the best one by what each may carry."""

        def chosen() -> Iterator[str]:
            yield OURS
            yield self._best(found)
            yield self._rivals[0].name

        contest.settle(found, chosen, list(map(self._search, _WINDOWS)), first_per_s, until_s)

    def _best(self, found: Mapping[str, CapacityFound]) -> str:
        """The rival that may carry most: what a search has seen before its end is a lower bound."""
        search = self._rough_search()

        def rank(name: str) -> tuple[float, float]:
            return search.most_per_s(found[name].samples), found[name].per_s

        return max(_rivals(found), key=rank, default=OURS)

    def _known(self, found: CapacityFound) -> tuple[float | None, bool]:
        """A capacity in tasks a second, and whether its search has ended; else it is a lower bound, and None
        where no rate held yet."""
        settled = self._rough_search().most_per_s(found.samples) == found.per_s
        return found.per_s if settled or found.per_s else None, settled

    def _result(
        self, found: Mapping[str, CapacityFound], absent: Mapping[str, str], digest: str, plan: Plan | None
    ) -> OwnResult:
        # Without an interval there is no verdict over it.
        best, naive = self._best(found), self._rivals[0].name
        known = {name: self._known(one) for name, one in found.items()}
        none = {name for name, one in known.items() if one == (0.0, True)}

        def over(rival: str) -> Ratio | None:
            ended = rival in known and known[OURS][1] and known[rival][1]
            return ratio_of(found[OURS].samples, found[rival].samples) if ended else None

        return OwnResult(
            models=tuple(self._model_row(model, plan) for model in self._models),
            capacities=tuple(_capacity_row(name, one, *known[name]) for name, one in found.items()),
            absent=absent,
            over_naive=over(naive),
            no_naive=why_no_naive(found.get(naive), lowest_index(self._window_s)),
            over_best=over(best),
            best=best,
            load_per_s=sum(self._load.rates_per_s.values()),
            digest=digest,
            plan=plan,
            window_s=self._window_s,
            warnings=self._warnings,
            precision=self._load.precision,
            ours_none=OURS in none,
            rivals_none=none.issuperset(_rivals(found)),
        )

    def _model_row(self, model: ModelUnderTest, plan: Plan | None) -> dict[str, Any]:
        row: dict[str, Any] = {"model": model.name, "deadline_ms": self._deadlines[model.name] * 1e3}
        if plan is not None:
            row |= _runs_by(plan, model.name)
        for runtime, taken in self._services.alone(model.name).items():
            row[f"{runtime.value}_ms"] = taken * 1e3 if isinstance(taken, float) else taken
        return row


def window_s(deadlines_s: Iterable[float], seconds: float, contestants: int) -> float:
    """How long a window lasts: ten times the longest deadline and at least 1.5 s, as far as `seconds` afford
    each contestant some windows.

    A window begins empty, and until tasks wait as long as they may it carries more than it could for long:
    about a deadline's worth of work, a tenth of a window of ten deadlines.
    """
    affordable_s = seconds / (_WINDOWS_EACH * contestants)
    return max(_LEAST_WINDOW_S, min(_DEADLINES_IN_A_WINDOW * max(deadlines_s), affordable_s))


def short_windows(lasts_s: float, deadlines_s: Iterable[float], contestants: int) -> list[str]:
    """A warning where windows are shorter than ten times the longest deadline."""
    longest_s = max(deadlines_s)
    wanted_s = _DEADLINES_IN_A_WINDOW * longest_s
    if lasts_s >= wanted_s:
        return []
    needed_s = math.ceil(wanted_s * _WINDOWS_EACH * contestants)
    advice = f"--seconds {needed_s} affords windows of {wanted_s:.3g} s"
    if needed_s > MOST_SECONDS:
        most_ms = 1e3 * MOST_SECONDS / (_DEADLINES_IN_A_WINDOW * _WINDOWS_EACH * contestants)
        advice = (
            f"a --deadline of {math.floor(most_ms)} ms is the longest that --seconds {MOST_SECONDS} affords"
        )
    return [
        f"windows of {lasts_s:.3g} s are short beside a deadline of {longest_s:.3g} s, and flatter every "
        f"contestant; {advice}"
    ]


def short_of_time(cores: int, quota: float) -> list[str]:
    """A warning where control groups leave less time than that of all cores."""
    warning = quota_warning(cores, quota)
    return [f"{warning}; {WHOLE_CORES}"] if warning else []


def hopeless_deadlines(deadlines_s: Mapping[str, float], times: TimesAlone) -> list[str]:
    """A warning for each model that takes longer than its deadline however it was timed alone."""
    return [
        f"the deadline of {name!r}, {1e3 * deadline_s:.3g} ms, is below its shortest run of all that were "
        f"timed, {1e3 * times.shortest_s(name):.3g} ms: expect no load that is carried"
        for name, deadline_s in deadlines_s.items()
        if deadline_s <= times.shortest_s(name) < math.inf
    ]


def why_no_naive(found: CapacityFound | None, lowest: int) -> str:
    """Why there is no ratio to a default session per model, if there is none.

    Args:
        found: what it carried; None where it is absent.
        lowest: the place on the grid where a search for that ends.
    """
    if found is None:
        return "a default session per model is absent, and not compared with"
    if not found.per_s and min(found.samples, default=lowest + 1) <= lowest:
        return "no load was found that a default session per model carries"
    return "a default session per model had too few windows to be compared with"


def _runs_by(plan: Plan, model: str) -> dict[str, Any]:
    index = next(number for number, one in enumerate(plan.models) if one.name == model)
    options = next(plan.executors[one.executor] for one in plan.combined if one.members[0].model == index)
    return {
        "executor": options.name,
        "threads": options.intra_op_threads,
        "precision": options.precision,
        "blocks": plan.models[index].num_blocks,
        "express": index in express_of(plan),
    }


def _rivals(names: Iterable[str]) -> list[str]:
    return [name for name in names if name != OURS]


def _capacity_row(name: str, found: CapacityFound, per_s: float | None, settled: bool) -> dict[str, Any]:
    _, low, high = (found.estimate if settled else None) or (None, None, None)
    windows = sum(map(len, found.samples.values()))
    bounds = {"low": low, "high": high}
    return {"contestant": name, "per_s": per_s, "settled": settled, **bounds, "windows": windows}


def _known_text(number: float | None, settled: bool, form: str = ".3g") -> str:
    if number is None:
        return "not known"
    return f"{'' if settled else 'at least '}{number:{form}}"


def result_text(result: OwnResult) -> str:
    """As a person reads it; the sentence that says what to do comes last."""
    runtimes = [one for one in RuntimeName if any(f"{one.value}_ms" in row for row in result.models)]
    columns = [f"on {one.value}" for one in runtimes]
    lines = [f"{'model':20} {'deadline':>10}  {'  '.join(columns)}   runs on"]
    for row in result.models:
        times = [
            f"{_shown_ms(row.get(f'{one.value}_ms')):>{len(column)}}"
            for one, column in zip(runtimes, columns, strict=True)
        ]
        lines.append(f"{row['model']:20} {row['deadline_ms']:7.1f} ms  {'  '.join(times)}   {_runs_on(row)}")
    lines += ["", "served by              tasks a second within the deadlines (95 % interval)"]
    for row in sorted(result.capacities, key=lambda row: -(row["per_s"] or 0.0)):
        interval = "" if row["low"] is None else f"   ({row['low']:.3g} to {row['high']:.3g})"
        lines.append(f"{row['contestant']:20} {_known_text(row['per_s'], row['settled']):>12}{interval}")
    lines += [f"{name}: {reason}" for name, reason in result.absent.items()]
    if result.load_per_s:
        ours = result.row(OURS)
        share = None if ours["per_s"] is None else ours["per_s"] / result.load_per_s
        said = _known_text(share, ours["settled"], ".2f")
        carried = "how much is carried is not known" if share is None else f"{said} times of it is carried"
        lines += ["", f"your load is {result.load_per_s:.3g} tasks a second; {carried}"]
    if result.warnings:
        lines += ["", *(f"warning: {one}" for one in result.warnings)]
    return "\n".join([*lines, "", result.verdict()])


def _runs_on(row: Mapping[str, Any]) -> str:
    if "executor" not in row:
        return "not known"
    blocks = f", in {row['blocks']} blocks" if row["blocks"] > 1 else ""
    return f"{row['executor']}{blocks}{', express' if row['express'] else ''}"


def _shown_ms(taken: object) -> str:
    if taken is None:
        return "-"
    return f"{taken:.2f} ms" if isinstance(taken, float) else "cannot"
