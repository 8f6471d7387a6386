"""Convolutions carry their settings: what one thread may do another never does."""

import threading
from typing import Any

import pytest
import torch
from torch.nn import functional

from stageloom.edge_agent.lowering import convolve as module
from stageloom.edge_agent.lowering.convolve import convolve, convolve_transposed, may_search, searching

PLAIN = (functional.conv1d, functional.conv2d, functional.conv3d)
TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


def test_only_the_thread_that_builds_may_search() -> None:
    seen: list[bool] = []
    with searching():
        thread = threading.Thread(target=lambda: seen.append(may_search()))
        thread.start()
        thread.join()
        with searching():
            pass
        seen.append(may_search())
    assert [*seen, may_search()] == [False, True, False]


def test_a_search_that_ends_in_an_error_leaves_no_trace() -> None:
    with pytest.raises(KeyError), searching():
        raise KeyError
    assert not may_search()


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_what_a_device_is_called_with_is_torchs_convolution(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that CUDA tensors take, on the processor: the same numbers, and a search if the thread may."""
    generator = torch.Generator().manual_seed(rank)
    source = torch.randn(2, 4, *[7] * rank, generator=generator)
    weight, bias = torch.randn(6, 2, *[3] * rank, generator=generator), torch.randn(6, generator=generator)
    stride, padding, dilation = [2] * rank, [1] * rank, [1] * rank
    asked: list[bool] = []
    real: Any = torch._convolution

    def noted(*arguments: Any) -> Any:
        asked.append(arguments[9])
        return real(*arguments)

    monkeypatch.setattr(torch, "_convolution", noted)
    wanted = PLAIN[rank - 1](source, weight, bias, stride, padding, dilation, 2)
    for scope in (False, True):
        if scope:
            with searching():
                found = module._on_cuda(source, weight, bias, stride, padding, dilation, 2, transposed=False)
        else:
            found = module._on_cuda(source, weight, bias, stride, padding, dilation, 2, transposed=False)
        assert torch.equal(found, wanted)
    assert asked == [False, True]
    assert torch.equal(convolve(source, weight, bias, stride, padding, dilation, 2), wanted)
    weight = torch.randn(4, 3, *[3] * rank, generator=generator)
    wanted = TRANSPOSED[rank - 1](source, weight, None, stride, 0, 0, 2, dilation)
    found = module._on_cuda(source, weight, None, stride, [0] * rank, dilation, 2, transposed=True)
    assert torch.equal(found, wanted)
    assert torch.equal(convolve_transposed(source, weight, stride, dilation, 2), wanted)
