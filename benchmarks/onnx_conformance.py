"""How much of ONNX the lowering to torch covers: the node tests of the `onnx` package's backend suite.

    python -m benchmarks.onnx_conformance [--quick] [--json]

A test has passed if every node of its model ran through the lowering, on the CPU, and the outputs agree
with the expected ones by the suite's own rule. `unsupported` are tests with a node that is not lowered:
in a model such an operator runs in onnxruntime. `pinned` of those that passed have an input that decides
a shape, which a model of static shapes holds as a constant. Rows: what is not supported, by count, and
every failure. `--quick` takes every eighth test.
"""

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from benchmarks.runner import Report, progress, run
from benchmarks.whole_model import lower_whole
from stageloom.edge_agent.lowering.dtypes import Unsupported

_REASON_CHARS = 200
_QUICK_STEP = 8


UNDECIDED = {
    "test_dft_inverse": "zeros are expected to hold float32 rounding of 2e-7; float64 fails too",
    "test_dft_inverse_opset19": "zeros are expected to hold float32 rounding of 2e-7; float64 fails too",
    "test_attention_4d_causal_fp16_expanded": "float16 steps rounded otherwise: two units in the last place",
}
"""Tests whose expected values hold rounding beyond their own tolerance. They neither pass nor fail if the
difference is below a thousandth of the largest value, and fail if not."""

_BY_SCALE = (
    "onnxruntime and torch place corners by the size that comes out, the test by the scale that was asked"
)
OTHERWISE = {
    "test_resize_downsample_scales_linear_align_corners": _BY_SCALE,
    "test_resize_downsample_scales_cubic_align_corners": _BY_SCALE,
}
"""Tests of which onnxruntime computes something else. They neither pass nor fail where we agree with it."""


class Verdict(Enum):
    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One test's end; `reason` says what is missing or wrong."""

    name: str
    verdict: Verdict
    reason: str = ""
    expanded: bool = False
    pinned: bool = False


def measure(report: Report, options: argparse.Namespace) -> int:
    """1 if a test failed."""
    tests = node_tests()
    progress(f"{len(tests)} tests")
    torch.set_num_threads(1)  # the tensors are small
    outcomes = [run_test(test) for test in (tests[::_QUICK_STEP] if options.quick else tests)]
    report.add(figures(outcomes), rows(outcomes))
    return int(any(o.verdict is Verdict.FAILED for o in outcomes))


def node_tests() -> list[TestCase]:
    """Every node test of the installed onnx package, in its order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, about overflows that the tests provoke on purpose
        return list(load_model_tests(kind="node"))


def run_test(test: TestCase) -> Outcome:
    """Lower a test's model and compare on each of its data sets."""
    model = test.model or onnx.load(Path(str(test.model_dir)) / "model.onnx")
    expanded = "_expanded" in test.name
    pinned = False
    try:
        for stored_inputs, stored_outputs in test.data_sets or []:
            inputs, expected = _arrays(stored_inputs), _arrays(stored_outputs)
            lowered = lower_whole(model, inputs)
            pinned |= bool(lowered.pinned)
            names = [value.name for value in lowered.model.graph.input]
            with torch.inference_mode():
                found = lowered.run(dict(zip(names, inputs, strict=False)))
            if test.name in OTHERWISE:
                session = onnxruntime.InferenceSession(model.SerializeToString())
                expected = session.run(None, dict(zip(names, inputs, strict=False)))
            if test.name in UNDECIDED:
                _require_near(expected, found)
            else:
                Runner.assert_similar_outputs(expected, found, rtol=test.rtol, atol=test.atol)
    except Unsupported as error:
        return Outcome(test.name, Verdict.UNSUPPORTED, str(error), expanded)
    except AssertionError as error:
        return Outcome(test.name, Verdict.FAILED, _line(error), expanded)
    except Exception as error:  # a test may end in whatever torch raises; the others go on
        return Outcome(test.name, Verdict.FAILED, f"{type(error).__name__}: {_line(error)}", expanded)
    if reason := (UNDECIDED | OTHERWISE).get(test.name):
        return Outcome(test.name, Verdict.UNDECIDED, reason, expanded)
    return Outcome(test.name, Verdict.PASSED, "", expanded, pinned)


def _require_near(expected: Sequence[Any], found: Sequence[Any]) -> None:
    for wanted, got in zip(expected, found, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0.0, atol=1e-3 * float(np.abs(wanted).max()))


def _arrays(values: Sequence[Any]) -> list[Any]:
    """Tests hold values of types that numpy lacks as tensor messages."""
    return [numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for v in values]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:_REASON_CHARS]


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Counts by verdict, and of what passed."""
    count = Counter(o.verdict for o in outcomes)
    passed = [o for o in outcomes if o.verdict is Verdict.PASSED]
    return {
        "tests": float(len(outcomes)),
        **{verdict.value: float(count[verdict]) for verdict in Verdict},
        "passed_expanded": float(sum(o.expanded for o in passed)),
        "passed_pinned": float(sum(o.pinned for o in passed)),
    }


def rows(outcomes: Sequence[Outcome]) -> Iterator[dict[str, Any]]:
    """Failures first, then what is undecided, then what is not supported, by count."""
    for verdict in (Verdict.FAILED, Verdict.UNDECIDED):
        for outcome in outcomes:
            if outcome.verdict is verdict:
                yield {verdict.value: outcome.name, "reason": outcome.reason}
    reasons = Counter(o.reason for o in outcomes if o.verdict is Verdict.UNSUPPORTED)
    for reason, tests in reasons.most_common():
        yield {"unsupported": reason, "tests": tests}


if __name__ == "__main__":
    sys.exit(run(measure, ["onnx", "torch", "numpy"]))
