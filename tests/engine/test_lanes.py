"""With several lanes none waits for another: what begins where, what lies behind it, and where tasks go."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lanes.chains import Chains, chain_row
from benchmarks.lanes.device import VirtualDevice
from stageloom.shared.engine.steps import Step
from stageloom.shared.plan import StepChoice
from tests.engine.driver import Driver
from tests.engine.plans import chains
from tests.engine.random_lanes import random_plan, random_seconds, random_use

_COMPLETIONS = 80


def _where(step: Step) -> tuple[int, int, int]:
    """Lane, replica and block of a step's first member."""
    member = step.members[0].member
    return step.lane, member.replica, member.block


def test_a_step_behind_a_busy_lane_reads_what_is_made_there() -> None:
    """`a` has two blocks: its second one lies behind its first; `b` takes the other lane."""
    driver = Driver(chains(2, 1, lanes=2, run_ahead=2))
    driver.submit("a")
    driver.submit("b")
    assert [(step.lane, step.members[0].member) for step in driver.issued] == [
        (0, (0, 0, 0)),
        (0, (0, 0, 1)),
        (1, (1, 0, 0)),
    ]


def test_a_block_that_waits_for_another_lane_leaves_the_idle_one_to_others() -> None:
    """
    1. `a` (three blocks, one replica) is at its second block in lane 0; a second task of `a` waits for it.
    2. Lane 1 ends its step: it takes `b`, which came last, as nothing of `a` can begin there.
    """
    driver = Driver(chains(3, 1, lanes=2, run_ahead=1))
    driver.submit("b")
    driver.submit("a")
    (running,) = [step for step in driver.steps if step.members[0].member.model == 1]
    first = next(step for step in driver.steps if step.members[0].member.model == 0)
    driver.end(first.id)
    driver.submit("a")
    driver.submit("b")
    driver.end(running.id)
    assert driver.issued[-1].members[0].member == (1, 0, 0)
    assert not driver.issued[-1].after


def test_what_merely_overwrites_lies_behind_no_step() -> None:
    """The second task's first block overwrites what the first one's second block reads: it waits for that."""
    driver = Driver(chains(3, lanes=2, run_ahead=2))
    driver.submit("a")
    driver.submit("a")
    driver.end()
    assert [_where(step) for step in driver.steps] == [(0, 0, 1), (0, 0, 2)]
    driver.end()
    assert [_where(step) for step in driver.steps] == [(0, 0, 2), (1, 0, 0)]


def test_a_task_goes_to_a_replica_whose_first_block_can_begin() -> None:
    """Two lanes, two replicas of a whole model: slot 0 of the first is free, yet a step of it runs."""
    driver = Driver(chains(1, lanes=2, run_ahead=2, fields={"replicas": 2}))
    driver.submit("a")
    driver.submit("a")
    assert [_where(step) for step in driver.issued] == [(0, 0, 0), (1, 1, 0)]


@pytest.mark.promise("step-waits-another-lane")
def test_a_task_that_could_begin_nowhere_waits_for_the_first_replica_that_ends() -> None:
    driver = Driver(chains(1, lanes=2, run_ahead=2, fields={"replicas": 2}))
    for _ in range(3):
        driver.submit("a")
    assert driver.core.snapshot(0.0).models[0].queued == 1
    driver.end(driver.steps[1].id)
    assert _where(driver.issued[-1]) == (1, 1, 0)


def test_of_replicas_that_could_begin_the_emptiest_takes_the_task() -> None:
    """The first replica's only task has two of five blocks behind it, the second replica's three."""
    driver = Driver(chains(5, lanes=3, run_ahead=1, fields={"replicas": 2}))
    driver.submit("a")
    driver.submit("a")
    for replica, blocks in ((0, 2), (1, 3)):
        for _ in range(blocks):
            driver.end(next(s.id for s in driver.steps if s.members[0].member.replica == replica))
    driver.submit("a")
    assert _where(driver.issued[-1])[1:] == (1, 0)


@pytest.mark.promise("under-deadline-queued-launched")
def test_the_earliest_deadline_goes_first_over_queued_and_launched_tasks() -> None:
    """One lane: `a` is queued behind no one, yet `b`, which came later, is due sooner."""
    driver = Driver(chains(1, 1, step_choice=StepChoice.DEADLINE, run_ahead=1))
    driver.submit("a", deadline_s=0.9)
    driver.submit("a", deadline_s=0.8)
    driver.submit("b", deadline_s=0.7)
    driver.submit("b")
    driver.submit("a", deadline_s=0.6)
    for _ in range(5):
        driver.end()
    order = [(step.members[0].member.model, step.members[0].tasks[0]) for step in driver.issued]
    # Within a model the queue's rule decides; here its oldest task goes first.
    assert order == [(0, 0), (1, 2), (0, 1), (0, 4), (1, 3)]


def test_a_block_on_its_way_competes_by_its_task_s_deadline() -> None:
    driver = Driver(chains(2, 1, step_choice=StepChoice.DEADLINE, run_ahead=1))
    driver.submit("a", deadline_s=9.0)
    driver.submit("b", deadline_s=5.0)
    driver.submit("b", deadline_s=12.0)
    for _ in range(4):
        driver.end()
    assert [step.members[0].tasks[0] for step in driver.issued] == [0, 1, 0, 2]


@pytest.mark.parametrize("ends", ["expired", "cancelled"])
def test_a_batch_that_runs_is_not_ranked_by_a_task_that_has_ended(ends: str) -> None:
    """1. A batch of two is between its blocks, wanted by 0.5 and by 9. 2. The first of them ends.
    3. The other model's task is wanted by 5, before what is left of the batch."""
    driver = Driver(chains(2, 1, step_choice=StepChoice.DEADLINE, run_ahead=1, fields={"batch": 2}))
    driver.submit("b", deadline_s=0.25)
    first = driver.submit("a", deadline_s=0.5)
    driver.submit("a", deadline_s=9.0)
    driver.end()
    assert driver.ran()[-1] == [(0, 0, 0)] and driver.issued[-1].members[0].tasks == (1, 2)
    driver.submit("b", deadline_s=5.0)
    if ends == "expired":
        driver.at(0.5)
    else:
        driver.do(driver.core.cancel(first, driver.now))
    assert driver.outcome(first) == ends
    driver.end_all()
    assert driver.ran()[2:] == [[(1, 0, 0)], [(0, 0, 1)]]
    assert driver.issued[-1].members[0].tasks == (1, 2), "it keeps its rows"


def test_a_task_past_its_deadline_never_runs() -> None:
    driver = Driver(chains(1, step_choice=StepChoice.DEADLINE, run_ahead=1))
    driver.submit("a", deadline_s=9.0)
    driver.submit("a", deadline_s=1.0)
    driver.now = 2.0
    driver.end()
    assert len(driver.issued) == 1


def test_by_deadline_a_strict_interval_is_kept_and_an_idle_lane_ends_a_loose_one() -> None:
    for work_conserving, launches in ((True, 2), (False, 1)):
        fields = {"launch_interval_us": 1_000_000, "work_conserving": work_conserving}
        driver = Driver(chains(1, step_choice=StepChoice.DEADLINE, run_ahead=1, fields=fields))
        driver.submit("a", deadline_s=9.0)
        driver.submit("a", deadline_s=9.0)
        driver.end()
        assert len(driver.issued) == launches
        driver.at(1.0)
        assert len(driver.issued) == 2


@pytest.mark.parametrize("run_ahead", [1, 2])
@pytest.mark.parametrize("random_times", [False, True])
def test_resnet_in_its_five_blocks_keeps_two_lanes_busy(run_ahead: int, random_times: bool) -> None:
    """The plan that kept them busy 0.625 of the time, with as many tasks as lanes, and with more."""
    for tasks in (2, 20):
        row = chain_row(Chains(2, 2, 5, run_ahead, 1, tasks, random_times))
        assert row["busy"] > 0.98
        assert row["could_idle"] == 0.0


@pytest.mark.promise("lane-idles-while-set")
@settings(max_examples=50, deadline=None)
@given(
    case=st.builds(
        Chains,
        lanes=st.integers(1, 4),
        replicas=st.integers(1, 4),
        blocks=st.integers(1, 12),
        run_ahead=st.integers(1, 2),
        models=st.integers(1, 3),
        tasks=st.integers(1, 24),
        random_times=st.booleans(),
    )
)
def test_no_lane_idles_while_something_could_begin_in_chains(case: Chains) -> None:
    row = chain_row(case, _COMPLETIONS)
    assert row["could_idle"] <= (0.001 if case.run_ahead == 1 else 0.02)
    assert row["most_skips_over_bound"] <= 0
    if case.replicas >= case.lanes <= case.tasks:
        assert row["busy"] >= 0.98


def require_no_idling(seed: int, completions: int) -> None:
    random = random_use(seed, completions)
    # Of two idle lanes one may take a block that the other could have run, and leave it only blocks that are
    # bound elsewhere.
    tight = random.plan.run_ahead == 1 and not random.plan.resources
    assert random.use.could_idle <= (0.001 if tight else 0.02)
    assert random.use.beyond_bound <= 0


@pytest.mark.promise("lane-idles-while-set")
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_no_lane_idles_while_something_could_begin_in_random_plans(seed: int) -> None:
    require_no_idling(seed, _COMPLETIONS)


@pytest.mark.promise("lane-idles-while-set")
@pytest.mark.full
@pytest.mark.timeout(1200)
def test_no_lane_idles_while_something_could_begin_in_many_random_plans() -> None:
    for seed in range(1200):
        require_no_idling(seed, 150)


@pytest.mark.promise("lane-idles-while-set")
def test_the_watch_sees_a_lane_that_is_left_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that takes nothing for its second lane: the oracle must say so."""
    from stageloom.shared.engine.choice import Chooser

    plain = Chooser.choose
    monkeypatch.setattr(
        Chooser, "choose", lambda self, lane, *rest: None if lane else plain(self, lane, *rest)
    )
    random = Random(3)
    bound = random_plan(random)
    while bound.plan.lanes < 2 or bound.plan.models[0].replicas < 2:
        bound = random_plan(random)
    use = VirtualDevice(bound, random_seconds(random), seed=0, tasks=40).run(60)
    assert use.could_idle > 0.1
