"""P6 and P7: kernels are chosen by measuring, once, and the choice is logged."""

import logging
from dataclasses import replace

import pytest
import torch

from edge_agent.executor.torch.kernels import KernelChoices, nature_of
from edge_agent.lowering.dtypes import Precision
from edge_agent.lowering.model import ModelLowering
from edge_agent.lowering.unit import Alternative, Unit
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
        choice = choices.measure(lowering, 1, unit, [], [], Clock(*medians))
    assert choice.name == (wanted or unit.alternatives[0].name)
    assert f"chosen={choice.name}" in caplog.text and "'other'" in caplog.text


def test_a_choice_is_made_once_and_used_from_then_on(lowering: ModelLowering) -> None:
    unit, choices, clock = _with_two_ways(lowering), KernelChoices(), Clock(3.0, 2.0)
    first = choices.measure(lowering, 1, unit, [], [], clock)
    assert choices.measure(lowering, 1, unit, [], [], clock) == first
    assert clock.asked == 2
    assert choices.choice(lowering, 2, unit.ops) is None, "another batch is another shape"


def test_an_operator_that_computes_little_for_its_bytes_is_memory_bound(lowering: ModelLowering) -> None:
    graph = lowering.artifact.graph
    units = lowering.at_batch(1).units
    kinds = {graph.operators[unit.ops[0]].kind: nature_of(lowering, 1, unit, 1e-5) for unit in units}
    assert kinds["MaxPool"].memory_bound and kinds["MaxPool"].seconds == 1e-5
    wide = artifact_of("squeezenet", width=1.0)
    full = ModelLowering(wide, device=torch.device("cpu"), precision=Precision.FP32, channels_last=False)
    found = [nature_of(full, 8, unit, 1e-5) for unit in full.at_batch(8).units]
    assert not all(one.memory_bound for one in found)
