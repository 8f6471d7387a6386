"""`benchmarks.search`: what it compares, and that every schedule runs in the engine where it measures."""

import pytest

from benchmarks.search import (
    LIMITS,
    MIX,
    Network,
    figures,
    measured_on_this_machine,
    plan_of,
    row,
    rows_of,
    subjects_of,
)
from benchmarks.zoo import ZOO
from stageloom.shared.blocks import combine
from stageloom.shared.bound import bind
from stageloom.shared.plan import Wait
from stageloom.shared.search.baselines import sequential
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.interface import Budget
from stageloom.shared.search.registry import schedulers
from tests.executor.models import artifact_of


def test_all_networks_are_compared_alone_and_the_mix_with_one_to_four_members() -> None:
    alone = [names for names in subjects_of(None, quick=False, measure=False) if len(names) == 1]
    together = [names for names in subjects_of(None, quick=False, measure=False) if len(names) > 1]
    assert alone == [(name,) for name in ZOO]
    assert [len(names) for names in together] == [2, 3, 4]
    measured = subjects_of(None, quick=False, measure=True)
    assert {len(names) for names in measured} == {1, 2, 3, 4} and set(MIX) == {n for m in measured for n in m}


def test_the_plan_of_networks_side_by_side_runs_their_ith_blocks_together() -> None:
    one = artifact_of("squeezenet")
    network = Network(one.digest, one.graph)
    networks = {"a": network, "b": network}
    rows = rows_of([network, network])
    assert rows == [[(0, block), (1, block)] for block in range(len(network.blocks))]
    schedules = []
    for members in rows:
        parts = [(one.digest, one.graph, network.blocks[block]) for _, block in members]
        graph = combine([(graph, block) for _, graph, block in parts])
        schedules.append(sequential(graph, CostTable().for_members(parts), LIMITS, Budget()))
    plan = plan_of(networks, schedules)
    assert plan.wait is Wait.ALL and len(bind(plan, {one.digest: one.graph}).combined) == len(rows)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_schedule_of_two_networks_runs_in_the_engine_and_has_a_time() -> None:
    names = ("squeezenet_bypass", "squeezenet")
    found = measured_on_this_machine(names, Budget(expansions=2_000), quick=True, width=0.25)
    rows = [row(one, measured) for one, measured in found]
    assert {one["scheduler"] for one in rows} == set(schedulers())
    assert all(one["measured_ms"] > 0.0 and one["predicted_ms"] > 0.0 for one in rows)
    sequentials = [one for one in rows if one["scheduler"] == "sequential"]
    assert [one["measured_over_sequential"] for one in sequentials] == [1.0]
    assert len(figures(rows)) == 2 * len(rows)
