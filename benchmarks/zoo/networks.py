"""GoogLeNet (Szegedy et al. 2015) as torchvision has it: 3x3 in place of the 5x5 branch.

Inception V3 (Szegedy et al. 2016) as torchvision has it.

ResNet-50 (He et al. 2016, stride on the 3x3 convolution) as torchvision has it.

SqueezeNet 1.0 (Iandola et al. 2016) as torchvision has it, and the variant with complex bypass.

The variant is the one that IOS (Ding et al. 2021) and TOP measure.

RandWire (Xie et al. 2019), regular regime with WS(4, 0.75), as IOS measures it.

A stage of 16 nodes, then three of 32, over a random graph each; 154 channels in the first. A node is a
weighted sum of its inputs, a Relu and a separable 3x3 convolution; a node without a predecessor reads the
stage's input with stride 2, and the mean of the nodes without a successor is the stage's output. IOS
counts a node as one operator: 120 of the whole network. Here its sum, its Relu and its two convolutions
are operators of their own, as the importer counts them in any file, and so is each weight of a sum.

NASNet-A Large (Zoph et al. 2018): 6 @ 4032, for images of 331 pixels, as TF-Slim and Keras have it.

Two stem cells, then three runs of six normal cells with a reduction cell between two runs. A branch is Relu,
separable convolution, Relu, separable convolution. A Relu or a pool that several branches of a cell take of
one tensor is written once. Each cell is a block; what a cell reads of the one before the last crosses the
border between. IOS schedules a smaller NASNet-A, of 13 blocks.
"""

import math
from collections.abc import Callable
from itertools import chain
from random import Random

from benchmarks.zoo.net import CLASSES, RELU_GAIN, Net

# Channels per module: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection.
_GOOGLENET = {
    "3a": (64, 96, 128, 16, 32, 32), "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64), "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64), "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128), "5b": (384, 192, 384, 48, 128, 128),
}  # fmt: skip


def googlenet(net: Net, x: str) -> str:
    x = net.max_pool(net.conv(x, 64, 7, stride=2, pad=3), 3, 2, ceil=True)
    x = net.max_pool(net.conv(net.conv(x, 64), 192, 3, pad=1), 3, 2, ceil=True)
    for name, (c1, r3, c3, r5, c5, cp) in _GOOGLENET.items():
        net.border(x)
        net.scope = f"inception{name}"
        b3 = net.conv(net.conv(x, r3), c3, 3, pad=1)
        b5 = net.conv(net.conv(x, r5), c5, 3, pad=1)
        pooled = net.conv(net.max_pool(x, 3, 1, pad=1, ceil=True), cp)
        x = net.concat(net.conv(x, c1), b3, b5, pooled)
        if name in ("3b", "4e"):
            x = net.max_pool(x, *((3, 2) if name == "3b" else (2, 2)), ceil=True)
    net.scope = "head"
    return net.classifier(net.global_pool(x))


def _inception_a(net: Net, x: str, pool_features: int) -> str:
    b1 = net.conv(x, 64)
    b5 = net.conv(net.conv(x, 48), 64, 5, pad=2)
    b3 = net.conv(net.conv(net.conv(x, 64), 96, 3, pad=1), 96, 3, pad=1)
    return net.concat(b1, b5, b3, net.conv(net.average_pool(x), pool_features))


def _inception_b(net: Net, x: str) -> str:
    b3 = net.conv(x, 384, 3, stride=2)
    double = net.conv(net.conv(net.conv(x, 64), 96, 3, pad=1), 96, 3, stride=2)
    return net.concat(b3, double, net.max_pool(x, 3, 2))


def _inception_c(net: Net, x: str, inner: int) -> str:
    b1 = net.conv(x, 192)
    b7 = net.conv(net.conv(x, inner), inner, (1, 7), pad=(0, 3))
    b7 = net.conv(b7, 192, (7, 1), pad=(3, 0))
    double = net.conv(net.conv(x, inner), inner, (7, 1), pad=(3, 0))
    double = net.conv(double, inner, (1, 7), pad=(0, 3))
    double = net.conv(double, inner, (7, 1), pad=(3, 0))
    double = net.conv(double, 192, (1, 7), pad=(0, 3))
    return net.concat(b1, b7, double, net.conv(net.average_pool(x), 192))


def _inception_d(net: Net, x: str) -> str:
    b3 = net.conv(net.conv(x, 192), 320, 3, stride=2)
    b7 = net.conv(net.conv(x, 192), 192, (1, 7), pad=(0, 3))
    b7 = net.conv(net.conv(b7, 192, (7, 1), pad=(3, 0)), 192, 3, stride=2)
    return net.concat(b3, b7, net.max_pool(x, 3, 2))


def _inception_e(net: Net, x: str) -> str:
    b1 = net.conv(x, 320)
    b3 = net.conv(x, 384)
    b3a, b3b = net.conv(b3, 384, (1, 3), pad=(0, 1)), net.conv(b3, 384, (3, 1), pad=(1, 0))
    double = net.conv(net.conv(x, 448), 384, 3, pad=1)
    da, db = net.conv(double, 384, (1, 3), pad=(0, 1)), net.conv(double, 384, (3, 1), pad=(1, 0))
    # One flat concat, as IOS has it; torchvision nests two, which the papers' count does not.
    return net.concat(b1, b3a, b3b, da, db, net.conv(net.average_pool(x), 192))


def inception_v3(net: Net, x: str) -> str:
    x = net.conv(net.conv(net.conv(x, 32, 3, stride=2), 32, 3), 64, 3, pad=1)
    x = net.conv(net.conv(net.max_pool(x, 3, 2), 80), 192, 3)
    x = net.max_pool(x, 3, 2)
    net.border(x)
    blocks: list[Callable[[str], str]] = [
        *(lambda y, p=p: _inception_a(net, y, p) for p in (32, 64, 64)),
        lambda y: _inception_b(net, y),
        *(lambda y, c=c: _inception_c(net, y, c) for c in (128, 160, 160, 192)),
        lambda y: _inception_d(net, y),
        lambda y: _inception_e(net, y),
        lambda y: _inception_e(net, y),
    ]
    for index, block in enumerate(blocks, start=1):
        net.scope = f"block{index}"
        x = block(x)
        net.border(x)
    net.scope = "head"
    return net.classifier(net.global_pool(x))


_RESIDUAL_GAIN = 0.5  # the residual branch adds a quarter of the variance, so 16 blocks do not explode


def _bottleneck(net: Net, x: str, planes: int, stride: int, project: bool) -> str:
    skip = net.conv(x, 4 * planes, stride=stride, relu=False) if project else x
    inner = net.conv(net.conv(x, planes), planes, 3, stride=stride, pad=1)
    grown = net.conv(inner, 4 * planes, relu=False, gain=RELU_GAIN * _RESIDUAL_GAIN)
    return net.relu(net.add(grown, skip))


def resnet50(net: Net, x: str) -> str:
    x = net.max_pool(net.conv(x, 64, 7, stride=2, pad=3), 3, 2, pad=1)
    for index, (planes, depth) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        net.border(x)
        for unit in range(depth):
            net.scope = f"layer{index + 1}.{unit}"
            x = _bottleneck(net, x, planes, 2 if index and not unit else 1, not unit)
    net.scope = "head"
    return net.classifier(net.global_pool(x))


def _fire(net: Net, x: str, squeeze: int, expand: int) -> str:
    squeezed = net.conv(x, squeeze)
    return net.concat(net.conv(squeezed, expand), net.conv(squeezed, expand, 3, pad=1))


_FIRES = [(16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256)]
_POOL_AFTER_FIRE = {2, 6}


def squeezenet(net: Net, x: str) -> str:
    x = net.max_pool(net.conv(x, 96, 7, stride=2), 3, 2, ceil=True)
    for index, (squeeze, expand) in enumerate(_FIRES):
        net.border(x)
        net.scope = f"fire{index + 2}"
        x = _fire(net, x, squeeze, expand)
        if index in _POOL_AFTER_FIRE:
            net.border(x)
            x = net.max_pool(x, 3, 2, ceil=True)
    net.border(x)
    net.scope = "head"
    return net.flatten(net.global_pool(net.conv(x, CLASSES, scale=False)))


def squeezenet_bypass(net: Net, x: str) -> str:
    x = net.max_pool(net.conv(x, 96, 7, stride=2, pad=3), 3, 2)
    for index, (squeeze, expand) in enumerate(_FIRES):
        net.border(x)
        net.scope = f"fire{index + 2}"
        fire = _fire(net, x, squeeze, expand)
        same = net.channels[fire] == net.channels[x]
        x = net.add(fire, x if same else net.conv(x, 2 * expand))
        if index in _POOL_AFTER_FIRE:
            net.border(x)
            x = net.max_pool(x, 3, 2)
    net.border(x)
    net.scope = "head"
    return net.flatten(net.global_pool(net.conv(x, CLASSES, scale=False)))


_RANDWIRE_CHANNELS = 154
_STAGES = ((16, 1), (32, 2), (32, 3), (32, 4))  # nodes, seed of the graph
_NEIGHBOURS = 4  # K of WS(K, P)
_REWIRED = 0.75  # P
_HEAD_CHANNELS = 1280


def watts_strogatz(nodes: int, neighbours: int, rewired: float, seed: int) -> list[tuple[int, ...]]:
    """The predecessors of each node, ascending, in a small-world graph; edges run from lower to higher.

    Watts and Strogatz 1998: a ring in which each node is linked to its `neighbours` (even) nearest ones; then
    the far end of each edge, nearest ones first, moves with probability `rewired` to a node drawn among those
    to which there is no edge yet. Only `Random.random` is drawn from: its stream is the same in every Python.
    """
    rng = Random(seed)
    linked: list[set[int]] = [set() for _ in range(nodes)]

    def link(a: int, b: int) -> None:
        linked[a].add(b)
        linked[b].add(a)

    for distance in range(1, neighbours // 2 + 1):
        for node in range(nodes):
            link(node, (node + distance) % nodes)
    for distance in range(1, neighbours // 2 + 1):
        for node in range(nodes):
            if rng.random() >= rewired:
                continue
            free = [other for other in range(nodes) if other != node and other not in linked[node]]
            far = (node + distance) % nodes
            linked[node].discard(far)
            linked[far].discard(node)
            link(node, free[int(rng.random() * len(free))])
    return [tuple(sorted(other for other in linked[node] if other < node)) for node in range(nodes)]


def _stage(net: Net, x: str, channels: int, nodes: int, seed: int) -> str:
    before = watts_strogatz(nodes, _NEIGHBOURS, _REWIRED, seed)
    ends = set(range(nodes)) - set(chain.from_iterable(before))
    made: list[str] = []
    for node, predecessors in enumerate(before):
        source = net.weighted_sum(*(made[p] for p in predecessors)) if predecessors else x
        # A mean of n independent tensors has an n-th of their variance.
        gain = RELU_GAIN * (math.sqrt(len(ends)) if node in ends else 1.0)
        made.append(net.separable(net.relu(source), channels, 3, stride=1 if predecessors else 2, gain=gain))
    return net.mean(*(made[node] for node in sorted(ends)))


def randwire(net: Net, x: str) -> str:
    x = net.conv(x, _RANDWIRE_CHANNELS // 2, 3, stride=2, pad=1, relu=False)
    for index, (nodes, seed) in enumerate(_STAGES):
        net.border(x)
        net.scope = f"stage{index + 1}"
        x = _stage(net, x, net.scaled(_RANDWIRE_CHANNELS << index), nodes, seed)
    net.border(x)
    net.scope = "head"
    return net.classifier(net.global_pool(net.conv(net.relu(x), _HEAD_CHANNELS, relu=False)))


_STEM_CHANNELS = 96
_NASNET_CHANNELS = 168  # of a branch in the first run of cells; 4032 = 6 branches of 4 times as many
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
    channels = net.scaled(_NASNET_CHANNELS // 4)
    last = cells.reduction(stem, cells.squeeze(stem, channels), channels)
    net.border(last)

    net.scope = "stem1"
    channels = net.scaled(_NASNET_CHANNELS // 2)
    right = cells.squeeze(last, channels)
    before, last = last, cells.reduction(cells.halve(stem, channels), right, channels)
    net.border(last)

    for run in range(3):
        channels = net.scaled(_NASNET_CHANNELS << run)
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
