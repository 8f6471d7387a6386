"""An average pool writes where it is told, though torch's on CUDA does not look at the strides of memory."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stageloom.edge_agent.lowering.program import Unit
from stageloom.shared.ids import OpId
from tests.executor.small_models import Builder
from tests.lowering.running import CPU, lowered

SHAPE = (2, 8, 7, 7)


class PoolsAsOnCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Pools into given memory as torch does on CUDA: packed, in the memory order of what is read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.avg_pool2d.out:
            return func(*args, **(kwargs or {}))
        out: Tensor = kwargs["out"]
        made = torch.ops.aten.avg_pool2d(*args)  # in the order of its argument
        out.as_strided(made.shape, made.stride(), out.storage_offset()).copy_(made)
        return out


@pytest.fixture(params=["as on cuda", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A CUDA device, or the processor with a pool that writes as there."""
    real = request.param == "cuda"
    mode: AbstractContextManager[object] = nullcontext() if real else PoolsAsOnCuda()  # type: ignore[no-untyped-call]
    with torch.inference_mode(), mode:
        yield torch.device("cuda") if real else CPU


def pool_of(device: torch.device, *, channels_last: bool, flat: bool) -> Unit:
    """An average pool to 7 x 7 pixels, alone or with a Flatten behind it."""
    b = Builder()
    made = b.node("AveragePool", "x", kernel_shape=[2, 2], strides=[2, 2])
    shape: tuple[int, ...] = SHAPE
    if flat:
        made, shape = b.node("Flatten", made), (2, 8 * 7 * 7)
    artifact = b.artifact({"x": (2, 8, 14, 14)}, {made: shape})
    lowering, model = lowered(artifact, channels_last=channels_last, device=device)
    ops = [OpId(op) for op in range(len(artifact.graph.operators))]
    return lowering.joined(1, ops) if len(ops) > 1 else model.units[0]


def _packed(order: torch.memory_format) -> Callable[[torch.device], tuple[Tensor, Tensor]]:
    def make(device: torch.device) -> tuple[Tensor, Tensor]:
        whole = torch.full(SHAPE, torch.nan, device=device).contiguous(memory_format=order)
        return whole, whole.view(whole.shape)

    return make


def _slice(order: torch.memory_format) -> Callable[[torch.device], tuple[Tensor, Tensor]]:
    def make(device: torch.device) -> tuple[Tensor, Tensor]:
        whole = torch.full((2, 24, 7, 7), torch.nan, device=device).contiguous(memory_format=order)
        return whole[:, 4:12], whole[:, 4:12]

    return make


BUFFERS = {
    f"{name} {order}".replace("torch.", ""): make(order)
    for name, make in (("packed", _packed), ("slice", _slice))
    for order in (torch.contiguous_format, torch.channels_last)
}
"""Each makes a buffer as two tensors: a kernel may change the strides of the one that it is given."""


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("buffer", BUFFERS)
def test_a_pool_writes_rightly_into_buffers_of_any_strides(
    device: torch.device, buffer: str, channels_last: bool
) -> None:
    unit = pool_of(device, channels_last=channels_last, flat=False)
    order = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(2, 8, 14, 14, device=device).contiguous(memory_format=order)
    seen, given = BUFFERS[buffer](device)
    unit.run_into([x], [given])
    assert torch.equal(seen, torch.nn.functional.avg_pool2d(x, 2))


def test_a_pool_whose_result_is_flattened_has_it_in_the_order_of_the_model(device: torch.device) -> None:
    """What is read is channels last, what is written one row for each image."""
    unit = pool_of(device, channels_last=True, flat=True)
    x = torch.randn(2, 8, 14, 14, device=device).contiguous(memory_format=torch.channels_last)
    out = torch.full((2, 8 * 7 * 7), torch.nan, device=device)
    unit.run_into([x], [out.view(out.shape)])
    assert torch.equal(out, torch.nn.functional.avg_pool2d(x, 2).flatten(1))
