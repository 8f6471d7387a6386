"""What parts of operators take here, by extent, and how well patterns of a dozen extents tell the others.

Every operator runs alone, on one thread of one core, as a part would: weights sliced to it, at its extent of
the axis. Extents are those at which boundaries may be. They take turns, and the shortest time counts:
whatever disturbs a measurement adds to it. Nearly half of those that are measured are not fitted.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks.runner import progress
from stageloom.shared.operator_parts import SplitAxis
from stageloom.shared.partition import Axis
from stageloom.shared.search.measured_splits import granule_of
from stageloom.shared.search.patterns import (
    PatternKind,
    extents_to_measure,
    fit,
    fitted_pattern,
    held_out_error,
)

HELD_OUT: Final = 10
"""Extents, drawn by a seed, that are measured and not fitted."""

SHORT_S: Final = 2e-4
"""Runs are repeated within one sample until it takes so long."""

Run = Callable[[], object]
Opener = Callable[[onnx.ModelProto, Mapping[str, np.ndarray]], Run]


class Node(NamedTuple):
    """A node of ONNX, with the shapes of its inputs and of its weights."""

    op: str
    attributes: dict[str, Any]
    inputs: list[tuple[int, ...]]
    weights: list[tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """An operator class, and an operator of it at an extent of an axis."""

    kind: str
    model: str  # where it is from
    axis: str
    extent: int
    node: Callable[[int], Node]  # by the extent of a part


@dataclass(frozen=True)
class _Conv:
    """A convolution of `channels` channels, or a depthwise one; rows of a part bring their halo."""

    channels: int
    out: int
    side: int
    kernel: int
    depthwise: bool = False

    def _node(self, out: int, rows: int) -> Node:
        read = out if self.depthwise else self.channels
        part, around = rows < self.side, self.kernel // 2
        halo = rows + self.kernel - 1 if part else rows
        attributes = {"pads": [0 if part else around, around] * 2, "group": out if self.depthwise else 1}
        weights = (out, 1 if self.depthwise else read, self.kernel, self.kernel)
        return Node("Conv", attributes, [(1, read, halo, self.side)], [weights])

    def by_channels(self, out: int) -> Node:
        return self._node(out, self.side)

    def by_rows(self, rows: int) -> Node:
        return self._node(self.out, rows)


def _matmul(read: int, out: int, rows: int) -> Node:
    return Node("MatMul", {}, [(rows, read)], [(read, out)])


def _matmul_part(rows: int, read: int, out: int) -> Node:
    return _matmul(read, out, rows)


def _pointwise(op: str, inputs: int, columns: int) -> Node:
    return Node(op, {}, [(128, columns)] * inputs, [])


def _softmax(rows: int) -> Node:
    return Node("Softmax", {"axis": -1}, [(12, rows, 128)], [])


def _transpose(rows: int) -> Node:
    return Node("Transpose", {"perm": [1, 0, 2]}, [(rows, 12, 64)], [])


def _concat(rows: int) -> Node:
    return Node("Concat", {"axis": 1}, [(rows, 80), (rows, 64)], [])


def cases() -> Iterator[Case]:
    """Of the models that are split: two convolutions, a depthwise one, dense layers, pointwise ones."""
    for model, conv in (
        ("resnet", _Conv(64, 128, 28, 3)),
        ("inception", _Conv(192, 192, 17, 1)),
        ("mobilenet", _Conv(128, 128, 56, 3, depthwise=True)),
    ):
        kind = "depthwise" if conv.depthwise else "conv2d"
        yield Case(kind, model, "c", conv.out, conv.by_channels)
        yield Case(kind, model, "h", conv.side, conv.by_rows)
    for model, rows, read, out in (("lstm", 16, 144, 256), ("bert", 128, 256, 512)):
        yield Case("dense", model, "n", rows, partial(_matmul, read, out))
        yield Case("dense", model, "c", out, partial(_matmul_part, rows, read))
    for op, inputs in (("Add", 2), ("Mul", 2), ("Sub", 2), ("Sigmoid", 1), ("Tanh", 1), ("Erf", 1)):
        yield Case(op, "bert", "c", 512, partial(_pointwise, op, inputs))
    yield Case("Softmax", "bert", "h", 128, _softmax)
    yield Case("Transpose", "bert", "h", 128, _transpose)
    yield Case("Concat", "lstm", "n", 256, _concat)


def _model(case: Case, extent: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    op, attributes, inputs, weights = case.node(extent)
    random = np.random.default_rng(0)
    names = [f"x{at}" for at in range(len(inputs))]
    held = [f"w{at}" for at in range(len(weights))]
    graph = helper.make_graph(
        [helper.make_node(op, [*names, *held], ["y"], **attributes)],
        case.kind,
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in zip(names, inputs, strict=True)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            onnx.numpy_helper.from_array(random.standard_normal(s).astype(np.float32), n)
            for n, s in zip(held, weights, strict=True)
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = {n: random.standard_normal(s).astype(np.float32) for n, s in zip(names, inputs, strict=True)}
    return model, feeds


def _open_onnx(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return lambda: session.run(None, dict(feeds))


@cache
def _core() -> Any:
    import openvino

    return openvino.Core()


def _open_openvino(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Run:

    core = _core()
    read = core.read_model(model.SerializeToString())
    settings = {
        "INFERENCE_NUM_THREADS": 1,
        "NUM_STREAMS": 0,  # on the calling thread
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": "f32",
        "EXECUTION_MODE_HINT": "ACCURACY",
    }
    request = core.compile_model(read, "CPU", settings).create_infer_request()
    for name, value in feeds.items():
        request.get_tensor(name).data[:] = value
    run: Run = request.infer
    return run


OPENERS: Final[Mapping[str, Opener]] = {"onnx": _open_onnx, "openvino": _open_openvino}


def measured_s(case: Case, extents: Sequence[int], open_one: Opener, repeats: int) -> dict[int, float]:
    """Least seconds of parts of these extents, which take turns in an order drawn anew each time."""
    runs = {extent: open_one(*_model(case, extent)) for extent in extents}
    counts = {}
    for extent, work in runs.items():
        for _ in range(3):
            began_s = time.perf_counter()
            work()
            once_s = time.perf_counter() - began_s
        counts[extent] = max(1, round(SHORT_S / once_s))
    taken: dict[int, list[float]] = {extent: [] for extent in extents}
    random = Random(0)
    for _ in range(repeats):
        for extent in random.sample(list(extents), len(extents)):
            began_s = time.perf_counter()
            for _ in range(counts[extent]):
                runs[extent]()
            taken[extent].append((time.perf_counter() - began_s) / counts[extent])
    return {extent: min(seconds) for extent, seconds in taken.items()}


def measure_part_times(executors: Sequence[str], repeats: int) -> Iterator[dict[str, Any]]:
    """A row per operator, axis and executor; errors are relative medians at extents that were not fitted."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    for executor in executors:
        for case in cases():
            progress(f"parts of {case.kind} on {executor}, along {case.axis}")
            granule = granule_of(SplitAxis(Axis(case.axis), 1, case.extent))
            fitted = extents_to_measure(case.extent, granule)
            others = [one for one in range(granule, case.extent, granule) if one not in fitted]
            held = Random(0).sample(others, min(HELD_OUT, len(others)))
            times_s = measured_s(case, [*fitted, *held], OPENERS[executor], repeats)
            known = {one: times_s[one] for one in fitted}
            unknown = {one: times_s[one] for one in held}
            pattern, line = fitted_pattern(known), fit(sorted(known.items()), PatternKind.LINEAR)
            row: dict[str, Any] = {
                "part": "part times",
                "executor": executor,
                "class": case.kind,
                "model": case.model,
            }
            row |= {"axis": case.axis, "extent": case.extent, "pattern": pattern.kind.value}
            row |= {"quantum": pattern.quantum, "whole_us": 1e6 * times_s[case.extent]}
            row |= {"error": held_out_error(pattern, unknown), "line_error": held_out_error(line, unknown)}
            yield row
    os.sched_setaffinity(0, everywhere)


def judged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per executor and class the two things that are asked: an error of 10 % at most, and no line's."""
    lines = []
    for executor in dict.fromkeys(row["executor"] for row in rows):
        own = [row for row in rows if row["executor"] == executor]
        for kind in dict.fromkeys(row["class"] for row in own):
            error, line = (
                median(row[key] for row in own if row["class"] == kind) for key in ("error", "line_error")
            )
            name: dict[str, Any] = {"part": "lines", "model": f"{kind} on {executor}"}
            asked = name | {"line": "median error of t(x)", "asked": "<= 0.1", "measured": error}
            lines.append(asked | {"met": error <= 0.1})
            over = name | {"line": "error over a line's", "asked": "<= 1", "measured": error / line}
            lines.append(over | {"met": error <= line})
    return lines
