"""Inception V3 (Szegedy et al. 2016) as torchvision has it."""

from collections.abc import Callable

from benchmarks.zoo.net import Net


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
