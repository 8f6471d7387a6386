"""Want of memory is told from an operator that torch lacks, also where torch calls it something else."""

from collections.abc import Sequence
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.edge_agent.lowering.out_of_memory import is_out_of_memory
from stageloom.edge_agent.lowering.program import Unit
from tests.executor.models import artifact_of
from tests.lowering.running import lowered

ON_A_JETSON = (
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/opt/pytorch/c10/cuda/CUDACachingAllocator.cpp":995, '
    "please report a bug to PyTorch."
)


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError(ON_A_JETSON), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Int'"), False),
        (RuntimeError("NVML driver/library version mismatch"), False),
    ],
)
def test_want_of_memory_has_several_texts(error: RuntimeError, memory: bool) -> None:
    assert is_out_of_memory(error) is memory


def test_an_operator_that_found_no_memory_on_a_jetson_is_not_handed_to_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Units of unusual types are tried once: what torch cannot run goes to onnxruntime."""
    raised = [RuntimeError("no kernel of this type")]

    def fails(self: Unit, args: Sequence[Tensor]) -> NoReturn:
        raise raised[-1]

    monkeypatch.setattr(Unit, "run", fails)
    _, model = lowered(artifact_of("squeezenet"), precision=Precision.FP16)
    assert {unit.foreign for unit in model.units} == {"no kernel of this type"}
    raised.append(RuntimeError(ON_A_JETSON))
    with pytest.raises(RuntimeError, match="NVML_SUCCESS"):
        lowered(artifact_of("squeezenet"), precision=Precision.FP16)
