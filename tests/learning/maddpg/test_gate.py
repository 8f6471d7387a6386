"""The gate: closed forms of its bounds; an untrained, a constant, a slower and a good policy."""

from dataclasses import replace
from math import exp, log, sqrt

import numpy as np
import pytest

from stageloom.planner.learning.maddpg import held_out as held_out_loads
from stageloom.planner.learning.maddpg.candidates import seeds
from stageloom.planner.learning.maddpg.gate import P99, THROUGHPUT, LoadOutcome, judge
from stageloom.planner.learning.maddpg.held_out import CheckSettings, held_out, load_outcome, turned
from stageloom.planner.learning.maddpg.learner import Learner
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.replay import Floats
from stageloom.planner.schema.policy import PolicyVerdict
from stageloom.planner.tournament.score import Score
from stageloom.shared.bound import BoundPlan
from stageloom.shared.digest import digest_bytes
from stageloom.shared.policy.maddpg.actions import actions_of
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint
from stageloom.shared.policy.maddpg.decide import Blocks
from stageloom.shared.policy.maddpg.network import MaddpgNetwork
from stageloom.shared.search.baselines import sequential
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits
from tests.learning.maddpg.sway import SwayDevices, loads, rows, swaying
from tests.learning.maddpg.toy import GRAPHS, SMALL, problem
from tests.policy.maddpg.cases import saying, space

DIGEST = digest_bytes([b"policy"])
SPACE = space(2, 2)
SETTINGS = CheckSettings()
STUDENT_1 = 12.7062  # the 97.5 % quantile with one degree of freedom


def score(throughput_per_s: float, p99_s: float = 0.1) -> Score:
    return Score(
        throughput_per_s=throughput_per_s,
        p99_s=p99_s,
        utilisation=0.5,
        queue_variance=0.0,
        variance_growth=0.0,
        met=1.0,
    )


def outcome(
    load: str, policy: list[Score], best_seed: list[Score], actions: Floats | None = None
) -> LoadOutcome:
    answers = np.array(rows(SPACE), np.float32) if actions is None else actions
    return LoadOutcome(
        load=load, seed="alone, fast", policy=tuple(policy), best_seed=tuple(best_seed), actions=answers
    )


def said(verdict: PolicyVerdict) -> dict[str, bool]:
    return {criterion.name: criterion.passed for criterion in verdict.criteria}


# -- closed forms -----------------------------------------------------------------------------------------


@pytest.mark.promise("policy-published-through-gate")
def test_the_ratios_interval_is_students_over_arrivals_of_logarithms_that_are_means_over_loads() -> None:
    """Logarithms 0.02 and 0.04 under one load, 0.04 and 0.10 under the other: means 0.03 and 0.07."""
    seed = [score(100.0), score(100.0)]
    verdict = judge(
        DIGEST,
        SPACE,
        [
            outcome("one", [score(100.0 * exp(0.02)), score(100.0 * exp(0.04))], seed),
            outcome("two", [score(100.0 * exp(0.04)), score(100.0 * exp(0.10))], seed),
        ],
    )
    reach = STUDENT_1 * sqrt(2 * 0.02**2) / sqrt(2)
    figures = verdict.criteria[1].figures
    found = [log(figures[name]) for name in ("ratio", "low", "high")]
    assert found == pytest.approx([0.05, 0.05 - reach, 0.05 + reach], rel=1e-4)
    assert not verdict.criteria[1].passed, "what varies as much as it gains is no gain"
    assert [log(load.low) for load in verdict.loads] == pytest.approx(
        [0.03 - STUDENT_1 * 0.01, 0.07 - STUDENT_1 * 0.03], rel=1e-4
    )


@pytest.mark.parametrize(
    ("gained", "p99_s", "figure", "ratio"),
    [(1.02, 0.4, THROUGHPUT, 1.02), (0.98, 0.01, THROUGHPUT, 0.98), (1.004, 0.08, P99, 1.25)],
)
def test_throughput_decides_and_p99_where_it_is_level(
    gained: float, p99_s: float, figure: str, ratio: float
) -> None:
    """A shorter p99 is a ratio above 1."""
    seed = [score(100.0), score(200.0)]
    mine = [score(gained * one.throughput_per_s, p99_s) for one in seed]
    (load,) = judge(DIGEST, SPACE, [outcome("load", mine, seed)]).loads
    assert load.figure == figure
    assert (load.ratio, load.low, load.high) == pytest.approx((ratio,) * 3)


@pytest.mark.parametrize(
    ("throughput", "p99_s", "passed"),
    [(0.995, 0.1, True), (0.9915, 0.1, True), (0.985, 0.1, False), (1.0, 0.109, True), (1.0, 0.12, False)],
)
def test_it_may_be_behind_under_one_load_by_a_margin(throughput: float, p99_s: float, passed: bool) -> None:
    """1 % of the throughput, a tenth by p99; whatever it gains under another load."""
    seed = [score(100.0), score(100.0)]
    verdict = judge(
        DIGEST,
        SPACE,
        [
            outcome("gains", [score(200.0), score(200.0)], seed),
            outcome("loses", [score(100.0 * throughput, p99_s)] * 2, seed),
        ],
    )
    assert verdict.criteria[2].passed is passed and verdict.criteria[1].passed
    assert "loses" in verdict.criteria[2].reason
    assert verdict.passed is passed and (verdict.reason == "") is passed


def test_a_seed_that_it_equals_is_not_beaten() -> None:
    seed = [score(100.0), score(90.0)]
    verdict = judge(DIGEST, SPACE, [outcome("load", seed, seed)])
    assert said(verdict) == {
        "answers depend on the state": True,
        "beats the best seed": False,
        "nowhere behind the best seed": True,
    }


def test_a_policy_that_serves_nothing_has_a_ratio_that_json_holds() -> None:
    seed = [score(100.0), score(100.0)]
    verdict = judge(DIGEST, SPACE, [outcome("load", [score(0.0, 0.0), score(1.0)], seed)])
    assert 0.0 < verdict.criteria[1].figures["low"] < verdict.criteria[1].figures["high"] < 1e30
    assert not verdict.passed


@pytest.mark.parametrize(
    ("others", "combinations"), [(0, 1), (1, 1), (2, 2), (100, 2)], ids=["none", "0.5 %", "1 %", "half"]
)
def test_a_combination_counts_where_a_hundredth_of_the_states_gets_it(others: int, combinations: int) -> None:
    """200 states; the rest gets the other combination, and the spread is that of two values mixed."""
    left, right = (np.array(row, np.float32) for row in rows(SPACE))
    answers = np.stack([right if at < others else left for at in range(200)])
    seed = [score(100.0), score(100.0)]
    first = judge(DIGEST, SPACE, [outcome("load", seed, seed, answers)]).criteria[0]
    assert first.figures["combinations"] == combinations and first.figures["states"] == 200
    share = others / 200
    spread = sqrt(share * (1.0 - share)) * float(np.abs(left - right).mean())
    assert first.figures["spread"] == pytest.approx(spread, rel=1e-4)
    assert first.passed is (combinations > 1 and spread > 0.01)


def test_the_same_combination_with_its_intervals_in_another_order_is_no_other_one() -> None:
    """1. Every block alone, in two orders. 2. Two and two beside every block alone."""
    launches = rows(SPACE)[0][: SPACE.num_models]
    alone = actions_of(SPACE, [[member] for member in SPACE.members])
    pairs = (0.5,) * SPACE.bins
    seed = [score(100.0), score(100.0)]
    for other, combinations in ((alone[::-1], 1), (pairs, 2)):
        answers = np.array([(*launches, *alone), (*launches, *other)], np.float32)
        first = judge(DIGEST, SPACE, [outcome("load", seed, seed, answers)]).criteria[0]
        assert first.figures["combinations"] == combinations and first.figures["spread"] > 0.01
        assert first.passed is (combinations > 1)


def test_loads_with_unequal_arrivals_give_no_verdict() -> None:
    seed = [score(100.0), score(100.0)]
    with pytest.raises(ValueError, match="unequal arrivals"):
        judge(DIGEST, SPACE, [outcome("one", seed, seed), outcome("two", [*seed, *seed], [*seed, *seed])])
    with pytest.raises(ValueError, match="no verdict"):
        judge(DIGEST, SPACE, [])


# -- held-out loads ---------------------------------------------------------------------------------------


def test_a_turned_mix_gives_each_model_the_work_of_the_next() -> None:
    """30 tasks of 1 s and 10 of 2 s are 30 and 20 s of work: 20 tasks of 1 s and 15 of 2 s."""
    assert turned((30.0, 10.0), (1.0, 2.0), 1) == (20.0, 15.0)
    assert turned((30.0, 10.0), (1.0, 2.0), 2) == (30.0, 10.0)


def test_no_held_out_load_is_the_one_that_training_saw_and_each_has_the_rates_that_it_says() -> None:
    made: dict[str, dict[str, float]] = {}
    trained = problem()

    def make(arrivals: object) -> SwayDevices:
        assert isinstance(arrivals, dict)
        devices = SwayDevices(1.0, arrivals)
        made[f"{len(made)}"] = {name: one.mean_per_s for name, one in arrivals.items()}
        return devices

    found = held_out(trained, make)
    assert list(found) == [
        "rates x0.5", "rates x0.75", "rates x1.25", "rates x1.5", "mix turned by 1", "bursts",
    ]  # fmt: skip
    for rates, held in zip(made.values(), found.values(), strict=True):
        assert tuple(rates.values()) == pytest.approx(held.arrivals_per_s)
    assert all(
        held.arrivals_per_s != trained.arrivals_per_s for name, held in found.items() if name != "bursts"
    )
    assert found["rates x1.5"].arrivals_per_s == pytest.approx((52.5, 37.5))


def test_models_that_bring_equal_work_are_not_turned_into_the_mix_that_training_saw() -> None:
    equal = replace(problem(), arrivals_per_s=tuple(30.0 / one_s for one_s in problem().service_s))
    assert list(held_out(equal, lambda arrivals: SwayDevices(1.0, arrivals))) == [
        "rates x0.5", "rates x0.75", "rates x1.25", "rates x1.5", "bursts",
    ]  # fmt: skip


def outcomes(found: dict[str, Problem], network: MaddpgNetwork) -> list[LoadOutcome]:
    policy = MaddpgCheckpoint(problem().space, network)
    return [load_outcome(load, held, policy, SETTINGS) for load, held in found.items()]


def checked(network: MaddpgNetwork, first: float = 0.7) -> PolicyVerdict:
    return judge(DIGEST, problem().space, outcomes(loads(first), network))


@pytest.mark.promise("policy-published-through-gate")
def test_policy_and_seed_meet_the_same_arrivals() -> None:
    """A policy that says what the best seed says has its score, arrivals by arrivals, which differ."""
    where = loads()
    seed = seeds(problem().space)["alone, fast"]
    row = tuple(min(max(action, 1e-4), 1.0 - 1e-4) for action in seed)
    (one, *_) = outcomes({"rates x1.5": where["rates x1.5"]}, saying(problem().space, row))
    assert one.policy == one.best_seed and len(set(one.policy)) == SETTINGS.arrivals


def test_the_best_seed_is_not_the_end_of_a_chain_of_level_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each serves 0.4 % less than the one before at a shorter p99: the second is level with the first."""
    held = loads()["rates x0.5"]
    names = list(seeds(held.space))
    looks = SETTINGS.choosing_arrivals
    told = (score(100.0 - 0.4 * (look // looks), 1.0 - 0.1 * (look // looks)) for look in range(10**6))
    monkeypatch.setattr(
        held_out_loads, "_episode", lambda *_: (next(told), [np.zeros(held.space.state_width)])
    )
    policy = MaddpgCheckpoint(held.space, swaying(held.space))
    assert load_outcome("load", held, policy, SETTINGS).seed == names[1] and len(names) > 3


def test_the_policys_own_schedules_are_used_for_it_and_for_the_seed() -> None:
    seen: list[BoundPlan] = []
    held = loads(seen=seen)["rates x0.5"]
    blocks = Blocks(held.template.models, GRAPHS)
    members = tuple(held.space.members[:1])
    own = sequential(blocks.graph(members), StageCosts(()), Limits(), Budget())
    policy = MaddpgCheckpoint(held.space, swaying(held.space), {blocks.key(members): own})
    load_outcome("load", held, policy, SETTINGS)
    used = {id(block.schedule) for bound in seen for block in bound.plan.combined if block.members == members}
    assert used == {id(own)}


# -- policies ---------------------------------------------------------------------------------------------


@pytest.mark.promise("policy-published-through-gate")
def test_an_untrained_policy_does_not_pass() -> None:
    """Actors as a training starts them, at the best seed: spread 0.000, one combination, the seed's value."""
    learner = Learner(problem().space, SMALL, seed=0)
    learner.start_at(seeds(problem().space)["alone, fast"])
    verdict = checked(MaddpgNetwork(learner.policy_weights(), problem().space.agents))
    first, second, third = verdict.criteria
    assert not verdict.passed and not first.passed and not second.passed and third.passed
    assert first.figures["spread"] < 0.001 and first.figures["combinations"] == 1
    assert second.figures["ratio"] == pytest.approx(1.0)
    assert "spread by 0.000 and give 1 combination of blocks" in verdict.reason


@pytest.mark.promise("policy-published-through-gate")
def test_a_constant_policy_does_not_pass_however_good_its_plan_is() -> None:
    verdict = checked(saying(problem().space, rows(problem().space)[0]))
    first, second, third = verdict.criteria
    assert not verdict.passed and not first.passed and second.passed and third.passed
    assert verdict.reason == first.reason


@pytest.mark.promise("policy-published-through-gate")
def test_a_policy_that_hurries_the_longer_queue_passes_where_that_pays() -> None:
    verdict = checked(swaying(problem().space))
    assert verdict.passed and verdict.reason == ""
    first, second, _ = verdict.criteria
    assert first.figures["combinations"] == 2 and second.figures["low"] > 1.05


@pytest.mark.promise("policy-published-through-gate")
def test_the_same_policy_does_not_pass_where_it_costs() -> None:
    verdict = checked(swaying(problem().space), first=1.3)
    first, second, third = verdict.criteria
    assert first.passed and not second.passed and not third.passed
    assert verdict.reason == f"{second.reason}; {third.reason}"
