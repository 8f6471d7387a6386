"""What launch intervals can do: closed forms, a world in which they pay, and equal arrivals for all."""

import json
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from benchmarks.learning import launcher_run
from benchmarks.learning.launcher import (
    FIXED,
    GRID,
    OBJECTIVES,
    Contestant,
    LauncherCell,
    Paces,
    Served,
    UnknowingTwin,
    chosen_paces,
    contestants,
    goodput_bound_per_s,
    launcher_alone,
    oracle,
    refusing_heaviest,
    served,
    strict,
)
from benchmarks.learning.launcher_run import cell_rows, contestant_row, figures_over, table
from benchmarks.runner import Report
from stageloom.planner.replan.levers import by_deadline
from stageloom.planner.tournament.score import Score
from stageloom.planner.twin.arrivals import Periodic, Poisson, Process
from stageloom.planner.twin.reference import Twin
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import bind
from tests.engine.plans import chains
from tests.twin.cases import measured

pytestmark = pytest.mark.more

DOCS = Path(__file__).parents[2] / "docs"


def twin(
    kind: type[Twin], times: StepTimes, load: Mapping[str, Process], late_s: Mapping[str, float], seed: int
) -> Twin:
    return kind(times, load, seed=seed, deadlines_s=late_s)


def cell(
    service_s: tuple[float, ...],
    load: tuple[Process, ...],
    deadlines_s: tuple[float, ...],
    blocks: tuple[int, ...] = (1, 1),
) -> LauncherCell:
    """Chains of equal blocks on one lane of a device that costs nothing beside."""
    bound = chains(*blocks[: len(service_s)])
    names = [model.name for model in bound.plan.models]
    each_s = [taken / number for taken, number in zip(service_s, blocks, strict=False)]
    times = measured(bound, dict(zip(names, each_s, strict=True)))
    arrivals = dict(zip(names, load, strict=True))
    late = dict(zip(names, deadlines_s, strict=True))
    rates = tuple(process.mean_per_s for process in load)
    return LauncherCell(
        plan=bound.plan,
        graphs={model.plan.artifact: model.graph for model in bound.models},
        rates_per_s=rates,
        service_s=service_s,
        load=sum(rate * taken for rate, taken in zip(rates, service_s, strict=True)),
        make_device=partial(twin, Twin, times, arrivals, late),
        make_unknowing=partial(twin, UnknowingTwin, times, arrivals, late),
        make_patient=partial(twin, Twin, times, arrivals, {}),
    )


ONE = cell((0.05,), (Periodic(rate_per_s=10.0),), (0.24,))
"""A task every 0.1 s takes 0.05 s and is wanted within 0.24 s."""

SMALL_AND_LARGE = (Periodic(rate_per_s=1.0), Periodic(rate_per_s=5.0, offset_s=0.03))
STARVED = cell((1.0, 0.1), SMALL_AND_LARGE, (5.0, 0.5))
"""Small tasks that are wanted within half the time of a large one, at load 1.5."""


def test_a_strict_interval_above_the_gap_makes_each_task_wait_for_all_before_it() -> None:
    """D/D/1 with the interval T for a server: task n waits n (T - gap), and the device is busy for s / T."""
    device = ONE.make_patient(0)
    plan = strict(ONE.plan, (0.5,), ONE.rates_per_s)
    device.deploy(bind(plan, ONE.graphs))
    window = device.run(4.0)
    latencies = window.models[0].latencies_s
    assert plan.models[0].launch_interval_us == 200_000
    assert latencies == pytest.approx([0.1 * n + 0.05 for n in range(20)])
    assert window.busy_s / window.seconds == pytest.approx(0.05 / 0.2)


def test_a_strict_interval_below_the_gap_makes_nobody_wait() -> None:
    device = ONE.make_patient(0)
    device.deploy(bind(strict(ONE.plan, (1.25,), ONE.rates_per_s), ONE.graphs))
    assert device.run(4.0).models[0].latencies_s == pytest.approx([0.05] * 40)


@pytest.mark.parametrize(("how", "per_s"), [("arrival", 0.0), ("unknowing", 0.0), ("fixed", 5.0)])
def test_what_can_no_longer_end_in_time_makes_room_under_the_fixed_rule_alone(how: str, per_s: float) -> None:
    """Launched every 0.2 s, the oldest that is not expired is 0.2 s old and would end at 0.25, behind its
    0.24: in order of arrival none ends in time. Given up, it makes room for one that came 0.1 s later."""
    plan = strict(ONE.plan if how == "arrival" else by_deadline(ONE.plan), (0.5,), ONE.rates_per_s)
    make = ONE.make_unknowing if how == "unknowing" else ONE.make_device
    (found,) = served(ONE, plan, [0], 10.0, make)
    assert found.goodput_per_s == pytest.approx(per_s, abs=0.11)


def test_the_oracle_finds_the_best_paces_where_models_do_not_meet() -> None:
    for target in product(GRID[1:], repeat=2):
        assert oracle(partial(_near, target), 2) == target


def _near(target: Paces, paces: Paces) -> tuple[float, ...]:
    pairs = zip(paces, target, strict=True)
    return (-sum(abs((9.0 if one is None else one) - (other or 0.0)) for one, other in pairs),)


def test_cells_before_an_interruption_are_told_with_figures_over_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = cell_rows(STARVED, 1.0, 1.0)

    def cell_or_ctrl_c(*where: object) -> LauncherCell:
        if where[2] == 1.1:
            raise KeyboardInterrupt
        return STARVED

    monkeypatch.setattr(launcher_run, "cell_of", cell_or_ctrl_c)
    monkeypatch.setattr(launcher_run, "cell_rows", lambda _: [dict(row) for row in found])
    report = Report("learning")
    with pytest.raises(KeyboardInterrupt):
        launcher_run.launcher(report, ["nano"])
    assert len(report.rows) == len(found) and report.figures["cells"] == 1.0


@pytest.mark.promise("launcher-beside-fixed-rule")
def test_where_a_model_starves_another_the_oracle_refuses_it() -> None:
    """Planted: while a large task runs, small ones expire. Without the large ones all small ones are in time,
    5 a second, and the oracle finds that in order of arrival and, as no step can be interrupted, under the
    fixed rule."""
    for plan in (STARVED.plan, by_deadline(STARVED.plan)):
        found, _ = chosen_paces(STARVED, plan, [0], 20.0)
        paces = found["goodput"]
        (free,) = served(STARVED, plan, [1], 20.0)
        (refusing,) = served(STARVED, strict(plan, paces, STARVED.rates_per_s), [1], 20.0)
        assert paces[0] == 0.0
        assert refusing.goodput_per_s == pytest.approx(5.0, abs=0.06) and refusing.least_share == 0.0
        assert refusing.goodput_per_s > 1.1 * free.goodput_per_s


def test_where_the_starving_model_is_cut_the_fixed_rule_does_more_than_any_refusal() -> None:
    """In ten blocks: small tasks go in between, all 5 a second, and half of the large ones are in time."""
    cut = cell((1.0, 0.1), SMALL_AND_LARGE, (5.0, 0.5), (10, 1))
    (found,) = served(cut, by_deadline(cut.plan), [1], 20.0)
    assert found.goodput_per_s == pytest.approx(5.5, abs=0.11)


def test_changing_the_launcher_alone_moves_variance_and_p99_under_strict_intervals_alone() -> None:
    """Overloaded, intervals as policies give them are those of arrivals whatever the action is."""
    heavy = cell((0.3, 0.1), (Periodic(rate_per_s=3.0), Periodic(rate_per_s=5.0, offset_s=0.01)), (9.0, 9.0))
    moved = launcher_alone(heavy, [0], 20.0)
    inert, below = moved["without deadlines, as it is"], moved["without deadlines, strict"]
    assert inert["p99"] < 1.1 and inert["variance"] < 1.1
    assert below["p99"] > 1.2 and below["variance"] > 1.2


@pytest.mark.promise("launcher-beside-fixed-rule")
def test_all_contestants_get_the_same_arrivals() -> None:
    random = cell((0.3, 0.1), (Poisson(rate_per_s=3.0), Poisson(rate_per_s=5.0)), (1.5, 0.5))
    paces: dict[str, Paces] = {name: (0.5, None) for name in OBJECTIVES}
    every = contestants(random, paces, paces)
    arrived = {
        tuple(
            one.arrived
            for one in served(
                random, each.plan, [3, 4], 20.0, random.make_unknowing if each.unknowing else None
            )
        )
        for each in every
    }
    assert len(every) == len({one.name for one in every}) == 2 * len(OBJECTIVES) + 6
    assert len(arrived) == 1 and len(set(next(iter(arrived)))) == 2, "equal for all, other for another seed"


def test_the_bound_serves_the_cheapest_first_and_no_whole_numbers_of_tasks_exceed_it() -> None:
    assert goodput_bound_per_s([10, 10], [2.0, 1.0], 15.0) == pytest.approx((10 + 2.5) / 15.0)
    arrived, service_s, seconds = (4, 3, 5), (1.5, 4.0, 0.7), 11.0
    best = max(
        sum(counts)
        for counts in product(*(range(one + 1) for one in arrived))
        if sum(n * taken for n, taken in zip(counts, service_s, strict=True)) <= seconds
    )
    assert best / seconds <= goodput_bound_per_s(arrived, service_s, seconds) < (best + 1) / seconds


@pytest.mark.parametrize(
    ("rates", "paces"),
    [
        ((1.0, 5.0, 2.0), (None, None, None)),
        ((3.0, 5.0, 2.0), (0.0, None, None)),
        ((3.0, 20.0, 4.0), (0.0, 0.0, None)),
    ],
    ids=["load 1.0", "load 1.6", "load 3.3"],
)
def test_the_heaviest_are_refused_until_the_rest_fits(
    rates: tuple[float, ...], paces: tuple[float | None, ...]
) -> None:
    assert refusing_heaviest(rates, (0.3, 0.1, 0.1)) == paces


def test_a_cell_compares_every_contestant_with_the_fixed_rule_on_other_arrivals_than_chose() -> None:
    seeds: list[int] = []

    def noted(seed: int) -> Twin:
        seeds.append(seed)
        return STARVED.make_device(seed)  # type: ignore[return-value]

    rows = cell_rows(STARVED._replace(make_device=noted), 3.0, 3.0)
    where = {"device": "toy", "structure": "whole", "load": 1.5, "deadline_over_service": 5.0}
    found = [{**where, **row} for row in rows]
    fixed = next(row for row in found if row.get("contestant") == FIXED)
    assert (fixed["goodput_over_fixed"], fixed["least_share_less_fixed"]) == (1.0, 0.0)
    assert {seed // 1_000_000 for seed in seeds} == {4, 5}
    figures = figures_over(found)
    assert figures["cells"] == figures["cells_where_intervals_gain"] == 1.0
    assert figures["most_goodput_over_fixed"] > 1.1


def served_so(per_s: float, *shares: float) -> Served:
    score = Score(
        throughput_per_s=per_s, p99_s=0.1, utilisation=1.0, queue_variance=1.0, variance_growth=0.0, met=0.5
    )
    return Served(score, shares, (100, 100), 1.0)


@pytest.mark.parametrize(("lost", "without_loss"), [(0.005, 1.0), (0.2, 0.0)])
def test_a_gain_is_without_loss_only_where_models_that_are_served_better_than_the_worst_keep_theirs(
    lost: float, without_loss: float
) -> None:
    """The worst one keeps its share; the other loses as much under each arrivals, which differ by more."""
    shares = (0.9, 0.7, 0.8)
    fixed = [served_so(10.0, 0.4, share) for share in shares]
    strict_ones = [served_so(11.0, 0.4, share - lost) for share in shares]
    where = {"device": "toy", "structure": "whole", "load": 1.5, "deadline_over_service": 5.0}
    rows = [
        {**where, **contestant_row(Contestant(name, STARVED.plan), served_rows, fixed)}
        for name, served_rows in ((FIXED, fixed), ("by deadline, strict for goodput", strict_ones))
    ]
    figures = figures_over(rows)
    assert figures["cells_where_intervals_gain"] == 1.0
    assert figures["cells_where_they_gain_without_loss"] == without_loss


@pytest.mark.promise("launcher-beside-fixed-rule")
def test_the_pages_table_of_the_launcher_is_what_its_file_says() -> None:
    page = (DOCS / "learning.md").read_text()
    (file,) = sorted((DOCS / "results").glob("*-launcher.json"))
    rows = json.loads(file.read_text())["rows"]
    assert file.name in page
    assert "\n".join(table(rows)) in page
