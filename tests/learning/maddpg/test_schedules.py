"""stage_dict: found when first needed, bettered later, shared between workers."""

import pickle
from dataclasses import replace

import numpy as np

from stageloom.planner.learning.maddpg.problem import ScheduleEntry
from stageloom.planner.learning.maddpg.train import polish
from stageloom.planner.learning.maddpg.work import bound_plan
from stageloom.planner.twin.device_file import load_device
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.bound import bind
from stageloom.shared.plan import Member
from stageloom.shared.schedule import Schedule
from stageloom.shared.search.costs import CostTable, StageCosts
from stageloom.shared.search.gpg import gpg
from stageloom.shared.search.interface import TOP_LIMITS, Budget, Limits
from tests.learning.maddpg.toy import problem

RATES = load_device("a100").rates()
WHERE = replace(problem(), costs=CostTable(rates=RATES))  # small kernels gain side by side
PAIR = (Member(0, 0, 0), Member(1, 0, 1))


def test_plans_are_what_bind_makes_of_them() -> None:
    """Nothing that was checked before is checked again; the value must be the same."""
    random = np.random.default_rng(0)
    table = WHERE.table()
    for _ in range(20):
        found = bound_plan(WHERE, table, random.random(6).tolist())
        assert found == bind(found.plan, WHERE.graphs)


def test_an_entry_is_found_once_and_is_no_worse_than_sequential() -> None:
    table = WHERE.table()
    found = table.find(PAIR)
    assert table.find(PAIR) is found
    assert found.seconds <= sum(WHERE.costs.for_members(table.blocks.parts(PAIR)).operators_s)


def test_blocks_that_are_asked_for_again_and_again_are_searched_for() -> None:
    """One-off combinations of exploration cost no search; what stays gets one."""
    table = WHERE.table()
    assert [table.find(PAIR).searched for _ in range(4)] == [False, False, True, True]
    assert WHERE.table().find(PAIR, thorough=True) == table.find(PAIR)


def test_another_scheduler_finds_the_stages_where_the_problem_names_one() -> None:
    """TOP's: the trained policy, which is never worse than the beam that it is joined with."""
    own = replace(WHERE, scheduler=gpg)
    assert pickle.loads(pickle.dumps(own)).scheduler is gpg
    asked: list[int] = []

    def counted(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> Schedule:
        asked.append(graph.size)
        return gpg(graph, costs, limits, budget)

    table = replace(WHERE, scheduler=counted).table()
    found = table.find(PAIR, thorough=True)
    assert asked == [table.blocks.graph(PAIR).size]
    assert found == own.table().find(PAIR, thorough=True)
    assert found.seconds <= WHERE.table().find(PAIR, thorough=True).seconds


def test_an_entry_only_ever_gets_cheaper_and_plans_follow_it() -> None:
    table = WHERE.table()
    first = table.find(PAIR)
    worse = replace(table.find((PAIR[0],)), seconds=2 * first.seconds)
    key = table.blocks.key(PAIR)
    assert not table.put({key: worse}) and table.find(PAIR) is first
    sequential = first.schedule.__class__(
        tuple(stage for stage in problem().table().find(PAIR).schedule.stages)
    )
    better = ScheduleEntry(sequential, first.seconds / 2)
    assert table.put({key: better})
    assert table.bound(PAIR).plan.schedule == sequential


def test_what_one_worker_found_another_need_not_search() -> None:
    one, other = WHERE.table(), WHERE.table()
    found = one.find(PAIR)
    new = one.taken_new()
    assert one.taken_new() == {}
    assert other.put(new) and not other.put(new)
    assert other.find(PAIR) == found and other.taken_new() == {}


def test_polishing_never_makes_a_plan_slower() -> None:
    table = WHERE.table()
    row = (0.0, 0.0, 0.1, 0.4, 0.1, 0.4)
    before = {one.members: table.find(one.members).seconds for one in bound_plan(WHERE, table, row).combined}
    polish(WHERE, table, row)
    assert all(table.find(members).seconds <= seconds for members, seconds in before.items())


def test_a_policy_takes_along_the_schedules_that_were_needed_most() -> None:
    table = WHERE.table()
    for members in (PAIR, (PAIR[0],), PAIR):
        table.find(members)
    assert table.most_used(1) == [PAIR]
    assert list(table.book(table.most_used(1))) == [table.blocks.key(PAIR)]
    assert len(table.book()) == 2


def test_a_problems_limits_bound_the_schedules_of_every_table_of_it() -> None:
    """TOP has three operators a group and eight groups a stage."""
    assert WHERE.table().limits == TOP_LIMITS
    assert replace(WHERE, limits=Limits(r=1, s=1)).table().limits == Limits(r=1, s=1)
    tight = replace(WHERE, limits=Limits(r=1, s=1)).table().find(PAIR, thorough=True)
    assert all(len(stage.groups) == len(stage.groups[0]) == 1 for stage in tight.schedule.stages)
