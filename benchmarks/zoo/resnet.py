"""ResNet-50 (He et al. 2016, stride on the 3x3 convolution) as torchvision has it."""

from benchmarks.zoo.net import RELU_GAIN, Net

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
