"""Cuts in two: the known answer in closed form and simulated, both cuts against all cuts listed."""

from itertools import pairwise
from math import inf, nan
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.errors import InputError
from stageloom.shared.plan import PlacementPolicy
from stageloom.shared.search.halves import RATE_TOLERANCE, PartTimes, balanced_cut, paper_cut
from tests.engine.placed import Scene, World, evenly, highest_rate, keeps_up, poisson

SECONDS = st.floats(0.01, 10.0)
POLICIES = [PlacementPolicy.DM, PlacementPolicy.DMDA, PlacementPolicy.HEFT]


def parts(tail: float, slow: float = 3.0, transfer_s: float = 0.0) -> PartTimes:
    """A model of one second, `tail` of it behind the cut, with a resource `slow` times slower."""
    return PartTimes(head_s=1 - tail, tail_s=tail, slow_tail_s=slow * tail, transfer_s=transfer_s)


class Measured:
    """Cuts of a model whose operators take so long, and how often each was measured."""

    def __init__(
        self, operators_s: list[float], slow: float = 3.0, transfers_s: list[float] | None = None
    ) -> None:
        self.times = operators_s
        self.slow = slow
        self.transfers_s = transfers_s or [0.0] * len(operators_s)
        self.asked: list[int] = []

    @property
    def cuts(self) -> list[int]:
        return list(range(1, len(self.times)))

    def at(self, cut: int) -> PartTimes:
        head_s, tail_s = sum(self.times[:cut]), sum(self.times[cut:])
        return PartTimes(
            head_s=head_s, tail_s=tail_s, slow_tail_s=self.slow * tail_s, transfer_s=self.transfers_s[cut]
        )

    def __call__(self, cut: int) -> PartTimes:
        self.asked.append(cut)
        return self.at(cut)


def random_model(seed: int) -> Measured:
    random = Random(seed)
    operators = random.randint(2, 40)
    return Measured(
        [random.uniform(0.05, 1.0) for _ in range(operators)],
        slow=random.uniform(1.0, 10.0),
        transfers_s=[random.uniform(0.0, 0.5) for _ in range(operators)],
    )


# The known answer


@given(SECONDS, SECONDS, SECONDS, st.integers(1, 4), st.integers(1, 32))
def test_at_the_highest_rate_no_resource_has_more_work_than_time(
    head_s: float, tail_s: float, slow_tail_s: float, slow_resources: int, batch: int
) -> None:
    times = PartTimes(head_s=head_s, tail_s=tail_s, slow_tail_s=slow_tail_s)
    away = times.share_away(slow_resources)
    batches = times.highest_rate_per_s(batch=batch, slow_resources=slow_resources) / batch
    assert 0.0 < away <= 1.0
    assert batches * (head_s + (1 - away) * tail_s) == pytest.approx(1.0)
    slow_load = batches * away * slow_tail_s / slow_resources
    assert slow_load == pytest.approx(1.0) if away < 1.0 else slow_load <= 1.0 + 1e-9


@given(SECONDS, SECONDS, SECONDS, st.floats(0, 1))
def test_no_other_share_of_tails_gives_a_higher_rate(
    head_s: float, tail_s: float, slow_tail_s: float, share: float
) -> None:
    times = PartTimes(head_s=head_s, tail_s=tail_s, slow_tail_s=slow_tail_s)
    fast_s, slow_s = head_s + (1 - share) * tail_s, share * slow_tail_s
    assert 1 / max(fast_s, slow_s) <= times.highest_rate_per_s() * (1 + 1e-9)


def test_a_quarter_in_the_tail_at_three_times_slower_gives_a_third_more_at_half_more_latency() -> None:
    balanced = parts(0.25)
    assert balanced.share_away() == 1.0
    assert balanced.highest_rate_per_s() == pytest.approx(4 / 3)
    assert balanced.latency_away_s == pytest.approx(1.5)
    assert parts(0.35).highest_rate_per_s() == pytest.approx(4 / 3), "a larger tail gives no more"


@given(st.floats(0.05, 0.15), st.floats(0.01, 100.0), st.integers(1, 4))
def test_the_papers_cut_gains_at_most_18_percent(tail: float, slow: float, slow_resources: int) -> None:
    assert parts(tail, slow).highest_rate_per_s(slow_resources=slow_resources) <= 1.18


@pytest.mark.parametrize("field", ["head_s", "tail_s", "slow_tail_s", "transfer_s"])
@pytest.mark.parametrize("seconds", [-1.0, inf, nan])
def test_what_is_no_time_is_refused(field: str, seconds: float) -> None:
    with pytest.raises(InputError, match="no times of two parts"):
        PartTimes(**{"head_s": 1.0, "tail_s": 1.0, "slow_tail_s": 1.0, field: seconds})


# Simulated


def scene_of(times: PartTimes, policy: PlacementPolicy, slow_resources: int = 1) -> Scene:
    """Heads stay on the fast resource; one that may go away takes ten times as long."""
    return Scene(
        parts_s=[
            [times.head_s] + [10 * times.head_s] * slow_resources,
            [times.tail_s] + [times.slow_tail_s] * slow_resources,
        ],
        policy=policy,
        allowed=[(0,), tuple(range(slow_resources + 1))],
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_evenly_spaced_batches_come_close_to_the_formula_and_never_above(
    policy: PlacementPolicy, seed: int
) -> None:
    random = Random(seed)
    times = PartTimes(head_s=1.0, tail_s=random.uniform(0.05, 0.4), slow_tail_s=random.uniform(0.2, 1.5))
    for slow_resources in (1, 2):
        known = times.highest_rate_per_s(slow_resources=slow_resources)
        reached = highest_rate(scene_of(times, policy, slow_resources), known)
        assert 0.95 <= reached <= 1.01


@pytest.mark.parametrize("policy", POLICIES)
def test_the_balanced_cut_reaches_99_percent_of_the_formula(policy: PlacementPolicy) -> None:
    times = parts(0.25)
    assert highest_rate(scene_of(times, policy), times.highest_rate_per_s()) >= 0.99


@pytest.mark.parametrize("policy", POLICIES)
def test_under_poisson_arrivals_the_rate_is_kept_and_latency_is_not(policy: PlacementPolicy) -> None:
    """0.9 of the highest rate is served all the same; some batches wait where none did."""
    times = parts(0.25)
    rate = 0.9 * times.highest_rate_per_s()
    scene = scene_of(times, policy)
    spaced = World(scene, evenly(rate, 2000)).run()
    drawn = World(scene, poisson(rate, 2000, 1)).run()
    assert keeps_up(spaced)
    assert fmean(drawn.latencies_s[1500:]) < 20.0
    assert fmean(drawn.latencies_s) > 1.5 * fmean(spaced.latencies_s)
    assert 0.19 <= fmean(drawn.away) <= 0.9


# Cuts


@given(st.integers(0, 100_000))
def test_the_papers_cut_is_the_best_of_all_in_its_range(seed: int) -> None:
    model = random_model(seed)
    listed = [cut for cut in model.cuts if 0.05 <= model.at(cut).tail_share <= 0.15]
    found = paper_cut(model.cuts, model)
    if not listed:
        assert found is None
        return
    assert found in listed
    best = max(model.at(cut).tail_s - model.at(cut).transfer_s for cut in listed)
    assert model.at(found).tail_s - model.at(found).transfer_s == best


@given(st.integers(0, 100_000))
def test_the_balanced_cut_is_the_best_of_all(seed: int) -> None:
    """Without transfers; with them a larger tail of less latency may be passed by."""
    model = random_model(seed)
    model.transfers_s = [0.0] * len(model.times)
    found = balanced_cut(model.cuts, model)
    highest = max(model.at(cut).highest_rate_per_s() for cut in model.cuts)
    as_good = [
        cut for cut in model.cuts if model.at(cut).highest_rate_per_s() >= (1 - RATE_TOLERANCE) * highest
    ]
    assert found is not None
    times = model.at(found)
    assert times.highest_rate_per_s() >= (1 - RATE_TOLERANCE) * highest * (1 - 1e-9)
    assert times.latency_away_s <= min(model.at(cut).latency_away_s for cut in as_good) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("slow", "slow_resources", "share"), [(3.0, 1, 0.25), (6.0, 1, 1 / 7), (6.0, 2, 0.25)]
)
def test_the_balanced_cut_leaves_what_the_slow_resources_can_take(
    slow: float, slow_resources: int, share: float
) -> None:
    model = Measured([0.001] * 1000, slow)
    cut = balanced_cut(model.cuts, model, slow_resources=slow_resources)
    assert cut is not None
    assert model.at(cut).tail_share == pytest.approx(share, abs=0.01)


def test_a_narrow_border_is_worth_a_shorter_tail() -> None:
    """Cuts with 6 to 14 % in the tail, all borders dear but the one at 8 %."""
    model = Measured([1.0] * 50, transfers_s=[6.0] * 50)
    model.transfers_s[46] = 0.5
    assert paper_cut(model.cuts, model) == 46


@pytest.mark.parametrize("choose", [paper_cut, balanced_cut])
def test_few_cuts_are_measured_and_each_once(choose: type) -> None:
    """Measuring a cut builds two sessions on each resource."""
    model = Measured([1.0] * 2000)
    choose(model.cuts[::20], model)
    assert len(model.asked) <= 20
    assert len(set(model.asked)) == len(model.asked)


def test_without_a_cut_in_range_there_is_none() -> None:
    assert paper_cut([], Measured([])) is None
    assert balanced_cut([], Measured([])) is None
    halves = Measured([1.0, 1.0])
    assert paper_cut(halves.cuts, halves) is None
    assert balanced_cut(halves.cuts, halves) == 1


def test_times_that_waver_still_give_a_cut_in_range() -> None:
    random = Random(5)
    model = Measured([1.0] * 200)

    def noisy(cut: int) -> PartTimes:
        exact = model.at(cut)
        head, tail, slow = (random.uniform(0.98, 1.02) for _ in range(3))
        return PartTimes(
            head_s=exact.head_s * head, tail_s=exact.tail_s * tail, slow_tail_s=exact.slow_tail_s * slow
        )

    cut = paper_cut(model.cuts, noisy)
    assert cut is not None and 0.045 <= model.at(cut).tail_share <= 0.155
    cut = balanced_cut(model.cuts, noisy)
    assert cut is not None and 200 * model.at(cut).highest_rate_per_s() >= 0.94 * 4 / 3


def test_more_in_the_tail_is_more_rate_until_the_slow_one_is_full() -> None:
    rates = [parts(tail / 100).highest_rate_per_s() for tail in range(1, 60)]
    assert all(before <= after + 1e-12 for before, after in pairwise(rates))
