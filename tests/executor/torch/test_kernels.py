"""P6 and P7: kernels are chosen by measuring, once, and the choice is logged."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from stageloom.edge_agent.executor.cuda.streams import Nature
from stageloom.edge_agent.executor.torch.kernels import (
    Instruments,
    KernelChoices,
    KernelSite,
    is_memory_bound,
)
from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.edge_agent.lowering.model import ModelLowering
from stageloom.edge_agent.lowering.program import Alternative, Unit
from stageloom.shared.ids import OpId
from tests.executor.models import artifact_of


@pytest.fixture(scope="module")
def lowering() -> ModelLowering:
    """A small model."""
    return ModelLowering(
        artifact_of("squeezenet"),
        device=torch.device("cpu"),
        precision=Precision.FP32,
        channels_last=False,
    )


def _with_two_ways(lowering: ModelLowering) -> Unit:
    unit = lowering.at_batch(1).units[0]
    first = unit.alternatives[0]
    return replace(unit, alternatives=(first, Alternative("other", first.run, first.run_into)))


def _tensors(unit: Unit, *, offset: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a unit reads and makes; with an offset, into a slice of a larger buffer."""
    reads = [torch.ones(spec.shape) for spec in unit.input_specs]
    shape = unit.output_specs[0].shape
    whole = torch.zeros(shape[0], shape[1] + 2 * offset, *shape[2:])
    whole = whole.contiguous(memory_format=torch.channels_last)
    return reads, [whole.narrow(1, offset, shape[1])]


class Clock:
    """Says that the alternatives take so long, one after the other."""

    def __init__(self, *medians: float) -> None:
        self.medians = list(medians)
        self.asked = 0

    def __call__(self, launch: object) -> list[float]:
        self.asked += 1
        middle = self.medians.pop(0)
        return [middle, 100.0, middle, middle, 0.0]


@pytest.mark.parametrize(("medians", "wanted"), [((3.0, 2.0), "other"), ((2.0, 3.0), None)])
def test_the_alternative_with_the_lowest_median_is_chosen(
    medians: tuple[float, float],
    wanted: str | None,
    lowering: ModelLowering,
    caplog: pytest.LogCaptureFixture,
) -> None:
    unit, choices = _with_two_ways(lowering), KernelChoices()
    with caplog.at_level(logging.INFO):
        choice = choices.measure(KernelSite(lowering, 1, unit, *_tensors(unit)), Instruments(Clock(*medians)))
    assert choice.name == (wanted or unit.alternatives[0].name)
    assert f"chosen={choice.name}" in caplog.text and "'other'" in caplog.text


@pytest.mark.promise("device-refuses-costs-plan")
def test_an_alternative_that_cannot_run_is_left_out_but_the_plain_one_must(lowering: ModelLowering) -> None:
    def refuses(*arguments: object) -> None:
        raise RuntimeError("FIND was unable to find an engine to execute this computation")

    def runs(*arguments: object) -> None:
        pass

    def timer(launch: Callable[[], object]) -> list[float]:
        launch()
        return [1.0]

    unit = lowering.at_batch(1).units[0]
    plain, other = Alternative("plain", runs, runs), Alternative("other", refuses, refuses)  # type: ignore[arg-type]
    some, tensors = replace(unit, alternatives=(plain, other)), _tensors(unit)
    choice = KernelChoices().measure(KernelSite(lowering, 1, some, *tensors), Instruments(timer))
    assert choice.seconds == (("plain", 1.0),)
    none = replace(unit, alternatives=(other, plain))
    with pytest.raises(RuntimeError, match="unable to find an engine"):
        KernelChoices().measure(KernelSite(lowering, 1, none, *tensors), Instruments(timer))


def test_a_choice_is_made_once_and_used_from_then_on(lowering: ModelLowering) -> None:
    unit, choices, clock = _with_two_ways(lowering), KernelChoices(), Clock(3.0, 2.0)
    tensors = _tensors(unit)
    first = choices.measure(KernelSite(lowering, 1, unit, *tensors), Instruments(clock))
    assert choices.measure(KernelSite(lowering, 1, unit, *tensors), Instruments(clock)) == first
    assert clock.asked == 2
    assert choices.way(KernelSite(lowering, 1, unit, *tensors)).name == "other"
    assert choices.choice(KernelSite(lowering, 2, unit, *tensors)) is None, "another batch is another shape"


def test_a_choice_holds_for_the_layout_that_it_was_measured_with(lowering: ModelLowering) -> None:
    """Fast into a packed buffer says nothing of a slice of a Concat's."""
    unit, choices, clock = _with_two_ways(lowering), KernelChoices(), Clock(3.0, 2.0, 2.0, 3.0)
    packed, sliced = _tensors(unit), _tensors(unit, offset=16)
    choices.measure(KernelSite(lowering, 1, unit, *packed), Instruments(clock))
    assert choices.way(KernelSite(lowering, 1, unit, *sliced)) is unit.alternatives[0], (
        "not measured yet: the plain one"
    )
    choices.measure(KernelSite(lowering, 1, unit, *sliced), Instruments(clock))
    assert choices.way(KernelSite(lowering, 1, unit, *packed)).name == "other"
    assert choices.way(KernelSite(lowering, 1, unit, *sliced)) is unit.alternatives[0]


class CachedPlans:
    """A convolution into given memory as torch's on CUDA: its plans are kept by the sizes, without the
    strides of the memory that they were made for."""

    def __init__(self, plain: Alternative) -> None:
        self._plain = plain
        self._plans: dict[torch.Size, tuple[int, ...]] = {}

    def run_into(self, args: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        out = outs[0]
        strides = self._plans.setdefault(out.shape, out.stride())
        out.as_strided(out.shape, strides).copy_(self._plain.run(args)[0])


def test_a_kernel_that_writes_a_slice_with_the_strides_of_a_packed_buffer_is_not_taken(
    lowering: ModelLowering, caplog: pytest.LogCaptureFixture
) -> None:
    """1. It is right and fast into a packed buffer. 2. Into a slice it is as fast, and wrong: left out."""
    unit = lowering.at_batch(1).units[0]
    plain = unit.alternatives[0]
    cached = Alternative("cached plans", plain.run, CachedPlans(plain).run_into)
    unit, choices = replace(unit, alternatives=(plain, cached)), KernelChoices()
    packed, sliced = _tensors(unit), _tensors(unit, offset=16)
    choices.measure(KernelSite(lowering, 1, unit, *packed), Instruments(Clock(3.0, 2.0)))
    assert choices.way(KernelSite(lowering, 1, unit, *packed)) is cached
    choice = choices.measure(KernelSite(lowering, 1, unit, *sliced), Instruments(Clock(3.0, 2.0)))
    assert choices.way(KernelSite(lowering, 1, unit, *sliced)) is plain
    assert [name for name, _ in choice.wrong] == ["cached plans"]
    assert "the kernel cached plans differs from the plain one" in caplog.text


@pytest.mark.parametrize("precision", list(Precision))
def test_a_kernel_that_gives_other_numbers_is_not_taken(precision: Precision) -> None:
    """It writes everything, and something else: nothing but the comparison of values can see that."""
    lowering = ModelLowering(
        artifact_of("squeezenet"), device=torch.device("cpu"), precision=precision, channels_last=False
    )
    unit, choices = lowering.at_batch(1).units[0], KernelChoices()
    plain = unit.alternatives[0]

    def off(args: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        plain.run_into(args, outs)
        outs[0].mul_(1.1)

    unit = replace(unit, alternatives=(plain, Alternative("off", plain.run, off)))
    reads = [torch.ones(spec.shape, dtype=spec.dtype) for spec in unit.input_specs]
    makes = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in unit.output_specs]
    choice = choices.measure(KernelSite(lowering, 1, unit, reads, makes), Instruments(Clock(3.0, 2.0)))
    assert choices.way(KernelSite(lowering, 1, unit, reads, makes)) is plain
    ((name, error),) = choice.wrong
    assert name == "off" and error == pytest.approx(0.1, rel=0.05)


def test_a_kernel_that_writes_beside_its_slice_is_not_taken_and_leaves_no_trace(
    lowering: ModelLowering,
) -> None:
    """Its own pixels are right; those of the next branch of the Concat are not its."""
    unit, choices = lowering.at_batch(1).units[0], KernelChoices()
    plain = unit.alternatives[0]
    reads, makes = _tensors(unit, offset=16)
    whole = makes[0]._base
    assert whole is not None
    before = whole.clone()

    def beyond(args: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        whole[:, :16, 1:].fill_(7.0)
        plain.run_into(args, outs)

    unit = replace(unit, alternatives=(plain, Alternative("beyond", plain.run, beyond)))
    choice = choices.measure(KernelSite(lowering, 1, unit, reads, makes), Instruments(Clock(3.0, 2.0)))
    assert [name for name, _ in choice.wrong] == ["beyond"]
    assert torch.equal(whole, before)


def test_measuring_leaves_the_tensors_as_they_were(lowering: ModelLowering) -> None:
    """Other operators of the program may read indices that lie in the same memory."""
    unit = _with_two_ways(lowering)
    reads, makes = _tensors(unit)
    before = [tensor.clone() for tensor in (*reads, *makes)]
    KernelChoices().measure(KernelSite(lowering, 1, unit, reads, makes), Instruments(Clock(3.0, 2.0)))
    assert all(torch.equal(a, b) for a, b in zip((*reads, *makes), before, strict=True))


def test_operators_that_compute_the_same_are_measured_once(lowering: ModelLowering) -> None:
    unit, choices, clock = _with_two_ways(lowering), KernelChoices(), Clock(3.0, 2.0)
    first = replace(unit, signature="a convolution")
    choices.measure(KernelSite(lowering, 1, first, *_tensors(unit)), Instruments(clock))
    second = replace(first, ops=(OpId(7),))
    choices.measure(KernelSite(lowering, 1, second, *_tensors(unit)), Instruments(clock))
    assert clock.asked == 2 and set(choices.natures(lowering, 1)) == {0, 7}


def test_an_operator_that_computes_little_for_its_bytes_is_memory_bound(lowering: ModelLowering) -> None:
    graph = lowering.artifact.graph
    units = lowering.at_batch(1).units
    kinds = {graph.operators[u.ops[0]].kind: is_memory_bound(lowering, 1, u, 20.0) for u in units}
    assert kinds["MaxPool"]
    wide = artifact_of("squeezenet", width=1.0)
    full = ModelLowering(wide, device=torch.device("cpu"), precision=Precision.FP32, channels_last=False)
    assert not all(is_memory_bound(full, 8, unit, 20.0) for unit in full.at_batch(8).units)


@pytest.mark.promise("launches-ordered-measured-demands")
@pytest.mark.promise("load-cannot-read-unsupported")
def test_what_bounds_an_operator_is_the_larger_of_the_shares_that_it_reaches(
    lowering: ModelLowering,
) -> None:
    """Its time and the two rates of a device decide, not its name: convolutions are bound by either."""
    graph, took_s, flop_per_s, bytes_per_s = lowering.artifact.graph, 12.5e-6, 3e12, 4e11
    kinds = set()
    for operator, unit in zip(graph.operators, lowering.at_batch(1).units, strict=True):
        tensors = sum(graph.tensors[tensor].nbytes for tensor in (*operator.inputs, *operator.outputs))
        flop_share = operator.flop / took_s / flop_per_s
        bytes_share = (operator.weight_bytes + tensors) / took_s / bytes_per_s
        memory_bound = is_memory_bound(lowering, 1, unit, flop_per_s / bytes_per_s)
        assert memory_bound == (bytes_share > flop_share)
        kinds.add((operator.kind, memory_bound))
    assert {("Conv", True), ("Conv", False)} <= kinds


def test_the_chosen_kernels_demand_is_asked_for_and_kept(lowering: ModelLowering) -> None:
    unit, choices, asked = _with_two_ways(lowering), KernelChoices(), []

    def demand(launch: object) -> float:
        asked.append(launch)
        return 0.75

    choices.measure(KernelSite(lowering, 1, unit, *_tensors(unit)), Instruments(Clock(3.0, 2.0), demand, 1e9))
    (nature,) = choices.natures(lowering, 1).values()
    assert nature == Nature(seconds=2.0, memory_bound=True, demand=0.75)
    assert len(asked) == 1, "of the fastest alternative alone"
