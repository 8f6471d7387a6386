"""The capacity search on a contestant whose capacity has a closed form, and with defects that it shows."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from stageloom.edge_agent.bench.capacity import (
    ROUGHLY,
    CapacitySearch,
    WindowCounts,
    capacity_estimate,
    capacity_per_s,
    lowest_index,
    ratio_of,
)
from stageloom.edge_agent.bench.load import (
    Array,
    ArrivalWindow,
    judge,
    poisson_window,
    rate_index,
    rate_per_s,
)

SERVICE_S = 0.01
DEADLINE_S = 0.05
WINDOW_S = 40.0  # 4,000 service times: that it begins empty does not count

Server = Callable[[ArrivalWindow], Array]


def deterministic_server(window: ArrivalWindow) -> Array:
    """One server, first come first served, the same time for each task; nothing is given up."""
    ended = np.empty(window.tasks)
    free_s = 0.0
    for number, at_s in enumerate(window.at_s.tolist()):
        free_s = max(free_s, at_s) + SERVICE_S
        ended[number] = free_s
    return ended


def share_in_time(rate_per_s: float) -> float:
    """P(wait < deadline - service) in an M/D/1 queue (Erlang's sum)."""
    rho = rate_per_s * SERVICE_S
    x = DEADLINE_S - SERVICE_S
    terms = (
        (rate_per_s * (k * SERVICE_S - x)) ** k
        / math.factorial(k)
        * math.exp(-rate_per_s * (k * SERVICE_S - x))
        for k in range(math.floor(x / SERVICE_S + 1e-9) + 1)
    )
    return (1.0 - rho) * math.fsum(terms) if rho < 1.0 else 0.0


CLOSED_FORM = max(place for place in range(150) if share_in_time(rate_per_s(place)) >= 0.95)


def search(server: Server, *, many: int = 20, first_per_s: float = 10.0) -> dict[int, list[WindowCounts]]:
    """All samples of a search."""
    samples: dict[int, list[WindowCounts]] = {}
    rates = CapacitySearch(few=2, many=many)
    while (place := rates.next_index(samples, rate_index(first_per_s))) is not None:
        found = samples.setdefault(place, [])
        window = poisson_window((1.0,), rate_per_s(place), WINDOW_S, (DEADLINE_S,), seed=len(found))
        found.append(WindowCounts.of(judge(window, server(window)), 1))
    return samples


@pytest.mark.promise("slo-capacity-closed-form")
@pytest.mark.parametrize("first_per_s", [1.0, 75.0, 3000.0])
def test_the_capacity_of_a_deterministic_server_is_its_closed_form(first_per_s: float) -> None:
    samples = search(deterministic_server, first_per_s=first_per_s)
    found = capacity_per_s(samples)
    assert abs(rate_index(found) - CLOSED_FORM) <= 1
    estimate = capacity_estimate(samples)
    assert estimate is not None
    middle, low, high = estimate
    assert low <= middle <= high
    assert low <= rate_per_s(CLOSED_FORM + 1)
    assert high >= rate_per_s(CLOSED_FORM)
    assert high / low < 1.15
    assert min(len(samples[rate_index(found)]), len(samples[rate_index(found) + 1])) >= 20
    assert sum(map(len, samples.values())) < 90


@pytest.mark.promise("slo-capacity-closed-form")
def test_latency_that_counts_from_handing_over_shows_in_the_capacity() -> None:
    def patient(window: ArrivalWindow) -> Array:  # the load waits for the server: closed, not open
        return window.at_s + SERVICE_S

    samples = search(patient, many=2)
    assert capacity_per_s(samples) > 1.5 * rate_per_s(CLOSED_FORM)


@pytest.mark.promise("slo-capacity-closed-form")
def test_dropped_tasks_that_were_not_counted_show_in_the_capacity() -> None:
    def forgetful(window: ArrivalWindow) -> Array:
        ended = deterministic_server(window)
        late = ended - window.at_s >= DEADLINE_S
        return np.where(late, window.at_s, ended)

    assert capacity_per_s(search(forgetful, many=2)) > 1.5 * rate_per_s(CLOSED_FORM)


def sample(*pairs: tuple[int, int]) -> WindowCounts:
    """(tasks, in time) by model."""
    return WindowCounts(np.array([tasks for tasks, _ in pairs]), np.array([good for _, good in pairs]))


def test_the_worst_model_decides_and_one_without_tasks_does_not() -> None:
    assert capacity_per_s({0: [sample((1000, 1000), (10, 9))]}) == 0.0
    assert capacity_per_s({0: [sample((1000, 960), (0, 0))]}) == 1.0


def test_windows_are_pooled_and_not_averaged() -> None:
    assert capacity_per_s({0: [sample((100, 100)), sample((2, 1))]}) == 1.0


def test_a_hopeless_window_is_not_repeated() -> None:
    rates = CapacitySearch(few=3, many=20)
    assert rates.next_index({10: [sample((40, 20))]}, 10) == 6
    assert rates.next_index({10: [sample((40, 37))]}, 10) == 10


def test_a_rate_is_not_judged_on_a_handful_of_a_rare_model_s_tasks() -> None:
    rates = CapacitySearch(few=1, many=20)
    window = sample((80, 80), (8, 7))  # 94 % of all, were it judged now
    assert rates.next_index({10: [window]}, 10) == 10
    assert rates.next_index({10: [window, sample((80, 80), (12, 12))]}, 10) == 14  # 19 of 20: it holds
    assert rates.next_index({10: [sample((80, 80), (8, 4))]}, 10) == 6  # four late: no luck would help
    assert rates.next_index({10: [sample((80, 80), (0, 0))] * 7}, 10) == 10
    assert rates.next_index({10: [sample((80, 80), (0, 0))] * 8}, 10) == 14  # it has none: the others decide


def test_where_many_are_looked_at_fewer_tasks_judge_a_rate() -> None:
    rates = CapacitySearch(few=1, many=1, judged_tasks=ROUGHLY)
    assert rates.next_index({10: [sample((80, 80), (ROUGHLY, ROUGHLY - 1))]}, 10) == 6
    assert rates.next_index({10: [sample((80, 80), (ROUGHLY - 1, ROUGHLY - 1))]}, 10) == 10
    samples = {6: [sample((80, 80), (5, 5))], 10: [sample((80, 80), (6, 5))]}
    assert (
        CapacitySearch(few=1, many=1).next_index(samples, 10) == 6
    )  # then what was judged so is judged again


@pytest.mark.promise("slo-capacity-closed-form")
def test_one_late_task_of_a_rare_model_does_not_bound_the_search_from_above() -> None:
    samples: dict[int, list[WindowCounts]] = {}
    rates = CapacitySearch(few=1, many=1)
    border = rate_index(400.0)
    unlucky = True
    while (place := rates.next_index(samples, rate_index(100.0))) is not None:
        rare = round(rate_per_s(place) * 0.08)
        late = rare if place > border else int(unlucky)
        unlucky = False
        samples.setdefault(place, []).append(sample((20 * rare, 20 * rare), (rare, rare - late)))
    assert rate_index(capacity_per_s(samples)) == border


def test_the_border_moves_when_more_windows_say_so() -> None:
    rates = CapacitySearch(few=1, many=3)
    good, bad = sample((100, 100)), sample((100, 90))
    samples = {4: [good] * 3, 5: [good], 6: [bad]}
    assert rates.next_index(samples, 0) == 5
    samples[5] += [bad, bad]
    assert rates.next_index(samples, 0) is None  # 4 holds and 5 does not, three windows each
    assert capacity_per_s(samples) == rate_per_s(4)


def test_nothing_that_holds_is_a_capacity_of_zero_and_ends_the_search() -> None:
    rates = CapacitySearch(few=1, many=3, lowest=-5)
    samples: dict[int, list[WindowCounts]] = {}
    while (place := rates.next_index(samples, 0)) is not None:
        samples.setdefault(place, []).append(sample((20, 0)))
    assert capacity_per_s(samples) == 0.0
    assert min(samples) == -5


def test_a_rate_at_which_no_task_came_does_not_hold() -> None:
    """What meets no deadline carried the rate whose windows were empty."""
    nothing, late = sample((0, 0)), sample((20, 0))
    assert capacity_per_s({-40: [nothing] * 8, 0: [late] * 8}) == 0.0
    assert capacity_estimate({-40: [nothing] * 8, 0: [late] * 8}) is None
    assert CapacitySearch(few=1, many=1, lowest=-40).next_index({-40: [nothing] * 8, 0: [late]}, 0) is None


def test_empty_windows_do_not_move_the_estimate() -> None:
    border = {10: [sample((20, 20))] * 4, 11: [sample((20, 9))] * 4}
    assert capacity_estimate({**border, -40: [sample((0, 0))] * 8}) == capacity_estimate(border)


@pytest.mark.parametrize("window_s", [0.05, 1.0, 1.5, 40.0])
def test_a_search_goes_no_lower_than_a_task_in_a_window(window_s: float) -> None:
    lowest = lowest_index(window_s)
    assert rate_per_s(lowest) * window_s == pytest.approx(1.0, rel=0.05)
    assert rate_per_s(lowest) * window_s >= 1.0 - 1e-6


def test_the_interval_of_a_ratio_holds_the_ratio_and_narrows_with_more_windows() -> None:
    rng = np.random.default_rng(5)

    def found(capacity: float, windows: int) -> dict[int, list[WindowCounts]]:
        places = range(rate_index(capacity) - 2, rate_index(capacity) + 3)
        shares = {place: 0.95 + 0.5 * math.log(capacity / rate_per_s(place)) for place in places}
        return {
            place: [sample((200, int(rng.binomial(200, min(share, 1.0))))) for _ in range(windows)]
            for place, share in shares.items()
        }

    few, many = (ratio_of(found(120.0, n), found(100.0, n)) for n in (4, 60))
    assert few is not None and many is not None
    assert many[1] < 1.2 < many[2]
    assert many[1] <= many[0] <= many[2]
    assert many[2] - many[1] < few[2] - few[1]


def shared(capacity: float, windows: int, rng: np.random.Generator) -> dict[int, list[WindowCounts]]:
    """Windows of 1,000 tasks at five rates around a capacity; a number that is hard is so at each rate."""
    hard = rng.normal(0.0, 0.05, windows)
    middle = rate_index(capacity)
    shares = {
        place: np.clip(0.95 + 0.5 * (math.log(capacity / rate_per_s(place)) - hard), 0.0, 1.0)
        for place in range(middle - 2, middle + 3)
    }
    return {
        place: [sample((1000, round(1000 * share))) for share in found.tolist()]
        for place, found in shares.items()
    }


def test_an_interval_holds_the_capacity_as_often_as_it_says_where_rates_share_arrivals() -> None:
    rng, capacity = np.random.default_rng(7), math.sqrt(rate_per_s(90) * rate_per_s(91))
    held = 0
    for _ in range(150):
        estimate = capacity_estimate(shared(capacity, 20, rng), resamples=150)
        assert estimate is not None
        held += estimate[1] <= capacity <= estimate[2]
    assert held >= 132  # 93 % are to be expected of twenty windows; drawn rate by rate it were 81 %


@pytest.mark.parametrize("more", [0, 5])
def test_arrivals_that_both_sides_of_a_ratio_share_say_nothing_of_it(more: int) -> None:
    """One carries two places more on each number's arrivals; the other may have had some windows less."""
    over = shared(100.0, 20 + more, np.random.default_rng(7))
    under = {place - 2: found[:20] for place, found in over.items()}
    found, alone = ratio_of(over, under), capacity_estimate(over)
    assert found is not None and alone is not None
    assert found[0] == pytest.approx(1.05**2, rel=0.02)
    assert found[2] / found[1] - 1.0 < 0.8 * (alone[2] / alone[1] - 1.0)
    if not more:
        assert found == pytest.approx((1.05**2,) * 3)


def test_of_few_windows_nothing_is_told_however_sure_it_seems() -> None:
    few, enough = ({10: [sample((20, 20))] * count, 11: [sample((20, 9))] * count} for count in (3, 4))
    assert capacity_estimate(few) is None
    assert ratio_of(few, enough) is None
    assert ratio_of(enough, few) is None
    assert ratio_of(enough, enough) == (1.0, 1.0, 1.0)


def test_a_ratio_is_that_of_the_capacities_between_the_grid_s_rates() -> None:
    """Both hold at the same rate of the grid; at the next one is just late, the other nearly always."""
    nearly, never = ({10: [sample((20, 20))] * 4, 11: [sample((20, late))] * 4} for late in (18, 1))
    assert capacity_per_s(nearly) == capacity_per_s(never)
    estimates = capacity_estimate(nearly), capacity_estimate(never)
    assert estimates[0] is not None and estimates[1] is not None
    found = ratio_of(nearly, never)
    assert found is not None
    assert found[0] == pytest.approx(estimates[0][0] / estimates[1][0])
    assert found[0] > 1.01


def test_a_capacity_whose_search_goes_on_may_come_to_the_lowest_rate_that_does_not_hold() -> None:
    looking = CapacitySearch(few=1, many=6, judged_tasks=5, lowest=0, highest=50)
    holds, fails = [sample((9, 9))], [sample((9, 0))]
    assert looking.most_per_s({}) == looking.most_per_s({10: holds}) == math.inf
    assert looking.most_per_s({10: holds, 14: fails, 18: fails}) == rate_per_s(14)
    assert looking.most_per_s({10: fails, 6: fails}) == rate_per_s(6)
    assert looking.most_per_s({10: holds, 11: fails}) == rate_per_s(10)
    assert looking.most_per_s({0: fails}) == 0.0
    assert looking.most_per_s({50: holds}) == rate_per_s(50)
