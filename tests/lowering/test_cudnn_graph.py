"""Kernels by cudnn's graph API: what the library may raise, seen through a stand-in for its package."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stageloom.edge_agent.lowering import cudnn_graph
from stageloom.edge_agent.lowering.cudnn_graph import ConvolutionSignature, _Plans


class NotSupported(Exception):
    """As cudnn's own: no RuntimeError."""


class Operation:
    """A value of an operation graph."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: self


class Graph:
    """An operation graph with one plan that cannot be built and one that can."""

    def __init__(self, executed: list[int], error: Exception | None) -> None:
        self._executed = executed
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: Operation()

    def get_execution_plan_count(self) -> int:
        return 2

    def build_plan_at_index(self, place: int) -> None:
        if place == 0:
            raise NotSupported("excluded by its notes")

    def get_workspace_size_plan_at_index(self, place: int) -> int:
        return 0

    def execute_plan_at_index(self, pack: Any, workspace: Any, place: int, handle: Any) -> None:
        if self._error is not None:
            raise self._error
        self._executed.append(place)


def plans(monkeypatch: pytest.MonkeyPatch, executed: list[int], error: Exception | None = None) -> _Plans:
    """Plans of a small convolution, by the stand-in."""
    package = SimpleNamespace(
        cudnnGraphNotSupportedError=NotSupported,
        create_handle=lambda: 1,
        set_stream=lambda handle, stream: None,
        pygraph=lambda **options: Graph(executed, error),
        data_type=SimpleNamespace(FLOAT=0, HALF=1),
        heur_mode=SimpleNamespace(A=0, FALLBACK=1),
        numerical_note=SimpleNamespace(NONDETERMINISTIC=0, DOWN_CONVERT_INPUTS=1, TENSOR_CORE=2),
    )
    monkeypatch.setattr(cudnn_graph, "library", lambda: package)
    monkeypatch.setattr(cudnn_graph, "_THREAD", SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    layout = (1, 8, 4, 4), (128, 1, 32, 8)
    signature = ConvolutionSignature(
        device=0,
        dtype=torch.float16,
        tf32=False,
        source=layout,
        weight=((8, 8, 1, 1), (8, 1, 8, 8)),
        target=layout,
        addend=None,
        bias=False,
        relu=False,
        stride=(1, 1),
        padding=(0, 0),
        dilation=(1, 1),
    )
    return _Plans(signature)


def test_plans_are_numbered_among_those_that_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[int] = []
    made = plans(monkeypatch, executed)
    made.execute(0, {"target": torch.zeros(1)})
    assert executed == [1]
    with pytest.raises(RuntimeError, match="cudnn has 1 plans"):
        made.execute(1, {"target": torch.zeros(1)})


@pytest.mark.parametrize("error", [NotSupported("no engine"), ValueError("a variant pack"), TypeError("int")])
def test_whatever_the_library_raises_while_running_is_what_leaves_a_kernel_out(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice of kernels goes on after a RuntimeError alone."""
    made = plans(monkeypatch, [], error)
    with pytest.raises(RuntimeError, match=str(error)):
        made.execute(0, {"target": torch.zeros(1)})
