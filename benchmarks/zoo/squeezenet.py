"""SqueezeNet 1.0 (Iandola et al. 2016) as torchvision has it, and the variant with complex bypass.

The variant is the one that IOS (Ding et al. 2021) and TOP measure.
"""

from benchmarks.zoo.net import CLASSES, Net


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
