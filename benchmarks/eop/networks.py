"""The networks of EOP's evaluation as graphs of unfused operators, as TVM counts them: no weights, no files.

Normalisation after a convolution is a multiplication and an addition. Parameters are those of the paper's
table 3. What it does not say: BERT reads 128 tokens; LSTM and GRU are cells over [input, state] with a dense
layer per gate group, so many steps unrolled as are asked for.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Final

from stageloom.shared.convolution import Convolution
from stageloom.shared.graph import Graph, Operator, Tensor
from stageloom.shared.ids import TensorId

INPUT, HIDDEN, LAYERS = 80, 64, 2
WIDTH, INTERMEDIATE, TOKENS = 768, 3072, 128
FLOAT_BYTES: Final = 4


class GraphMaker:
    """Collects operators; a tensor is its number."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._tensors: list[Tensor] = []
        self._operators: list[Operator] = []
        self._inputs: list[TensorId] = []

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self._tensors[tensor].shape

    def input(self, *shape: int) -> int:
        self._inputs.append(TensorId(len(self._tensors)))
        return self._tensor(f"input{len(self._inputs)}", shape)

    def _tensor(self, name: str, shape: Sequence[int]) -> int:
        self._tensors.append(Tensor(name, "float32", tuple(shape)))
        return len(self._tensors) - 1

    def several(
        self,
        kind: str,
        reads: Sequence[int],
        shapes: Sequence[Sequence[int]],
        flop: int = 0,
        weights: int = 0,
        convolution: Convolution | None = None,
    ) -> list[int]:
        """An operator with some outputs; `weights` in elements."""
        name = f"{kind}{len(self._operators)}"
        outputs = [self._tensor(f"{name}.{at}", shape) for at, shape in enumerate(shapes)]
        self._operators.append(
            Operator(
                kind=kind,
                name=name,
                nodes=(len(self._operators),),
                inputs=tuple(TensorId(one) for one in dict.fromkeys(reads)),
                outputs=tuple(map(TensorId, outputs)),
                flop=flop,
                weight_bytes=FLOAT_BYTES * weights,
                fused_unit=len(self._operators),
                convolution=convolution,
            )
        )
        return outputs

    def pointwise(self, kind: str, *reads: int, flop: int = 1, weights: int = 0) -> int:
        """As many elements as the first input has; `flop` per element."""
        shape = self.shape(reads[0])
        return self.several(kind, reads, [shape], flop * prod(shape), weights)[0]

    def chain(self, value: int, *kinds: str) -> int:
        for kind in kinds:
            value = self.pointwise(kind, value)
        return value

    def reshaped(self, kind: str, value: int, *shape: int) -> int:
        """The same elements, in another shape or order."""
        return self.several(kind, [value], [shape])[0]

    def dense(self, value: int, out: int) -> int:
        *rows, features = self.shape(value)
        return self.several(
            "dense", [value], [(*rows, out)], 2 * prod(rows) * features * out, features * out
        )[0]

    def conv(
        self, value: int, out: int, kernel: int | tuple[int, int], stride: int = 1, *, pad: bool = True
    ) -> int:
        """Over all channels; with `pad` the extents shrink by the stride alone."""
        _, channels, height, width = self.shape(value)
        sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
        pads = tuple((size - 1) // 2 if pad else 0 for size in sizes)
        described = Convolution(sizes, (stride, stride), (1, 1), (*pads, *pads))
        extents = described.extents((height, width))
        weights = channels * out * prod(sizes)
        shape = (1, out, *extents)
        return self.several("conv2d", [value], [shape], 2 * weights * prod(extents), weights, described)[0]

    def normalised(self, value: int, activation: str = "relu") -> int:
        channels = self.shape(value)[1]
        for kind in ("multiply", "add"):
            value = self.pointwise(kind, value, weights=channels)
        return self.pointwise(activation, value)

    def pool(self, value: int, kernel: int, stride: int, *, pad: bool = False, kind: str = "max_pool") -> int:
        _, channels, height, width = self.shape(value)
        pads = 2 * ((kernel - 1) // 2) if pad else 0
        extents = [(extent + pads - kernel) // stride + 1 for extent in (height, width)]
        return self.several(kind, [value], [(1, channels, *extents)], kernel**2 * channels * prod(extents))[0]

    def concat(self, values: Sequence[int], axis: int = 1) -> int:
        shape = list(self.shape(values[0]))
        shape[axis] = sum(self.shape(value)[axis] for value in values)
        return self.several("concatenate", values, [shape])[0]

    def graph(self, *outputs: int) -> Graph:
        return Graph(
            name=self.name,
            tensors=tuple(self._tensors),
            operators=tuple(self._operators),
            inputs=tuple(self._inputs),
            outputs=tuple(map(TensorId, outputs)),
            batchable=True,
        )


# Recurrent networks


def lstm(steps: int = 1, *, inputs: int = INPUT, layers: int = LAYERS) -> Graph:
    """Cells of 13 operators."""
    of = GraphMaker("LSTM")
    states = [(of.input(1, HIDDEN), of.input(1, HIDDEN)) for _ in range(layers)]
    for value in [of.input(1, inputs) for _ in range(steps)]:
        for layer, (hidden, cell) in enumerate(states):
            gates = of.dense(of.concat([value, hidden]), 4 * HIDDEN)
            gates = of.pointwise("add", gates, weights=4 * HIDDEN)
            i, f, g, o = of.several("split", [gates], [(1, HIDDEN)] * 4)
            i, f, o = (of.pointwise("sigmoid", one, flop=8) for one in (i, f, o))
            g = of.pointwise("tanh", g, flop=8)
            kept, added = of.pointwise("multiply", f, cell), of.pointwise("multiply", i, g)
            cell = of.pointwise("add", kept, added)
            value = of.pointwise("multiply", o, of.pointwise("tanh", cell, flop=8))
            states[layer] = value, cell
    return of.graph(*(one for pair in states for one in pair))


def gru(steps: int = 1, *, inputs: int = INPUT, layers: int = LAYERS) -> Graph:
    """Cells of 15 operators."""
    of = GraphMaker("GRU")
    states = [of.input(1, HIDDEN) for _ in range(layers)]
    for value in [of.input(1, inputs) for _ in range(steps)]:
        for layer, hidden in enumerate(states):
            gates = of.dense(of.concat([value, hidden]), 2 * HIDDEN)
            gates = of.pointwise("add", gates, weights=2 * HIDDEN)
            r, z = of.several("split", [gates], [(1, HIDDEN)] * 2)
            r, z = (of.pointwise("sigmoid", one, flop=8) for one in (r, z))
            fresh = of.dense(of.concat([value, of.pointwise("multiply", r, hidden)]), HIDDEN)
            fresh = of.pointwise("tanh", of.pointwise("add", fresh, weights=HIDDEN), flop=8)
            rest = of.pointwise("subtract", z)
            kept, added = of.pointwise("multiply", z, hidden), of.pointwise("multiply", rest, fresh)
            value = states[layer] = of.pointwise("add", kept, added)
    return of.graph(*states)


# Transformers


def bert(layers: int = 12, *, heads: int = 12) -> Graph:
    """Attention layers over 128 tokens of width 768. The embedding is left out: it is a look-up."""
    of = GraphMaker("BERT")
    value = of.input(1, TOKENS, WIDTH)
    mask = of.input(1, heads, TOKENS, TOKENS)
    for _ in range(layers):
        value = _attention(of, value, mask, heads)
        inner = _gelu(of, _projected(of, value, INTERMEDIATE))
        value = _layer_norm(of, of.pointwise("add", _projected(of, inner, WIDTH), value))
    return of.graph(value)


def _projected(of: GraphMaker, value: int, out: int) -> int:
    return of.pointwise("add", of.dense(value, out), weights=out)


def _attention(of: GraphMaker, value: int, mask: int, heads: int) -> int:
    size = WIDTH // heads
    split = []
    for _ in "qkv":
        rows = of.reshaped("reshape", _projected(of, value, WIDTH), 1, TOKENS, heads, size)
        split.append(of.reshaped("transpose", rows, 1, heads, TOKENS, size))
    query, key, values = split
    key = of.reshaped("transpose", key, 1, heads, size, TOKENS)
    flop = 2 * heads * TOKENS * TOKENS * size
    scores = of.several("batch_matmul", [query, key], [(1, heads, TOKENS, TOKENS)], flop)[0]
    scores = of.pointwise("add", of.pointwise("divide", scores), mask)
    weights = of.pointwise("softmax", scores, flop=12)
    read = of.several("batch_matmul", [weights, values], [(1, heads, TOKENS, size)], flop)[0]
    rows = of.reshaped("transpose", read, 1, TOKENS, heads, size)
    out = _projected(of, of.reshaped("reshape", rows, 1, TOKENS, WIDTH), WIDTH)
    return _layer_norm(of, of.pointwise("add", out, value))


def _layer_norm(of: GraphMaker, value: int) -> int:
    mean = of.several("mean", [value], [(1, TOKENS, 1)], TOKENS * WIDTH)[0]
    centred = of.pointwise("subtract", value, mean)
    variance = of.several("mean", [of.pointwise("power", centred)], [(1, TOKENS, 1)], TOKENS * WIDTH)[0]
    deviation = of.chain(variance, "add", "sqrt")
    scaled = of.pointwise("multiply", of.pointwise("divide", centred, deviation), weights=WIDTH)
    return of.pointwise("add", scaled, weights=WIDTH)


def _gelu(of: GraphMaker, value: int) -> int:
    inner = of.pointwise("add", of.pointwise("erf", of.pointwise("multiply", value), flop=12))
    return of.pointwise("multiply", of.pointwise("multiply", value, inner))


# Convolutional networks


def mobilenet(side: int = 224) -> Graph:
    """MobileNet V1: 13 pairs of a depthwise and a pointwise convolution."""
    of = GraphMaker("MobileNet")
    value = of.normalised(of.conv(of.input(1, 3, side, side), 32, 3, 2))
    widths = [
        (64, 1),
        (128, 2),
        (128, 1),
        (256, 2),
        (256, 1),
        (512, 2),
        *[(512, 1)] * 5,
        (1024, 2),
        (1024, 1),
    ]
    for out, stride in widths:
        value = of.normalised(_depthwise(of, value, stride))
        value = of.normalised(of.conv(value, out, 1))
    return of.graph(_classified(of, value))


def _depthwise(of: GraphMaker, value: int, stride: int) -> int:
    _, channels, height, width = of.shape(value)
    shape = (1, channels, -(-height // stride), -(-width // stride))
    return of.several("depthwise", [value], [shape], 18 * prod(shape), 9 * channels)[0]


def _classified(of: GraphMaker, value: int) -> int:
    channels = of.shape(value)[1]
    pooled = of.several("mean", [value], [(1, channels, 1, 1)], prod(of.shape(value)))[0]
    scores = of.dense(of.reshaped("reshape", pooled, 1, channels), 1000)
    return of.pointwise("softmax", of.pointwise("add", scores, weights=1000), flop=12)


def resnet18(side: int = 224) -> Graph:
    of = GraphMaker("ResNet-18")
    value = of.pool(of.normalised(of.conv(of.input(1, 3, side, side), 64, 7, 2)), 3, 2, pad=True)
    for out, first in ((64, 1), (128, 2), (256, 2), (512, 2)):
        for stride in (first, 1):
            inner = of.normalised(of.conv(value, out, 3, stride))
            inner = _scaled(of, of.conv(inner, out, 3))
            if stride > 1:
                value = _scaled(of, of.conv(value, out, 1, stride))
            value = of.pointwise("relu", of.pointwise("add", inner, value))
    return of.graph(_classified(of, value))


def _scaled(of: GraphMaker, value: int) -> int:
    channels = of.shape(value)[1]
    return of.pointwise("add", of.pointwise("multiply", value, weights=channels), weights=channels)


def squeezenet(side: int = 224) -> Graph:
    """SqueezeNet 1.1, whose convolutions have a bias and no normalisation."""
    of = GraphMaker("SqueezeNet")

    def biased(value: int, out: int, kernel: int, stride: int = 1, *, pad: bool = True) -> int:
        made = of.conv(value, out, kernel, stride, pad=pad)
        return of.pointwise("relu", of.pointwise("add", made, weights=out))

    value = of.pool(biased(of.input(1, 3, side, side), 64, 3, 2, pad=False), 3, 2)
    for at, (squeezed, out) in enumerate(
        [(16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256)]
    ):
        if at in (2, 4):
            value = of.pool(value, 3, 2)
        value = biased(value, squeezed, 1)
        value = of.concat([biased(value, out, 1), biased(value, out, 3)])
    value = of.pointwise("dropout", value, flop=0)
    value = biased(value, 1000, 1)
    pooled = of.several("mean", [value], [(1, 1000, 1, 1)], prod(of.shape(value)))[0]
    return of.graph(of.pointwise("softmax", of.reshaped("reshape", pooled, 1, 1000), flop=12))


def yolo_v3(side: int = 640) -> Graph:
    """Darknet-53 and its three heads for 80 classes."""
    of = GraphMaker("Yolo v3")

    def block(value: int, out: int, kernel: int, stride: int = 1) -> int:
        return of.normalised(of.conv(value, out, kernel, stride), "leaky_relu")

    def neck(value: int, width: int) -> tuple[int, int]:
        for kernel in (1, 3, 1, 3):
            value = block(value, width if kernel == 1 else 2 * width, kernel)
        value = block(value, width, 1)
        out = of.conv(block(value, 2 * width, 3), 255, 1)
        return value, of.pointwise("sigmoid", of.pointwise("add", out, weights=255), flop=8)

    value = block(of.input(1, 3, side, side), 32, 3)
    routes = []
    for width, repeats in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
        value = block(value, width, 3, 2)
        for _ in range(repeats):
            value = of.pointwise("add", block(block(value, width // 2, 1), width, 3), value)
        routes.append(value)
    value, large = neck(routes[-1], 512)
    heads = [large]
    for width, route in ((256, routes[-2]), (128, routes[-3])):
        value = block(value, width, 1)
        _, channels, height, length = of.shape(value)
        value = of.several("upsampling", [value], [(1, channels, 2 * height, 2 * length)])[0]
        value, head = neck(of.concat([value, route]), width)
        heads.append(head)
    return of.graph(*heads)


def inception_v3(side: int = 299) -> Graph:
    """Inception V3 without its auxiliary head."""
    of = GraphMaker("Inception V3")

    def block(
        value: int, out: int, kernel: int | tuple[int, int], stride: int = 1, *, pad: bool = True
    ) -> int:
        return of.normalised(of.conv(value, out, kernel, stride, pad=pad))

    def branch(value: int, *steps: tuple[int, int | tuple[int, int]]) -> int:
        for out, kernel in steps:
            value = block(value, out, kernel)
        return value

    def pooled(value: int, out: int) -> int:
        return block(of.pool(value, 3, 1, pad=True, kind="avg_pool"), out, 1)

    value = block(of.input(1, 3, side, side), 32, 3, 2, pad=False)
    value = of.pool(block(block(value, 32, 3, pad=False), 64, 3), 3, 2)
    value = of.pool(block(block(value, 80, 1), 192, 3, pad=False), 3, 2)
    for out in (32, 64, 64):
        branches = [branch(value, (64, 1)), branch(value, (48, 1), (64, 5))]
        branches += [branch(value, (64, 1), (96, 3), (96, 3)), pooled(value, out)]
        value = of.concat(branches)
    deep = block(branch(value, (64, 1), (96, 3)), 96, 3, 2, pad=False)
    value = of.concat([block(value, 384, 3, 2, pad=False), deep, of.pool(value, 3, 2)])
    row, column = (1, 7), (7, 1)
    for c in (128, 160, 160, 192):
        branches = [branch(value, (192, 1)), branch(value, (c, 1), (c, row), (192, column))]
        branches.append(branch(value, (c, 1), (c, column), (c, row), (c, column), (192, row)))
        value = of.concat([*branches, pooled(value, 192)])
    short = block(branch(value, (192, 1)), 320, 3, 2, pad=False)
    deep = block(branch(value, (192, 1), (192, row), (192, column)), 192, 3, 2, pad=False)
    value = of.concat([short, deep, of.pool(value, 3, 2)])
    for _ in range(2):
        middle, deep = branch(value, (384, 1)), branch(value, (448, 1), (384, 3))
        wide = [[block(one, 384, (1, 3)), block(one, 384, (3, 1))] for one in (middle, deep)]
        value = of.concat([branch(value, (320, 1)), *map(of.concat, wide), pooled(value, 192)])
    return of.graph(_classified(of, value))


NETWORKS: Mapping[str, Callable[[], Graph]] = {
    "InceptionV3": inception_v3,
    "ResNet-18": resnet18,
    "MobileNet": mobilenet,
    "SqueezeNet": squeezenet,
    "Yolo v3": yolo_v3,
    "LSTM": lstm,
    "GRU": gru,
    "Transformers": bert,
}
"""By the names of the paper's table 1."""
