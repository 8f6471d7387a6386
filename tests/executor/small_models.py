"""Small models of kinds that the zoo lacks, imported once per run of the tests. Nothing here needs torch."""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits
from tests.scratch import scratch


class Builder:
    """Collects nodes and seeded weights; every method returns the name of the value it makes."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def node(self, kind: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        made = [f"{kind.lower()}{len(self.nodes)}.{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), made, name=made[0], **attributes))
        return made[0]

    def weight(self, *shape: int, scale: float = 1.0, positive: bool = False) -> str:
        values = self.rng.standard_normal(shape).astype(np.float32) * np.float32(scale)
        return self.constant(np.abs(values) + np.float32(0.5) if positive else values)

    def constant(self, values: "np.ndarray | Sequence[int]") -> str:
        array = np.asarray(values)
        name = f"weight{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def artifact(
        self,
        inputs: Mapping[str, tuple[int, ...]],
        outputs: Mapping[str, tuple[int, ...]],
        *,
        opset: int = 17,
    ) -> Artifact:
        """The model as an artifact, through the importer."""
        return imported(self.model(inputs, outputs, opset=opset))

    def model(
        self,
        inputs: Mapping[str, tuple[int, ...]],
        outputs: Mapping[str, tuple[int, ...]],
        *,
        opset: int = 17,
    ) -> onnx.ModelProto:
        """The model; inputs and outputs are float32."""

        def described(values: Mapping[str, tuple[int, ...]]) -> list[onnx.ValueInfoProto]:
            return [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in values.items()]

        graph = helper.make_graph(self.nodes, "small", described(inputs), described(outputs), self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
        model.ir_version = 10
        return model


SHARED_BYTES = 512 * 512 * 4
"""What `unrolled` multiplies with at every step."""


@cache
def unrolled(steps: int = 8) -> Artifact:
    """Steps that all read one weight, as exporters write a recurrent layer."""
    b = Builder()
    weight, x = b.weight(512, 512, scale=512**-0.5), "x"
    for _ in range(steps):
        x = b.node("Tanh", b.node("Gemm", x, weight))
    return b.artifact({"x": (1, 512)}, {x: (1, 512)})


def imported(model: onnx.ModelProto) -> Artifact:
    """A model on disk, through the importer."""
    folder = scratch()
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    import_here(folder / "model.onnx", {}, folder, ImportLimits(), lambda line: None)
    return open_artifact(folder / ARTIFACT_NAME)


@cache
def transformer(layers: int = 2, width: int = 32, heads: int = 4, length: int = 12) -> Artifact:
    """Encoder layers as exporters write them: attention by reshapes and transposes, Gelu by Erf, a mask."""
    b = Builder(1)
    x = "tokens"
    mask = b.node("Mul", "mask", b.constant(np.array(-1e4, np.float32)))
    for _ in range(layers):
        x = _encoder_layer(b, x, mask, width, heads, length)
    pooled = b.node("ReduceMean", x, axes=[1], keepdims=0)
    answer = b.node("Gemm", pooled, b.weight(width, 10), b.weight(10))
    return b.artifact({"tokens": (1, length, width), "mask": (1, 1, 1, length)}, {answer: (1, 10)}, opset=17)


def _encoder_layer(b: Builder, x: str, mask: str, width: int, heads: int, length: int) -> str:
    def linear(source: str, out: int) -> str:
        product = b.node("MatMul", source, b.weight(width, out, scale=width**-0.5))
        return b.node("Add", product, b.weight(out, scale=0.1))

    def split(source: str) -> str:
        apart = b.node("Reshape", source, b.constant(np.array([0, length, heads, width // heads])))
        return b.node("Transpose", apart, perm=[0, 2, 1, 3])

    joined = linear(x, 3 * width)
    size = b.constant(np.array([width, width, width]))
    b.nodes.append(helper.make_node("Split", [joined, size], [f"{joined}.{p}" for p in "qkv"], axis=2))
    q, k, v = (split(f"{joined}.{p}") for p in "qkv")
    keys = b.node("Transpose", k, perm=[0, 1, 3, 2])
    scores = b.node(
        "Div", b.node("MatMul", q, keys), b.constant(np.array((width / heads) ** 0.5, np.float32))
    )
    weights = b.node("Softmax", b.node("Add", scores, mask), axis=-1)
    context = b.node("Transpose", b.node("MatMul", weights, v), perm=[0, 2, 1, 3])
    flat = b.node("Reshape", context, b.constant(np.array([0, length, width])))
    x = _normalised(b, b.node("Add", x, linear(flat, width)), width)
    wide = linear(x, 2 * width)
    half = b.node("Mul", wide, b.constant(np.array(0.5, np.float32)))
    erf = b.node("Erf", b.node("Div", wide, b.constant(np.array(2**0.5, np.float32))))
    gelu = b.node("Mul", half, b.node("Add", erf, b.constant(np.array(1.0, np.float32))))
    back = b.node("MatMul", gelu, b.weight(2 * width, width, scale=(2 * width) ** -0.5))
    return _normalised(b, b.node("Add", x, back), width)


def _normalised(b: Builder, x: str, width: int) -> str:
    return b.node("LayerNormalization", x, b.weight(width, positive=True), b.weight(width), axis=-1)


@cache
def recurrent(kind: str, direction: str = "bidirectional") -> Artifact:
    """One recurrent layer over a sequence and a classifier on its last state."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    steps, width, hidden, ways = 6, 10, 8, 2 if direction == "bidirectional" else 1
    b = Builder(2)
    name = b.node(
        kind,
        "sequence",
        b.weight(ways, gates * hidden, width, scale=0.4),
        b.weight(ways, gates * hidden, hidden, scale=0.4),
        b.weight(ways, 2 * gates * hidden, scale=0.1),
        outputs=2,
        hidden_size=hidden,
        direction=direction,
    )
    last = name.replace(".0", ".1")
    answer = b.node("ReduceSum", last, b.constant(np.array([0])), keepdims=0)
    return b.artifact({"sequence": (steps, 1, width)}, {answer: (1, hidden), name: (steps, ways, 1, hidden)})
