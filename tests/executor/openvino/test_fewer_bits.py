"""Models that compute inside in more bits than OpenVINO does: refused, or watched as they run."""

import itertools
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from stageloom.edge_agent.executor.openvino import executor, fewer_bits
from stageloom.shared.artifact import Artifact
from stageloom.shared.errors import ExecutorError
from tests.executor.openvino.small import artifact_from, both, one_node, opened
from tests.importer.models import info, model_of

INT64 = TensorProto.INT64
ONES = np.ones(8, np.int64)
TABLE = np.arange(97, dtype=np.float32)


def node(kind: str, reads: str, makes: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, reads.split(), makes.split(), **attributes)


def float64_inside() -> list[onnx.NodeProto]:
    return [
        node("Cast", "x", "wide", to=TensorProto.DOUBLE),
        node("CumSum", "wide zero", "sums"),
        node("Cast", "sums", "y", to=TensorProto.FLOAT),
    ]


def shifted(wide: int) -> list[onnx.NodeProto]:
    return [
        node("Cast", "x", "wide", to=wide),
        node("BitShift", "wide wide", "moved", direction="RIGHT"),
        node("Cast", "moved", "y", to=TensorProto.FLOAT),
    ]


def on_floats(nodes: Sequence[onnx.NodeProto], folder: Path) -> Artifact:
    weights = {"zero": np.int64(0), "scale": np.float64(1 / 3)}
    return artifact_from(model_of(nodes, [info("x", [8])], [info("y", [8])], weights), folder)


def on_integers(nodes: Sequence[onnx.NodeProto], folder: Path, **weights: Any) -> Artifact:
    """`ids` and `mask` in, floats out of a table at the places `at`."""
    inputs = [info("ids", [8], INT64), info("mask", [8], INT64)]
    model = model_of(
        [*nodes, node("Gather", "table at", "y")],
        inputs,
        [info("y", [8])],
        {"table": TABLE, "zero": np.int64(0), "one": np.int64(1), **weights},
    )
    return artifact_from(model, folder)


@pytest.mark.promise("openvino-refuses-at-load")
@pytest.mark.parametrize(
    ("kind", "nodes"),
    [
        ("float64", float64_inside()),
        ("uint32", shifted(TensorProto.UINT32)),
        ("uint64", shifted(TensorProto.UINT64)),
    ],
)
def test_a_model_of_a_type_inside_that_would_be_narrowed_is_refused(
    kind: str, nodes: list[onnx.NodeProto], tmp_path: Path
) -> None:
    with pytest.raises(ExecutorError, match=f"computes in {kind} inside, .* use the executor onnx"):
        opened(on_floats(nodes, tmp_path))


def test_without_the_refusal_float64_inside_would_give_other_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it does not any more, float64 inside need not be refused."""
    monkeypatch.setattr(executor, "narrowed", lambda model: "")
    x = np.array([1 << 24, *[1] * 7], np.float32)
    (found,), (wanted,) = both(on_floats(float64_inside(), tmp_path), {"x": x})
    assert wanted[-1] == (1 << 24) + 8 and found[-1] != wanted[-1]


def test_float64_in_a_branch_is_refused(tmp_path: Path) -> None:
    wide = [
        node("Cast", "x", "wide", to=TensorProto.DOUBLE),
        node("Exp", "wide", "grown"),
        node("Cast", "grown", "b", to=TensorProto.FLOAT),
    ]
    then = helper.make_graph(wide, "then", [], [info("b", [8])])
    other = helper.make_graph([node("Neg", "x", "c")], "else", [], [info("c", [8])])
    branches = [
        node("ReduceSum", "x", "sum", keepdims=0),
        node("Greater", "sum limit", "positive"),
        node("If", "positive", "y", then_branch=then, else_branch=other),
    ]
    weights = {"limit": np.float32(0)}
    model = artifact_from(model_of(branches, [info("x", [8])], [info("y", [8])], weights), tmp_path)
    with pytest.raises(ExecutorError, match="computes in float64 inside"):
        opened(model)


def test_float64_that_follows_from_shapes_and_constants_is_taken(tmp_path: Path) -> None:
    nodes = [
        node("Shape", "x", "shape"),
        node("Cast", "shape", "wide", to=TensorProto.DOUBLE),
        node("Mul", "wide scale", "scaled"),
        node("Cast", "scaled", "factor", to=TensorProto.FLOAT),
        node("Mul", "x factor", "y"),
    ]
    x = np.arange(8, dtype=np.float32)
    (found,), (wanted,) = both(on_floats(nodes, tmp_path), {"x": x})
    assert np.array_equal(found, wanted)


@pytest.mark.promise("openvino-refuses-at-load")
def test_arithmetic_that_32_bits_cannot_hold_whatever_comes_in_is_refused(tmp_path: Path) -> None:
    """Ids are hashed to places of a table."""
    nodes = [node("Mul", "ids prime", "mixed"), node("Mod", "mixed size", "at")]
    model = on_integers(nodes, tmp_path, prime=np.int64(2654435761), size=np.int64(97))
    with pytest.raises(
        ExecutorError, match=r"Multiply of model .* has integers that openvino does not compute exactly"
    ):
        opened(model)


POSITIONS = {
    "positions of a mask": [
        node("CumSum", "mask zero", "counted"),
        node("Mul", "counted mask", "masked"),
        node("Add", "masked one", "at"),
    ],
    "a product of masks": [node("Mul", "mask mask", "at")],
    "ids with an offset": [node("Add", "ids one", "at")],
    "masked ids": [node("Mul", "ids mask", "at")],
    "lengths of sequences": [
        node("ReduceSum", "mask", "length"),
        node("Sub", "length mask", "at"),
    ],
    "places of the largest": [
        node("TopK", "ids eight", "values places"),
        node("Mul", "places eight", "rows"),
        node("Add", "rows mask", "at"),
    ],
}


@pytest.mark.parametrize("name", POSITIONS)
def test_what_exporters_make_of_indices_positions_and_masks_is_taken(name: str, tmp_path: Path) -> None:
    model = on_integers(POSITIONS[name], tmp_path, eight=np.array([8]))
    given = {"ids": np.arange(8), "mask": ONES}
    (found,), (wanted,) = both(model, given)
    assert np.array_equal(found, wanted)


def test_a_run_whose_integers_may_be_too_large_inside_is_refused_and_others_run(tmp_path: Path) -> None:
    """Ids are mixed with a small prime: 24 bits hold that of a vocabulary, and not of any integer."""
    nodes = [node("Mul", "ids prime", "mixed"), node("Mod", "mixed size", "at")]
    model = on_integers(nodes, tmp_path, prime=np.int64(113), size=np.int64(97))
    ids = np.array([0, 1, 2, 96, 97, 1000, 50_265, 128_000])
    (found,), (wanted,) = both(model, {"ids": ids, "mask": ONES})
    assert np.array_equal(found, wanted)
    for factor, kind in ((2, "Mod"), (1000, "Multiply")):
        values = dict(zip(model.graph.inputs, (ids * factor, ONES), strict=True))
        with pytest.raises(ExecutorError, match=f"{kind} may have integers that openvino does not compute"):
            opened(model).run(values)


def test_int32_wraps_around_in_the_model_too_and_is_taken(tmp_path: Path) -> None:
    int32 = TensorProto.INT32
    nodes = [node("Mul", "x prime", "z"), node("Cast", "z", "y", to=TensorProto.FLOAT)]
    weights = {"prime": np.int32(0x7FFFFFFF)}
    model = artifact_from(model_of(nodes, [info("x", [8], int32)], [info("y", [8])], weights), tmp_path)
    (found,), (wanted,) = both(model, {"x": np.arange(8, dtype=np.int32)})
    assert np.array_equal(found, wanted)


LARGE = np.random.default_rng(0).integers(-(1 << 30), 1 << 30, (8, 8))
NEAR = LARGE + np.random.default_rng(1).integers(0, 2, (8, 8))

ON_INTEGERS: dict[str, tuple[np.ndarray, Any, dict[str, Any]]] = {
    "Add": (LARGE, NEAR, {}),
    "Sub": (LARGE, NEAR // 2, {}),
    "Mul": (LARGE % 30011, NEAR % 30011, {}),
    "CumSum": (LARGE // 8, 1, {}),
    "Div": (LARGE, 113, {}),
    "Mod": (LARGE, 97, {}),
    "Pow": (LARGE % 30011, 2, {}),
    "Clip": (LARGE, (-(1 << 29) - 1, 1 << 29), {}),
    "Equal": (LARGE, NEAR, {}),
    "Less": (LARGE, NEAR, {}),
    "LessOrEqual": (NEAR, LARGE, {}),
    "Greater": (NEAR, LARGE, {}),
    "GreaterOrEqual": (LARGE, NEAR, {}),
    "ReduceMax": (LARGE, None, {"axes": [1]}),
    "ReduceMin": (LARGE, None, {"axes": [1]}),
    "ReduceSum": (LARGE // 8, np.array([1]), {}),
}
IN_INT32 = {"Add", "Sub", "Mul", "CumSum"}


def of_one_node(kind: str, dtype: str, folder: Path) -> tuple[Artifact, np.ndarray]:
    x, other, given = ON_INTEGERS[kind]
    wide = np.int64 if kind in ("CumSum", "ReduceSum") else dtype
    others = {} if other is None else {"b": other} if kind != "Clip" else dict(zip("bc", other, strict=True))
    weights = {name: np.asarray(array, wide) for name, array in others.items()}
    model = one_node(kind, {"x": (dtype, x.shape)}, weights=weights, **given)
    return artifact_from(model, folder), x.astype(dtype)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("kind", ON_INTEGERS)
def test_operators_that_it_computes_in_float32_are_known(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On numbers of 30 bits. Where one agrees that is refused, the entry can go."""
    model, x = of_one_node(kind, dtype, tmp_path)
    if kind not in IN_INT32:
        values = dict(zip(model.graph.inputs, [x], strict=True))
        with pytest.raises(ExecutorError, match="that openvino does not compute exactly"):
            opened(model).run(values)
        monkeypatch.setattr(fewer_bits.Integers, "inexact", lambda self, given: "")
    (found,), (wanted,) = both(model, {"x": x})
    assert np.array_equal(found, wanted) is (kind in IN_INT32)


@pytest.mark.parametrize("kind", sorted(ON_INTEGERS.keys() - IN_INT32))
def test_they_are_exact_on_integers_of_24_bits(kind: str, tmp_path: Path) -> None:
    model, x = of_one_node(kind, "int64", tmp_path)
    most = (1 << 24) - 1
    x = x % {"Pow": 1 << 11, "ReduceSum": most // 8}.get(kind, most)
    (found,), (wanted,) = both(model, {"x": x})
    assert np.array_equal(found, wanted)


COMPUTED: dict[str, Callable[[int, int], int]] = {
    "Add": operator.add,
    "Divide": operator.floordiv,
    "FloorMod": operator.mod,
    "Maximum": max,
    "Minimum": min,
    "Multiply": operator.mul,
    "Power": operator.pow,
    "Subtract": operator.sub,
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_range_holds_whatever_its_operator_makes(kind: str) -> None:
    ranges = [pair for pair in itertools.product(range(-4, 5), repeat=2) if pair[0] <= pair[1]]
    least = {"Divide": 1, "FloorMod": 1, "Power": 0}.get(kind, -4)
    for one, other in itertools.product(ranges, [pair for pair in ranges if pair[0] >= least]):
        made = [
            COMPUTED[kind](a, b) for a in range(one[0], one[1] + 1) for b in range(other[0], other[1] + 1)
        ]
        held = fewer_bits._OF_TWO[kind](one, other)
        assert held is not None and held[0] <= min(made) and max(made) <= held[1], (one, other)
