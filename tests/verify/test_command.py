"""Ranges on the command line, and the exit code."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stageloom.edge_agent.verify.check import verify
from stageloom.edge_agent.verify.inputs import ValueRange, parse_ranges
from stageloom.edge_agent.verify.reduced import LargestAgree
from stageloom.shared.errors import ExecutorError, ExitCode, InputError, ModelError, SettingError
from tests.verify.models import constant_cnn, text_model


def test_ranges_are_read_from_the_last_equals_sign() -> None:
    assert parse_ranges(["a=b/x:0=0:30521", "t=-1.5:2e3"]) == {
        "a=b/x:0": ValueRange(0, 30521),
        "t": ValueRange(-1.5, 2000),
    }


@pytest.mark.parametrize(
    "text", ["x", "=0:1", "x=", "x=1", "x=a:b", "x=0:1:2", "x=1:0", "x=nan:1", "x=0:inf"]
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="write"):
        parse_ranges([text])


def test_input_named_twice_is_refused() -> None:
    with pytest.raises(SettingError, match="'x' twice"):
        parse_ranges(["x=0:1", "x=0:2"])


def test_report_has_the_exit_code_of_the_command(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(text_model().SerializeToString())
    report = verify(path, "greedy", ranges=parse_ranges(["ids=0:99"]), repeats=1)
    assert report.exit_code is ExitCode.OK
    assert report.to_text().endswith("\nOK")


def test_shape_for_an_input_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(constant_cnn().SerializeToString())
    with pytest.raises(ModelError, match="no input 'y'"):
        verify(path, "greedy", shapes={"y": (1, 3)})


def test_range_for_an_input_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(constant_cnn().SerializeToString())
    with pytest.raises(InputError, match="no input 'ids'"):
        verify(path, "greedy", ranges=parse_ranges(["ids=0:1"]))


def test_a_precision_without_a_rule_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(text_model().SerializeToString())
    with pytest.raises(InputError, match="no rule for results in 'fp16'"):
        verify(path, "greedy", precision="fp16")


def test_an_executor_that_does_not_know_bfloat16_refuses_it(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(text_model().SerializeToString())
    with pytest.raises(ExecutorError, match="onnx executor does not know the precision 'bf16'"):
        verify(path, "greedy", precision="bf16", ranges=parse_ranges(["ids=0:99"]))


def test_the_largest_element_is_compared_along_the_last_axis() -> None:
    wanted = {"y": np.array([[1.0, 3.0], [5.0, 4.0]]), "one": np.ones((4, 1)), "index": np.array([1, 2])}
    found = {**wanted, "y": np.array([[2.0, 1.0], [7.0, 6.0]])}
    counted = LargestAgree()
    counted.add({}, wanted)
    assert counted.share is None
    counted.add(found, wanted)
    assert (counted.same, counted.rows) == (1, 2) and counted.share == 0.5


def test_a_report_in_bfloat16_calls_itself_approximate(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(text_model().SerializeToString())
    exact = verify(path, "greedy", ranges=parse_ranges(["ids=0:99"]), repeats=1)
    text = replace(exact, precision="bf16", largest_agree=0.875).to_text()
    assert "executor onnx in bf16: approximate" in text and "87.5 % of the outputs' rows" in text
    assert text.endswith("\nOK, approximate: rounding to bf16 explains it")
