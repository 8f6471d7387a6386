"""Convolution, bias, Add and Relu as one kernel that writes into the caller's buffer, by cudnn's graph API.

torch has the fused kernels, too, but only into memory of its own, which costs a copy; and its plans for a
convolution into given memory are kept without the strides of that memory, so that a slice may be written with
the strides of a packed buffer (seen on a Hopper with torch 2.11: wrong pixels, once an illegal instruction).
Here a plan belongs to the shapes and strides of all its tensors. The package is `nvidia-cudnn-frontend`;
where it is not installed these kernels are not offered.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import allows_tf32

PLANS = 5
"""How many of the plans that cudnn's heuristics offer are worth measuring; the fastest was among them."""

_ALIGNMENT = 16  # bytes; what a plan takes for granted of every address
_KEPT = 4096  # signatures

Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


@cache
def library() -> Any:
    """The package; None where it or its library is missing."""
    try:
        found = import_module("cudnn")
        found.backend_version()
    except (ImportError, OSError, RuntimeError):
        return None
    return found


@dataclass(frozen=True, slots=True)
class ConvolutionSignature:
    """All that a plan depends on. Layouts are [n, c, h, w] and [filters, c / groups, h, w]."""

    device: int
    dtype: torch.dtype
    tf32: bool
    source: Layout
    weight: Layout
    target: Layout
    addend: Layout | None
    bias: bool
    relu: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FusedConvolution:
    """A convolution with constant weights and what follows it."""

    weight: Tensor
    bias: Tensor | None
    relu: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def run_into(self, plan: int, source: Tensor, addend: Tensor | None, target: Tensor) -> None:
        """Write relu(convolution + bias + addend) into `target` by the plan of that number.

        The first call for a layout builds its plans, which no capture may.

        Raises:
            RuntimeError: cudnn has no such plan for these tensors.
        """
        tensors = {"source": source, "weight": self.weight, "target": target}
        if self.bias is not None:
            tensors["bias"] = self.bias
        if addend is not None:
            tensors["addend"] = addend
        if any(tensor.data_ptr() % _ALIGNMENT for tensor in tensors.values()):
            raise RuntimeError(f"a tensor is not aligned to {_ALIGNMENT} bytes")
        signature = ConvolutionSignature(
            device=source.get_device(),
            dtype=source.dtype,
            tf32=allows_tf32(),
            source=_layout(source),
            weight=_layout(self.weight),
            target=_layout(target),
            addend=None if addend is None else _layout(addend),
            bias=self.bias is not None,
            relu=self.relu,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
        )
        _plans(signature).execute(plan, tensors)


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride()


@lru_cache(maxsize=_KEPT)
def _plans(signature: ConvolutionSignature) -> "_Plans":
    return _Plans(signature)


class _Plans:
    """The plans for one signature, built when they are first asked for.

    Not thread-safe: threads that build programs take turns (`GraphDevice.preparing`), and no other calls it.
    """

    def __init__(self, signature: ConvolutionSignature) -> None:
        """
        Raises:
            RuntimeError: cudnn knows no plan.
        """
        self._cudnn = library()
        self._handle = _handle(self._cudnn)
        self._built: list[int] = []  # places in cudnn's list
        self._next = 0
        try:
            self._graph, self._tensors = _graph(self._cudnn, self._handle, signature)
        except (ValueError, TypeError, self._cudnn.cudnnGraphNotSupportedError) as error:
            raise RuntimeError(str(error)) from error

    def execute(self, plan: int, tensors: Mapping[str, Tensor]) -> None:
        """Run the plan of that number, among those that can be built, on the current stream.

        Raises:
            RuntimeError: there is none, or it refuses the tensors.
        """
        place = self._place(plan)
        pack = {self._tensors[name]: tensor for name, tensor in tensors.items()}
        stream: Any = torch.cuda.current_stream()
        try:
            size = self._graph.get_workspace_size_plan_at_index(place)
            workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=tensors["target"].device)
            self._cudnn.set_stream(handle=self._handle, stream=stream.cuda_stream)
            self._graph.execute_plan_at_index(pack, workspace, place, handle=self._handle)
        except (ValueError, TypeError, self._cudnn.cudnnGraphNotSupportedError) as error:
            raise RuntimeError(str(error)) from error

    def _place(self, plan: int) -> int:
        """The place of the plan-th of those that can be built."""
        while len(self._built) <= plan:
            if self._next >= self._graph.get_execution_plan_count():
                raise RuntimeError(f"cudnn has {len(self._built)} plans for this convolution")
            place, self._next = self._next, self._next + 1
            try:
                self._graph.build_plan_at_index(place)
            except (RuntimeError, ValueError, self._cudnn.cudnnGraphNotSupportedError):
                continue  # one that the notes exclude, or that does not support it after all
            self._built.append(place)
        return self._built[plan]


def _graph(cudnn: Any, handle: Any, signature: ConvolutionSignature) -> tuple[Any, dict[str, Any]]:
    """The operation graph and its tensors by name."""
    single = cudnn.data_type.FLOAT
    data_type = cudnn.data_type.HALF if signature.dtype is torch.float16 else single
    graph = cudnn.pygraph(
        io_data_type=data_type, intermediate_data_type=single, compute_data_type=single, handle=handle
    )

    def tensor(name: str, layout: Layout) -> Any:
        made = graph.tensor(name=name, dim=list(layout[0]), stride=list(layout[1]), data_type=data_type)
        tensors[name] = made
        return made

    tensors: dict[str, Any] = {}
    value = graph.conv_fprop(
        image=tensor("source", signature.source),
        weight=tensor("weight", signature.weight),
        padding=list(signature.padding),
        stride=list(signature.stride),
        dilation=list(signature.dilation),
    )
    if signature.bias:
        filters = signature.weight[0][0]
        layout = (1, filters, 1, 1), (filters, 1, filters, filters)
        value = graph.bias(name="biased", input=value, bias=tensor("bias", layout))
    if signature.addend is not None:
        value = graph.add(a=value, b=tensor("addend", signature.addend))
    if signature.relu:
        value = graph.relu(name="positive", input=value)
    shape, strides = signature.target
    value.set_output(True).set_data_type(data_type).set_dim(list(shape)).set_stride(list(strides))
    tensors["target"] = value
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.deselect_numeric_notes(_unwanted(cudnn, signature))
    graph.check_support()
    return graph, tensors


def _unwanted(cudnn: Any, signature: ConvolutionSignature) -> list[Any]:
    """What torch leaves out, too: other bits every time, and shorter products than the precision says."""
    note = cudnn.numerical_note
    notes = [note.NONDETERMINISTIC, note.DOWN_CONVERT_INPUTS]
    if signature.dtype is torch.float32 and not signature.tf32:
        notes.append(note.TENSOR_CORE)
    return notes


_THREAD = threading.local()


def _handle(cudnn: Any) -> Any:
    """One for each thread: a handle belongs to the stream that was set last."""
    if not hasattr(_THREAD, "handle"):
        _THREAD.handle = cudnn.create_handle()
    return _THREAD.handle
