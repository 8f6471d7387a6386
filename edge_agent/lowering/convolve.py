"""Convolutions whose settings come with the call, not from the process.

`torch.backends.cudnn.benchmark` belongs to the process: were it switched on while programs are built, a
thread that serves meanwhile would search, too, and a search waits for the whole device. So it stays off here,
and the thread that builds says for itself that it may search.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from stageloom.edge_agent.lowering.dtypes import allows_tf32

_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


class _Thread(threading.local):
    searches = False


_THREAD = _Thread()


@contextmanager
def searching() -> Iterator[None]:
    """While inside, libraries may search for the fastest kernel of each shape, on this thread alone."""
    before, _THREAD.searches = _THREAD.searches, True
    try:
        yield
    finally:
        _THREAD.searches = before


def may_search() -> bool:
    """Whether this thread is one that builds."""
    return _THREAD.searches


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """torch's convolution over one to three dimensions, [n, c, ...] to [n, filters, ...]."""
    if not x.is_cuda:
        function = _CONVOLUTIONS[x.ndim - 3]
        return function(x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups)
    return _on_cuda(x, weight, bias, stride, padding, dilation, groups, transposed=False)


def convolve_transposed(
    x: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """torch's transposed convolution without padding, [n, c, ...] to [n, filters * groups, ...]."""
    if not x.is_cuda:
        function = _TRANSPOSED[x.ndim - 3]
        return function(x, weight, None, tuple(stride), 0, 0, groups, tuple(dilation))
    return _on_cuda(x, weight, None, stride, [0] * len(stride), dilation, groups, transposed=True)


def _on_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    transposed: bool,
) -> Tensor:
    """What `functional.conv2d` calls in the end, with the settings that it would read from the process."""
    settings = (may_search(), torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled, allows_tf32())
    made: Tensor = torch._convolution(
        x, weight, bias, stride, padding, dilation, transposed, [0] * len(stride), groups, *settings
    )
    return made
