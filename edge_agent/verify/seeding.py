"""Seed uniform weights: those whose elements are all equal, zero included.

A model with such weights gives the same output for every input, so a dropped or swapped operator would pass
any comparison. Operator by operator, in run order, weights are drawn and then scaled by the operator's output
for a few inputs, so that every output channel has about unit variance: data-dependent initialisation
(Salimans & Kingma 2016; layer-sequential: Mishkin & Matas 2016).

A bias takes away half of a channel's mean. With none of it the positive mean of Relu outputs grows from layer
to layer and buries what depends on the input; with all of it every layer also enlarges rounding errors by
some 1.2 times, as batch normalisation does (Yang et al. 2019): measured on a ResNet-50 behind 50 layers, two
correct runs then differ by 1e-4, with half of it by 1e-5.

Works on a normalised ONNX file: weights are initializers, nodes are in topological order.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from stageloom.edge_agent.verify.inputs import Feeds
from stageloom.shared.importer.nodes import captured_names

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import onnxruntime


class WeightRole(Enum):
    """The part that a stored tensor plays in its operator.

    Only tensors with a role are replaced: a shape, an epsilon, an exponent or a resize scale is a stored
    tensor too, and often one with equal elements.
    """

    WEIGHT = "weight"  # summed over with the input; drawn with the variance of one over its fan-in
    BIAS = "bias"  # added; chosen so that the output is centred
    GAIN = "gain"  # multiplied; stays away from zero
    SHIFT = "shift"  # added, not measured
    MEAN = "mean"  # BatchNormalization's statistics, measured
    VARIANCE = "variance"
    SLOPE = "slope"  # of PRelu, between 0 and 1
    TABLE = "table"  # rows picked by an index


@dataclass(frozen=True, slots=True)
class Linear:
    """Axes of a linear operator's weight and output; None: not separable, one scale for all."""

    weight: int  # input index of the weight
    bias: int | None  # input index of the bias
    weight_axis: int | None  # output channels in the weight
    output_axis: int | None  # output channels in the output


_BY_INPUT: dict[str, dict[int, WeightRole]] = {
    "Conv": {1: WeightRole.WEIGHT, 2: WeightRole.BIAS},
    "ConvTranspose": {1: WeightRole.WEIGHT, 2: WeightRole.BIAS},
    "Gemm": {0: WeightRole.WEIGHT, 1: WeightRole.WEIGHT, 2: WeightRole.BIAS},
    "MatMul": {0: WeightRole.WEIGHT, 1: WeightRole.WEIGHT},
    "BatchNormalization": {
        1: WeightRole.GAIN,
        2: WeightRole.SHIFT,
        3: WeightRole.MEAN,
        4: WeightRole.VARIANCE,
    },
    "InstanceNormalization": {1: WeightRole.GAIN, 2: WeightRole.SHIFT},
    "GroupNormalization": {1: WeightRole.GAIN, 2: WeightRole.SHIFT},
    "LayerNormalization": {1: WeightRole.GAIN, 2: WeightRole.SHIFT},
    "RMSNormalization": {1: WeightRole.GAIN},
    "PRelu": {1: WeightRole.SLOPE},
    "Gather": {0: WeightRole.TABLE},
    "LSTM": {1: WeightRole.WEIGHT, 2: WeightRole.WEIGHT, 3: WeightRole.SHIFT},
    "GRU": {1: WeightRole.WEIGHT, 2: WeightRole.WEIGHT, 3: WeightRole.SHIFT},
    "RNN": {1: WeightRole.WEIGHT, 2: WeightRole.WEIGHT, 3: WeightRole.SHIFT},
}
_BY_KIND = {
    "Add": WeightRole.SHIFT,
    "Sub": WeightRole.SHIFT,
    "Sum": WeightRole.SHIFT,
    "Mul": WeightRole.GAIN,
    "Div": WeightRole.GAIN,
}


def role_of(kind: str, index: int, size: int) -> WeightRole | None:
    """Return the role of a stored tensor with `size` elements at input `index`; None if it has none.

    A single number in arithmetic is part of a formula (an epsilon, a temperature), not a weight.
    """
    if kind in _BY_KIND:
        return _BY_KIND[kind] if size > 1 else None
    return _BY_INPUT.get(kind, {}).get(index)


def linear_of(kind: str, weight_index: int, *, transposed: bool) -> Linear | None:
    """Return the axes of a linear operator whose weight is input `weight_index`; None for other operators."""
    if kind == "Conv":
        return Linear(1, 2, 0, 1)
    if kind == "ConvTranspose":
        return Linear(1, 2, None, None)  # groups interleave its output channels
    if kind == "Gemm" and weight_index == 1:
        return Linear(1, 2, 0 if transposed else 1, 1)
    if kind == "MatMul" and weight_index == 1:
        return Linear(1, None, -1, -1)
    if kind in ("Gemm", "MatMul"):
        return Linear(0, 2 if kind == "Gemm" else None, None, None)
    return None


_log = logging.getLogger(__name__)
_EMBED_ELEMENTS = 1 << 16  # smaller stored tensors become part of the session: some kernels ask for constants


def reads_of(node: "onnx.NodeProto") -> list[str]:
    """Return all values that the node and its sub-graphs read, without repeats."""
    return list(dict.fromkeys([*(name for name in node.input if name), *captured_names(node)]))


class NodeRunner:
    """Runs nodes of one model, each in a session of its own."""

    def __init__(self, model: "onnx.ModelProto") -> None:
        self._opsets = list(model.opset_import)
        self._ir_version = model.ir_version
        self._functions = list(model.functions)

    def run(
        self,
        node: "onnx.NodeProto",
        runs: "Sequence[Mapping[str, np.ndarray]]",
        stored: "Mapping[str, onnx.TensorProto]",
        replaced: "Mapping[str, np.ndarray]",
    ) -> "list[list[np.ndarray]] | None":
        """Return each output's value in each run; None if onnxruntime does not run the node alone.

        `stored` are the node's stored tensors; `replaced` holds other values for some of them.
        """
        from onnx import numpy_helper

        fed: dict[str, np.ndarray] = {}
        embedded: list[onnx.TensorProto] = []
        for name, tensor in stored.items():
            if name in replaced:
                array = numpy_helper.to_array(tensor)
                fed[name] = replaced[name].astype(array.dtype).reshape(array.shape)
            elif tensor.ByteSize() > _EMBED_ELEMENTS:
                fed[name] = numpy_helper.to_array(tensor)
            else:
                embedded.append(tensor)
        outputs = [name for name in node.output if name]
        try:
            session = self._session(node, {**runs[0], **fed}, embedded, outputs)
            results = [session.run(outputs, {**run, **fed}) for run in runs]
        except Exception as error:  # onnxruntime's exceptions share no base class
            _log.info("node %s cannot be run alone: %s", node.name, str(error)[:200])
            return None
        return [[result[i] for result in results] for i in range(len(outputs))]

    def _session(
        self,
        node: "onnx.NodeProto",
        feeds: "Mapping[str, np.ndarray]",
        embedded: "list[onnx.TensorProto]",
        outputs: list[str],
    ) -> "onnxruntime.InferenceSession":
        from onnx import helper

        graph = helper.make_graph(
            [node],
            "single_node",
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in feeds.items()
            ],
            [helper.make_empty_tensor_value_info(name) for name in outputs],
            embedded,
        )
        model = helper.make_model(graph, opset_imports=self._opsets, functions=self._functions)
        model.ir_version = self._ir_version
        return quiet_session(model.SerializeToString(), optimised=False)


def quiet_session(model: str | bytes, *, optimised: bool) -> "onnxruntime.InferenceSession":
    """Open a session on the CPU for a few runs, from a path or the model's bytes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


Samples: TypeAlias = "list[np.ndarray]"
"""A value for each of the calibration inputs. [num_samples]"""

_CENTRED = 0.5  # share of the mean that a bias takes away; see the module's text
_NOISE = 0.1  # standard deviation of what biases and shifts add
_FEW_POSITIONS = 16  # fewer per channel do not give a standard deviation of their own
_TINY = 1e-12
_COPY_BYTES = 64 << 20  # a larger shared weight is not copied, and stays as it is
_FLOATS = {"float16", "float32", "float64"}
_STATISTICS = (WeightRole.MEAN, WeightRole.VARIANCE)


def seed_weights(model: "onnx.ModelProto", inputs: Sequence[Feeds], rng: "np.random.Generator") -> list[str]:
    """Replace uniform weights, in place; return the names of those replaced, in run order.

    `inputs` are the calibration inputs, two or more. Weights of nodes that cannot be run alone are not
    scaled.
    """
    seeder = _Seeder(model, inputs, rng)
    for node in model.graph.node:
        if not seeder.waiting:
            break
        seeder.visit(node)
    return seeder.replaced


class _Seeder:
    def __init__(self, model: "onnx.ModelProto", inputs: Sequence[Feeds], rng: "np.random.Generator") -> None:
        self.rng = rng
        self.waiting = _separate_uniform_weights(model)
        self.stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self.num_samples = len(inputs)
        self.replaced: list[str] = []
        self.runner = NodeRunner(model)
        self.values: dict[str, Samples] = {
            value.name: [feeds[value.name] for feeds in inputs] for value in model.graph.input
        }
        self.readers_left: dict[str, int] = {}
        for node in model.graph.node:
            for name in reads_of(node):
                self.readers_left[name] = self.readers_left.get(name, 0) + 1

    def visit(self, node: "onnx.NodeProto") -> None:
        """Draw the node's uniform weights, run it on every sample, scale the weights."""
        mine: dict[str, WeightRole] = {}
        for index, name in enumerate(node.input):
            if name in self.waiting and (role := role_of(node.op_type, index, _size(self.stored[name]))):
                mine[name] = role
        drawn = {name: self._draw(node, name, role) for name, role in mine.items()}
        if any(role in _STATISTICS for role in mine.values()):
            self._measure_statistics(node, mine, drawn)
        outputs = self._run(node, drawn)
        if outputs is not None and WeightRole.WEIGHT in mine.values():
            self._scale(node, mine, drawn, outputs[0])
        self._keep(node, drawn, outputs)

    def _draw(self, node: "onnx.NodeProto", name: str, role: WeightRole) -> "np.ndarray":
        import numpy as np

        shape = tuple(self.stored[name].dims)
        if role is WeightRole.WEIGHT:
            return self._draw_weight(node, list(node.input).index(name), shape)
        if role is WeightRole.BIAS:  # centring decides it
            return np.zeros(shape, np.float32)
        if role in (WeightRole.GAIN, WeightRole.VARIANCE):
            return self.rng.uniform(0.5, 1.5, shape).astype("float32")
        if role is WeightRole.SLOPE:
            return self.rng.uniform(0.05, 0.3, shape).astype("float32")
        spread = 1.0 if role is WeightRole.TABLE else _NOISE
        return self.rng.standard_normal(shape, dtype="float32") * spread

    def _draw_weight(self, node: "onnx.NodeProto", index: int, shape: tuple[int, ...]) -> "np.ndarray":
        drawn = self.rng.standard_normal(shape, dtype="float32")
        linear = linear_of(node.op_type, index, transposed=_transposed(node))
        if linear is None or linear.weight_axis is None:
            return drawn / math.sqrt(max(drawn.size // max(shape), 1))
        summed = tuple(a for a in range(len(shape)) if a != linear.weight_axis % len(shape))
        fan_in = math.prod(shape[a] for a in summed)
        return drawn / math.sqrt(max(fan_in, 1))

    def _measure_statistics(
        self, node: "onnx.NodeProto", mine: Mapping[str, WeightRole], drawn: "dict[str, np.ndarray]"
    ) -> None:
        samples = self.values.get(node.input[0])
        if samples is None:
            return
        mean, deviation = _statistics(samples, 1)
        for name, role in mine.items():
            if role is WeightRole.MEAN:
                drawn[name] = mean
            elif role is WeightRole.VARIANCE:
                drawn[name] = deviation**2

    def _run(self, node: "onnx.NodeProto", drawn: "Mapping[str, np.ndarray]") -> list[Samples] | None:
        """Return the samples of each output; None if the node cannot be run alone."""
        wanted = [name for name in reads_of(node) if name not in self.stored]
        if any(name not in self.values for name in wanted):
            return None
        runs = [{name: self.values[name][k] for name in wanted} for k in range(self.num_samples)]
        stored = {name: self.stored[name] for name in reads_of(node) if name in self.stored}
        return self.runner.run(node, runs, stored, drawn)

    def _scale(
        self,
        node: "onnx.NodeProto",
        mine: Mapping[str, WeightRole],
        drawn: "dict[str, np.ndarray]",
        samples: Samples,
    ) -> None:
        """Scale weight and bias so that the first output has about unit variance; samples change too."""
        import numpy as np

        index = next(i for i, name in enumerate(node.input) if mine.get(name) is WeightRole.WEIGHT)
        linear = linear_of(node.op_type, index, transposed=_transposed(node))
        if linear is None or samples[0].dtype.name not in _FLOATS:
            return
        mean, deviation = _statistics(samples, linear.output_axis)
        kept = (1.0 - _CENTRED) * mean
        scale = 1.0 / np.sqrt(deviation**2 + kept**2)
        weight = drawn[node.input[index]]
        weight *= _along(scale, weight.ndim, linear.weight_axis)
        shift = self._bias(node, mine, drawn, linear, (mean - kept) * scale)
        for k, sample in enumerate(samples):
            wide = sample * _along(scale, sample.ndim, linear.output_axis)
            samples[k] = (wide + _along(shift, sample.ndim, linear.output_axis)).astype(sample.dtype)

    def _bias(
        self,
        node: "onnx.NodeProto",
        mine: Mapping[str, WeightRole],
        drawn: "dict[str, np.ndarray]",
        linear: Linear,
        mean: "np.ndarray",
    ) -> "np.ndarray":
        """Set a seeded bias; return what it adds per output channel."""
        import numpy as np

        name = node.input[linear.bias] if linear.bias is not None and linear.bias < len(node.input) else ""
        if mine.get(name) is not WeightRole.BIAS:
            return np.zeros_like(mean)
        bias = drawn[name]
        noise = _NOISE * self.rng.standard_normal(bias.shape, dtype="float32")
        fits = linear.output_axis is not None and bias.size == mean.size
        drawn[name] = noise - (mean.reshape(bias.shape) if fits else 0.0)
        return drawn[name].reshape(-1) if fits else np.zeros_like(mean)

    def _keep(
        self, node: "onnx.NodeProto", drawn: "Mapping[str, np.ndarray]", outputs: list[Samples] | None
    ) -> None:
        """Write the weights into the model, keep the outputs, drop values without further readers."""
        for name, array in drawn.items():
            _store(self.stored[name], array)
            self.waiting.discard(name)
            self.replaced.append(name)
        if outputs is not None:
            self.values.update(zip([name for name in node.output if name], outputs, strict=True))
        for name in reads_of(node):
            self.readers_left[name] -= 1
            if not self.readers_left[name]:
                self.values.pop(name, None)


def _separate_uniform_weights(model: "onnx.ModelProto") -> set[str]:
    """Names of the weights to replace, each read once: those that others read too are copied first.

    Files share equal tensors, of one role or of several; scaled for one reader they would not suit the next.
    """
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    reads = Counter(name for node in model.graph.node for name in (*node.input, *captured_names(node)))
    verdicts: dict[tuple[str, int | None], bool] = {}
    uniform: set[str] = set()
    for node in model.graph.node:
        for index, name in _to_replace(node, stored, verdicts, bool(uniform)):
            if reads[name] == 1:
                uniform.add(name)
            elif stored[name].ByteSize() <= _COPY_BYTES:
                reads[name] -= 1
                copy = model.graph.initializer.add()
                copy.CopyFrom(stored[name])
                copy.name = f"{name}/{node.name}/{index}"
                node.input[index] = copy.name
                uniform.add(copy.name)
    return uniform


def _to_replace(
    node: "onnx.NodeProto",
    stored: "Mapping[str, onnx.TensorProto]",
    verdicts: dict[tuple[str, int | None], bool],
    replaced_before: bool,
) -> list[tuple[int, str]]:
    """Return input index and name of the node's weights to replace; a bias is replaced with its weight.

    A kernel that is constant per output channel is uniform too: BatchNorm folded into equal weights.
    BatchNorm's statistics no longer fit once a weight before it was replaced.
    """
    chosen = []
    biases = []
    replaces_weight = False
    for index, name in enumerate(node.input):
        if name not in stored or not (role := role_of(node.op_type, index, _size(stored[name]))):
            continue
        linear = (
            linear_of(node.op_type, index, transposed=_transposed(node))
            if role is WeightRole.WEIGHT
            else None
        )
        key = (name, linear.weight_axis if linear else None)
        if key not in verdicts:
            verdicts[key] = _is_uniform(stored[name], key[1])
        if verdicts[key] or (replaced_before and role in _STATISTICS):
            chosen.append((index, name))
            replaces_weight |= role is WeightRole.WEIGHT
        elif role is WeightRole.BIAS:
            biases.append((index, name))
    return chosen + biases if replaces_weight else chosen


def _is_uniform(tensor: "onnx.TensorProto", axis: int | None) -> bool:
    """Return whether all elements are equal or, with an axis, all elements at each position along it.

    A single number is not uniform: it may be the bias that keeps a detector's only channel near zero.
    """
    import numpy as np
    from onnx import numpy_helper

    array = numpy_helper.to_array(tensor)
    if array.dtype.name not in _FLOATS or array.size < 2:
        return False
    rows = array.reshape(1, -1)
    if axis is not None and array.size > array.shape[axis]:
        rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    return bool((rows == rows[:, :1]).all())


def _statistics(samples: Samples, axis: int | None) -> "tuple[np.ndarray, np.ndarray]":
    """Return mean and standard deviation per channel. [channels], or [1] without an axis.

    Channels of too few positions share one deviation; a channel that never varies gets 1.
    """
    import numpy as np

    stacked = np.stack(samples).astype(np.float32)  # [num_samples, ...]
    if axis is None:
        flat = stacked.reshape(1, -1)
    else:
        place = axis % (stacked.ndim - 1) + 1
        flat = np.moveaxis(stacked, place, 0).reshape(stacked.shape[place], -1)
    mean = flat.mean(axis=1, dtype=np.float64)
    variance = np.square(flat - mean[:, None].astype(np.float32)).mean(axis=1, dtype=np.float64)
    if flat.shape[1] < _FEW_POSITIONS:
        variance = np.full_like(variance, variance.mean())
    usable = np.isfinite(variance) & (variance > _TINY)
    deviation = np.sqrt(np.where(usable, variance, 1.0))
    return np.where(np.isfinite(mean), mean, 0.0).astype(np.float32), deviation.astype(np.float32)


def _along(vector: "np.ndarray", ndim: int, axis: int | None) -> "np.ndarray":
    """Shape `vector` to multiply along `axis`; a vector of one element multiplies everywhere."""
    if axis is None:
        return vector.reshape((1,) * ndim)
    shape = [1] * ndim
    shape[axis] = vector.size
    return vector.reshape(shape)


def _store(tensor: "onnx.TensorProto", array: "np.ndarray") -> None:
    from onnx import helper

    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    for field in ("float_data", "double_data", "int32_data", "raw_data"):
        tensor.ClearField(field)
    tensor.raw_data = array.astype(dtype).tobytes()


def _size(tensor: "onnx.TensorProto") -> int:
    return math.prod(tensor.dims)


def _transposed(node: "onnx.NodeProto") -> bool:
    return any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
