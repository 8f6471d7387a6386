"""Probes of single kernels: what fusing saves, what writing into a slice costs, and whether it is right."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.bench import CHILD_S, Bench, fused
from benchmarks.gpu.child import in_child
from benchmarks.gpu.device import Work, require_cuda
from benchmarks.gpu.networks import Subject, dtype_of
from benchmarks.gpu.results import Skip
from stageloom.edge_agent.lowering.cudnn_graph import FusedConvolution, library

_CONCATENATIONS: Final = {
    # branches' channels, channels read, side: SqueezeNet's last fire module, Inception's first mixed block
    "squeezenet": ((256, 256), 64, 13),
    "inception": ((64, 64, 96, 32), 192, 25),
}


def concatenations(bench: Bench) -> dict[str, float | None]:
    """1x1 convolutions of one input and their concatenation in channels-last, in microseconds.

    `concat`: fused convolutions, then torch.cat. `sliced`: convolutions whose Relu writes into its slice.
    """
    figures: dict[str, float | None] = {}
    for name, (channels, reads, side) in _CONCATENATIONS.items():
        ways = _ways_to_concatenate(bench, channels, reads, side)
        figures |= {f"concat.{name}.{way}_us": bench.graphed_us(call) for way, call in ways.items()}
    return figures


def _ways_to_concatenate(bench: Bench, channels: Sequence[int], reads: int, side: int) -> dict[str, Work]:
    source, joined = bench.random(1, reads, side, side), bench.random(1, sum(channels), side, side)
    weights = [bench.random(count, reads, 1, 1) for count in channels]
    biases = [torch.zeros_like(weight[:, 0, 0, 0]) for weight in weights]
    branches = list(zip(torch.split(joined, list(channels), dim=1), weights, biases, strict=True))

    def concat() -> None:
        torch.cat([fused(source, weight, bias) for _, weight, bias in branches], 1, out=joined)

    def sliced() -> None:
        for target, weight, bias in branches:
            torch.clamp_min(functional.conv2d(source, weight, bias), 0, out=target)

    return {"concat": concat, "sliced": sliced}


_SLICED: Final = ((64, 64, 3, 28), (192, 64, 1, 35), (160, 192, 7, 17))
"""Channels read and made, side of the kernel and of the image: of the papers' three networks."""

_OFFSETS: Final = (0, 64, 3)  # channels before the slice: aligned as a Concat's usually are, and not


def strided_outputs(bench: Bench) -> dict[str, float | None]:
    """Errors of torch's convolution into a slice, after a packed buffer of the same sizes was written.

    Its plans are kept by sizes, types and alignment, without the strides of what they write into. What is
    wrong there can end the process's use of the device, so it runs in one of its own.
    """
    require_cuda(bench.device)
    if not bench.settings.children:
        raise Skip("needs child processes")
    figures: dict[str, float | None] = {}
    for number in range(len(_SLICED)):
        row = f"strided.{'x'.join(map(str, _SLICED[number]))}"
        try:
            errors = in_child(strided_errors, number, bench.settings.precision, limit_s=CHILD_S)
        except RuntimeError:
            figures[f"{row}.lost_the_device"] = 1.0
            continue
        figures |= {f"{row}.offset_{offset}_error": error for offset, error in errors.items()}
    return figures


def strided_errors(number: int, precision: str) -> dict[int, float]:
    """By offset the relative error of a convolution into a slice. What was not written counts as wrong."""
    torch.manual_seed(number)
    channels, filters, side, image = _SLICED[number]
    dtype, order = dtype_of(precision), torch.channels_last
    source = torch.randn(1, channels, image, image, device="cuda", dtype=dtype)
    weight = torch.randn(filters, channels, side, side, device="cuda", dtype=dtype) / (channels**0.5 * side)
    source, weight = (one.contiguous(memory_format=order) for one in (source, weight))
    wanted = functional.conv2d(source.double(), weight.double(), padding=side // 2)
    settings = ((side // 2,) * 2, (1, 1), (1, 1), 1, False, False, precision == "tf32")
    packed = torch.empty_like(wanted, dtype=dtype, memory_format=order)
    torch.ops.aten.cudnn_convolution.out(source, weight, *settings, out=packed)
    errors = {}
    for offset in _OFFSETS:
        whole = torch.zeros(1, filters + 128, image, image, device="cuda", dtype=dtype)
        slice_ = whole.contiguous(memory_format=order).narrow(1, offset, filters)
        torch.ops.aten.cudnn_convolution.out(source, weight, *settings, out=slice_)
        errors[offset] = float((slice_.double() - wanted).norm() / wanted.norm())
    return errors


def fused_kernels(bench: Bench) -> dict[str, float | None]:
    """Microseconds of a model's convolutions, one after another, each with bias and Relu into packed memory.

    `unfused`: torch's convolution, then Relu into the buffer; `fused`: cudnn's fused kernel by torch, and a
    copy; `graph`: the first plan of cudnn's graph API, straight into the buffer. Each signature counts as
    often as the model has it.
    """
    require_cuda(bench.device)
    figures: dict[str, float | None] = {}
    for subject in bench.subjects:
        sums: dict[str, float] = {}
        for signature, count in _convolutions(subject).items():
            for way, call in _ways_to_convolve(bench, *signature).items():
                sums[way] = sums.get(way, 0.0) + count * bench.graphed_us(call)
        figures |= {f"fused.{subject.name}.{way}_us": total for way, total in sums.items()}
    return figures


_Convolution: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Shapes of source and weight; stride and padding."""


def _convolutions(subject: Subject) -> Counter[_Convolution]:
    """The model's convolutions that torch pads by itself."""
    network = subject.network(torch.device("cpu"), "fp32")
    shapes: Counter[_Convolution] = Counter()

    def note(module: Any, inputs: tuple[Tensor, ...]) -> None:
        shapes[tuple(inputs[0].shape), tuple(module.weight.shape), module.stride, module.padding] += 1

    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(note)
    with torch.inference_mode():
        network(torch.from_numpy(subject.image))
    return shapes


def _ways_to_convolve(
    bench: Bench,
    source_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> dict[str, Work]:
    source, weight = bench.random(*source_shape), bench.random(*weight_shape)
    bias = bench.random(weight_shape[0])
    made = functional.conv2d(source, weight, bias, stride, padding)
    target = torch.empty_like(made, memory_format=torch.channels_last)

    def unfused() -> None:
        torch.clamp_min(functional.conv2d(source, weight, bias, stride, padding), 0, out=target)

    def fused_and_copied() -> None:
        target.copy_(torch.cudnn_convolution_relu(source, weight, bias, stride, padding, (1, 1), 1))

    ways: dict[str, Work] = {"unfused": unfused, "fused": fused_and_copied}
    if library() is not None:
        fused = FusedConvolution(weight, bias, True, stride, padding, (1, 1))
        ways["graph"] = partial(fused.run_into, 0, source, None, target)
    return ways
