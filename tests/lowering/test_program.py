"""What a program may overwrite, and where it writes: arguments and shared values stay as they are."""

from collections.abc import Mapping, Sequence

import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.edge_agent.lowering.node import Spec, WeightStore
from stageloom.edge_agent.lowering.program import KernelProgram
from stageloom.edge_agent.lowering.trace import NodeTracer

X = torch.linspace(-2.0, 2.0, 6).reshape(2, 3)


def node(kind: str, source: str, made: str, *others: str, **attributes: int) -> onnx.NodeProto:
    return helper.make_node(kind, [source, *others], [made], **attributes)


def program(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> KernelProgram:
    trace = NodeTracer(
        WeightStore(torch.device("cpu"), Precision.FP32), {}, opset=17, batch=1, channels_last=False
    )
    trace.add_input("x", Spec((2, 3), torch.float32))
    traced = [t for one in nodes if (t := trace.visit(one)) is not None]
    return KernelProgram(traced, ["x"], outputs, trace)


E, FLAT = X.exp(), (1, 6)
CASES: Mapping[str, tuple[list[onnx.NodeProto], dict[str, Tensor]]] = {
    "a view of the argument is not overwritten": (
        [node("Flatten", "x", "f"), node("Relu", "f", "y")],
        {"y": X.relu()},
    ),
    "a value with two readers is not overwritten": (
        [node("Exp", "x", "e"), node("Relu", "e", "a"), node("Neg", "e", "b")],
        {"a": E, "b": -E},
    ),
    "a view of a value that is read later is not overwritten": (
        [node("Exp", "x", "e"), node("Identity", "e", "i"), node("Sqrt", "i", "y"), node("Neg", "e", "n")],
        {"y": E.sqrt(), "n": -E},
    ),
    "an output is not overwritten by what is made of it": (
        [node("Exp", "x", "e"), node("Sqrt", "e", "a")],
        {"e": E, "a": E.sqrt()},
    ),
    "an output and its view have buffers of their own": (
        [node("Exp", "x", "e"), node("Flatten", "e", "f", axis=0)],
        {"e": E, "f": E.reshape(FLAT)},
    ),
    "both arguments may be the same value": (
        [node("Exp", "x", "e"), node("Mul", "e", "y", "e")],
        {"y": E * E},
    ),
    "a value and what was made of it may meet": (
        [node("Exp", "x", "e"), node("Sigmoid", "e", "s"), node("Mul", "e", "y", "s")],
        {"y": E * torch.sigmoid(E)},
    ),
    "a chain through reshapes": (
        [node("Exp", "x", "e"), node("Flatten", "e", "f", axis=0), node("Sqrt", "f", "y")],
        {"y": E.sqrt().reshape(FLAT)},
    ),
    "an argument that is returned is copied": ([node("Identity", "x", "y")], {"y": X}),
}


@pytest.mark.promise("units-write-wherever-they")
@pytest.mark.parametrize("apart", [False, True], ids=["dense buffers", "slices of larger buffers"])
@pytest.mark.parametrize("name", CASES)
def test_every_output_is_right_and_the_argument_stays(name: str, apart: bool) -> None:
    nodes, wanted = CASES[name]
    made = program(nodes, list(wanted))
    x = X.clone()
    outs = []
    for value in wanted.values():
        large = torch.full((value.shape[0], 2 * value.shape[1]), torch.nan)
        outs.append(large[:, ::2] if apart else torch.full_like(value, torch.nan))
    returned = made.run([x])
    made.run_into([x], outs)
    for value, one, other in zip(wanted.values(), returned, outs, strict=True):
        assert torch.equal(one, value) and torch.equal(other, value)
    assert torch.equal(x, X)


def test_the_last_kernel_writes_into_the_buffer_through_reshapes_and_in_place_steps() -> None:
    """The same memory all the way: an intermediate of its own would show in the allocator's peak."""
    nodes, _ = CASES["a chain through reshapes"]
    out = torch.empty(FLAT)
    seen: list[int] = []
    made = program(nodes, ["y"])

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                seen.append(result.untyped_storage().data_ptr())
            return result

    with Watch():  # type: ignore[no-untyped-call]
        made.run_into([X.clone()], [out])
    assert set(seen[1:]) == {out.untyped_storage().data_ptr()}, "the first is the clone"
