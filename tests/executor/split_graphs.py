"""Random small graphs that hold the kinds of nodes which may be split, with attributes drawn at random."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

OPSET = 17


class RandomNet:
    """Grows a graph node by node; what onnx refuses is not added."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._count = 0

    def weight(self, *shape: int, positive: bool = False) -> str:
        """A float constant."""
        array = self.numbers.standard_normal(shape).astype(np.float32)
        return self.constant(np.abs(array) + 0.5 if positive else array)

    def constant(self, array: np.ndarray) -> str:
        """A constant."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def add(self, kind: str, inputs: Sequence[str], **attributes: object) -> str | None:
        """A node; None where it would not be valid."""
        made = f"v{self._count}"
        node = helper.make_node(kind, list(inputs), [made], **attributes)
        try:
            inferred = onnx.shape_inference.infer_shapes(
                self._model([node], [made]), check_type=True, strict_mode=True, data_prop=True
            )
        except (onnx.shape_inference.InferenceError, RuntimeError):
            return None
        dims = inferred.graph.output[0].type.tensor_type.shape.dim
        shape = tuple(int(d.dim_value) for d in dims)
        if any(size < 1 for size in shape) or not 1 <= np.prod(shape, dtype=int) < 20_000:
            return None
        self._count += 1
        self.nodes.append(node)
        self.shapes[made] = shape
        return made

    def _model(self, nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> onnx.ModelProto:
        float32 = onnx.TensorProto.FLOAT
        names = {name for node in nodes for name in node.input}
        made = {name for node in nodes for name in node.output}
        inputs = [
            helper.make_tensor_value_info(name, float32, shape)
            for name, shape in self.shapes.items()
            if name in names and name not in made
        ]
        results = [helper.make_tensor_value_info(name, float32, self.shapes.get(name)) for name in outputs]
        graph = helper.make_graph(nodes, "random", inputs, results, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)

    def finished(self) -> onnx.ModelProto:
        """The model; whatever nobody reads is an output."""
        read = {name for node in self.nodes for name in node.input}
        ends = [node.output[0] for node in self.nodes if node.output[0] not in read]
        return self._model(self.nodes, ends)


def random_net(seed: int, size: int = 8) -> onnx.ModelProto:
    """A model of about `size` operators over one input, an image or a sequence."""
    net = RandomNet(seed)
    image = net.rng.random() < 0.7
    batch = net.rng.choice((1, 1, 3))
    net.shapes["x"] = (batch, 6, 11, 9) if image else (batch, 10, 12)
    known = ["x"]
    tries = 0
    while len(net.nodes) < size and tries < 20 * size:
        tries += 1
        source = known[-1] if net.rng.random() < 0.7 else net.rng.choice(known)
        rank = len(net.shapes[source])
        makers = _IMAGE if rank == 4 else _SEQUENCE if rank == 3 else _MATRIX if rank == 2 else ()
        if makers and (made := net.rng.choice(makers)(net, source)) is not None:
            known.append(made)
    return net.finished()


def _conv(net: RandomNet, x: str) -> str | None:
    channels = net.shapes[x][1]
    groups = net.rng.choice([g for g in range(1, channels + 1) if channels % g == 0])
    filters = groups * net.rng.randint(1, 3)
    kernel = [net.rng.randint(1, 4), net.rng.randint(1, 3)]
    dilations = [net.rng.randint(1, 2), net.rng.randint(1, 2)]
    reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    inputs = [x, net.weight(filters, channels // groups, *kernel)]
    if net.rng.random() < 0.7:
        inputs.append(net.weight(filters))
    padding: dict[str, object] = {"pads": [net.rng.randint(0, r) for r in (*reach, *reach)]}
    if net.rng.random() < 0.3:
        padding = {"auto_pad": net.rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))}
        dilations = [1, 1]
    if any(n < d * (k - 1) + 1 for n, d, k in zip(net.shapes[x][2:], dilations, kernel, strict=True)):
        return None  # onnx infers an extent for it, and onnxruntime does not run it
    strides = [net.rng.randint(1, 3), net.rng.randint(1, 2)]
    made = net.add(
        "Conv", inputs, kernel_shape=kernel, strides=strides, dilations=dilations, group=groups, **padding
    )
    if made is not None and net.rng.random() < 0.5:
        return _activation(net, made) or made
    return made


def _pool(net: RandomNet, x: str) -> str | None:
    kernel = [net.rng.randint(2, 4), net.rng.randint(1, 3)]
    if any(n < k for n, k in zip(net.shapes[x][2:], kernel, strict=True)):
        return None
    pads = [net.rng.randint(0, k - 1) for k in (*kernel, *kernel)]
    more: dict[str, object] = {"pads": pads}
    if net.rng.random() < 0.2:
        more = {"auto_pad": net.rng.choice(("SAME_UPPER", "SAME_LOWER"))}
    elif net.rng.random() < 0.5:
        more["ceil_mode"] = 1
    kind = net.rng.choice(("MaxPool", "AveragePool"))
    if kind == "AveragePool" and net.rng.random() < 0.5:
        more["count_include_pad"] = 1
    strides = [net.rng.randint(1, 3), net.rng.choice((1, 1, 2))]
    if "auto_pad" in more and any(s > k for s, k in zip(strides, kernel, strict=True)):
        return None  # onnxruntime would pad by less than nothing
    if "ceil_mode" in more and _starts_in_padding(net.shapes[x][2:], kernel, strides, pads):
        return None
    return net.add(kind, [x], kernel_shape=kernel, strides=strides, **more)


def _starts_in_padding(
    extents: Sequence[int], kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int]
) -> bool:
    """Whether a last window lies in padding alone: onnx infers an output for it, onnxruntime makes none."""
    return any(
        -(-(n + before + behind - size) // stride) * stride >= n + before
        for n, size, stride, before, behind in zip(extents, kernel, strides, pads[:2], pads[2:], strict=True)
    )


def _activation(net: RandomNet, x: str) -> str | None:
    if net.rng.random() < 0.3:
        return net.add("PRelu", [x, net.weight(net.shapes[x][1], 1, 1)])
    return net.add(net.rng.choice(("Relu", "Sigmoid", "Tanh", "HardSwish", "Elu")), [x])


def _batch_norm(net: RandomNet, x: str) -> str | None:
    channels = net.shapes[x][1]
    parts = [net.weight(channels, positive=number in (0, 3)) for number in range(4)]
    return net.add("BatchNormalization", [x, *parts])


def _instance_norm(net: RandomNet, x: str) -> str | None:
    channels = net.shapes[x][1]
    return net.add("InstanceNormalization", [x, net.weight(channels), net.weight(channels)])


def _arithmetic(net: RandomNet, x: str) -> str | None:
    same = [name for name, shape in net.shapes.items() if shape == net.shapes[x]]
    kind = net.rng.choice(("Add", "Mul", "Sub", "Max"))
    if net.rng.random() < 0.5:
        return net.add(kind, [x, net.rng.choice(same)])
    shape = net.shapes[x]
    kept = net.rng.randrange(len(shape))
    return net.add(kind, [x, net.weight(*(n if d == kept else 1 for d, n in enumerate(shape) if d))])


def _concat(net: RandomNet, x: str) -> str | None:
    axis = net.rng.randrange(1, len(net.shapes[x]))
    rest = tuple(n for d, n in enumerate(net.shapes[x]) if d != axis)
    others = [
        name
        for name, shape in net.shapes.items()
        if len(shape) == len(net.shapes[x]) and tuple(n for d, n in enumerate(shape) if d != axis) == rest
    ]
    chosen = [x, *(net.rng.choice(others) for _ in range(net.rng.randint(1, 2)))]
    return net.add("Concat", chosen, axis=axis)


def _softmax(net: RandomNet, x: str) -> str | None:
    return net.add(net.rng.choice(("Softmax", "LogSoftmax")), [x], axis=net.rng.randrange(len(net.shapes[x])))


def _transpose(net: RandomNet, x: str) -> str | None:
    order = list(range(1, len(net.shapes[x])))
    net.rng.shuffle(order)
    return net.add("Transpose", [x], perm=[0, *order])


def _transposed_conv(net: RandomNet, x: str) -> str | None:
    filters = net.rng.randint(2, 4)
    weight = net.weight(net.shapes[x][1], filters, 2, 2)
    return net.add("ConvTranspose", [x, weight, net.weight(filters)], strides=[2, 1])


def _resize(net: RandomNet, x: str) -> str | None:
    scales = net.constant(np.array([1, 1, net.rng.choice((1, 2)), 2], np.float32))
    return net.add("Resize", [x, "", scales], mode="nearest")


def _global_pool(net: RandomNet, x: str) -> str | None:
    return net.add(net.rng.choice(("GlobalAveragePool", "GlobalMaxPool")), [x])


def _reduce(net: RandomNet, x: str) -> str | None:
    axis = net.rng.randrange(1, len(net.shapes[x]))
    return net.add("ReduceMean", [x], axes=[axis], keepdims=net.rng.randint(0, 1))


def _flatten(net: RandomNet, x: str) -> str | None:
    shape = net.shapes[x]
    if len(shape) == 4 and net.rng.random() < 0.6:
        made = net.add("Reshape", [x, net.constant(np.array([0, shape[1], -1], np.int64))])
        return net.add("Transpose", [made], perm=[0, 2, 1]) if made and net.rng.random() < 0.5 else made
    return net.add("Flatten", [x], axis=1)


def _matmul(net: RandomNet, x: str) -> str | None:
    columns = net.rng.randint(3, 9)
    made = net.add("MatMul", [x, net.weight(net.shapes[x][-1], columns)])
    return net.add("Add", [made, net.weight(columns)]) if made and net.rng.random() < 0.7 else made


def _heads(net: RandomNet, x: str) -> str | None:
    batch, rows, features = net.shapes[x]
    heads = net.rng.choice([h for h in (2, 3) if features % h == 0] or [1])
    made = net.add("MatMul", [x, net.weight(features, features)])
    if made is None:
        return None
    made = net.add("Reshape", [made, net.constant(np.array([batch, rows, heads, -1], np.int64))])
    return net.add("Transpose", [made], perm=[0, 2, 1, 3]) if made else None


def _attention(net: RandomNet, x: str) -> str | None:
    rank = len(net.shapes[x])
    turned = net.add("Transpose", [x], perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = net.add("MatMul", [x, turned]) if turned else None
    weights = net.add("Softmax", [scores], axis=-1) if scores else None
    return net.add("MatMul", [weights, x]) if weights else None


def _layer_norm(net: RandomNet, x: str) -> str | None:
    size = net.shapes[x][-1]
    return net.add("LayerNormalization", [x, net.weight(size), net.weight(size)], axis=-1)


def _gemm(net: RandomNet, x: str) -> str | None:
    columns, turned = net.rng.randint(3, 9), net.rng.randint(0, 1)
    rows = net.shapes[x][1]
    weight = net.weight(columns, rows) if turned else net.weight(rows, columns)
    bias = net.rng.choice(((columns,), (1, columns), (net.shapes[x][0], columns)))
    return net.add("Gemm", [x, weight, net.weight(*bias)], transB=turned, alpha=0.5)


def _slice(net: RandomNet, x: str) -> str | None:
    axis = net.rng.randrange(1, len(net.shapes[x]))
    bounds = [net.constant(np.array([value], np.int64)) for value in (1, net.shapes[x][axis], axis)]
    return net.add("Slice", [x, *bounds])


def _pad(net: RandomNet, x: str) -> str | None:
    rank = len(net.shapes[x])
    axis = net.rng.randrange(1, rank)
    pads = [int(d == axis) for d in range(rank)] * 2
    return net.add("Pad", [x, net.constant(np.array(pads, np.int64))])


Maker = Callable[[RandomNet, str], str | None]
_ANY: tuple[Maker, ...] = (_arithmetic, _concat, _softmax, _transpose, _reduce, _slice, _pad)
_IMAGE: tuple[Maker, ...] = (
    *(_conv,) * 6, *(_pool,) * 4, _activation, _batch_norm, _instance_norm, _transposed_conv, _resize,
    _global_pool, _flatten, _attention, *_ANY,
)  # fmt: skip
_SEQUENCE: tuple[Maker, ...] = (*(_matmul,) * 3, _heads, _attention, _layer_norm, _flatten, *_ANY)
_MATRIX: tuple[Maker, ...] = (*(_gemm,) * 2, _matmul, _layer_norm, _arithmetic, _softmax)
