"""Models that really run split over two resources, judged: each at its batches, on both pairs.

A model's operators and their parts are timed, the ways to split it are searched, and what they propose runs.
`eop` proposes several plans, of fewer and fewer splits, with and without chains beside each other, and the
whole batch split, which is one run from the first operator to the last; windows of a trial choose among them
and either resource alone, as a device's trial does. Everything is judged on fresh windows. `auto` is what
the trial would choose of all, one session of two threads (`intra_op=2`) included, which is no fair rival on
the paced pair: its second core is slow by agreement.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

from benchmarks.eop.lines import (
    Windows,
    aa_spread,
    around,
    auto_lines,
    bound_s,
    boundary_line,
    line,
    model_lines,
    ratio_of,
    rival_lines,
    take_turns,
)
from benchmarks.eop.models import BATCHES, NAMES, YOLO, Subject, layers, load, made, operator_alone
from benchmarks.eop.rig import (
    CHAIN,
    JoinCost,
    Limits,
    Machine,
    Rig,
    measured_joins,
    profiled,
    whole,
)
from benchmarks.real_models.fetching import NoRegistryError
from benchmarks.runner import Report, progress
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.errors import StageloomError
from stageloom.shared.importer.splittable import SplitReader
from stageloom.shared.partition import Split
from stageloom.shared.search.eop import (
    apart,
    apart_cost_s,
    at_best_home,
    eop,
    eop_at_most,
    key_operators,
    splitter,
)
from stageloom.shared.search.measured_splits import alike, batch_splits
from stageloom.shared.search.split_problem import Halves, SplitChoice, SplitProblem

WIDE: Final = "intra_op=2"
RIVALS: Final = ("eop_paper", "equal", "fixed")
CONDITIONS_ON: Final = "bert"
"""The model of the paper's figure 11."""

KEY_OPERATORS: Final = 40
TRIAL_ROUNDS: Final = 9
GAIN: Final = 0.97
"""As `auto` has it of executors: who is to take another's place must be 3 % faster."""

LEAST_S: Final = 10.0
"""Of one model on one pair, however late it is."""

LONG_S: Final = 0.02
"""Of models that take longer, parts are timed less often."""

ROUNDS: Final = (7, 41)
"""At least and at most; as many as there is time for."""


@dataclass(frozen=True)
class Judged:
    """One model on one pair: its rows and lines, and what was learnt of it."""

    subject: Subject
    problem: SplitProblem
    windows: Windows
    row: dict[str, Any]
    lines: list[dict[str, Any]]


def measure_models(report: Report, minutes: float, quick: bool, cache: Path) -> None:
    """Rows, and among them lines, each as it comes; `minutes` is what all of it may take."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        progress("two cores are needed")
        return
    both = cores[0], cores[1]
    machines = [Machine(("onnx", "paced"), both)]
    if find_spec("openvino") is not None:
        machines.append(Machine(("onnx", "openvino"), both))
    wanted = [("squeezenet", 16), ("lstm", 1)] if quick else _all()
    ends_s = time.monotonic() + 60.0 * minutes * 0.85
    with tempfile.TemporaryDirectory(prefix="stageloom-eop-") as folder:
        subjects = []
        for name, batch in wanted:
            try:
                subjects.append(load(name, batch, Path(folder), cache))
            except NoRegistryError:  # noqa: PERF203
                report.add({}, [_left_out(name, batch, "no registry")])
        chain = made("layers", 1, layers(CHAIN), Path(folder))
        left = len(machines) * len(subjects)
        for machine in machines:
            join = measured_joins(machine, chain)
            row = {"part": "joins", "pair": machine.label, "handover_us": 1e6 * join.handover_s}
            report.add({}, [row | {"copy_gb_per_s": join.bytes_per_s / 1e9}])
            judged: list[Judged] = []
            for subject in subjects:
                budget_s = max((ends_s - time.monotonic()) / left, LEAST_S)
                left -= 1
                judged += measure_model(report, subject, machine, join, budget_s)
            found = rival_lines({one.subject.label: one.windows for one in judged}) if judged else []
            report.add({}, [one | {"model": f"all on {machine.label}"} for one in found])
            if machine.paced:
                count, rounds = (4, 7) if quick else (KEY_OPERATORS, 15)
                for one in measure_boundaries(judged, machine, Path(folder), count, rounds):
                    report.add({}, [one])


def measure_model(
    report: Report, subject: Subject, machine: Machine, join: JoinCost, budget_s: float
) -> list[Judged]:
    """One model on one pair, with its row and lines; empty where it is left out or computes otherwise."""
    where = f"{subject.label} on {machine.label}"
    progress(where)
    try:
        judged = judged_model(subject, machine, join, budget_s)
    except ArithmeticError as error:
        report.add({}, [_wrong(where, error)])
    except StageloomError as error:
        why = f"{machine.label}: {str(error)[:160]}"
        report.add({}, [_left_out(subject.name, subject.batch, why)])
    else:
        report.add({}, [judged.row, *judged.lines])
        return [judged]
    return []


def _left_out(name: str, batch: int, why: str) -> dict[str, Any]:
    progress(f"{name} x{batch} is left out: {why}")
    return {"part": "left out", "model": name, "batch": batch, "why": why}


def _wrong(where: str, error: ArithmeticError) -> dict[str, Any]:
    """The line of a plan that does not compute what the model does."""
    progress(str(error))
    return line(where, "outputs are the whole model's", "within 1e-4", 1.0, False)


def _all() -> list[tuple[str, int]]:
    return [(name, batch) for name in NAMES for batch in BATCHES if batch == 1 or name != YOLO]


# One model


def judged_model(subject: Subject, machine: Machine, join: JoinCost, budget_s: float) -> Judged:
    """Profile, search, trial, and fresh windows.

    Raises:
        StageloomError: a resource does not run the model.
        ArithmeticError: a plan does not compute what the model does.
    """
    ends_s = time.monotonic() + budget_s
    rig = Rig(subject, machine)
    try:
        singles_s = _singles_s(rig)
        if singles_s[1] < singles_s[0]:
            rig.close()
            machine = machine.swapped
            rig = Rig(subject, machine)
            singles_s = _singles_s(rig)
        limits = Limits(min(20.0, budget_s / 4), repeats=5 if singles_s[0] < LONG_S else 3)
        problem = profiled(subject, machine, limits).problem(subject, singles_s, join)
        graph, reader = subject.artifact.graph, SplitReader(subject.artifact)
        batches = batch_splits(graph, reader, singles_s, join.handover_s)
        return _judged(rig, machine, problem, proposals(problem, batches), ends_s)
    finally:
        rig.close()


def _singles_s(rig: Rig) -> tuple[float, float]:
    count = len(rig.subject.artifact.graph.operators)
    keys = [rig.choice(whole(count, resource)) for resource in (0, 1)]
    fast, slow = (min(rig.window_s(key) for _ in range(3)) for key in keys)
    return fast, slow


def proposals(problem: SplitProblem, batches: Sequence[SplitChoice]) -> dict[str, SplitChoice]:
    """What `eop` finds, with fewer and fewer splits, and without chains beside each other; and batches."""
    found = {f"batch at {one.splits[0].boundary}": one for one in batches}
    for words, one in (("", problem), (", in turn", replace(problem, stages=()))):
        choice = at_best_home(eop, one)
        found[f"splits{words}"] = choice
        most = len(choice.splits) // 2
        while most:
            found[f"splits{words}, {most}"] = at_best_home(lambda p, most=most: eop_at_most(p, most), one)  # type: ignore[misc]
            most //= 4
    distinct: dict[object, str] = {}
    for name, choice in found.items():
        distinct.setdefault((choice.states, choice.splits, choice.beside, choice.home), name)
    return {name: found[name] for name in distinct.values()}


def _judged(
    rig: Rig, machine: Machine, problem: SplitProblem, offered: Mapping[str, SplitChoice], ends_s: float
) -> Judged:
    count = len(problem.operators)
    fast, slow = whole(count, 0), whole(count, 1)
    proposed = {"fast": fast, "slow": slow}
    proposed |= {name: one for name, one in offered.items() if one.states not in (fast.states, slow.states)}
    keys = {name: rig.choice(choice) for name, choice in proposed.items()}
    wide = {}
    for name in dict.fromkeys(machine.names):
        if name != "paced":
            wide[f"{WIDE} of {name}"] = rig.wide(name)
    trial = take_turns(rig.window_s, keys | wide, TRIAL_ROUNDS)
    chosen = min(keys, key=lambda name: median(trial[name]))
    auto = min(wide, key=lambda name: median(trial[name]))
    if machine.paced or median(trial[auto]) > GAIN * median(trial[chosen]):
        auto = chosen
    plans = {"fast": keys["fast"], "slow": keys["slow"], "eop": keys[chosen]}
    choices = {name: splitter(name).choose(problem) for name in RIVALS}
    if rig.subject.name == CONDITIONS_ON:
        choices |= conditions(problem)
    plans |= {name: rig.choice(choice) for name, choice in choices.items()}
    plans |= wide
    windows = take_turns(rig.window_s, plans, _rounds(rig, plans, ends_s))
    at_s = {name: median(seconds) for name, seconds in windows.items()}
    best_wide = min(wide, key=lambda name: at_s[name])
    spread = aa_spread(windows)
    wins = ratio_of(windows, best_wide, "eop") < 1 - spread
    choice = proposed[chosen]
    subject = rig.subject
    row: dict[str, Any] = {"part": "models", "pair": machine.label, "model": subject.name}
    row |= {
        "batch": subject.batch,
        "side": subject.side,
        "operators": count,
        "key": len(key_operators(problem.operators)),
    }
    row |= {"chosen": chosen, "splits": len(choice.splits), "beside": len(choice.beside)}
    alone_s = sum(one.whole_s[choice.home.resource] for one in problem.operators)
    row |= {"predicted_ms": 1e3 * (choice.seconds or alone_s)}
    row |= {f"{name}_ms": 1e3 * at_s[name] for name in ("fast", "slow", "eop", *choices)}
    row |= {"bound_ms": 1e3 * bound_s(problem), "intra_op_2_ms": 1e3 * at_s[best_wide]}
    row |= {"intra_op_2_wins": wins, "auto": auto, "rounds": len(windows["eop"]), "aa": spread}
    row |= {f"{name}_splits": len(one.splits) for name, one in choices.items()}
    where = f"{subject.label} on {machine.label}"
    lines = model_lines(where, windows, problem)
    if not machine.paced:
        lines += auto_lines(where, windows, auto if auto in wide else "eop", best_wide)
    return Judged(subject, problem, windows, row, lines)


def _rounds(rig: Rig, plans: Mapping[str, PlanKey], ends_s: float) -> int:
    """As many as there is time for, by one round."""
    began_s = time.monotonic()
    for key in plans.values():
        rig.window_s(key)
    round_s = time.monotonic() - began_s
    least, most = ROUNDS
    return max(least, min(most, int((ends_s - time.monotonic()) / round_s)))


# Boundaries of single operators


def measure_boundaries(
    judged: Sequence[Judged], machine: Machine, folder: Path, count: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Key operators drawn by a seed over all models, each a model of its own: a line of each, or a row that
    says why it is left out."""
    for number, (one, op, state) in enumerate(drawn_operators(judged, count)):
        where = f"{one.subject.label}, operator {op}, {state.axis.value}{state.boundary}"
        progress(f"boundaries of {where}")
        try:
            alone = operator_alone(one.subject, op, folder / f"operator{number}")
            yield _boundary(one.problem, op, state, where, Rig(alone, machine), rounds)
        except ArithmeticError as error:
            yield _wrong(where, error)
        except StageloomError as error:
            why = f"operator {op} alone: {str(error)[:160]}"
            yield _left_out(one.subject.name, one.subject.batch, why)


def _boundary(
    problem: SplitProblem, op: int, state: Halves, where: str, rig: Rig, rounds: int
) -> dict[str, Any]:
    """The line of one operator; closes the rig."""
    try:
        axis = next(axis for axis in problem.operators[op].axes if axis.axis is state.axis)
        rig.choice(whole(1, 0))
        keys = {end: rig.choice(split_alone(Halves(state.axis, end))) for end in around(axis, state.boundary)}
        windows = take_turns(rig.step_window_s, {str(end): key for end, key in keys.items()}, rounds)
        return boundary_line(where, state, {int(end): taken for end, taken in windows.items()})
    finally:
        rig.close()


def drawn_operators(judged: Sequence[Judged], count: int) -> list[tuple[Judged, int, Halves]]:
    """Key operators of all models in turn, drawn by a seed; of operators that are alike one."""
    random = Random(0)
    offered = []
    for one in judged:
        graph = one.subject.artifact.graph
        first = alike(graph, SplitReader(one.subject.artifact))
        own = sorted({first[op] for op in key_operators(one.problem.operators)})
        states = [(one, op, state) for op in own if (state := least_halves(one.problem, op)) is not None]
        offered.append(random.sample(states, len(states)))
    in_turn = [one for row in zip_longest(*offered) for one in row if one is not None]
    return in_turn[:count]


def conditions(problem: SplitProblem) -> dict[str, SplitChoice]:
    """Those of the paper's section 5.1 that are no rivals already: key operators, each by itself, and every
    operator, whether it pays or not. The third, both, is `eop_paper`."""
    halves = [least_halves(problem, op) for op in range(len(problem.operators))]
    states = [one or operator.best_whole for one, operator in zip(halves, problem.operators, strict=True)]
    return {"condition_1": splitter("separate").choose(problem), "condition_2": apart(problem, states)}


def least_halves(problem: SplitProblem, op: int) -> Halves | None:
    """The split of an operator that is predicted to take least, whether it pays or not."""
    states = [Halves(axis.axis, end) for axis in problem.operators[op].axes for end in axis.boundaries]
    return min(states, key=lambda state: apart_cost_s(problem, op, state), default=None)


def split_alone(state: Halves) -> SplitChoice:
    """A model of one operator, which is split."""
    return SplitChoice(states=(state,), splits=(Split(0, 0, state.axis, state.boundary),), seconds=0.0)
