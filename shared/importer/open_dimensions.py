"""Models with open dimensions: one operator over the file's own nodes, tried at both ends of its ranges.

The model is not folded for one shape and not cut: the session that serves it is the one that onnxruntime
makes of the file, so results are those of the file, bit by bit, whatever shape comes. What such a model costs
in memory and work is counted by the graph that the largest shapes give.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime

from stageloom.shared.errors import ModelError
from stageloom.shared.graph import ITEM_BYTES, Graph, Operator, Tensor
from stageloom.shared.ids import TensorId
from stageloom.shared.importer.build import Built
from stageloom.shared.importer.inputs import require_fitting
from stageloom.shared.importer.normalise import forget_origin, tidy
from stageloom.shared.importer.process import ImportLimits
from stageloom.shared.importer.session import Draws, one_line, open_session
from stageloom.shared.importer.values import Value
from stageloom.shared.shape_ranges import ShapeRanges, middle_shape, range_text

OPEN: Final = "its inputs have open dimensions"
KIND: Final = "Model"

Shapes = Mapping[str, Sequence[int]]


def require_ranges(model: onnx.ModelProto, smallest: Shapes, largest: Shapes) -> None:
    """Check ranges against each other and against the file, before anything runs.

    Raises:
        ModelError: a range holds no size, or a dimension is fixed in the file.
    """
    inputs = {value.name: value for value in model.graph.input}
    for name, low in smallest.items():
        high = largest.get(name, ())
        if len(low) != len(high) or any(not 1 <= a <= b for a, b in zip(low, high, strict=False) if a != b):
            raise ModelError(
                f"the shapes of input {name[:80]!r} from {list(low)[:16]} to {list(high)[:16]} are no range",
                remedy="give the smallest size, at least 1, then the largest, of every open dimension",
            )
        if name in inputs:  # whoever pins the largest says what is wrong with another name
            require_fitting(inputs[name], low)
            require_fitting(inputs[name], high)


def build_open(
    model: onnx.ModelProto,
    at_largest: Graph,
    smallest: Shapes,
    file: Path,
    limits: ImportLimits,
) -> Built:
    """Write `model`, which is consumed, to `file`, and try it at the ends of its ranges.

    `at_largest` is its graph as the largest shapes pin it.

    Raises:
        ModelError: it does not run, or its outputs are no tensors of numbers with a bounded shape.
    """
    tidy(model, limits)
    forget_origin(model)
    nodes = len(model.graph.node)
    names = [output.name for output in model.graph.output]
    if passed := sorted(set(names) & {value.name for value in model.graph.input}):
        raise ModelError(
            f"unsupported: output {passed[0][:80]!r} of a model with open dimensions is an input",
            remedy="export the model without that output",
        )
    file.write_bytes(model.SerializeToString(deterministic=True))
    inputs = [at_largest.tensors[t] for t in at_largest.inputs]
    lows = [tuple(smallest.get(tensor.name, tensor.shape)) for tensor in inputs]
    runs = _runs(model, file, names, inputs, lows)
    outputs, output_lows = _outputs(names, runs)
    tensors = (*inputs, *outputs)
    numbers = tuple(map(TensorId, range(len(tensors))))
    whole = Operator(
        kind=KIND,
        name=at_largest.name,
        nodes=tuple(range(nodes)),
        inputs=numbers[: len(inputs)],
        outputs=numbers[len(inputs) :],
        flop=sum(operator.flop for operator in at_largest.operators),
        weight_bytes=sum(operator.weight_bytes for operator in at_largest.operators),
        fused_unit=0,
        opaque=OPEN,
    )
    graph = Graph(
        name=at_largest.name,
        tensors=tensors,
        operators=(whole,),
        inputs=whole.inputs,
        outputs=whole.outputs,
        partitions=(("whole", ()), ("base", ())),
        ranges=ShapeRanges((*lows, *output_lows), at_largest.largest_tensor_bytes),
    )
    return Built(graph, 0, {})


def _runs(
    model: onnx.ModelProto,
    file: Path,
    names: Sequence[str],
    inputs: Sequence[Tensor],
    lows: Sequence[tuple[int, ...]],
) -> list[list[Any]]:
    """What the outputs are at the largest shapes, at the smallest and, where it runs, between them.

    Raises:
        ModelError: it does not run at an end of its ranges.
        MemoryError: a run needs more memory than this process may use.
    """
    try:
        session = open_session(file, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC)
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ModelError(
            f"unsupported: onnxruntime cannot load the model: {one_line(error, file.parent)}",
            remedy="export it with standard operators of opset 7 or later",
        ) from error
    runs = []
    for shapes in ([tensor.shape for tensor in inputs], lows):
        made = _run(session, model, names, inputs, shapes)
        if isinstance(made, Exception):
            text = ", ".join(f"{t.name[:80]}={range_text(s, s)}" for t, s in zip(inputs, shapes, strict=True))
            raise ModelError(
                f"the model does not run with {text[:300]}: {one_line(made)}",
                remedy="give a range whose ends it takes: many networks want multiples of 32",
            )
        runs.append(made)
    middles = [middle_shape(low, tensor.shape) for low, tensor in zip(lows, inputs, strict=True)]
    made = _run(session, model, names, inputs, middles)
    return runs if isinstance(made, Exception) else [*runs, made]


def _run(
    session: onnxruntime.InferenceSession,
    model: onnx.ModelProto,
    names: Sequence[str],
    inputs: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
) -> list[Any] | Exception:
    values = {t.name: Value(t.dtype, shape) for t, shape in zip(inputs, shapes, strict=True)}
    draws = Draws(values, model)
    try:
        return draws.settle(session, names)
    except MemoryError:
        raise
    except Exception as error:  # onnxruntime's exceptions share no base class
        return error


def _outputs(
    names: Sequence[str], runs: Sequence[Sequence[Any]]
) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """The outputs at their largest, and their smallest shapes.

    Raises:
        ModelError: one is no tensor of numbers, or has another number of dimensions or type in each run.
    """
    outputs, lows = [], []
    for index, name in enumerate(names):
        seen = [run[index] for run in runs]
        kinds = {(one.dtype.name, one.ndim) if isinstance(one, np.ndarray) else ("", 0) for one in seen}
        dtype, _ = kinds.pop()
        if kinds or dtype not in ITEM_BYTES:
            raise ModelError(
                f"unsupported: output {name[:80]!r} is no tensor of one type and number of dimensions",
                remedy="export the model so that its outputs are tensors of numbers",
            )
        shapes = [one.shape for one in seen]
        outputs.append(Tensor(name, dtype, tuple(map(max, zip(*shapes, strict=True)))))
        lows.append(tuple(map(min, zip(*shapes, strict=True))))
    return outputs, lows
