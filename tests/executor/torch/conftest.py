"""The torch executors that run without a GPU."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from stageloom.edge_agent.executor.torch.builder import Effort
from stageloom.edge_agent.executor.torch.cpu import TorchCpuExecutor
from stageloom.edge_agent.executor.torch.executor import TorchCudaExecutor
from tests.executor.torch.simulated import SimulatedGraphDevice

TorchExecutor: TypeAlias = TorchCpuExecutor | TorchCudaExecutor

QUICK = Effort(warm_runs=1, laps=1, launches_per_lap=1, form_rounds=0, product_side=0, alone=False)


def simulated(seed: int = 0, effort: Effort = QUICK) -> TorchCudaExecutor:
    """The graph executor on a simulated device, measuring next to nothing."""
    return TorchCudaExecutor(SimulatedGraphDevice(seed), effort=effort)


MAKERS: dict[str, Callable[[], TorchExecutor]] = {
    "cpu": TorchCpuExecutor,
    "cpu-channels-last": lambda: TorchCpuExecutor(channels_last=True),
    "graphs": simulated,
}


@pytest.fixture(params=["cpu", "graphs", pytest.param("cpu-channels-last", marks=pytest.mark.full)])
def executor(request: pytest.FixtureRequest) -> Iterator[TorchExecutor]:
    """On threads, and as graphs on the simulated device."""
    made = MAKERS[request.param]()
    yield made
    made.close()
