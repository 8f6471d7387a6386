"""An executor on the real device, or a reason why there is none."""

from collections.abc import Iterator

import pytest

from stageloom.edge_agent.executor.torch.builder import Effort
from stageloom.edge_agent.executor.torch.cuda import CudaGraphDevice, why_not
from stageloom.edge_agent.executor.torch.executor import TorchCudaExecutor

SCHEDULED = Effort(form_rounds=0, alone=False)
"""Keep the schedule's streams even where one would be faster: it is the streams that are tested."""


@pytest.fixture(scope="session")
def device() -> CudaGraphDevice:
    """The device: its streams are taken once per process."""
    if reason := why_not():
        pytest.skip(reason)
    return CudaGraphDevice()


@pytest.fixture
def executor(device: CudaGraphDevice) -> Iterator[TorchCudaExecutor]:
    """`torch_cuda`, with the schedule's streams."""
    made = TorchCudaExecutor(device, effort=SCHEDULED)
    yield made
    made.close()
