"""The command line's arguments and exit codes."""

from pathlib import Path

import pytest

from edge_agent.verify.command import VerifyArgs, parse_ranges, parse_shapes, run_verify
from edge_agent.verify.inputs import ValueRange
from shared.errors import ExitCode, InputError, ModelError, SettingError
from tests.verify.models import constant_cnn, text_model


def test_shapes_and_ranges_are_read_from_the_last_equals_sign() -> None:
    assert parse_shapes(["a=b/x:0=1x3x224x224", "scalar=7"]) == {"a=b/x:0": (1, 3, 224, 224), "scalar": (7,)}
    assert parse_ranges(["ids=0:30521", "t=-1.5:2e3"]) == {
        "ids": ValueRange(0, 30521),
        "t": ValueRange(-1.5, 2000),
    }


@pytest.mark.parametrize(
    "text", ["x", "=1x3", "x=", "x=1x", "x=0x3", "x=-1", "x=1x3.0", "x=1X3", "x=" + "x".join(["1"] * 17)]
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="write"):
        parse_shapes([text])


@pytest.mark.parametrize(
    "text", ["x", "=0:1", "x=", "x=1", "x=a:b", "x=0:1:2", "x=1:0", "x=nan:1", "x=0:inf"]
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="write"):
        parse_ranges([text])


def test_input_named_twice_is_refused() -> None:
    with pytest.raises(SettingError, match="'x' twice"):
        parse_shapes(["x=1", "x=2"])
    with pytest.raises(SettingError, match="'x' twice"):
        parse_ranges(["x=0:1", "x=0:2"])


def test_command_returns_the_report_and_its_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(text_model().SerializeToString())
    report, code = run_verify(VerifyArgs(model=path, schedule="greedy", ranges=("ids=0:99",), repeats=1))
    assert code is report.exit_code is ExitCode.OK
    assert report.to_text().endswith("\nOK")


def test_shape_for_an_input_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(constant_cnn().SerializeToString())
    with pytest.raises(ModelError, match="no input 'y'"):
        run_verify(VerifyArgs(model=path, schedule="greedy", shapes=("y=1x3",)))


def test_range_for_an_input_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(constant_cnn().SerializeToString())
    with pytest.raises(InputError, match="no input 'ids'"):
        run_verify(VerifyArgs(model=path, schedule="greedy", ranges=("ids=0:1",)))
