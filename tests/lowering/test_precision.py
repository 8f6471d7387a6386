"""TF32 is the process's setting, and torch has it twice: both must say the same, or reading one raises."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stageloom.edge_agent.lowering import dtypes
from stageloom.edge_agent.lowering.dtypes import allows_tf32, use_tf32

BACKENDS: Any = torch.backends
TWICE = hasattr(BACKENDS.cuda.matmul, "fp32_precision")  # since torch 2.9
PLACES = (BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn) if TWICE else ()
needs_both = pytest.mark.skipif(not TWICE, reason="this torch has the setting once")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The process has the setting once."""
    before = [place.fp32_precision for place in PLACES]
    allowed = allows_tf32()
    yield
    use_tf32(allowed)
    for place, precision in zip(PLACES, before, strict=True):
        place.fp32_precision = precision


def _older() -> tuple[bool, bool]:
    return BACKENDS.cuda.matmul.allow_tf32, BACKENDS.cudnn.allow_tf32


@needs_both
@pytest.mark.promise("torch-s-two-tf32")
@pytest.mark.parametrize("order", [(True, False, True), (False, True, False)])
def test_older_and_newer_settings_agree_whatever_was_set_before(order: tuple[bool, ...]) -> None:
    for on in order:
        use_tf32(on)
        assert _older() == (on, on)
        assert {place.fp32_precision for place in PLACES} == {"tf32" if on else "ieee"}
        assert allows_tf32() is on
        torch.get_float32_matmul_precision()


@needs_both
def test_settings_that_disagree_are_mended() -> None:
    use_tf32(False)
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="allow_tf32"):
        _older()
    use_tf32(False)
    assert _older() == (False, False)


def test_a_torch_that_has_the_setting_once_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """JetPack 6 ships torch 2.5, whose settings have no `fp32_precision`; torch has it since 2.9."""

    class Settings:
        """As torch's: what they do not know cannot be set."""

        __slots__ = ("allow_tf32",)

        def __init__(self) -> None:
            self.allow_tf32 = True

    backends = SimpleNamespace(cuda=SimpleNamespace(matmul=Settings()), cudnn=Settings())
    monkeypatch.setattr(dtypes, "torch", SimpleNamespace(backends=backends))
    for on in (False, True):
        use_tf32(on)
        assert (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32) == (on, on)
        assert allows_tf32() is on
