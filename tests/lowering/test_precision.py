"""TF32 is the process's setting, and torch has it twice: both must say the same, or reading one raises."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stageloom.edge_agent.lowering.dtypes import Precision, allows_tf32, arithmetic, use_tf32

BACKENDS: Any = torch.backends
PLACES = (BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The process has the setting once."""
    before = [place.fp32_precision for place in PLACES]
    yield
    use_tf32(before[1] == "tf32")
    for place, precision in zip(PLACES, before, strict=True):
        place.fp32_precision = precision


def _older() -> tuple[bool, bool]:
    return BACKENDS.cuda.matmul.allow_tf32, BACKENDS.cudnn.allow_tf32


@pytest.mark.promise("torch-s-two-tf32")
@pytest.mark.parametrize("order", [(True, False, True), (False, True, False)])
def test_older_and_newer_settings_agree_whatever_was_set_before(order: tuple[bool, ...]) -> None:
    for on in order:
        use_tf32(on)
        assert _older() == (on, on)
        assert {place.fp32_precision for place in PLACES} == {"tf32" if on else "ieee"}
        assert allows_tf32() is on
        torch.get_float32_matmul_precision()


def test_settings_that_disagree_are_mended() -> None:
    use_tf32(False)
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="allow_tf32"):
        _older()
    use_tf32(False)
    assert _older() == (False, False)


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("inside", [Precision.FP32, Precision.TF32])
def test_a_precision_holds_inside_and_ends_there(inside: Precision, outside: bool) -> None:
    use_tf32(outside)
    with arithmetic(inside):
        assert _older() == (inside is Precision.TF32,) * 2
    assert _older() == (outside, outside)
    assert allows_tf32() is outside
