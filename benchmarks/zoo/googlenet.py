"""GoogLeNet (Szegedy et al. 2015) as torchvision has it: 3x3 in place of the 5x5 branch."""

from benchmarks.zoo.net import Net

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
