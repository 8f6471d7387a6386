"""Profile requests through engine processes that restart."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from stageloom.edge_agent.lifecycle import events as link
from stageloom.edge_agent.reporting.profiles import ProfileQueue
from stageloom.edge_agent.worker.messages import (
    Command,
    OperatorTimes,
    PartsTimed,
    Profile,
    ProfileStages,
    StageTimes,
    WholeTime,
)
from stageloom.shared.digest import digest_bytes
from stageloom.shared.messages.control import ArtifactNeed, ProfileRequest, StageProfileRequest
from stageloom.shared.messages.telemetry import (
    ExecutorTime,
    PartProfileResult,
    ProfileResult,
    RowData,
    StageProfileResult,
    Utilisation,
    decode_row,
    encode_row,
)
from stageloom.shared.messages.telemetry import Row as TelemetryRow
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.compose import ModelChoice, compose
from tests.policy.test_plain import PLAN
from tests.search.graphs import CHAIN, model

NEED = ArtifactNeed("m", digest_bytes([b"artifact"]), 8)
OPERATORS = ProfileRequest(1, NEED, 1, 20.0)
STAGES = StageProfileRequest(request=2, plan_digest=PLAN.digest, plan=PLAN.wire, artifacts=(NEED,))
CLOCK = Utilisation("gpu_clock", 1980.0, "MHz")


class Desk:
    """A desk with everything it says."""

    def __init__(self) -> None:
        self.asked: list[Profile | ProfileStages] = []
        self.plans: list[bytes] = []
        self.rows: list[RowData] = []
        self.told: list[link.Event] = []
        self.desk = ProfileQueue(
            self.send,
            lambda digest: Path("/artifacts") / digest,
            self.rows.extend,
            self.told.append,
            environment=lambda: "here",
            clocks=lambda: [CLOCK],
            executor="onnx",
            intra_op_threads=1,
            wall_s=60.0,
        )

    def send(self, request: Command, fds: Sequence[int]) -> bool:
        assert isinstance(request, Profile | ProfileStages)
        if isinstance(request, ProfileStages):
            self.plans.append(os.pread(fds[0], 1 << 20, 0))
        self.asked.append(request)
        return True


def stage_times(combined: int, last: bool, step_us: float = 1000.0) -> StageTimes:
    return StageTimes(2, PLAN.digest, combined, ((0, step_us, 1.0, 9, 1),), step_us, last)


def test_requests_wait_for_the_engine_and_are_answered_once() -> None:
    it = Desk()
    for _ in range(2):
        it.desk.wanted(OPERATORS)
        it.desk.wanted(STAGES)
    assert it.asked == [] and it.desk.needed() == {NEED.digest}
    it.desk.engine_ready()
    assert [type(one) for one in it.asked] == [Profile, ProfileStages] and it.plans == [PLAN.wire]
    it.desk.stage_times(stage_times(0, False))
    assert it.told == []
    it.desk.stage_times(stage_times(1, True))
    it.desk.stage_times(stage_times(1, True))  # late
    it.desk.operator_times(OperatorTimes(1, NEED.digest, 1, ((1.0, 0.1, 5),), "", 0, 1))
    assert it.told == [link.ProfileAnswered(2), link.ProfileAnswered(1)]
    stages = [row for row in it.rows if isinstance(row, StageProfileResult)]
    assert it.rows.count(CLOCK) == 2, "the clocks stand beside each of the two answers"
    assert [(row.combined_block, row.last) for row in stages] == [(0, False), (1, True)]
    assert it.desk.needed() == set()


def test_a_request_is_measured_on_the_executor_that_it_names_and_the_whole_model_is_told() -> None:
    it = Desk()
    it.desk.engine_ready()
    it.desk.wanted(ProfileRequest(3, NEED, 4, 20.0, "openvino", 2))
    it.desk.wanted(OPERATORS)
    asked = [one for one in it.asked if isinstance(one, Profile)]
    assert [(one.executor, one.timing.intra_op_threads) for one in asked] == [("openvino", 2), ("onnx", 1)]
    it.desk.whole_time(WholeTime(3, 812.5, 9))
    it.desk.whole_time(WholeTime(1, None, 0, "the operator is unknown to it"))
    it.desk.whole_time(WholeTime(7, 1.0, 9))  # nobody asked
    assert it.rows == [
        ExecutorTime(NEED.digest, "openvino", 2, 4, "here", 812.5, 9),
        ExecutorTime(NEED.digest, "onnx", 1, 1, "here", None, 0, "the operator is unknown to it"),
    ]
    assert it.told == [], "the times of the operators end a request"


def test_another_request_of_an_open_ones_number_takes_its_place_and_not_its_times() -> None:
    """1. The engine process works on a request. 2. A restored planner gives its number again."""
    it = Desk()
    it.desk.engine_ready()
    it.desk.wanted(structs.replace(STAGES, request=1))
    it.desk.wanted(OPERATORS)
    it.desk.wanted(ProfileRequest(1, NEED, 1, 20.0, "openvino", 2))
    for _ in range(2):
        it.desk.wanted(ProfileRequest(1, NEED, 2, 20.0, "openvino", 2))
    it.desk.stage_times(StageTimes(1, PLAN.digest, 0, ((0, 9.0, 1.0, 9, 1),), 9.0, True))
    for _ in range(2):
        it.desk.whole_time(WholeTime(1, 9.0, 9))
        it.desk.operator_times(OperatorTimes(1, NEED.digest, 1, ((9.0, 0.1, 5),), "", 0, 1))
    assert len(it.asked) == 4 and it.rows == [] and it.told == []
    it.desk.whole_time(WholeTime(1, 5.0, 9))
    it.desk.operator_times(OperatorTimes(1, NEED.digest, 2, ((5.0, 0.1, 5),), "", 0, 1))
    assert it.rows[0] == ExecutorTime(NEED.digest, "openvino", 2, 2, "here", 5.0, 9)
    assert it.told == [link.ProfileAnswered(1)]


def test_parts_are_measured_where_asked_for_and_told_in_rows_that_fit_before_the_answer() -> None:
    it = Desk()
    it.desk.engine_ready()
    it.desk.wanted(ProfileRequest(3, NEED, 1, 20.0, "openvino", 1, parts=9))
    it.desk.wanted(OPERATORS)
    assert [one.parts for one in it.asked if isinstance(one, Profile)] == [9, 0]
    times = tuple((op, "c", 1 << 20, 1e6 + op / 3, 0.123456789, 5) for op in range(999_936, 1_000_000))
    it.desk.parts_timed(PartsTimed(3, (*times, (4, "h", 7, 2.5, 0.5, 5)), 131.5, 4.5e9, "cut off"))
    it.desk.parts_timed(PartsTimed(7, times))  # nobody asked
    rows = [row for row in it.rows if isinstance(row, PartProfileResult)]
    assert rows == it.rows, "the operators' times answer"
    assert [len(row.timings) for row in rows] == [64, 1]
    assert [(row.handover_us, row.copy_bytes_per_s) for row in rows] == [(131.5, 4.5e9), (None, None)]
    assert {row.reason for row in rows} == {"cut off"}
    for row in rows:
        assert decode_row(encode_row(TelemetryRow(1, row))).data == row


def test_a_long_combined_block_is_told_in_rows_that_fit() -> None:
    it = Desk()
    it.desk.engine_ready()
    it.desk.wanted(STAGES)
    times = tuple((stage, 1e6 + stage / 3, 0.123456789, 9, 1) for stage in range(150))
    it.desk.stage_times(StageTimes(2, PLAN.digest, 0, times, 5.0, True, "cut off"))
    rows = [row for row in it.rows if isinstance(row, StageProfileResult)]
    assert [len(row.timings) for row in rows] == [64, 64, 22]
    assert [row.last for row in rows] == [False, False, True]
    for row in rows:
        assert decode_row(encode_row(TelemetryRow(1, row))).data == row


def test_a_request_survives_every_end_of_the_engine_process_of_which_it_is_not_to_blame() -> None:
    it = Desk()
    it.desk.wanted(OPERATORS)
    for _ in range(5):
        it.desk.engine_ready()
        it.desk.working_on(OPERATORS.request)
        assert not it.desk.engine_exited(blameless=True)
    assert len(it.asked) == 5 and it.told == []


@pytest.mark.parametrize(
    ("worked_on", "row", "waits"),
    [(OPERATORS, ProfileResult, ProfileStages), (STAGES, StageProfileResult, Profile)],
)
def test_the_request_that_was_worked_on_is_asked_again_after_one_crash_and_given_up_after_two(
    worked_on: ProfileRequest | StageProfileRequest, row: type, waits: type
) -> None:
    """The other one waits for a moment and is asked again as often as it takes."""
    it = Desk()
    it.desk.wanted(OPERATORS)
    it.desk.wanted(STAGES)
    for _ in range(2):
        it.desk.engine_ready()
        assert it.told == []
        it.desk.working_on(worked_on.request)
        assert it.desk.engine_exited()
    (told,) = it.rows
    assert isinstance(told, ProfileResult | StageProfileResult) and isinstance(told, row)
    assert "ended twice" in told.reason and told.last
    assert it.told == [link.ProfileAnswered(worked_on.request)]
    it.desk.engine_ready()
    assert isinstance(it.asked.pop(), waits) and len(it.asked) == 4


def test_a_crash_while_requests_only_wait_for_a_moment_is_none_of_theirs() -> None:
    """1. Work begins. 2. A task comes. 3. The process ends, again and again."""
    it = Desk()
    it.desk.wanted(STAGES)
    for _ in range(5):
        it.desk.engine_ready()
        it.desk.working_on(STAGES.request)
        it.desk.working_on(0)
        assert it.desk.engine_exited() is False
    assert it.desk.engine_exited() is False, "the process that never came up had asked nothing"
    assert it.told == [] and len(it.asked) == 5


def test_the_same_models_on_the_same_executors_are_given_up_together_and_others_are_not() -> None:
    """Rounds of one way cannot be measured either; with more threads it may be, at another time."""
    it, ended = Desk(), list[tuple[int, bool]]()
    it.desk.on_steps = lambda number, step_us, reason, cannot: ended.append((number, cannot))
    digest, graph = model("m", CHAIN)
    choice, need = ModelChoice(name="m", artifact=digest, graph=graph), ArtifactNeed("m", digest, 8)
    for number, (executor, threads) in enumerate([("onnx", 1), ("onnx", 1), ("onnx", 2), ("openvino", 1)]):
        plan = compose([choice], executor=ExecutorOptions(name=executor, intra_op_threads=threads))
        it.desk.wanted(
            StageProfileRequest(
                request=1 + number, plan_digest=plan.digest, plan=plan.wire, artifacts=(need,)
            )
        )
    for _ in range(2):
        it.desk.engine_ready()
        it.desk.working_on(1)
        it.desk.engine_exited()
    assert ended == [(1, True), (2, True), (3, False)]
    assert it.desk.needed() == {digest}, "the fourth is still there"


def test_a_request_that_took_the_place_of_the_one_that_is_worked_on_is_not_to_blame() -> None:
    it = Desk()
    it.desk.engine_ready()
    it.desk.wanted(structs.replace(STAGES, request=1))
    it.desk.working_on(1)
    it.desk.wanted(OPERATORS)
    assert it.desk.engine_exited() is False
