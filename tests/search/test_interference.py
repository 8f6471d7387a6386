"""The model of a device class: laws that it finds again, what it must doubt, what it must never say."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageloom.shared.blocks import combine, split
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.schedule import Stage, StageSchedule
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.baselines import greedy, sequential
from stageloom.shared.search.beam import beam
from stageloom.shared.search.costs import CostTable, MeasuredStage, samples
from stageloom.shared.search.interface import Budget, Limits, Scheduler
from stageloom.shared.search.interference import (
    LEAST_SAMPLES,
    GroupTerms,
    Interference,
    Sample,
    Terms,
    fit,
    stage_terms,
)
from stageloom.shared.search.ios import brute, ios
from stageloom.shared.search.makespan import lower_bounds
from stageloom.shared.search.stage_costs import StageCosts
from tests.search.graphs import DIAMOND, model, union

LAUNCH_S = 2e-5
SECONDS = st.floats(1e-5, 1e-2)


def stage(seconds: Sequence[float], operators: int = 1) -> Terms:
    """A stage of groups that take so long each, and move nothing."""
    return stage_terms([GroupTerms(one, 0.0, 0.0, 0.0, 0.0, operators) for one in seconds], LAUNCH_S)


def drawn(rng: random.Random, groups: int) -> list[float]:
    return [rng.uniform(1e-4, 3e-3) for _ in range(groups)]


def taught(
    law: Callable[[Terms], float], *, most: int, count: int = 200, noise: float = 0.0, seed: int = 1
) -> Interference:
    """Fitted to stages of one to `most` groups under a law, with relative errors."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        terms = stage(drawn(rng, rng.randint(1, most)))
        found.append(Sample(terms, law(terms) * (1.0 + rng.gauss(0.0, noise))))
    return fit(found, launch_s=LAUNCH_S)


def straight(terms: Terms) -> float:
    """Groups hinder each other by two fifths, and meeting takes three launches."""
    return terms.longest + 0.4 * terms.rest + 3.0 * terms.meet


def two_at_a_time(terms: Terms) -> float:
    """Two executors that share the work as well as may be, and do not hinder each other."""
    return max(terms.longest, (terms.longest + terms.rest) / 2.0)


@given(st.lists(SECONDS, min_size=1, max_size=5), st.floats(0.0, 2.0), st.floats(0.0, 1e-4))
def test_with_nothing_measured_it_says_what_the_formula_says_and_is_sure_of_nothing(
    seconds: list[float], contention: float, barrier_s: float
) -> None:
    costs = StageCosts(tuple(seconds), contention, barrier_s)
    groups = [(op,) for op in range(len(seconds))]
    model = fit((), contention=contention, barrier_s=barrier_s, launch_s=LAUNCH_S)
    assert model.seconds(stage(seconds)) == pytest.approx(costs.formula_s(groups))
    assert not model.sure(stage(seconds))
    assert model.doubt(stage(seconds)) == (0.0 if len(seconds) == 1 else inf)


@pytest.mark.promise("interference-model-sure-where")
def test_a_law_within_its_terms_is_found_again_and_it_is_sure_where_it_was_taught() -> None:
    found, rng = taught(straight, most=3), random.Random(2)
    for _ in range(50):
        terms = stage(drawn(rng, rng.randint(1, 3)))
        assert found.seconds(terms) == pytest.approx(straight(terms), rel=0.02)
        assert found.sure(terms)


@pytest.mark.promise("interference-model-sure-where")
def test_it_is_unsure_beyond_what_was_measured() -> None:
    found = taught(straight, most=3)
    assert not found.sure(stage([1e-3] * 4)), "more groups than any measured stage"
    assert not found.sure(stage([1.0, 1.0])), "a hundred times as long"
    assert not found.sure(stage([1e-3], operators=4)), "more operators than any measured stage"
    assert found.doubt(stage([1e-3] * 4)) == inf


def test_two_groups_tell_nothing_of_how_many_the_device_runs_at_a_time() -> None:
    """Among stages of up to two groups two executors look like any number; four groups tell them apart."""
    rng = random.Random(3)
    narrow = fit(
        [
            Sample(terms, two_at_a_time(terms))
            for terms in [
                *(stage(drawn(rng, rng.randint(1, 2))) for _ in range(150)),
                stage([1e-4, 1e-4, 1.0]),  # of three groups, and yet like one
            ]
        ],
        launch_s=LAUNCH_S,
    )
    wide = taught(two_at_a_time, most=4, count=400)
    unlike = stage([1e-3, 1e-3, 1e-3])
    assert not narrow.sure(unlike) and narrow.doubt(unlike) > 3 * wide.doubt(unlike)
    assert wide.sure(unlike)
    assert wide.seconds(unlike) == pytest.approx(1.5e-3, rel=0.1)


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_nine_of_ten_stages_never_seen_lie_within_their_doubt(noise: float) -> None:
    found, rng = taught(straight, most=3, noise=noise), random.Random(4)
    inside = 0
    for _ in range(500):
        terms = stage(drawn(rng, rng.randint(1, 3)))
        truth = straight(terms) * (1.0 + rng.gauss(0.0, noise))
        inside += abs(truth - found.seconds(terms)) <= found.doubt(terms) * found.seconds(terms)
    assert 0.8 <= inside / 500 <= 0.98


def test_a_machine_that_scatters_widely_is_never_sure() -> None:
    found = taught(straight, most=3, noise=0.3)
    assert not found.sure(stage([1e-3, 5e-4]))


def test_a_few_measurements_that_went_wrong_change_little() -> None:
    rng = random.Random(5)
    known = [stage(drawn(rng, rng.randint(1, 3))) for _ in range(200)]
    wrong = [
        Sample(terms, (10.0 if at % 20 == 0 else 1.0) * straight(terms)) for at, terms in enumerate(known)
    ]
    found = fit(wrong, launch_s=LAUNCH_S)
    for terms in known[:50]:
        assert found.seconds(terms) == pytest.approx(straight(terms), rel=0.1)


def test_below_twenty_measured_stages_it_is_sure_of_none() -> None:
    terms = stage([1e-3, 5e-4])
    assert not taught(straight, most=2, count=LEAST_SAMPLES - 1).sure(terms)
    assert taught(straight, most=2, count=10 * LEAST_SAMPLES).sure(terms)


SAMPLES = st.lists(
    st.tuples(st.lists(SECONDS, min_size=1, max_size=4), st.floats(1e-6, 1.0)), min_size=1, max_size=30
)


@settings(max_examples=50)
@given(SAMPLES, st.lists(SECONDS, min_size=1, max_size=8))
def test_whatever_it_was_taught_a_prediction_lies_between_the_shares_that_were_seen(
    known: list[tuple[list[float], float]], seconds: list[float]
) -> None:
    found = fit([Sample(stage(groups), took_s) for groups, took_s in known], launch_s=LAUNCH_S)
    terms = stage(seconds)
    assert 0.0 < found.least <= 1.0 <= found.most
    assert found.least * max(seconds) * 0.999 <= found.seconds(terms) <= found.most * sum(seconds) * 1.001
    assert found.doubt(terms) >= 0.0


def test_the_order_of_groups_and_of_samples_changes_nothing() -> None:
    rng = random.Random(6)
    known = [Sample(stage(drawn(rng, rng.randint(1, 3))), 1e-3 * rng.uniform(0.5, 2.0)) for _ in range(60)]
    terms, turned = stage([1e-3, 2e-3, 3e-3]), stage([3e-3, 1e-3, 2e-3])
    assert fit(known).seconds(terms) == pytest.approx(fit(known[::-1]).seconds(turned))


# In the costs of a combined block

ARTIFACT, GRAPH = model("m", DIAMOND)
BLOCK = split(GRAPH, ())[0]
PARTS = [(ARTIFACT, GRAPH, BLOCK)]
COMBINED = combine([(GRAPH, BLOCK)])
SIDE_BY_SIDE = ((1,), (2,))
TABLE = CostTable(
    measured_s={(ARTIFACT, OpId(op)): 1e-3 for op in range(4)},
    rates=DeviceRates(launch_s=LAUNCH_S),
    interference=taught(straight, most=3),
)


def measured_stage(seconds: float, at_us: int = 0) -> MeasuredStage:
    return MeasuredStage(((ARTIFACT, 0, 4),), 1, SIDE_BY_SIDE, seconds, samples=9, measured_at_us=at_us)


def test_a_stage_costs_its_measurement_else_the_prediction() -> None:
    predicted = TABLE.for_members(PARTS)
    assert predicted.stage_s(SIDE_BY_SIDE) == pytest.approx(1.46e-3, rel=0.02)
    known = replace(TABLE, stages=(measured_stage(7e-3),)).for_members(PARTS)
    assert known.stage_s(SIDE_BY_SIDE) == 7e-3


def test_a_measurement_that_is_too_old_counts_and_is_asked_for_again() -> None:
    one = Stage(SIDE_BY_SIDE)
    unsure = replace(TABLE, interference=fit((), launch_s=LAUNCH_S))
    assert not unsure.for_members(PARTS).is_sure(one)
    for since_us, fresh in ((5, True), (6, False)):
        costs = replace(unsure, stages=(measured_stage(7e-3, 5),), fresh_since_us=since_us).for_members(PARTS)
        assert costs.stage_s(SIDE_BY_SIDE) == 7e-3
        assert costs.is_sure(one) is fresh


def test_operators_that_were_only_estimated_make_a_stage_unsure() -> None:
    guessed = replace(TABLE, measured_s={}).for_members(PARTS)
    assert TABLE.for_members(PARTS).is_sure(Stage(SIDE_BY_SIDE))
    assert not guessed.is_sure(Stage(SIDE_BY_SIDE)) and guessed.is_sure(Stage(((1,),)))


def test_stages_of_one_group_in_a_row_cost_the_one_launch_that_they_become() -> None:
    """1. Following in a group saves half a launch. 2. In turn or as one group: the same run and cost."""
    rng = random.Random(7)
    lessons = []
    for _ in range(200):
        operators = rng.randint(1, 4)
        terms = stage(drawn(rng, 1), operators)
        lessons.append(Sample(terms, terms.longest - 0.5 * terms.fused))
    costs = replace(TABLE, interference=fit(lessons, launch_s=LAUNCH_S)).for_members(PARTS)
    in_turn = sequential(COMBINED, costs, Limits(), Budget())
    one_group = StageSchedule((Stage(((0, 1, 2, 3),)),))
    assert list(costs.runs(in_turn.stages)) == list(one_group.stages)
    assert costs.schedule_s(in_turn) == costs.schedule_s(one_group) < 4e-3
    broken_up = StageSchedule((Stage(((0,),)), Stage(SIDE_BY_SIDE), Stage(((3,),))))
    assert list(costs.runs(broken_up.stages)) == list(broken_up.stages)


def test_a_search_that_hopes_takes_what_is_unsure_and_one_that_does_not_leaves_it() -> None:
    unsure = replace(TABLE, interference=fit((), launch_s=LAUNCH_S))
    wide = Stage(SIDE_BY_SIDE)
    plain = ios(COMBINED, unsure.for_members(PARTS), Limits(), Budget())
    hoping = ios(COMBINED, replace(unsure, optimism=1.0).for_members(PARTS), Limits(), Budget())
    assert wide not in plain.stages and any(len(one.groups) > 1 for one in hoping.stages)
    sure = replace(TABLE, optimism=1.0).for_members(PARTS)
    assert sure.stage_s(SIDE_BY_SIDE) == TABLE.for_members(PARTS).stage_s(SIDE_BY_SIDE)


@pytest.mark.parametrize("scheduler", [ios, beam, brute])
def test_a_search_that_hopes_takes_a_merge_that_is_estimated_and_no_dear_one_that_was_measured(
    scheduler: Scheduler,
) -> None:
    """Merged the two take 2.5 ms, apart 2 ms; an estimate may be wrong by half."""
    pair, graph = (1, 2), union(DIAMOND)
    estimated = StageCosts((1e-3,) * 4, merges=((pair, 2.5e-3),))
    hoped = replace(estimated, optimism=1.0)
    measured = replace(hoped, measured_merges=(pair,))
    for costs, merges in ((estimated, False), (hoped, True), (measured, False)):
        found = scheduler(graph, costs, Limits(), Budget())
        assert isinstance(found, StageSchedule)
        assert (Stage(SIDE_BY_SIDE, merge=True) in found.stages) is merges


@settings(max_examples=20, deadline=None)
@given(SAMPLES, st.lists(st.floats(1e-5, 1e-2), min_size=8, max_size=8))
def test_searches_stay_within_bounds_and_never_above_sequential_under_any_model(
    known: list[tuple[list[float], float]], seconds: list[float]
) -> None:
    learned = fit([Sample(stage(groups), took_s) for groups, took_s in known], launch_s=LAUNCH_S)
    other = model("other", DIAMOND)
    both = [*PARTS, (*other, split(other[1], ())[0])]
    table = CostTable(
        measured_s={
            (artifact, OpId(op)): seconds[4 * at + op]
            for at, (artifact, _, _) in enumerate(both)
            for op in range(4)
        },
        interference=learned,
    )
    costs, graph = table.for_members(both), combine([(one, block) for _, one, block in both])
    least_s = max(lower_bounds(graph, costs, Limits()))
    in_turn_s = costs.schedule_s(sequential(graph, costs, Limits(), Budget()))
    for scheduler in (ios, beam):
        found_s = costs.schedule_s(scheduler(graph, costs, Limits(), Budget(expansions=2000)))
        assert least_s * 0.999 <= found_s <= in_turn_s
    assert costs.schedule_s(greedy(graph, costs, Limits(), Budget())) >= least_s * 0.999


def test_samples_are_stages_whose_operators_and_graph_are_known() -> None:
    stranger = MeasuredStage(((Digest("cd" * 32), 0, 2),), 1, ((0,), (1,)), 1e-3)
    table = replace(TABLE, stages=(measured_stage(2e-3), stranger))
    (found,) = samples(table, {ARTIFACT: GRAPH})
    assert (found.seconds, found.terms.groups) == (2e-3, 2)
    assert samples(replace(table, measured_s={}), {ARTIFACT: GRAPH}) == []


def test_bytes_count_as_inner_where_a_group_keeps_them_and_as_border_where_it_does_not() -> None:
    costs = TABLE.for_members(PARTS)
    together, apart = costs.terms([(0, 1, 2, 3)]), costs.terms([(0,)])
    outside = GRAPH.tensors[GRAPH.inputs[0]].nbytes + GRAPH.tensors[GRAPH.outputs[0]].nbytes
    assert together.border == pytest.approx(outside / TABLE.rates.bytes_per_s)
    assert together.inner > 0.0 and apart.inner == 0.0
    assert together.fused == pytest.approx(3 * LAUNCH_S) and apart.fused == 0.0
