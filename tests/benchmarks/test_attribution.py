"""What learning gains: equal evaluations, equal answers for equal seeds, margins with exact intervals."""

import json
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import exp, sqrt
from pathlib import Path
from statistics import pstdev
from typing import Any

import numpy as np
import pytest

from benchmarks.learning import attribution, attribution_run
from benchmarks.learning.attribution import (
    METHODS,
    RIVAL,
    TRAINING,
    USUAL,
    WINDOWS,
    Answer,
    Cell,
    attributed,
    evaluations_of,
    searched,
    trained,
    transitions_within,
)
from benchmarks.learning.attribution_run import HEADLINE, attribute, cell_rows, pieces, table
from benchmarks.learning.margin import best_of_methods, bootstrap_interval, margin
from benchmarks.learning.pair import MIX, SWAP_S, whole_s, workloads
from benchmarks.learning.unlearned import SEARCHES, ActionRow, Best, best_seed, local_search, neighbour
from benchmarks.runner import Report
from stageloom.planner.learning.maddpg.candidates import seeds
from stageloom.planner.learning.maddpg.settings import MaddpgSettings, Start
from stageloom.planner.learning.maddpg.work import Evaluate
from stageloom.planner.tournament.score import Score
from stageloom.planner.twin.arrivals import Counted
from stageloom.planner.twin.device_file import load_device
from stageloom.planner.twin.times import StepTimes
from stageloom.planner.twin.window import TargetDevice
from stageloom.shared.plan import Member
from stageloom.shared.policy.maddpg.actions import combine_blocks
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.search.costs import CostTable
from tests.learning.maddpg.toy import LEFT, problem
from tests.policy.maddpg.cases import space

DOCS = Path(__file__).parents[2] / "docs"
PROBLEM = problem()
EVALUATIONS = 30
SMALL = replace(USUAL, batch=16, actors=(16, 12), critics=(32, 24, 16), actor_after=10, learn_from=60)
TRAININGS = {
    "usual": (SMALL, False),
    "frozen": (replace(SMALL, updates_per_transition=0.0), False),
    "without pull": (replace(SMALL, pull=0.0), False),
    "random start": (replace(SMALL, start=Start.PAPER, seeded=False), False),
    "printed": (
        replace(
            MaddpgSettings.paper(step_s=1.0),
            validation_steps=9,
            batch=16,
            actors=(16, 12),
            critics=(32, 24, 16),
            printed_critic=True,
        ),
        True,
    ),
}


def _trainings() -> list[object]:
    """Those that run other code than the usual one; the others differ in a number."""
    numbers = ("frozen", "without pull")
    return [
        pytest.param(name, marks=[pytest.mark.full] if name in numbers else []) for name in sorted(TRAININGS)
    ]


def score(throughput: float, p99: float = 1.0) -> Score:
    return Score(
        throughput_per_s=throughput,
        p99_s=p99,
        utilisation=1.0,
        queue_variance=0.0,
        variance_growth=0.0,
        met=1.0,
    )


class Counting:
    """Makes devices, and counts the windows that they run."""

    def __init__(self) -> None:
        self.windows = 0

    def __call__(self, seed: int) -> TargetDevice:
        device = PROBLEM.make_device(seed)
        ran = device.run

        def counted(*given: Any, **named: Any) -> Any:
            self.windows += 1
            return ran(*given, **named)

        device.run = counted  # type: ignore[method-assign]
        return device


@pytest.mark.parametrize("name", sorted(SEARCHES))
def test_a_search_runs_the_windows_it_was_given(name: str) -> None:
    devices = Counting()
    answer = searched(SEARCHES[name], replace(PROBLEM, make_device=devices), EVALUATIONS, 1)
    wanted = len(seeds(PROBLEM.space)) if name == "best seed" else EVALUATIONS
    assert (answer.evaluations, devices.windows) == (wanted, wanted * WINDOWS)


@pytest.mark.more
@pytest.mark.parametrize("name", _trainings())
def test_a_training_runs_the_windows_it_was_given(name: str) -> None:
    """A superblock as printed runs nothing: its window is one of those given, and no device's."""
    settings, as_printed = TRAININGS[name]
    devices = Counting()
    where = replace(PROBLEM, make_device=devices)
    answer = trained(settings, where, EVALUATIONS, 1, as_printed=as_printed)
    assert answer.evaluations == EVALUATIONS
    assert devices.windows <= EVALUATIONS * WINDOWS
    assert as_printed or devices.windows == EVALUATIONS * WINDOWS
    assert answer.updates == 0 if name == "frozen" else answer.updates > 0


def test_a_search_that_wants_more_is_stopped() -> None:
    def greedy(where: Space, best: Best, evaluations: int, rng: Any) -> None:
        for _ in range(evaluations + 1):
            best.judged(next(iter(seeds(where).values())))

    with pytest.raises(RuntimeError, match="more than 3 evaluations"):
        searched(greedy, PROBLEM, 3, 1)


def test_an_episode_and_the_evaluation_of_a_plan_are_equally_long() -> None:
    held = Evaluate(number=0, name="", seeds=(1,) * USUAL.validation_seeds, steps=USUAL.validation_steps)
    assert evaluations_of(held) == 1 and USUAL.episode_steps == WINDOWS


@pytest.mark.parametrize("evaluations", [14, 30, 48, 150])
def test_the_longest_training_that_fits_is_chosen(evaluations: int) -> None:
    """By counting what a course of that length hands out; one episode more would be too much."""
    length = transitions_within(SMALL, evaluations, len(seeds(PROBLEM.space)))
    needs = len(seeds(PROBLEM.space)) + 1 + length // WINDOWS
    assert needs < evaluations and length % WINDOWS == 0
    assert transitions_within(SMALL, evaluations + 12, len(seeds(PROBLEM.space))) > length


def small(name: str) -> Any:
    if name in SEARCHES:
        return partial(searched, SEARCHES[name])
    settings, as_printed = TRAININGS[name]
    return partial(trained, settings, as_printed=as_printed)


def plain(answer: Answer) -> Any:
    return answer.row, answer.score, answer.policy, answer.updates


@pytest.mark.parametrize(
    "name",
    [
        "local search",
        "cross-entropy",
        *(pytest.param(one, marks=pytest.mark.more) for one in ("usual", "printed")),
    ],
)
def test_equal_seeds_give_equal_answers(name: str) -> None:
    answers = [small(name)(PROBLEM, 24, seed) for seed in (3, 3)]
    assert plain(answers[0]) == plain(answers[1])


def test_a_better_plan_near_the_seed_is_found_by_local_search() -> None:
    """Planted: any plan in which the last blocks of both models run together, which no seed has."""
    where = space(3, 2)
    planted = (Member(0, 0, 2), Member(1, 0, 0))
    judged: list[ActionRow] = []

    def has(row: ActionRow) -> bool:
        return planted in combine_blocks(where, row[where.num_models :]).combined

    def judge(row: ActionRow) -> Score:
        judged.append(row)
        return score(110.0 if has(row) else 100.0)

    best_seed(where, Best(judge), 99, np.random.default_rng(0))
    assert len(judged) == len(seeds(where)) and not any(map(has, judged))
    judged.clear()
    best = Best(judge)
    local_search(where, best, 120, np.random.default_rng(0))
    assert has(best.row) and len(judged) == 120


def test_a_chain_of_plans_that_are_each_level_with_the_one_before_loses_no_throughput() -> None:
    """Each has 0.4 % less than the one before, which is no difference, and a shorter p99."""
    falling = [score(100.0 * 0.996**at, 1.0 - 0.1 * at) for at in range(5)]
    best = Best(lambda row: falling[int(row[0])])
    for at in range(5):
        best.judged((float(at),))
    assert best.row == (1.0,)


def test_a_neighbour_differs_in_one_blocks_place_or_in_one_models_pace() -> None:
    where, rng = space(3, 2, 4), np.random.default_rng(0)
    row = next(iter(seeds(where).values()))
    for _ in range(200):
        other = neighbour(where, row, rng)
        before, after = (
            {frozenset(one) for one in combine_blocks(where, r[where.num_models :]).combined}
            for r in (row, other)
        )
        paces = sum(one != two for one, two in zip(row, other, strict=True) if before == after)
        moved = [member for member in where.members if _company(before, member) != _company(after, member)]
        assert before != after or paces == 1
        assert before == after or any(_without(before, one) == _without(after, one) for one in moved)
        row = other


def _company(rows: set[frozenset[Member]], member: Member) -> frozenset[Member]:
    return next(row for row in rows if member in row)


def _without(rows: set[frozenset[Member]], member: Member) -> set[frozenset[Member]]:
    return {left for row in rows if (left := row - {member})}


def test_the_bootstrap_of_two_values_is_what_it_is_on_paper() -> None:
    """Resamples of (0, 1) have the means 0, 1/2 and 1 with weights 1/4, 1/2 and 1/4."""
    assert bootstrap_interval([0.0, 1.0], 0.95) == (0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], 0.4) == (0.5, 0.5)


def test_the_bootstrap_interval_is_that_of_a_normal_distribution_where_values_are_many() -> None:
    """The mean of the values, and their deviation over the square root of their number."""
    values = [float(value) for value in (1, 4, 2, 8, 5, 7, 3, 6)]
    low, high = bootstrap_interval(values)
    mean, error = sum(values) / len(values), pstdev(values) / sqrt(len(values))
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.1)


def test_equal_values_have_an_interval_without_width() -> None:
    assert bootstrap_interval([0.25] * 5) == (0.25, 0.25)


def test_a_margin_is_of_throughput_and_of_p99_where_that_is_level() -> None:
    under = [score(100.0, 1.0), score(100.0, 1.0)]
    found = margin([score(110.0, 5.0), score(110.0, 5.0)], under)
    assert found.by == "throughput" and (found.ratio, found.low, found.high) == pytest.approx((1.1,) * 3)
    found = margin([score(100.2, 0.5), score(100.2, 0.25)], under)
    assert found.by == "p99" and (found.low, found.high) == pytest.approx((2.0, 4.0))
    assert found.ratio == pytest.approx(exp((np.log(2.0) + np.log(4.0)) / 2))


def test_the_best_method_has_the_best_mean_over_its_seeds() -> None:
    scores = {"a": [score(100.0)] * 2, "b": [score(120.0)] * 2, "c": [score(120.0, 0.5)] * 2}
    assert best_of_methods(scores) == "c"


def rows_of(throughputs: dict[str, float], seeds: int = 3) -> list[dict[str, Any]]:
    figures = {"p99_ms": 10.0, "utilisation": 1.0, "queue_variance": 0.0, "variance_growth_per_s": 0.0}
    rows = []
    for name in HEADLINE:
        found: dict[str, Any] = {"throughput_per_s": throughputs.get(name, 80.0), "met": 1.0, **figures}
        found |= {f"policy_{key}": value for key, value in found.items()} if name == TRAINING else {}
        rows += [
            {"device": "nano", "load": "paper", "method": name, "seed": seed, "beside": "", **found}
            for seed in range(seeds)
        ]
    return rows


@pytest.mark.promise("learning-gains-counted-best")
def test_a_training_is_compared_with_the_best_that_learned_nothing() -> None:
    (cell,) = cell_rows(rows_of({TRAINING: 105.0, "local search": 100.0, "uniform": 90.0, RIVAL: 102.0}))
    assert (cell["best_method"], cell["best_search"]) == (TRAINING, "local search")
    assert cell["learned_over_best_search_low"] == pytest.approx(1.05)
    assert (cell["best_unlearned"], cell["learned_over_best_unlearned_low"]) == (
        RIVAL,
        pytest.approx(1.0294, abs=1e-4),
    )
    assert cell["seeds"] == 3


def test_a_cell_that_lacks_a_headline_method_says_nothing() -> None:
    rows = [row for row in rows_of({}) if row["method"] != "cross-entropy"]
    assert cell_rows(rows) == []
    assert cell_rows(rows_of({}, seeds=1)) == []


def test_what_the_figures_need_comes_before_what_explains_them() -> None:
    order = [piece.method in HEADLINE for piece in pieces(["a", "b"], ["x"], 2)]
    assert order == sorted(order, reverse=True) and not order[-1]


def test_policy_and_plan_are_judged_on_arrivals_that_chose_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def device(seed: int) -> TargetDevice:
        used.append(seed)
        return PROBLEM.make_device(seed)

    method = replace(METHODS[TRAINING], answer=partial(trained, SMALL))
    monkeypatch.setattr(attribution, "METHODS", {TRAINING: method})
    cell = Cell("toy", "x", replace(PROBLEM, make_device=device), "", {})
    row = attributed(cell, TRAINING, 24, 2)
    fresh = [seed for seed in used if seed >= 3_000_000_000]
    assert fresh == used[-len(fresh) :] and len(fresh) == 2 * len(set(fresh))
    assert row["policy_throughput_per_s"] > 0.0 and row["of"] in ("plan", "policy")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, BrokenProcessPool])
def test_what_a_stopped_run_finished_is_kept_and_only_the_rest_is_asked_for(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Five pieces end, then Ctrl-C, SIGTERM or a worker's death. 2. The same command is given the others
    alone. 3. Nothing is left."""
    asked: list[int] = []
    whole = {(row["method"], row["seed"]): row for row in rows_of({}, seeds=2)}

    def done(left: list[Any], evaluations: int, workers: int) -> Iterator[Any]:
        asked.append(len(left))
        for count, piece in enumerate(left):
            if len(asked) == 1 and count == 5:
                raise error
            yield piece, whole.get((piece.method, piece.seed - 1), {**whole[TRAINING, 0], **piece._asdict()})

    monkeypatch.setattr(attribution_run, "_done", done)
    options: dict[str, Any] = {"seeds": 2, "evaluations": 9, "workers": 1, "state": tmp_path}
    reports = []
    for _ in range(3):
        reports.append(Report("learning"))
        with suppress(error):
            attribute(reports[-1], ["nano"], ["paper"], **options)
    total = len(pieces(["nano"], ["paper"], 2))
    assert asked == [total, total - 5]
    assert reports[0].about["pieces"] == f"5 of {total}" and "cells" in reports[0].figures
    assert reports[1].rows == reports[2].rows and reports[2].figures["cells"] == 1.0


def test_a_load_that_swaps_asks_the_same_of_the_device_under_both_mixes() -> None:
    """1.1 of what it serves one operator after another, as far as whole tasks go."""
    device = load_device("nano")
    artifact, graph = LEFT
    names = [name for name, _ in MIX]
    models = [ModelChoice(name=name, artifact=artifact, graph=graph) for name in names]
    times = StepTimes(device, CostTable(rates=device.rates()))
    loads = workloads(device, times, models)
    swapping = [loads["swapping"][name] for name in names]
    task_s = whole_s(times, models[0])
    counts = [[span[2] for span in process.spans] for process in swapping if isinstance(process, Counted)]
    for mix in zip(*counts, strict=True):
        assert sum(mix) * task_s / SWAP_S == pytest.approx(1.1, rel=0.01)
    assert counts[0] == counts[-1][::-1] and counts[0][0] < counts[0][1]


@pytest.mark.promise("learning-gains-counted-best")
def test_the_pages_table_is_what_its_file_says() -> None:
    page = (DOCS / "learning.md").read_text()
    (file,) = sorted((DOCS / "results").glob("*-learning.json"))
    lines = table(json.loads(file.read_text())["rows"])
    assert file.name in page and len(lines) > 2
    assert "\n".join(lines) in page
