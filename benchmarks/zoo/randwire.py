"""RandWire (Xie et al. 2019), regular regime with WS(4, 0.75), as IOS measures it.

A stage of 16 nodes, then three of 32, over a random graph each; 154 channels in the first. A node is a
weighted sum of its inputs, a Relu and a separable 3x3 convolution; a node without a predecessor reads the
stage's input with stride 2, and the mean of the nodes without a successor is the stage's output. IOS counts a
node as one operator: 120 of the whole network. Here its sum, its Relu and its two convolutions are operators
of their own, as the importer counts them in any file, and so is each weight of a sum.
"""

import math
from itertools import chain
from random import Random

from benchmarks.zoo.net import RELU_GAIN, Net

_CHANNELS = 154
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
    x = net.conv(x, _CHANNELS // 2, 3, stride=2, pad=1, relu=False)
    for index, (nodes, seed) in enumerate(_STAGES):
        net.border(x)
        net.scope = f"stage{index + 1}"
        x = _stage(net, x, net.scaled(_CHANNELS << index), nodes, seed)
    net.border(x)
    net.scope = "head"
    return net.classifier(net.global_pool(net.conv(net.relu(x), _HEAD_CHANNELS, relu=False)))
