"""Doubts on networks that were never seen: a device on which whole networks err together."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest

from stageloom.shared.search.interference import (
    LEAST_OF_NETWORK,
    GroupTerms,
    Interference,
    Sample,
    Terms,
    fit,
    stage_terms,
    student,
)

LAUNCH_S = 2e-5
STAGES = 40  # of a network
WORLDS = 12


class World(NamedTuple):
    """Relative errors, as standard deviations."""

    network: float  # shared by all stages of a network
    stage: float  # of every stage


def stage(rng: random.Random) -> Terms:
    """One to three groups that move nothing."""
    seconds = [rng.uniform(3e-4, 3e-3) for _ in range(rng.randint(1, 3))]
    return stage_terms([GroupTerms(one, 0.0, 0.0, 0.0, 0.0, 1) for one in seconds], LAUNCH_S)


def network(name: str, world: World, rng: random.Random, count: int = STAGES) -> list[Sample]:
    """Stages of one network: its operators' seconds were all measured too short or too long by one share."""
    wrong = 1.0 + rng.gauss(0.0, world.network)
    found = []
    for _ in range(count):
        terms = stage(rng)
        truth_s = terms.longest + 0.4 * terms.rest + 3.0 * terms.meet
        found.append(Sample(terms, truth_s * wrong * (1.0 + rng.gauss(0.0, world.stage)), (name,)))
    return found


def networks(count: int, world: World, rng: random.Random) -> list[Sample]:
    return [one for at in range(count) for one in network(f"n{at}", world, rng)]


def inside(model: Interference, seen: Sample) -> bool:
    predicted_s = model.seconds(seen.terms)
    return abs(seen.seconds - predicted_s) <= model.doubt(seen.terms) * predicted_s


def unlabelled(samples: Sequence[Sample]) -> list[Sample]:
    return [one._replace(networks=()) for one in samples]


def covered(world: World, count: int, *, labels: bool = True) -> float:
    """Share of the stages of networks never seen that lie within their doubt, over many devices."""
    found = []
    for seed in range(WORLDS):
        rng = random.Random(seed)
        known = networks(count, world, rng)
        model = fit(known if labels else unlabelled(known), launch_s=LAUNCH_S)
        found += [inside(model, one) for at in range(5) for one in network(f"new{at}", world, rng)]
    return sum(found) / len(found)


@pytest.mark.promise("interference-model-s-doubt")
@pytest.mark.parametrize("count", [3, 5, 9])
@pytest.mark.parametrize("world", [World(0.0, 0.05), World(0.05, 0.05), World(0.1, 0.05)])
def test_nine_of_ten_stages_of_a_network_never_seen_lie_within_their_doubt(world: World, count: int) -> None:
    assert 0.85 <= covered(world, count) <= 0.99


@pytest.mark.promise("interference-model-s-doubt")
def test_single_stages_left_out_promise_too_much_where_networks_err_as_a_whole() -> None:
    world = World(0.1, 0.03)
    assert covered(world, 5, labels=False) < 0.75
    assert covered(world, 5) >= 0.85


def sure_ones(world: World, *, labels: bool) -> list[bool]:
    """Over devices of three to seven networks; those that look sure by chance are in it, too."""
    found = []
    for seed in range(2 * WORLDS):
        rng = random.Random(seed)
        known = networks(3 + seed % 5, world, rng)
        model = fit(known if labels else unlabelled(known), launch_s=LAUNCH_S)
        unseen = [one for at in range(5) for one in network(f"new{at}", world, rng)]
        found += [inside(model, one) for one in unseen if model.sure(one.terms)]
    return found


@pytest.mark.promise("interference-model-s-doubt")
@pytest.mark.parametrize("world", [World(0.03, 0.03), World(0.08, 0.03)])
def test_what_it_is_sure_of_on_networks_never_seen_keeps_the_promise(world: World) -> None:
    kept, naive = sure_ones(world, labels=True), sure_ones(world, labels=False)
    assert len(kept) > 5 * STAGES
    assert sum(kept) / len(kept) >= 0.85
    assert sum(naive) / len(naive) < 0.85


def test_few_networks_that_differ_leave_more_doubt_than_many() -> None:
    world = World(0.1, 0.03)
    terms = stage(random.Random(1))
    doubts = {
        count: sorted(
            fit(networks(count, world, random.Random(seed)), launch_s=LAUNCH_S).doubt(terms)
            for seed in range(WORLDS)
        )[WORLDS // 2]
        for count in (2, 4, 12)
    }
    assert doubts[2] > 1.3 * doubts[4] > 1.3 * doubts[12]


def test_one_network_is_left_out_stage_by_stage() -> None:
    known = networks(1, World(0.1, 0.05), random.Random(2))
    assert fit(known, launch_s=LAUNCH_S) == fit(unlabelled(known), launch_s=LAUNCH_S)


def test_networks_of_too_few_stages_are_not_left_out() -> None:
    rng, world = random.Random(3), World(0.0, 0.05)
    known = network("long", world, rng, 60)
    short = [
        one._replace(seconds=1.5 * one.seconds) for one in network("short", world, rng, LEAST_OF_NETWORK)
    ]
    assert fit(known + short[1:], launch_s=LAUNCH_S) == fit(unlabelled(known + short[1:]), launch_s=LAUNCH_S)
    known += short
    assert fit(known, launch_s=LAUNCH_S).width > 2.0 * fit(unlabelled(known), launch_s=LAUNCH_S).width


def test_a_stage_of_two_networks_is_left_out_with_either() -> None:
    """Where all stages are of the same pair, nothing is left without either: they count one by one."""
    pairs = [one._replace(networks=("a", "b")) for one in network("", World(0.1, 0.05), random.Random(4))]
    assert fit(pairs, launch_s=LAUNCH_S) == fit(unlabelled(pairs), launch_s=LAUNCH_S)
    rng, world = random.Random(5), World(0.15, 0.02)
    alone = network("a", world, rng) + network("b", world, rng)
    with_b = [*alone, *(one._replace(networks=("b", "c")) for one in network("", world, rng))]
    with_c = [*alone, *(one._replace(networks=("c",)) for one in with_b[len(alone) :])]
    assert fit(with_b, launch_s=LAUNCH_S).width != fit(with_c, launch_s=LAUNCH_S).width


def test_labels_widen_the_doubt_and_change_no_prediction() -> None:
    known = networks(4, World(0.1, 0.05), random.Random(5))
    labelled, plain = fit(known, launch_s=LAUNCH_S), fit(unlabelled(known), launch_s=LAUNCH_S)
    assert labelled.width > plain.width
    assert replace(labelled, width=plain.width, jitter_s=0.0, scatter=0.0) == replace(
        plain, jitter_s=0.0, scatter=0.0
    )


def test_errors_of_measurement_do_not_make_predictions_too_short() -> None:
    """As shares of the measured seconds they would, by twice their variance: 8 % here."""
    rng = random.Random(6)
    model = fit([one for at in range(5) for one in network(f"n{at}", World(0.0, 0.2), rng, 200)])
    ratios = []
    for _ in range(200):
        terms = stage(rng)
        ratios.append(model.seconds(terms) / (terms.longest + 0.4 * terms.rest + 3.0 * terms.meet))
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.025)


@pytest.mark.parametrize(
    ("freedom", "expected", "within"),
    [(1, 6.314, 0.13), (2, 2.920, 0.015), (3, 2.353, 0.005), (4, 2.132, 1e-3), (30, 1.697, 1e-3)],
)
def test_students_t_as_its_table_has_it(freedom: int, expected: float, within: float) -> None:
    assert student(freedom) == pytest.approx(expected, rel=within)
