"""The zoo's networks as plain torch modules: what a user of torch would have, and the oracle.

Nothing here is shared with the executor's own lowering, so that an error there cannot hide. Artifacts are
made as the importer makes them, without onnxruntime: the zoo's files need no folding, and whether rows of a
batch equal single runs is tried in torch. `tests/benchmarks` holds both ways to be one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from benchmarks.zoo import build
from stageloom.shared.artifact import Artifact, open_artifact, write_artifact
from stageloom.shared.importer.build import build_graph
from stageloom.shared.importer.cuts import METADATA_KEY, parse_borders
from stageloom.shared.importer.values import infer_values


class _Join(nn.Module):
    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, self.axis)


class _Sum(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right


def _module(node: onnx.NodeProto, weights: Mapping[str, np.ndarray]) -> nn.Module:
    """The module of one node.

    Raises:
        ValueError: the zoo's classical networks have no such node.
    """
    given = {field.name: onnx.helper.get_attribute_value(field) for field in node.attribute}
    own = [torch.from_numpy(weights[name].copy()) for name in node.input if name in weights]
    pads = tuple(given.get("pads", [0, 0, 0, 0]))
    if pads[:2] != pads[2:]:
        raise ValueError(f"uneven pads {pads} have no plain module")
    match node.op_type:
        case "Conv":
            filters, fan_in, height, width = own[0].shape
            groups = given.get("group", 1)
            how = {"stride": tuple(given.get("strides", [1, 1])), "padding": pads[:2], "groups": groups}
            made = nn.Conv2d(fan_in * groups, filters, (height, width), bias=len(own) > 1, **how)
            return _filled(made, own)
        case "Gemm" if given.get("transB"):
            return _filled(nn.Linear(own[0].shape[1], own[0].shape[0]), own)
        case "Relu":
            return nn.ReLU(inplace=True)
        case "MaxPool":
            ceil = bool(given["ceil_mode"])
            return nn.MaxPool2d(given["kernel_shape"], given["strides"], pads[:2], ceil_mode=ceil)
        case "AveragePool":
            padded = bool(given.get("count_include_pad", 0))
            return nn.AvgPool2d(given["kernel_shape"], given["strides"], pads[:2], count_include_pad=padded)
        case "GlobalAveragePool":
            return nn.AdaptiveAvgPool2d(1)
        case "Flatten":
            return nn.Flatten(given.get("axis", 1))
        case "Concat":
            return _Join(given["axis"])
        case "Add":
            return _Sum()
        case other:
            raise ValueError(f"a {other} has no plain module")


def _filled(made: nn.Module, own: Sequence[Tensor]) -> nn.Module:
    for parameter, values in zip(made.parameters(), own, strict=True):
        parameter.data = values
    return made


class Network(nn.Module):
    """One network, one input and one output, node by node."""

    def __init__(self, model: onnx.ModelProto) -> None:
        """
        Raises:
            ValueError: a node has no plain module, or reads what a Relu in place has changed.
        """
        super().__init__()
        weights = {weight.name: numpy_helper.to_array(weight) for weight in model.graph.initializer}
        self.image = model.graph.input[0].name
        self.logits = model.graph.output[0].name
        self.nodes = nn.ModuleList(_module(node, weights) for node in model.graph.node)
        self.reads = [[name for name in node.input if name not in weights] for node in model.graph.node]
        self.makes = [node.output[0] for node in model.graph.node]
        readers = [name for reads in self.reads for name in reads]
        for node, reads in zip(self.nodes, self.reads, strict=True):
            if isinstance(node, nn.ReLU) and readers.count(reads[0]) > 1:
                node.inplace = False
        self.eval().requires_grad_(False)

    def forward(self, image: Tensor) -> Tensor:
        """[batch, 3, side, side] to [batch, classes]."""
        values = {self.image: image}
        for node, reads, makes in zip(self.nodes, self.reads, self.makes, strict=True):
            values[makes] = node(*[values[name] for name in reads])
        return values[self.logits]


@dataclass(frozen=True)
class Subject:
    """One model, everything about it that is the same for all variants."""

    name: str
    artifact: Artifact
    image: np.ndarray  # [1, 3, side, side] float32
    expected: np.ndarray  # [1, classes] float32, by torch on the CPU

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        """The image by the name of the model's input."""
        graph = self.artifact.graph
        return {graph.tensors[graph.inputs[0]].name: self.image}

    @property
    def logits(self) -> str:
        """The name of the model's output."""
        graph = self.artifact.graph
        return graph.tensors[graph.outputs[0]].name

    def network(self, device: torch.device, precision: str) -> Network:
        """A copy on the device in channels-last."""
        made: Any = Network(onnx.load_model_from_string(self.artifact.onnx_bytes()))
        found: Network = made.to(device=device, dtype=dtype_of(precision), memory_format=torch.channels_last)
        return found

    def images(self, device: torch.device, precision: str, batch: int = 1) -> Tensor:
        """The image `batch` times, resident on the device. [batch, 3, side, side]"""
        image = torch.from_numpy(self.image).to(device=device, dtype=dtype_of(precision))
        return image.expand(batch, -1, -1, -1).contiguous(memory_format=torch.channels_last)

    def error_of(self, logits: Tensor | np.ndarray) -> float:
        """Norm of the worst row's difference over the norm of the reference; infinite where not finite."""
        rows = logits.detach().float().cpu().numpy() if isinstance(logits, Tensor) else logits
        difference = np.linalg.norm(np.asarray(rows, np.float64) - self.expected, axis=-1).max()
        error = float(difference / np.linalg.norm(self.expected))
        return error if np.isfinite(error) else float("inf")


def dtype_of(precision: str) -> torch.dtype:
    """Of weights and activations; `tf32` is float32 with the matrix units' shorter products."""
    return torch.float16 if precision == "fp16" else torch.float32


def oracle(model: onnx.ModelProto, image: np.ndarray) -> np.ndarray:
    """Logits by torch on the CPU in float32. [1, classes]"""
    with torch.inference_mode():
        found: np.ndarray = Network(model)(torch.from_numpy(image)).numpy()
    return found


MODELS: Final = ("inception_v3", "resnet50", "squeezenet")
_BATCH_TOLERANCE: Final = 1e-4


def make_subject(
    name: str, folder: Path, *, width: float = 1.0, size: int | None = None, seed: int = 0
) -> Subject:
    """A zoo model with seeded weights, a seeded image and the logits that torch gives on the CPU."""
    model = build(name, width=width, size=size, seed=seed)
    shape = [one.dim_value for one in model.graph.input[0].type.tensor_type.shape.dim]
    image = np.random.default_rng(seed + 1).standard_normal(shape, dtype=np.float32)
    carried = next(one.value for one in model.metadata_props if one.key == METADATA_KEY)
    del model.metadata_props[:]
    model.graph.initializer.sort(key=lambda weight: weight.name)
    graph = build_graph(model, infer_values(model), parse_borders(carried)).graph
    graph = replace(graph, batchable=_rows_are_single_runs(model, image))
    path = folder / f"{name}.artifact"
    digest = write_artifact(path, graph, model.SerializeToString(deterministic=True))
    return Subject(name, open_artifact(path, digest), image, oracle(model, image))


def _rows_are_single_runs(model: onnx.ModelProto, image: np.ndarray) -> bool:
    both = np.concatenate([image, image[..., ::-1]])
    network = Network(model)
    with torch.inference_mode():
        together = network(torch.from_numpy(both)).numpy()
        single = np.concatenate([network(torch.from_numpy(one[None].copy())).numpy() for one in both])
    return bool(np.linalg.norm(together - single) <= _BATCH_TOLERANCE * np.linalg.norm(single))
