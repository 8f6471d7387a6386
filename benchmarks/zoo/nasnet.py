"""NASNet-A Large (Zoph et al. 2018): 6 @ 4032, for images of 331 pixels, as TF-Slim and Keras have it.

Two stem cells, then three runs of six normal cells with a reduction cell between two runs. A branch is Relu,
separable convolution, Relu, separable convolution. A Relu or a pool that several branches of a cell take of
one tensor is written once. Each cell is a block; what a cell reads of the one before the last crosses the
border between. IOS schedules a smaller NASNet-A, of 13 blocks.
"""

import math

from benchmarks.zoo.net import RELU_GAIN, Net

_STEM_CHANNELS = 96
_CHANNELS = 168  # of a branch in the first run of cells; 4032 = 6 branches of 4 times as many
_RUN = 6  # normal cells between two reductions
_SQUEEZE_GAIN = RELU_GAIN * 0.75  # a cell adds up branches; this keeps the variance from growing cell by cell


def _same(side: int, kernel: int, stride: int) -> tuple[int, int, int, int]:
    """Pads that make the output ceil(side / stride) wide; an odd one is at the bottom and right."""
    total = max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
    return total // 2, total // 2, total - total // 2, total - total // 2


class _Cells:
    """Cells of one network; `side` is the current one in pixels."""

    def __init__(self, net: Net, side: int) -> None:
        self._net = net
        self._relus: dict[str, str] = {}
        self.side = side

    def relu(self, source: str) -> str:
        if source not in self._relus:
            self._relus[source] = self._net.relu(source)
        return self._relus[source]

    def squeeze(self, source: str, channels: int) -> str:
        return self._net.conv(self.relu(source), channels, relu=False, gain=_SQUEEZE_GAIN, scale=False)

    def branch(self, source: str, channels: int, kernel: int, stride: int = 1) -> str:
        pads = _same(self.side, kernel, stride)
        inner = self._net.separable(self.relu(source), channels, kernel, stride=stride, pads=pads)
        return self._net.separable(self._net.relu(inner), channels, kernel)

    def halve(self, source: str, channels: int) -> str:
        """Half as large in pixels, by two grids of every other pixel (factorised reduction)."""
        active = self.relu(source)
        none = (0, 0, 0, 0)
        grids = [self._net.average_pool(grid, 1, 2, pads=none) for grid in (active, self._net.shift(active))]
        halves = [
            self._net.conv(grid, channels // 2, relu=False, gain=_SQUEEZE_GAIN, scale=False) for grid in grids
        ]
        return self._net.concat(*halves)

    def normal(self, left: str, right: str, channels: int) -> str:
        """`left` comes of the cell before the last, `right` of the last; both squeezed to `channels`."""
        net = self._net
        first = net.add(self.branch(right, channels, 5), self.branch(left, channels, 3))
        second = net.add(self.branch(left, channels, 5), self.branch(left, channels, 3))
        third = net.add(net.average_pool(right, count_pads=False), left)
        pooled = net.average_pool(left, count_pads=False)
        fourth = net.add(pooled, pooled)
        fifth = net.add(self.branch(right, channels, 3), right)
        return net.concat(left, first, second, third, fourth, fifth)

    def reduction(self, left: str, right: str, channels: int) -> str:
        """As `normal`, and half as large in pixels."""
        net, pads = self._net, _same(self.side, 3, 2)
        peak = net.max_pool(right, 3, 2, pads=pads)
        first = net.add(self.branch(right, channels, 5, 2), self.branch(left, channels, 7, 2))
        second = net.add(peak, self.branch(left, channels, 7, 2))
        mean = net.average_pool(right, 3, 2, pads=pads, count_pads=False)
        third = net.add(mean, self.branch(left, channels, 5, 2))
        self.side = math.ceil(self.side / 2)
        fourth = net.add(net.average_pool(first, count_pads=False), second)
        fifth = net.add(self.branch(first, channels, 3), peak)
        return net.concat(second, third, fourth, fifth)


def nasnet_large(net: Net, x: str) -> str:
    stem = net.conv(x, _STEM_CHANNELS, 3, stride=2, relu=False)
    net.border(stem)
    cells = _Cells(net, (net.side - 3) // 2 + 1)

    net.scope = "stem0"
    channels = net.scaled(_CHANNELS // 4)
    last = cells.reduction(stem, cells.squeeze(stem, channels), channels)
    net.border(last)

    net.scope = "stem1"
    channels = net.scaled(_CHANNELS // 2)
    right = cells.squeeze(last, channels)
    before, last = last, cells.reduction(cells.halve(stem, channels), right, channels)
    net.border(last)

    for run in range(3):
        channels = net.scaled(_CHANNELS << run)
        if run:
            net.scope = f"reduction{run}"
            # `before` stays: the next cell reads, beside the reduction, what that read beside its own input.
            last = cells.reduction(cells.squeeze(before, channels), cells.squeeze(last, channels), channels)
            net.border(last)
        for cell in range(_RUN):
            net.scope = f"cell{run * _RUN + cell}"
            left = cells.squeeze(before, channels) if cell else cells.halve(before, channels)
            made = cells.normal(left, cells.squeeze(last, channels), channels)
            before, last = last, made
            net.border(last)
    net.scope = "head"
    return net.classifier(net.global_pool(cells.relu(last)))
