"""The whole comparison on small models: what it proves, and when it says that it proves nothing."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from stageloom.edge_agent.executor.base import Rows
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.verify.check import verify, verify_artifact
from stageloom.edge_agent.verify.inputs import MAX_PAIRS, ValueRange
from stageloom.edge_agent.verify.report import VerifyReport
from stageloom.shared.engine.steps import InstanceId, Step
from stageloom.shared.errors import (
    ExecutorError,
    ExitCode,
    InputError,
    PlanError,
    SettingError,
    UnpinnedShape,
)
from tests.verify.models import constant_cnn, image, imported_model, make_model, tensor, text_model


def check(
    model: onnx.ModelProto,
    folder: Path,
    ranges: dict[str, ValueRange] | None = None,
    *,
    partition: str | None = None,
    schedule: str = "greedy",
    seed: int = 0,
) -> VerifyReport:
    artifact = imported_model(model, folder)
    return verify_artifact(
        artifact, schedule, OnnxExecutor(), ranges=ranges, partition=partition, seed=seed, repeats=2
    )


def test_constant_weights_are_seeded_and_the_schedule_agrees(tmp_path: Path) -> None:
    report = check(constant_cnn(), tmp_path)
    assert report.exit_code is ExitCode.OK
    assert report.seeded_weights == 6  # onnxruntime's folding made one of the two equal convolutions
    assert report.sensitivity > 0.1
    assert report.difference <= 1e-4


def constant_models() -> dict[str, onnx.ModelProto]:
    x, y = image("x", 1, 8), image("y", 1, 8)
    one = {"five": np.array(5.0, np.float32)}
    return {
        "cancelled": make_model([helper.make_node("Sub", ["x", "x"], ["y"])], [x], [y], {}),
        "saturated": make_model([helper.make_node("Clip", ["x", "five", "five"], ["y"])], [x], [y], one),
        "one of two": make_model(
            [helper.make_node("Relu", ["x"], ["z"]), helper.make_node("Sub", ["x", "x"], ["y"])],
            [x],
            [y, image("z", 1, 8)],
            {},
        ),
    }


@pytest.mark.promise("broken-schedules-caught-verify")
@pytest.mark.parametrize("name", list(constant_models()))
def test_output_that_cannot_change_proves_nothing(name: str, tmp_path: Path) -> None:
    report = check(constant_models()[name], tmp_path)
    assert report.difference == 0.0
    assert report.pairs == MAX_PAIRS
    assert report.exit_code is ExitCode.CANNOT_FAIL
    assert "PROVES NOTHING" in report.to_text()


def test_pairs_are_drawn_again_until_one_can_fail(tmp_path: Path) -> None:
    # The output says which half of the range the sum lies in: the whole range seldom changes that.
    nodes = [
        helper.make_node("ReduceSum", ["ids", "axis"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "middle"], ["above"]),
        helper.make_node("Cast", ["above"], ["y"], to=TensorProto.FLOAT),
    ]
    stored = {"axis": np.array([1], np.int64), "middle": np.array([50 * 64], np.int64)}
    model = make_model(nodes, [tensor("ids", TensorProto.INT64, 1, 64)], [image("y", 1)], stored)
    ranges = {"ids": ValueRange(0, 100)}
    reports = [check(model, tmp_path, ranges, seed=seed) for seed in range(6)]
    assert {report.exit_code for report in reports} == {ExitCode.OK}
    assert {report.pairs for report in reports} == {1, 2}


@pytest.mark.parametrize("schedule", ["sequential", "greedy"])
def test_ids_masks_and_half_precision_inputs_work_with_and_without_a_range(
    schedule: str, tmp_path: Path
) -> None:
    for ranges in (None, {"ids": ValueRange(0, 99), "temperature": ValueRange(0.5, 2.0)}):
        report = check(text_model(rows=100), tmp_path, ranges, schedule=schedule)
        assert report.exit_code is ExitCode.OK
        assert report.seeded_weights == 2


def test_range_beyond_what_the_model_takes_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(ExecutorError, match="--range NAME=LO:HI"):
        check(text_model(rows=10), tmp_path, {"ids": ValueRange(900, 1000)})


def test_output_that_is_no_number_is_never_agreement(tmp_path: Path) -> None:
    nodes = [helper.make_node("Sub", ["x", "ten"], ["below"]), helper.make_node("Log", ["below"], ["y"])]
    stored = {"ten": np.array(100.0, np.float32)}
    report = check(make_model(nodes, [image("x", 1, 8)], [image("y", 1, 8)], stored), tmp_path)
    assert report.exit_code is ExitCode.FAILED
    assert report.sensitivity == 0.0


def test_random_operator_is_never_agreement(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["noise"]),
        helper.make_node("Add", ["x", "noise"], ["y"]),
    ]
    report = check(make_model(nodes, [image("x", 1, 8)], [image("y", 1, 8)], {}), tmp_path)
    assert report.exit_code is ExitCode.FAILED


def test_saturated_softmax_does_not_hide_that_the_input_matters(tmp_path: Path) -> None:
    # Logits of 1000 and 0 plus the input: the probabilities are 1 and 0 whatever comes in.
    nodes = [helper.make_node("Add", ["x", "bias"], ["z"]), helper.make_node("Softmax", ["z"], ["y"])]
    stored = {"bias": np.array([[30.0, 0.0]], np.float32)}
    report = check(make_model(nodes, [image("x", 1, 2)], [image("y", 1, 2)], stored), tmp_path)
    assert report.exit_code is ExitCode.OK


def test_partition_is_base_unless_the_file_carries_borders_or_one_is_named(tmp_path: Path) -> None:
    model = constant_cnn()
    assert check(model, tmp_path).partition == "base"
    whole = check(model, tmp_path, partition="whole")
    assert (whole.partition, whole.blocks, whole.exit_code) == ("whole", 1, ExitCode.OK)
    with pytest.raises(PlanError, match="no partition 'paper'"):
        check(model, tmp_path, partition="paper")


def test_unknown_scheduler_and_no_repeats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="choose one of"):
        check(constant_cnn(), tmp_path, schedule="fastest")
    with pytest.raises(InputError, match="compare nothing"):
        verify_artifact(imported_model(constant_cnn(), tmp_path), "greedy", OnnxExecutor(), repeats=0)


def test_file_is_imported_with_its_shapes_pinned_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    model = constant_cnn()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    path = tmp_path / "open.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UnpinnedShape):
        verify(path, "sequential")
    lines: list[str] = []
    report = verify(path, "sequential", shapes={"x": (1, 3, 24, 24)}, repeats=1, progress=lines.append)
    assert report.exit_code is ExitCode.OK
    assert lines[0] == "importing"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("delays", [True, False])
def test_pauses_come_before_the_groups_of_every_repeat_but_the_first(delays: bool, tmp_path: Path) -> None:
    class Watched(OnnxExecutor):
        def issue(self, step: Step, feeds: Mapping[InstanceId, Rows]) -> None:
            shaken.append(self.pause is not None)
            super().issue(step, feeds)

    shaken: list[bool] = []
    artifact = imported_model(constant_cnn(), tmp_path)
    report = verify_artifact(artifact, "greedy", Watched(), repeats=3, delays=delays)
    assert report.exit_code is ExitCode.OK
    steps = 2 * report.blocks  # of the two tasks of one repeat
    assert shaken == [False] * steps + [delays] * 2 * steps


def test_report_is_one_json_object_with_the_numbers(tmp_path: Path) -> None:
    report = check(constant_cnn(), tmp_path)
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert found["difference"] == report.difference
    assert found["sensitivity"] == report.sensitivity
    assert (found["exit_code"], found["agrees"], found["stable"]) == (0, True, True)


@pytest.mark.promise("broken-schedules-caught-verify")
def test_null_executor_computes_nothing_and_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(constant_cnn().SerializeToString())
    assert verify(path, "sequential", executor="null", repeats=1).exit_code is ExitCode.FAILED
