"""What the engine's steps took: union of busy time, sums per combined block and mask, bounded reports."""

from stageloom.edge_agent.executor.base import StepResult
from stageloom.edge_agent.worker.accounting import MAX_COMBINED, StepCounter
from stageloom.edge_agent.worker.messages import MAX_MESSAGE_BYTES, Stats, encode
from stageloom.shared.engine.steps import InstanceId, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.ids import StepId, TaskId
from stageloom.shared.plan import Member


def _step(combined: int, mask: int = 1, tasks: int = 2) -> Step:
    member = StepMember(0, Member(0, 0, 0), InstanceId(1), tuple(map(TaskId, range(tasks))), True)
    return Step(StepId(1), 0, ProgramKey(PlanKey(1), combined, mask, (tasks,)), (member,), ())


def test_busy_time_is_the_union_of_overlapping_steps() -> None:
    tally = StepCounter()
    tally.step_issued(1.0)
    tally.step_issued(2.0)
    tally.step_ended(_step(0), None, 4.0)
    assert tally.busy_s(5.0) == 4.0
    tally.step_ended(_step(0), None, 6.0)
    assert tally.busy_s(9.0) == 5.0


def test_sums_are_kept_apart_by_mask_and_start_anew_when_taken() -> None:
    tally = StepCounter()
    for mask, taken_s in ((1, 0.5), (1, 0.25), (3, 1.0)):
        tally.step_issued(0.0)
        tally.step_ended(_step(4, mask), StepResult(1.0, 1.0 + taken_s), 2.0)
    one, both = tally.take()
    assert (one.combined, one.mask, one.steps, one.tasks) == (4, 1, 2, 4)
    assert (one.busy_s, one.shortest_s, one.longest_s) == (0.75, 0.25, 0.5)
    assert (both.mask, both.steps) == (3, 1)
    assert tally.take() == ()


def test_batches_of_any_size_under_one_mask_are_one_sum() -> None:
    tally = StepCounter()
    for tasks, taken_s in ((1, 0.5), (4, 0.25), (4, 1.0)):
        tally.step_issued(0.0)
        tally.step_ended(_step(4, tasks=tasks), StepResult(1.0, 1.0 + taken_s), 2.0)
    (one,) = tally.take()
    assert (one.steps, one.tasks, one.busy_s) == (3, 9, 1.75)
    assert (one.shortest_s, one.longest_s) == (0.25, 1.0)
    assert tally.take() == ()


def test_a_report_of_very_many_combined_blocks_is_split_and_fits_a_message() -> None:
    tally = StepCounter()
    for combined in range(MAX_COMBINED + 3):
        tally.step_issued(0.0)
        tally.step_ended(_step(combined, mask=1 << 62), StepResult(1e6 / 3, 1e6 / 2), 2.0)
    first, second = tally.take(), tally.take()
    assert (len(first), len(second)) == (MAX_COMBINED, 3)
    assert len(encode(Stats(1.0, 1, 1.0, (), first))) < MAX_MESSAGE_BYTES


def test_sums_that_a_report_leaves_out_come_before_those_that_began_after_them() -> None:
    tally = StepCounter()

    def run(combined: range) -> None:
        for one in combined:
            tally.step_issued(0.0)
            tally.step_ended(_step(one), StepResult(0.0, 1.0), 1.0)

    run(range(MAX_COMBINED + 3))
    tally.take()
    run(range(MAX_COMBINED))
    late = [one.combined for one in tally.take()[:3]]
    assert late == [MAX_COMBINED, MAX_COMBINED + 1, MAX_COMBINED + 2]
