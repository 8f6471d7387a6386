"""Rows that the agent makes of what its two processes measured."""

import msgspec

from stageloom.edge_agent.reporting.telemetry import ServiceTimes, engine_rows, profile_rows, trace_row
from stageloom.edge_agent.worker.messages import (
    MAX_GROUPS,
    OperatorTimes,
    QueueStats,
    Stats,
    StepStats,
    StepTraced,
)
from stageloom.shared.ids import Digest
from stageloom.shared.messages.telemetry import ProfileResult, StepTimings, StepTrace


def _stats(a: int, b: int, *combined: StepStats) -> Stats:
    models = tuple(QueueStats(name, 0, 0.0, {"completed": n}) for name, n in (("a", a), ("b", b)))
    return Stats(0.0, 1, 0.0, models, combined)


def test_service_time_of_a_step_belongs_to_the_members_that_ran_in_it() -> None:
    times = ServiceTimes([("a", "b")])
    times.add(_stats(0, 0))
    times.add(
        _stats(
            10,
            5,
            StepStats(1, 0, 0b01, 5, 5, 5.0, 1.0, 1.0),
            StepStats(1, 0, 0b11, 5, 10, 10.0, 2.0, 2.0),
        )
    )
    assert times.per_task_us() == {"a": 1e6, "b": 1e6}


def test_steps_before_the_first_count_of_tasks_are_not_part_of_their_service_time() -> None:
    """The first report after an activation has steps of that plan, and no count of tasks to begin with."""
    times = ServiceTimes([("a", "b")])
    for completed in (10, 20):
        times.add(_stats(completed, 0, StepStats(1, 0, 0b01, 10, 10, 10.0, 1.0, 1.0)))
    assert times.per_task_us() == {"a": 1e6}


def test_service_times_leave_out_steps_of_another_plan() -> None:
    times = ServiceTimes([("a", "b")])
    times.add(_stats(0, 0))
    times.add(_stats(1, 0, StepStats(9, 0, 0b01, 1, 1, 5.0, 5.0, 5.0)))
    assert times.per_task_us() == {"a": 0.0}


def test_steps_of_a_plan_that_gave_way_before_the_report_are_told_as_its_own() -> None:
    """In a trial plans take turns; whichever is active when the report is made, both ran."""
    stats = _stats(0, 0, StepStats(1, 0, 1, 5, 5, 5.0), StepStats(2, 3, 1, 4, 4, 2.0), StepStats(9, 0, 1, 1))
    rows = engine_rows(stats, {1: Digest("a" * 64), 2: Digest("b" * 64)}, {})
    steps = [(row.plan[0], row.combined_block, row.count) for row in rows if isinstance(row, StepTimings)]
    assert steps == [("a", 0, 5), ("b", 3, 4)]


def test_profile_in_several_reports_numbers_its_operators_through_and_ends_once() -> None:
    digest = "a" * 64
    parts = [
        OperatorTimes(3, digest, 1, ((1.0, 0.5, 5),) * 70, "", 0, 100),
        OperatorTimes(3, digest, 1, ((2.0, 0.25, 3),) * 29 + ((0.0, 0.0, 0),), "", 70, 100),
    ]
    rows = [row for part in parts for row in profile_rows(part, "here")]
    assert all(isinstance(row, ProfileResult) for row in rows)
    results = [row for row in rows if isinstance(row, ProfileResult)]
    timings = [timing for row in results for timing in row.timings]
    assert [timing.operator for timing in timings] == list(range(99))
    assert {timing.runs for timing in timings} == {5, 3}, "what was run, not what was asked for"
    assert (timings[98].median_us, timings[98].spread_us) == (2.0, 0.25)
    assert [row.last for row in results] == [False, False, True]


def test_a_traced_step_is_a_row_of_all_its_groups_and_whole_as_the_engine_says() -> None:
    digest = Digest("a" * 64)
    groups = tuple((item, 0, 1.0 + item, 2.0 + item) for item in range(MAX_GROUPS))
    row = trace_row(StepTraced(1, 0, 1, 0, 0b1, 1.0, 2.0, groups, True), digest)
    assert row.whole and [group.begin_us for group in row.groups] == [n * 10**6 for n in range(MAX_GROUPS)]
    assert msgspec.convert(msgspec.to_builtins(row), StepTrace) == row, "within the limits of a row"
    assert not trace_row(StepTraced(1, 0, 1, 0, 0b1, 1.0, 2.0, groups[:1], False), digest).whole
