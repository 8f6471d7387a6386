"""Policies that choose among known plans: each way learns what there is to learn, with what it was given."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.learning.attribution import METHODS, WINDOWS, searched_arms
from benchmarks.learning.attribution_run import DECIDING, HEADLINE, deciding_rows, pieces
from benchmarks.learning.deciding import CLUSTERS, WAYS, Choose, Log, best_pair, clusters_of, held
from tests.benchmarks.test_attribution import PROBLEM, Counting, rows_of

pytestmark = pytest.mark.more

MODELS = 2
KINDS = np.array([[1.6, 0.4], [0.4, 1.6]])
"""Arrivals of two models, over their means."""


class TwoLoads:
    """Two kinds of load that change every fifth window; arm 0 is best under one, arm 1 under the other."""

    rows = ((0.0,), (1.0,), (2.0,))
    context_width = 2 * MODELS + 1
    problem = SimpleNamespace(space=SimpleNamespace(num_models=MODELS))

    def __init__(self) -> None:
        self._rng = np.random.default_rng(3)

    def context(self, kind: int) -> Any:
        return np.array([*(KINDS[kind] + self._rng.normal(0.0, 0.1, MODELS)), 0.0, 0.0, 1.0])

    def episode(self, choose: Choose) -> Log:
        first = int(self._rng.integers(2))
        kinds = [(first + at // 5) % 2 for at in range(WINDOWS + 1)]
        contexts = [self.context(kind) for kind in kinds]
        arms = [choose(context) for context in contexts[:-1]]
        rewards = [3.0 + (arm == kind) - (arm == 2) for arm, kind in zip(arms, kinds, strict=False)]
        return Log(np.array(contexts), np.array(arms), np.array(rewards, float))


@pytest.mark.parametrize("name", sorted(WAYS))
def test_every_way_learns_which_plan_is_best_under_which_load(name: str) -> None:
    loads = TwoLoads()
    arms: Any = loads
    choose = WAYS[name](arms, loads.episode, 60, np.random.default_rng(1))
    right = [choose(loads.context(kind)) == kind for kind in (0, 1) for _ in range(100)]
    assert np.mean(right) > 0.9


@pytest.mark.parametrize("name", sorted(WAYS))
def test_a_way_runs_the_windows_it_was_given_and_equal_seeds_give_equal_policies(name: str) -> None:
    evaluations, devices = 30, Counting()
    answers = [METHODS[name].answer(replace(PROBLEM, make_device=devices), evaluations, 1) for _ in range(2)]
    assert devices.windows == 2 * evaluations * WINDOWS
    assert answers[0].policy == answers[1].policy and answers[0].evaluations == evaluations
    arms, _ = answers[0].decides or pytest.fail("no policy")
    assert answers[0].row == arms.rows[0] and len(set(arms.rows)) == len(arms.rows) > 1


def test_two_kinds_of_load_are_told_apart_by_what_arrives() -> None:
    loads = TwoLoads()
    kinds = [0] * 30 + [1] * 10
    near = clusters_of(np.array([loads.context(kind) for kind in kinds]), MODELS)
    first = near(loads.context(0))
    assert {near(loads.context(0)) for _ in range(20)} == {first}
    assert {near(loads.context(1)) for _ in range(20)} == {CLUSTERS - 1 - first}


def test_the_best_pair_is_no_worse_than_any_plan_that_stays() -> None:
    arms, _ = searched_arms(PROBLEM, 15, np.random.default_rng(2))
    seeds = (7, 8)
    pair, score = best_pair(arms, seeds, 4)

    for arm in range(len(arms.rows)):
        stays = arms.score(held(arm), seeds, 4)
        spread = max(score.throughput_spread, stays.throughput_spread, 0.005 * stays.throughput_per_s)
        assert score.throughput_per_s >= stays.throughput_per_s - spread
    assert all(0 <= arm < len(arms.rows) for arm in pair)


def test_ways_to_decide_are_asked_for_where_the_load_changes() -> None:
    asked = pieces(["a"], ["paper", "swapping"], 2)
    assert {one.load for one in asked if one.method in DECIDING} == {"swapping"}
    alone = pieces(["a"], ["swapping"], 2, [DECIDING[0]])
    assert {one.method for one in alone} == {*HEADLINE, DECIDING[0]}


def test_a_way_is_compared_with_the_best_that_learned_nothing() -> None:
    name = next(iter(WAYS))
    rows = [*rows_of({"uniform": 100.0})]
    own = [{**row, "method": name} for row in rows if row["method"] == "uniform"]
    rows += [
        {**row, "throughput_per_s": 103.0}
        | {f"policy_{key}": value for key, value in row.items() if isinstance(value, float)}
        for row in own
    ]
    cell = {"device": "nano", "load": "paper", "seeds": 3}
    cell |= {"best_unlearned": "uniform", "best_search": "uniform"}
    (found,) = deciding_rows(rows, [cell])
    assert found["method"] == name
    assert (found["over_best_unlearned_low"], found["policy_over_best_search"]) == (1.03, 1.0)
