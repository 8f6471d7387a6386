"""Restarts after crashes, and probation: pure, with an injected clock."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.edge_agent.lifecycle.engine_view import Supervisor
from stageloom.edge_agent.lifecycle.probation import Probation, ProbationConfig
from stageloom.shared.engine.interval_guard import GuardVerdict
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.ids import Digest

A, B = Digest("a" * 64), Digest("b" * 64)


def test_first_restart_is_immediate_and_the_next_ones_wait_longer() -> None:
    supervisor = Supervisor(Random(1), first_delay_s=1.0, longest_delay_s=8.0)
    delays = [supervisor.crashed(None, 0.1 * i) for i in range(6)]
    assert delays[0] == 0.0
    for delay, whole_s in zip(delays[1:], (1.0, 2.0, 4.0, 8.0, 8.0), strict=True):
        assert whole_s / 2 <= delay <= whole_s


def test_a_process_that_lived_long_starts_the_pace_anew() -> None:
    supervisor = Supervisor(Random(1), stable_s=30.0)
    supervisor.started(0.0)
    assert supervisor.crashed(A, 1.0) == 0.0
    supervisor.started(2.0)
    assert supervisor.crashed(A, 3.0) > 0.0
    supervisor.started(4.0)
    assert supervisor.crashed(A, 40.0) == 0.0


def test_processes_that_end_before_they_take_commands_are_restarted_ever_later() -> None:
    """The clock ran long before the agent began, or the last process that was ready began long ago."""
    never = Supervisor(Random(1), first_delay_s=1.0)
    once = Supervisor(Random(1), first_delay_s=1.0)
    once.started(1000.0)
    for supervisor in (never, once):
        delays = [supervisor.crashed(None, 1100.0 + 40.0 * at) for at in range(4)]
        assert delays[0] == 0.0
        for delay, whole_s in zip(delays[1:], (1.0, 2.0, 4.0), strict=True):
            assert whole_s / 2 <= delay <= whole_s


@pytest.mark.promise("crashing-engines-restarted-guard")
def test_three_crashes_within_the_window_condemn_the_plan_and_no_other() -> None:
    supervisor = Supervisor(Random(1))
    supervisor.crashed(A, 0.0)
    supervisor.crashed(A, 10.0)
    supervisor.crashed(B, 11.0)
    assert not supervisor.condemned(A)
    supervisor.crashed(A, 59.0)
    assert supervisor.condemned(A)
    assert not supervisor.condemned(B)


def test_crashes_far_apart_condemn_nothing() -> None:
    supervisor = Supervisor(Random(1))
    for i in range(10):
        supervisor.crashed(A, 31.0 * i)
    assert not supervisor.condemned(A)


def test_probation_passes_when_its_time_is_over_and_not_before() -> None:
    probation = Probation(100.0, ProbationConfig(length_s=5.0))
    verdicts = []
    for now_s in (104.9, 105.0):
        probation.tick(now_s)
        verdicts.append(probation.verdict)
    assert verdicts == [GuardVerdict.OPEN, GuardVerdict.KEEP]


def test_refused_and_expired_tasks_do_not_speak_against_a_plan() -> None:
    probation = Probation(0.0, ProbationConfig(min_failed=1))
    for outcome in (Outcome.REFUSED, Outcome.EXPIRED, Outcome.CANCELLED):
        probation.task_ended(outcome, "load")
    probation.tick(1e9)
    assert probation.verdict is GuardVerdict.KEEP


@given(st.lists(st.booleans(), max_size=200))
def test_probation_fails_exactly_when_enough_of_those_that_ran_have_failed(failures: list[bool]) -> None:
    config = ProbationConfig(min_failed=3, max_failed_share=0.1)
    probation = Probation(0.0, config)
    expected = GuardVerdict.OPEN
    failed = 0
    for index, fails in enumerate(failures, 1):
        probation.task_ended(Outcome.FAILED if fails else Outcome.COMPLETED, "wrong")
        failed += fails
        if expected is GuardVerdict.OPEN and fails and failed >= 3 and failed > 0.1 * index:
            expected = GuardVerdict.ROLL_BACK
        assert probation.verdict is expected


def test_a_plan_that_outlives_its_probation_is_no_longer_condemned() -> None:
    supervisor = Supervisor(Random(0))
    plan = Digest("a" * 64)
    for second in range(3):
        supervisor.crashed(plan, float(second))
    assert supervisor.condemned(plan)
    supervisor.pardon(plan)
    assert not supervisor.condemned(plan)
    supervisor.crashed(plan, 4.0)
    assert not supervisor.condemned(plan), "it starts anew"
